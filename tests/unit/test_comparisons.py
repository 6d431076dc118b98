"""Which cases are compared, what their interval says, and that all numbers of a run hang together."""

import math

import numpy as np
import pandas as pd
import pytest
from made import made_manifest, new_run, planned, resolved, times_of
from recorded_pages import FORMS
from report_runs import case
from sample_runs import EVERY_SAMPLE, comparisons, rebuilt
from test_aggregate import DRIFTING, IDS, PLAN, frames

from ddp_bench.bench.results.aggregate import describe_planned_case, make_case_rows
from ddp_bench.bench.results.block_times import BlockTimes
from ddp_bench.bench.results.case_columns import CASES
from ddp_bench.bench.results.case_result import CaseResult, read_case_results
from ddp_bench.bench.results.columns import COMPARISONS, make_frame
from ddp_bench.bench.results.comparisons import (
    EQUAL,
    FASTER,
    METRIC,
    SLOWER,
    TOO_FEW,
    UNRESOLVED,
    Comparison,
    compare_pairs,
    list_pairs,
    read_comparisons,
)
from ddp_bench.bench.results.recorder import Recorder
from ddp_bench.bench.results.store import load_run
from ddp_bench.bench.stats.fit import FittedSteps
from ddp_bench.bench.stats.interval import Interval

NAN = math.nan


def make(low, high, *, margin=0.05, num_rounds=20):
    return Comparison("a", "b", Interval(math.sqrt(low * high), low, high), margin, num_rounds)


@pytest.mark.parametrize(
    ("low", "high", "answer", "within", "narrow"),
    [
        (1.20, 1.30, FASTER, False, False),
        (1.20, 1.24, FASTER, False, True),
        (1.01, 1.04, FASTER, True, True),
        (1.01, 1.06, FASTER, False, True),
        (0.80, 0.90, SLOWER, False, False),
        (0.96, 0.99, SLOWER, True, True),
        (0.94, 0.99, SLOWER, False, False),
        (0.97, 1.03, EQUAL, True, False),
        (1 / 1.05, 1.05, EQUAL, True, False),
        (1 / 1.0501, 1.05, UNRESOLVED, False, False),
        (0.98, 1.0501, UNRESOLVED, False, False),
        (0.99, 1.06, UNRESOLVED, False, False),
        (1.0, 1.04, EQUAL, True, True),
        (0.5, 2.0, UNRESOLVED, False, False),
        (NAN, NAN, TOO_FEW, False, False),
    ],
)
def test_an_interval_has_one_answer_at_the_margin(low, high, answer, *, within, narrow):
    one = make(low, high)
    assert (one.answer, one.within_margin) == (answer, within)
    assert one.is_narrow == narrow
    other = make(1 / high, 1 / low)
    swapped = {FASTER: SLOWER, SLOWER: FASTER}
    assert other.answer == swapped.get(answer, answer), "the other way round it says the same"
    assert (other.within_margin, other.is_narrow) == (within, narrow)


def test_the_margin_and_the_rounds_decide():
    assert make(0.97, 1.03, margin=0.01).answer == UNRESOLVED
    assert make(0.97, 1.03, margin=0.1).answer == EQUAL
    assert make(0.97, 1.03, margin=0.1).is_narrow
    assert [make(1.2, 1.3, num_rounds=n).answer for n in (1, 4, 5)] == [TOO_FEW, TOO_FEW, FASTER]
    assert make(NAN, NAN).half_width == math.inf


def test_a_row_comes_back_from_the_table():
    made = [make(1.2, 1.3), make(0.97, 1.03, margin=0.01), make(NAN, NAN, num_rounds=3)]
    table = make_frame((one.to_row() for one in made), COMPARISONS)
    assert table["answer"].tolist() == [one.answer for one in made] == [FASTER, UNRESOLVED, TOO_FEW]
    assert set(table["metric"]) == {METRIC}
    again = read_comparisons(table)
    assert again[:2] == made[:2]
    assert math.isnan(again[2].ratio.low)
    assert again[2].answer == TOO_FEW
    assert list(made[0].to_row()) == [column.name for column in COMPARISONS]


