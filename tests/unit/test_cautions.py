"""What speaks against trusting a run: links, load of others, drift, levels, outliers; words are recorded."""

import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from gate_runs import block_rows, plan
from made import made_manifest, times_of
from msgspec import structs
from report_runs import case, run

from ddp_bench.bench.findings.cautions import check_rounds, find_cautions, find_slow_links
from ddp_bench.bench.machine.load import LoadReading, average_loads, compute_loads, read_load
from ddp_bench.bench.machine.manifest import Load
from ddp_bench.bench.results.aggregate import describe_planned_case, make_case_rows
from ddp_bench.bench.results.block_times import NotProved, ProofResult
from ddp_bench.bench.results.case_columns import CASES
from ddp_bench.bench.results.case_result import read_case_results
from ddp_bench.bench.results.columns import BLOCKS, make_frame
from ddp_bench.bench.worker.facts import make_proof_facts
from ddp_bench.report.conditions import group_conditions

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


PCIE_4 = {f"h {a}-{b}": PCIE for a in range(4) for b in range(a + 1, 4)}
TWO, FOUR = case("ddp", 2, 100.0), case("ddp", 4, 100.0)
LATER = {"h 2-3": HOST_MEMORY}
TURNED = told_of({"h 0-1": HOST_MEMORY}) | {"ranks": ranks_on(*(("h", f"h{i}") for i in (2, 3, 0, 1)))}
TWO_HOSTS = told_of({"a 0-1": HOST_MEMORY, "b 0-1": HOST_MEMORY}, hosts=("a", "b"))


@pytest.mark.parametrize(
    ("told", "cases", "num_pairs"),
    [
        (told_of(LATER), [TWO, case("ddp", 4, status="failed")], 0),  # of measured cases alone
        (told_of(PCIE_4), [FOUR], 0),  # there is no better choice
        (told_of(PCIE_4 | {"h 2-3": NVLINK}), [TWO], 1),
        (told_of(PCIE_4 | {"h 2-3": NVLINK}), [FOUR], 5),
        (TURNED, [TWO], 0),  # ranks are found by UUID
        (TURNED, [case("dp", 2, 100.0)], 1),  # and replicas by their place
        (TWO_HOSTS, [case("ddp", 8, 100.0)], 2),
        (TWO_HOSTS | {"ranks": ranks_on(("a", "a0"), ("b", "b1"))}, [TWO], 0),  # between hosts is a network
        ({}, [FOUR], 0),
        ({**told_of({"h 0-1": HOST_MEMORY}), "ranks": ranks_on(*[("h", None)] * 4)}, [FOUR], 0),  # no UUID
        (told_of({"h 0-1": HOST_MEMORY}), [case("ddp", 2, 100.0, device_type="cpu")], 0),
    ],
)
def test_pairs_of_gpus_without_the_best_link_that_were_used(told, cases, num_pairs):
    found = find_slow_links(made_manifest(**told), read_case_results(make_frame(cases, CASES)))
    assert (found is None) == (num_pairs == 0)
    if found is not None:
        assert f"used {num_pairs} pair" in found.text
        assert found.case_id == cases[-1]["case_id"]


BURN = """
import os, sys, time
if sys.argv[1] == "orphan" and os.fork():
    os._exit(0)  # its parent is now init: a descendant of nobody here
began = time.process_time()
while time.process_time() - began < 0.6:
    pass
print("done", flush=True)
"""


def reading(rank, at_s, own_s, busy_s, **more):
    steal = tuple(0.0 for _ in busy_s)
    made = LoadReading("a", (rank,), at_s, own_s, busy_s, steal)
    return replace(made, **more)


