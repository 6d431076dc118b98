"""What a step consists of and what of it could be saved; who the others wait for."""

import numpy as np
import pytest
from finding_cases import CAP_25, DDP, SINGLE, concluded, exposing, hiding, made_run, over
from made import block
from report_runs import case, measured

from ddp_bench.bench.findings.communication import explain_ddp_step
from ddp_bench.bench.findings.findings import conclude_run
from ddp_bench.bench.findings.late_ranks import find_straggler
from ddp_bench.bench.results.columns import BLOCKS, make_frame
from ddp_bench.bench.stats.interval import Interval
from ddp_bench.report.tables import tabulate_savings

STEP = {"step_ms": 100.0, "exposed_comm_ms": 3.0, "buffers_ms": 1.0, "data_ms": 0.1, "rank_skew_ms": 2.0}


def explained(made, *, has_straggler=False):
    return explain_ddp_step(made.results[1], made, has_straggler=has_straggler)


def step_of(*more, has_straggler=False, **ddp):
    made = made_run([SINGLE, DDP | measured(**STEP | ddp), *more])
    return explained(made, has_straggler=has_straggler)


def blocks_of(*columns, rounds=40):
    """Blocks of cases and phases with these ms; the pace of rounds varies by a tenth."""
    rng, rows = np.random.default_rng(1), []
    for r in range(rounds):
        pace = 1 + 0.1 * rng.standard_normal()
        for row, phase, ms in columns:
            for rank in range(row["num_devices"] if row["mode"] == "ddp" else 1):
                noise = 0.05 * rng.standard_normal()
                rows.append(block(row["case_id"], r, ms * pace + noise, phase=phase, rank=rank))
    return make_frame(rows, BLOCKS)


def found(*more, **how):
    step = step_of(*more, **how)
    return [(one.what, round(one.ms.estimate, 1), one.remedy) for one in step.savings] if step else []


@pytest.mark.parametrize(
    ("ddp", "what", "ms", "remedy"),
    [
        ({"exposed_comm_ms": 40.0}, "communication", 40.0, "--comm-hook bf16"),
        ({"exposed_comm_ms": 40.0, "comm_ms": 60.0}, "exposed", 40.0, "change the training"),
        ({"exposed_comm_ms": 12.0, "buffers_ms": 10.0}, "buffers", 10.0, "--sync-buffers off"),
        ({"data_ms": 25.0}, "data loading", 25.0, "--data-workers"),
        ({"rank_skew_ms": 30.0, "has_straggler": True}, "slowest rank", 30.0, "same cores"),
    ],
)
def test_what_takes_most_is_named_first_with_what_mends_it(ddp, what, ms, remedy):
    (first, *others) = found(**ddp)
    assert what in first[0]
    assert first[1] == ms
    assert remedy in first[2]
    assert not others


def test_all_reduces_take_no_more_than_they_do_alone():
    parts = found(exposed_comm_ms=41.0, comm_ms=11.0)
    assert [(what.split()[0], ms) for what, ms, _ in parts] == [("contention,", 30.0), ("all-reduce", 11.0)]


def test_own_work_is_that_of_one_device_and_views_tell_its_copies():
    """DDP on one device takes 100 ms where single takes 80; 8 of the 20 are saved by views on two."""
    ddp = DDP | measured(**STEP | {"step_ms": 120.0, "exposed_comm_ms": 40.0, "comm_ms": 12.0})
    one = case("ddp", 1, 80.0, case_id="one")
    views = case("ddp", 2, 170.0, case_id="views", gradient_as_bucket_view=True)
    columns = [(SINGLE, "timed", 80), (one, "timed", 100), (views, "timed", 112)]
    columns += [(ddp, "timed", 120), (ddp, "no_sync", 80), (ddp, "comm", 12)]
    for rows, wanted in (
        ([], {"all-reduce": 12, "contention,": 28}),
        ([one], {"all-reduce": 12, "contention,": 28, "DDP's": 20}),
        ([one, views], {"all-reduce": 12, "contention,": 28, "DDP's": 12, "copying": 8}),
    ):
        ids = {row["case_id"] for row in (SINGLE, ddp, *rows)}
        blocks = blocks_of(*(column for column in columns if column[0]["case_id"] in ids))
        by = [over(views, ddp, 1.06, 1.08)] if views in rows else []
        savings = explained(made_run([SINGLE, ddp, *rows], by, blocks=blocks)).savings
        told = {one.what.split()[0]: one.ms.estimate for one in savings}
        assert told == pytest.approx(wanted, abs=1)
        parts = {one.what.split()[0] for one in savings if one.part_of == "contention, waiting and copies"}
        assert parts == {"DDP's", "copying"} & wanted.keys(), "a part of what the answer calls contention"


