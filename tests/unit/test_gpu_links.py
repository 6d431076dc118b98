"""Cautions about pairs of GPUs, of manifests made by hand."""

import pytest
from made import made_manifest
from report_runs import case, run, usual_cases

from ddp_bench.bench.findings.cautions import slow_links
from ddp_bench.bench.results.schema import CASES, typed_frame
from ddp_bench.report.page import page

NVLINK = {"nvlink": True, "peer_access": True}
PCIE = {"nvlink": False, "peer_access": True}
HOST_MEMORY = {"nvlink": False, "peer_access": False, "path": "SYS"}


def told_of(pairs, *, hosts=("h",)):
    """Hosts of four GPUs with a rank each; `pairs` by host and places, as `h 0-1`, all others on NVLink."""

    def host(name):
        places = [(a, b) for a in range(4) for b in range(a + 1, 4)]
        known = [pairs.get(f"{name} {a}-{b}", NVLINK) | {"first": a, "second": b} for a, b in places]
        return {"gpus": [{"uuid": f"{name}{i}", "name": "A"} for i in range(4)], "gpu_pairs": known}

    return {
        "hosts": {name: host(name) for name in hosts},
        "ranks": ranks_on(*((name, f"{name}{i}") for name in hosts for i in range(4))),
    }


def ranks_on(*places):
    return [{"rank": rank, "host": host, "gpu": gpu} for rank, (host, gpu) in enumerate(places)]


def found(told, *cases):
    """The one caution's text; empty without one."""
    made = slow_links(made_manifest(**told), typed_frame(list(cases), CASES))
    return "" if made is None else made.text


def test_a_pair_without_peer_access_is_told_where_a_measured_case_used_it():
    told = told_of({"h 2-3": HOST_MEMORY})
    assert found(told, case("ddp", 2, 100.0), case("ddp", 4, status="failed")) == ""
    assert found(told, case("ddp", 2, 100.0), case("ddp", 4, 100.0)).startswith("cases used 1 pair of GPUs")
    caution = slow_links(
        made_manifest(**told), typed_frame([case("ddp", 2, 100.0), case("ddp", 4, 100.0)], CASES)
    )
    assert caution.case_id == case("ddp", 4)["case_id"]


def test_a_pair_without_nvlink_is_told_where_others_have_it():
    pcie = {f"h {a}-{b}": PCIE for a in range(4) for b in range(a + 1, 4)}
    assert found(told_of(pcie), case("ddp", 4, 100.0)) == "", "there is no better choice"
    assert "used 1 pair" in found(told_of(pcie | {"h 2-3": NVLINK}), case("ddp", 2, 100.0))
    assert "used 5 pairs" in found(told_of(pcie | {"h 2-3": NVLINK}), case("ddp", 4, 100.0))


def test_ranks_are_found_by_uuid_and_replicas_by_their_place():
    told = told_of({"h 0-1": HOST_MEMORY})
    told["ranks"] = ranks_on(*(("h", f"h{i}") for i in (2, 3, 0, 1)))
    assert found(told, case("ddp", 2, 100.0)) == ""
    assert found(told, case("dp", 2, 100.0))
    assert found(told, case("ddp", 4, 100.0))


def test_pairs_are_of_one_host():
    told = told_of({"a 0-1": HOST_MEMORY, "b 0-1": HOST_MEMORY}, hosts=("a", "b"))
    assert "used 1 pair" in found(told, case("ddp", 4, 100.0))
    assert "used 2 pairs" in found(told, case("ddp", 8, 100.0))
    told["ranks"] = ranks_on(("a", "a0"), ("b", "b1"))
    assert found(told, case("ddp", 2, 100.0)) == "", "between hosts there is a network"


@pytest.mark.parametrize(
    "told",
    [
        {},
        told_of({"h 0-1": {"nvlink": None, "peer_access": None}}),
        {**told_of({"h 0-1": HOST_MEMORY}), "ranks": ranks_on(*[("h", None)] * 4)},
    ],
    ids=["empty", "not readable", "no UUID"],
)
def test_what_is_not_known_is_not_told(told):
    assert found(told, case("ddp", 4, 100.0)) == ""


def test_cores_that_stand_in_for_gpus_have_no_links():
    assert found(told_of({"h 0-1": HOST_MEMORY}), case("ddp", 2, 100.0, device_type="cpu")) == ""


def test_the_page_shows_them_beside_the_other_cautions():
    (shown,) = page([run(usual_cases(), told_of({"h 0-1": HOST_MEMORY}))]).runs
    assert "slow links" in [caution.kind for caution in shown.cautions]