def test_what_the_ranks_did_not_use_of_their_cores_others_did():
    """By hand: over 10 s, cores 0 and 1 are busy for 9 and 7 s, of which the two ranks had 8 and 4 s."""
    before = [reading(0, 100.0, 1.0, (50.0, 60.0, 70.0)), reading(1, 100.5, 2.0, (51.0, 61.0, 71.0))]
    after = [
        reading(0, 110.0, 9.0, (59.0, 67.0, 80.0), steal_s=(0.5, 0.0, 9.0)),
        reading(1, 111.0, 6.0, (60.0, 68.0, 81.0)),
    ]
    assert compute_loads(before, after) == [Load(cores=2, others=0.4, steal=0.05, seconds=10.0)]
    assert compute_loads([before[0], None], after) == compute_loads(before[:1], [None]) == [], (
        "one cannot tell"
    )
    apart = [[replace(r, machine=name) for r, name in zip(rs, "ab", strict=True)] for rs in (before, after)]
    assert compute_loads(*apart) == [
        Load(cores=1, others=0.1, steal=0.05, seconds=10.0),
        Load(cores=1, others=0.286, steal=0.0, seconds=10.5),
    ]


def test_loads_of_two_attempts_are_weighed_by_their_time():
    earlier = Load(cores=2, others=0.1, steal=0.0, seconds=30.0)
    now = Load(cores=2, others=0.5, steal=0.2, seconds=10.0)
    assert average_loads(now, earlier) == Load(cores=2, others=0.2, steal=0.05, seconds=40.0)
    at_once = (structs.replace(load, seconds=0.0) for load in (now, earlier))
    assert average_loads(*at_once).others == 0.5, "of no time at all"


@pytest.mark.skipif(sys.platform != "linux", reason="counted by Linux' /proc")
def test_a_program_of_others_is_counted_and_a_child_of_ones_own_is_not():
    """Oracle: the 0.6 s of CPU time that the program itself counts before it ends."""

    def own_and_others(kind):
        before = read_load()
        subprocess.run([sys.executable, "-c", BURN, kind], check=True, stdout=subprocess.PIPE)
        after = read_load()
        (found,) = compute_loads([before], [after])
        return after.own_s - before.own_s, found.others * (after.at_s - before.at_s)

    own_s, others_s = own_and_others("orphan")
    assert own_s < 0.4
    assert others_s > 0.4
    own_s, _ = own_and_others("child")
    assert own_s > 0.5


def told(busy, steal):
    return {"load": [{"cores": 2, "others": 0.0, "steal": 0.0}, {"cores": 4, "others": busy, "steal": steal}]}


@pytest.mark.parametrize(
    ("busy", "steal", "said"),
    [
        (0.4, 0.0, "other programs used 10% of the cores during the rounds"),
        (0.0, 0.2, "other programs used 0% of the cores, other guests 5% during the rounds"),
        (0.4, 0.2, "used 10% of the cores, other guests 5%"),
        (0.2, 0.08, ""),
    ],
)
def test_a_load_that_could_pass_for_a_regression_is_a_caution(busy, steal, said):
    measured = run([case("single", 1, 100.0, device_type="cpu")], told(busy, steal))
    found = [c for c in find_cautions(measured) if "load" in c.kind]
    assert len(found) == bool(said)
    assert all(said in caution.sentence for caution in found)
    shown = group_conditions(measured.manifest, measured.results)["Run"]["load"]
    assert shown.startswith(f"other programs used {25 * busy:.0f}% of the cores")


def test_a_load_average_is_programs_per_core_and_no_share():
    measured = run([case("single", 1, 100.0, device_type="cpu")], told(0.4, 0.0) | {"load_before": 15.88})
    shown = group_conditions(measured.manifest, measured.results)["Run"]["load"]
    assert shown.endswith("before the run 16 programs per core")
    assert re.findall(r"[\d.,]+%", shown) == ["10%"]


def test_a_load_is_of_cores_that_stand_in_for_devices_where_it_is_told():
    for load, device_type in (
        ([], "cpu"),
        ([{"cores": 0, "others": 1}], "cpu"),
        (told(4, 4)["load"], "cuda"),
    ):
        measured = run([case("single", 1, 100.0, device_type=device_type)], {"load": load})
        assert "other load" not in [one.kind for one in find_cautions(measured)]