@pytest.mark.parametrize("buffers_ms", [1.0, 8.0])
def test_own_work_is_a_part_of_what_is_exposed_where_the_all_reduce_alone_is_not_known(buffers_ms):
    ddp = DDP | measured(**STEP | {"step_ms": 120.0, "exposed_comm_ms": 40.0, "buffers_ms": buffers_ms})
    one = case("ddp", 1, 80.0, case_id="one")
    columns = [(SINGLE, "timed", 80), (one, "timed", 92), (ddp, "timed", 120), (ddp, "no_sync", 80)]
    savings = explained(made_run([SINGLE, ddp, one], blocks=blocks_of(*columns))).savings
    told = {one.label: one.ms.estimate for one in savings}
    own_work = "DDP's own overhead on one device (part of exposed communication)"
    wanted = {"exposed communication": 40.0, own_work: 12.0}
    if buffers_ms == 8:
        wanted |= {"exposed communication": 32.0, "DDP's broadcast of buffers": 8.0}
    assert told == pytest.approx(wanted, abs=1)


UNKNOWN = {"exposed_comm_ms_low": float("nan"), "exposed_comm_ms_high": float("nan")}


def test_what_is_small_not_known_or_of_chance_is_not_named():
    assert found() == []
    assert found(rank_skew_ms=30.0) == []


@pytest.mark.parametrize("ends", [{"exposed_comm_ms_low": -5.0, "exposed_comm_ms_high": 85.0}, UNKNOWN])
def test_nothing_is_to_be_saved_of_communication_that_is_not_resolved(ends):
    """The answer says unresolved, or too few rounds; a note that says more than it contradicts it."""
    row = DDP | measured(**STEP | {"exposed_comm_ms": 40.0, "comm_ms": 20.0}) | ends
    made = concluded(SINGLE, row, CAP_25)
    assert next(one for one in made.verdicts if one.question == "communication").is_open
    assert not made.step
    assert not any("go to" in note for note in made.notes)


def test_exposed_time_is_not_called_all_reduce_where_the_overlap_is_not_known():
    vague = {"hidden_pct": 40.0, "hidden_pct_low": -80.0, "hidden_pct_high": 160.0}
    row = DDP | measured(**STEP | {"exposed_comm_ms": 40.0, "comm_ms": 20.0}) | vague
    made = concluded(SINGLE, row)
    assert "How much of it is overlapped is not known" in made.verdicts[1].sentence
    (saving,) = made.step.savings
    assert (saving.what, saving.ms.estimate) == ("exposed communication", 40.0)


def test_the_step_of_dp_on_the_same_gpus_stands_beside_it():
    rows = [SINGLE, case("dp", 2, 190.0) | measured(step_ms=84.0)]
    made = concluded(*rows, DDP | measured(**STEP | {"data_ms": 30.0}))
    told = "takes 100 (99\N{EN DASH}101) ms, under DP 84.0 (83.2\N{EN DASH}84.8) ms."
    assert made.step.consists_of.endswith(told)
    assert not made.notes, "it stands beside what would save time"
    shown = tabulate_savings(made.step.savings, made.step.consists_of)
    assert shown.note.endswith(told)
    saved = "30.0 (29.7\N{EN DASH}30.3) ms", "data loading", "try more --data-workers or a faster source"
    assert shown.rows == (saved,)


@pytest.mark.parametrize("buffers_ms", [1.0, 8.0])
def test_the_parts_of_a_step_add_up(buffers_ms):
    step = STEP | {"exposed_comm_ms": 41.0, "comm_ms": 16.0, "buffers_ms": buffers_ms}
    single = SINGLE | measured(step_ms=50.0)
    note = concluded(single, DDP | measured(**step)).step.consists_of
    told = [float(part.split()[0]) for part in note.split(": ")[1].split(" + ")]
    assert told == ([50.0, 41.0, 9.0] if buffers_ms == 1 else [50.0, 8.0, 33.0, 9.0])


def test_a_remainder_has_the_interval_of_its_rounds():
    """What rounds have in common cancels; subtracting the ends of intervals would give 1 ms either way."""
    ddp = DDP | measured(**STEP | {"step_ms": 60.0, "exposed_comm_ms": 30.0, "comm_ms": 10.0})
    single = SINGLE | measured(step_ms=28.0)
    columns = (single, "timed", 28), (ddp, "timed", 60), (ddp, "no_sync", 30), (ddp, "comm", 10)
    step = explained(made_run([single, ddp], blocks=blocks_of(*columns)))
    single, exposed, other = (part.split() for part in step.consists_of.rstrip(".").split(" + "))
    assert (exposed[0], exposed[3:]) == ("30.0", ["exposed", "communication"]), "whatever it holds"
    low, high = map(float, other[1].strip("()").split("\N{EN DASH}"))
    (contention,) = (one.ms for one in step.savings if one.what.startswith("contention"))
    for found, true in ((contention, 20), (Interval(float(other[0]), low, high), 2)):
        assert found.estimate == pytest.approx(true, abs=0.5)
        assert found.low < true < found.high
        assert found.high - found.low < 0.1 * true + 0.5


