"""What DDP's step loses: each part by its own measurement, the most first, with what mends it."""

import pytest
from finding_cases import CAP_25, DDP, SINGLE, concluded, over
from report_runs import case, measured

from ddp_bench.bench.findings.causes import MENDS, causes
from ddp_bench.bench.results.case_columns import CASES
from ddp_bench.bench.results.case_result import case_results
from ddp_bench.bench.results.columns import typed_frame

STEP = {"step_ms": 100.0, "exposed_comm_ms": 3.0, "buffers_ms": 1.0, "data_ms": 0.1, "rank_skew_ms": 2.0}


SLOW = ("Rank 1 is the slowest.",)


def found(*more, by=(), ranks=(), **ddp):
    rows = typed_frame([SINGLE, DDP | measured(**STEP | ddp), *more], CASES)
    parts = causes(case_results(rows), ranks, by)
    return [(what, round(ms.estimate, 1), MENDS[what]) for what, ms in parts.items()]


@pytest.mark.parametrize(
    ("ddp", "what", "ms", "mend"),
    [
        ({"exposed_comm_ms": 40.0}, "all-reduces", 40.0, "--comm-hook bf16"),
        ({"exposed_comm_ms": 12.0, "buffers_ms": 10.0}, "buffers", 10.0, "--sync-buffers off"),
        ({"data_ms": 25.0}, "batches", 25.0, "--data-workers"),
        ({"rank_skew_ms": 30.0, "ranks": SLOW}, "uneven ranks", 30.0, "same cores"),
    ],
)
def test_what_takes_most_is_named_first_with_what_mends_it(ddp, what, ms, mend):
    (first, *others) = found(**ddp)
    assert what in first[0]
    assert first[1] == ms
    assert mend in first[2]
    assert not others


def test_all_reduces_take_no_more_than_they_do_alone():
    parts = found(exposed_comm_ms=41.0, comm_ms=11.0)
    assert [(what.split()[0], ms) for what, ms, _ in parts] == [("waiting", 30.0), ("all-reduces", 11.0)]


def test_own_work_is_that_of_one_device_and_views_tell_its_copies():
    """DDP on one device takes 100 ms where single takes 80; 8 of the 20 are saved by views on two."""
    one = case("ddp", 1, 80.0, case_id="one") | measured(step_ms=100.0, speedup=0.8)
    assert [part[:2] for part in found(one)] == [("DDP's own work on one device", 20.0)]
    views = case("ddp", 2, 170.0, case_id="views", gradient_as_bucket_view=True)
    parts = found(one, views, by=[over(views, DDP, 1 / 0.925, 1 / 0.915)])
    assert [part[0].split()[0] for part in parts] == ["DDP's", "copies"]
    assert sum(part[1] for part in parts) == pytest.approx(20.0)


def test_what_is_small_not_known_or_of_chance_is_not_named():
    assert found() == []
    assert found(rank_skew_ms=30.0) == []
    wide = {"exposed_comm_ms": 40.0, "exposed_comm_ms_low": -5.0, "exposed_comm_ms_high": 85.0}
    rows = typed_frame([SINGLE, DDP | measured(**STEP) | wide, CAP_25], CASES)
    assert causes(case_results(rows)) == {}


def test_the_step_of_dp_on_the_same_gpus_stands_beside_it():
    rows = [SINGLE, case("dp", 2, 190.0) | measured(step_ms=84.0)]
    step, saved = concluded(*rows, DDP | measured(**STEP | {"data_ms": 30.0})).notes
    assert step.endswith("takes 100 (99\N{EN DASH}101) ms, under DP 84.0 (83.2\N{EN DASH}84.8) ms.")
    assert saved.startswith(
        "Could be saved: 30.0 (29.7\N{EN DASH}30.3) ms the wait for batches, by more --data-workers"
    )


def test_the_parts_of_a_step_add_up():
    step = STEP | {"exposed_comm_ms": 41.0, "comm_ms": 11.0}
    single = SINGLE | measured(step_ms=50.0)
    note, *_ = concluded(single, DDP | measured(**step)).notes
    told = [float(part.split()[0]) for part in note.split(": ")[1].split(" + ")]
    assert told == [50.0, 11.0, 30.0, 9.0]