def found(*series):
    """The cautions about a run whose cases had these step times by round, in ms; by kind."""
    planned = plan()[: len(series)]
    rows = [
        row
        for p, times in zip(planned, series, strict=True)
        for row in block_rows(p.case.case_id, p.case.mode, times)
    ]
    times = times_of(make_frame(rows, BLOCKS))
    cases = make_case_rows([describe_planned_case(p) for p in planned], times)
    made = [*check_rounds(read_case_results(cases), times)]
    assert len({caution.kind for caution in made}) == len(made)
    return {caution.kind: caution for caution in made}


def normal(rng, size):
    return 100 * np.exp(0.02 * rng.normal(size=size))


def test_drift_is_told_with_its_size_and_interval():
    rng = np.random.default_rng(0)
    slower = np.linspace(1.0, 1.1, 20)
    caution = found(*(normal(rng, 20) * slower for _ in range(3)))["drift"]
    size, low, high = map(
        int, re.search(r"became (\d+)% \((\d+)\N{EN DASH}(\d+)\) slower", caution.text).groups()
    )
    assert low <= size <= high
    assert low <= 100 * (1 - 1 / 1.1) <= high
    assert "from round 1 to 20" in caution.text


def test_drift_alone_is_not_called_scatter():
    rng = np.random.default_rng(1)
    assert set(found(100 * np.linspace(1, 1.5, 30) * np.exp(0.005 * rng.normal(size=30)))) == {"large drift"}


def test_rounds_that_scatter_are_told_with_how_far():
    """A twentieth on either side is left out: of 12 rounds the outermost counts a little less than half."""
    times = normal(np.random.default_rng(6), 12)
    times[6] = 300
    caution = found(times, normal(np.random.default_rng(7), 12))["scattered rounds"]
    assert caution.case_id == plan()[0].case.case_id
    share = int(re.search(r"rounds vary by up to (\d+)% about the median", caution.text)[1])
    assert share == pytest.approx(100 * (3**0.45 - 1), abs=6)
    assert "1 case of 2 by more than 10%" in caution.text


def test_a_run_that_measured_little_nothing_or_lacks_its_blocks():
    assert set(found([100.0, 101, 99])) == {"few rounds"}
    planned = plan()
    blocks = make_frame(block_rows(planned[0].case.case_id, "single", [100.0, 101]), BLOCKS)
    cases = read_case_results(make_case_rows([describe_planned_case(planned[0])], times_of(blocks)))
    broken = blocks.assign(block_ms=pd.Series([0.0, float("nan")]))
    for of, times in (([], blocks), (cases, blocks[:0]), (cases, broken[broken["block_ms"] > 0])):
        assert [*check_rounds(of, times_of(times))] == []


def test_what_one_round_among_many_does_and_no_noise_at_all_are_not_mentioned():
    assert found([100.0] * 20, [50.0] * 20) == {}
    rng = np.random.default_rng(9)
    times = normal(rng, 100)
    times[0], times[50] = 140, 300
    assert found(times, normal(rng, 100) * 1.4 ** np.eye(100)[0]) == {}


@pytest.mark.parametrize("proof", ["first", "second"])
def test_a_case_that_is_not_proved_says_why_and_what_would_prove_it(proof):
    doubt = ProofResult(not_proved=NotProved(reason="it draws; and more", remedy="a seed"))
    first, second = (doubt, ProofResult(error=0.0)) if proof == "first" else (ProofResult(error=0.0), doubt)
    facts = make_proof_facts(first, second)
    told = {name: facts[name] for name in ("not_proved", "proved_by")}
    (found,) = (one for one in find_cautions(run([TWO | told, FOUR])) if one.kind == "not proved")
    assert found.text == "1 case of 2 could not be proved to train right: it draws; and more"
    assert found.advice == "a seed"