SINGLE, DP, DDP = case("single", 1), case("dp", 2), case("ddp", 2)
CAP_1, CAP_25 = (case("ddp", 2, bucket_cap_mb=cap) for cap in ("1", "25"))
DP_4, DDP_4 = (case(mode, 4, oversubscribed=True) for mode in ("dp", "ddp"))
CAP_4 = case("ddp", 4, oversubscribed=True, bucket_cap_mb="1")
OWN_DP, OWN_DDP = case("dp", 3), case("ddp", 3)


@pytest.mark.parametrize(
    ("cases", "pairs"),
    [
        ((SINGLE, DP, CAP_1, DDP, CAP_25, case("ddp", 1)), [(DDP, DP), (CAP_1, DDP), (CAP_25, DDP)]),
        ((SINGLE, DP_4, DDP_4, CAP_4, OWN_DP, OWN_DDP, DP, DDP), [(DDP, DP), (OWN_DDP, OWN_DP)]),
        ((SINGLE, DP_4, DDP_4, CAP_4), [(DDP_4, DP_4), (CAP_4, DDP_4)]),
        ((SINGLE, DP, CAP_25, CAP_1), [(CAP_25, DP), (CAP_1, CAP_25)]),
        ((SINGLE, DP, case("ddp", 1)), []),
        (tuple(FORMS), [(row, FORMS[1]) for row in FORMS[2:]]),
    ],
    ids=["default", "own counts", "shared alone", "first for the default", "no DDP", "forms"],
)
def test_which_cases_are_compared(cases, pairs):
    """Rows of a plan or of a table."""
    expected = [(first["case_id"], second["case_id"]) for first, second in pairs]
    assert (
        list_pairs(map(CaseResult.from_row, cases))
        == list_pairs(read_case_results(make_frame(cases, CASES)))
        == expected
    )


def test_the_margin_is_the_manifests_else_its_devices():
    for settings, margin in (
        ({"margin": 0.02, "device": "cpu"}, 0.02),
        ({"margin": None, "device": "cuda"}, 0.01),
        ({}, 0.05),
    ):
        assert made_manifest(settings=settings).margin == margin


def test_rates_count_the_batch_of_each_and_the_rounds_of_the_one_with_fewer():
    rng = np.random.default_rng(0)
    steps = {
        (name, "timed"): {r: ms * math.exp(0.01 * rng.standard_normal()) for r in range(1, rounds)}
        for name, ms, rounds in (("a", 100.0, 21), ("b", 50.0, 11), ("c", 50.0, 21))
    }
    typical = FittedSteps(steps)
    pairs, units = [("a", "b"), ("gone", "b"), ("a", "c")], {"a": 64, "b": 16, "c": 16, "gone": 1}
    one, other = compare_pairs(pairs, typical, units=units, margin=0.05)
    assert (one.case_id, one.reference_id, one.num_rounds) == ("a", "b", 10)
    assert one.ratio.estimate == pytest.approx(2, rel=0.02), "four times the batch in twice the time"
    assert one.ratio.low < one.ratio.estimate < one.ratio.high
    assert (other.reference_id, other.num_rounds) == ("c", 20)