@pytest.mark.parametrize(
    ("counts", "num_ranks", "straggler"),
    [
        ({0: 0, 1: 6}, 2, 1),
        ({0: 0, 1: 5}, 2, None),  # one of two equal ranks is the slower one in all of five rounds once in 16
        ({0: 2, 1: 8}, 2, None),
        ({0: 10, 1: 30}, 2, 1),
        ({0: 14, 1: 26}, 2, None),
        ({3: 4}, 8, 3),
        ({}, 2, None),
    ],
)
def test_a_straggler_is_no_rank_of_chance(counts, num_ranks, straggler):
    assert find_straggler(counts, sum(counts.values()), num_ranks) == straggler


def test_equal_ranks_are_seldom_taken_for_stragglers():
    rng = np.random.default_rng(0)
    for num_ranks, num_rounds in ((2, 8), (2, 40), (4, 6), (8, 5)):
        drawn = rng.integers(0, num_ranks, (2000, num_rounds))
        named = [
            find_straggler(dict(zip(*np.unique(one, return_counts=True), strict=True)), num_rounds, num_ranks)
            for one in drawn
        ]
        assert sum(one is not None for one in named) <= 0.06 * len(named)


def test_copies_are_a_cost_only_where_views_are_answered_to_be_faster():
    ddp = DDP | measured(**STEP | {"step_ms": 120.0, "exposed_comm_ms": 40.0})
    views = case("ddp", 2, 170.0, case_id="views", gradient_as_bucket_view=True)
    blocks = blocks_of((SINGLE, "timed", 80), (ddp, "timed", 120), (views, "timed", 112))
    for ends, is_named in (((1.06, 1.08), True), ((0.99, 1.15), False)):
        made = made_run([SINGLE, ddp, views], [over(views, ddp, *ends)], blocks=blocks)
        assert any("copying" in one.what for one in explained(made).savings) == is_named


def test_communication_that_is_surely_below_nothing_adds_nothing():
    """Exposed time below 0 is no cost, and no share of anything is overlapped."""
    made = concluded(SINGLE | measured(step_ms=95.0), DDP | measured(**STEP, comm_ms=20.0) | exposing(-6, -2))
    (verdict,) = (one for one in made.verdicts if one.question == "communication")
    assert "adds nothing: each DDP step is 4 (2\N{EN DASH}6) ms shorter" in verdict.sentence
    assert made.step.savings == ()
    assert "%" not in verdict.sentence


def test_what_contention_adds_has_the_interval_of_its_rounds():
    """Subtracting the ends of intervals would give 4 ms either way."""
    ddp = DDP | measured(step_ms=60.0, exposed_comm_ms=30.0, comm_ms=10.0) | hiding(-210, -190)
    columns = (SINGLE, "timed", 28), (ddp, "timed", 60), (ddp, "no_sync", 30), (ddp, "comm", 10)
    made = conclude_run(made_run([SINGLE, ddp], blocks=blocks_of(*columns)))
    value, ends = made.verdicts[1].sentence.rstrip(".").split(" another ")[1].split()[:2]
    low, high = map(float, ends.strip("()").split("\N{EN DASH}"))
    assert low < 20 < high
    assert abs(float(value) - 20) < 0.5
    assert high - low < 3


@pytest.mark.parametrize(
    ("settings", "single", "first"),
    [
        ({"accumulate": 4}, 28.0, "112 (111\N{EN DASH}113) ms 4 single-device steps"),
        (
            {"scaling": "strong", "batch_per_device": 5},
            100.0,
            "50.0 (49.5\N{EN DASH}50.5) ms 1/2 of the single-device step",
        ),
        ({}, 200.0, "200 (198\N{EN DASH}202) ms single-device step"),
    ],
)
def test_a_sum_begins_with_what_one_device_takes_for_the_same_work(settings, single, first):
    ddp = DDP | measured(**STEP | {"step_ms": 150.0, "exposed_comm_ms": 30.0}) | settings
    note = concluded(SINGLE | measured(step_ms=single), ddp).step.consists_of
    assert note.split(": ")[1].startswith(first)
    told = note.rstrip(".").split(": ")[1].replace(" - ", " + -").split(" + ")
    assert sum(float(part.split()[0]) for part in told) == pytest.approx(150, abs=1)


def test_without_intervals_there_is_no_sum():
    ddp = DDP | measured(**STEP | {"exposed_comm_ms": 40.0}) | UNKNOWN
    assert not concluded(SINGLE | measured(step_ms=50.0), ddp).step