@pytest.mark.parametrize("path", EVERY_SAMPLE)
def test_quotients_hang_together(path):
    """Over everything in cases.csv and comparisons.csv, to 1e-9."""
    cases = rebuilt(path).set_index("case_id")
    ok = cases[cases["status"] == "ok"]
    rate, step = ok["images_per_s"].astype(float), ok["step_ms"].astype(float)
    assert rate.tolist() == pytest.approx((1000 * ok["global_batch"] / step).tolist(), rel=1e-9)
    single = rate[ok["mode"] == "single"].iloc[0]
    assert ok["speedup"].tolist() == pytest.approx((rate / single).tolist(), rel=1e-9)
    assert (ok["efficiency"] * ok["num_devices"]).tolist() == pytest.approx(ok["speedup"].tolist(), rel=1e-9)
    exposed = ok["exposed_comm_ms"].dropna()
    assert exposed.tolist() == pytest.approx((step - ok["no_sync_step_ms"]).dropna().tolist(), rel=1e-9)
    hidden = ok["hidden_pct"].dropna()
    formed = 100 * (1 - exposed / ok["comm_ms"].astype(float))
    assert hidden.tolist() == pytest.approx(formed[hidden.index].tolist(), rel=1e-9)
    for one in comparisons(path):
        assert one.ratio.estimate == pytest.approx(rate[one.case_id] / rate[one.reference_id], rel=1e-9)
        row = ok.loc[one.case_id]
        stored = [row[f"vs_ddp_default{end}"] for end in ("", "_low", "_high")]
        assert stored == [one.ratio.estimate, one.ratio.low, one.ratio.high]
        assert ok.loc[one.reference_id, "vs_ddp_default"] == 1.0
    for name in ("step_ms", "images_per_s", "speedup", "efficiency", "exposed_comm_ms", "comm_ms"):
        known = ok[ok[f"{name}_low"].notna()]
        assert (known[f"{name}_low"] <= known[name] * (1 + 1e-12) + 1e-12).all()
        assert (known[name] <= known[f"{name}_high"] * (1 + 1e-12) + 1e-12).all()


def test_dp_stands_below_the_line_in_its_comparison():
    """As gathered in cases.csv: DP over DDP's default is the inverse of the answer that is printed."""
    _, blocks = frames(DRIFTING)
    times = times_of(blocks)
    dp, ddp, cap = (IDS[key] for key in (("dp", 2, ""), ("ddp", 2, "default"), ("ddp", 2, "1")))
    batch = {p.case.case_id: p.case.global_batch for p in PLAN}
    found = compare_pairs([(ddp, dp), (cap, ddp)], times.fit_steps(), units=batch, margin=0.05)
    measured = {IDS[key] for key in DRIFTING}
    outcomes = [describe_planned_case(p) for p in PLAN if p.case.case_id in measured]
    rows = make_case_rows(outcomes, times, found).set_index("case_id")["vs_ddp_default"]
    assert rows[dp] == pytest.approx(125 / 200)
    assert rows[ddp] == 1.0
    assert rows[cap] == pytest.approx(125 / 112.5, rel=1e-3)
    assert pd.isna(rows[IDS["single", 1, ""]])


def test_a_default_that_has_the_layout_of_another_cap_is_no_reference(tmp_path):
    """On a small model every cap gives one bucket: the first cap is measured and stands for the default."""
    plan = planned(resolved(bucket_cap_mb="25,default,1", gpus="2"), arch="resnet20", image_size=32)
    recorder = Recorder.begin(plan, new_run(tmp_path / "run", settings={"margin": 0.05}))
    _, _, cap, default, other = (p.case.case_id for p in plan)
    for index in (0, 1, 2, 4):
        recorder.set_outcome(index, "ok")
    recorder.set_outcome(3, "skipped", "same buckets as cap 25: the gradients are 1.03 MiB")
    for r in range(1, 7):
        for case_id, ms in ((other, 50.0), (cap, 100.0)):
            times = BlockTimes(ms + 0.1 * (r % 3), (ms,))
            recorder.add_block(case_id, "timed", r, 0, 0.0, [("h", rank, times) for rank in range(2)])
    cases = recorder.write()
    assert [(one.case_id, one.reference_id) for one in recorder.tables.comparisons] == [(other, cap)]
    assert recorder.tables.comparisons[0].ratio.estimate == pytest.approx(2, rel=0.01)
    assert default not in set(cases["case_id"][cases["status"] == "ok"])
    (again,) = load_run(tmp_path / "run").compared
    assert (again.case_id, again.reference_id, again.answer) == (other, cap, FASTER)
    assert again.ratio.low == pytest.approx(recorder.tables.comparisons[0].ratio.low)
