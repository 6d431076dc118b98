import json
import math
from dataclasses import replace
from types import SimpleNamespace

import made
import numpy as np
import pandas as pd
import pytest
from made import cap_of, planned, resolved, times_of
from scipy import stats as scipy_stats

from ddp_bench.bench.plan.buckets import BucketLayout
from ddp_bench.bench.results.aggregate import (
    compute_metrics_by_round,
    compute_rate_half_widths,
    describe_planned_case,
    estimate_cases,
    make_allreduce_rows,
    make_bucket_rows,
    make_case_rows,
)
from ddp_bench.bench.results.case_result import read_case_results
from ddp_bench.bench.results.columns import BLOCKS, make_frame
from ddp_bench.bench.results.journal import Curve
from ddp_bench.bench.results.recorder import Recorder
from ddp_bench.bench.results.round_times import RoundTimes

PLAN = planned(resolved(gpus=(1, 2), bucket_cap_mb=("default", "1")))
IDS = {(p.case.mode, p.case.num_devices, cap_of(p.case)): p.case.case_id for p in PLAN}
SINGLE, DDP, DP, CAP = ("single", 1, ""), ("ddp", 2, "default"), ("dp", 2, ""), ("ddp", 2, "1")


def block(key, round_index, step_ms, **more):
    return made.block(IDS[key], round_index, step_ms, steps=2, **more)


def row_of(key, rows):
    """The row of a case in cases.csv, where these blocks are all that was measured."""
    measured = {row["case_id"] for row in rows}
    outcomes = [describe_planned_case(p) for p in PLAN if p.case.case_id in measured]
    return make_case_rows(outcomes, times_of(make_frame(rows, BLOCKS))).set_index("case_id").loc[IDS[key]]


def frames(step_ms):
    blocks = make_frame(
        [
            block(key, r + 1, ms, rank=rank)
            for key, series in step_ms.items()
            for r, ms in enumerate(series)
            for rank in range(key[1] if key[0] == "ddp" else 1)
        ],
        BLOCKS,
    )
    measured = {IDS[key] for key in step_ms}
    outcomes = [
        describe_planned_case(p)
        if p.case.case_id in measured
        else describe_planned_case(p, status="skipped", reason=p.skip_reason or "?")
        for p in PLAN
    ]
    return make_case_rows(outcomes, times_of(blocks)), blocks


DRIFTING = {
    SINGLE: [100.0, 110, 120, 130, 140],
    ("ddp", 1, "default"): [101.0, 111, 121, 131, 141],
    DP: [200.0, 220, 240, 260, 280],
    DDP: [125.0, 137.5, 150, 162.5, 175],
    CAP: [112.5, 123.8, 135, 146.2, 157.5],
}


def test_ratios_are_formed_inside_a_round():
    cases, _ = frames(DRIFTING)
    row = cases.set_index("case_id").loc[IDS[DDP]]
    assert row["speedup"] == pytest.approx(1.6)
    ends = np.log([row["speedup_low"] / row["speedup"], row["speedup_high"] / row["speedup"]])
    assert ends == pytest.approx([0, 0], abs=1e-4), "the drift of 40% cancels"
    assert row["images_per_s_high"] - row["images_per_s_low"] > 20


def test_what_was_not_measured_is_empty():
    cases, _ = frames(DRIFTING)
    assert len(cases) == len(PLAN), "every planned case has exactly one row"
    skipped = cases[cases["status"] == "skipped"].iloc[0]
    assert pd.isna(skipped["images_per_s"])
    assert pd.isna(skipped["num_rounds"])
    assert cases["comm_ms"].isna().all()
    assert cases.set_index("mode").loc["single", "bucket_cap_mb"] is pd.NA
    assert cases["vs_ddp_default"].isna().all()


ROUNDS = range(1, 7)
SINGLE_MS = [100.0, 102, 98, 101, 99, 100]
DDP_MS = [130.0, 134, 128, 131, 129, 133]
LOCAL_MS = [101.0, 103, 97, 102, 100, 105]
COMM_MS = [60.0, 64, 58, 61, 59, 63]
LAG_MS = [4.0, 6, 3, 5, 2, 7]
"""How much later rank 1 is than rank 0 where nobody waits."""


def phases(key=CAP, rank=0, **series):
    """The blocks of a rank of a case, by phase and round."""
    return [
        block(key, r, ms, phase=phase, rank=rank)
        for phase, all_ms in series.items()
        for r, ms in enumerate(all_ms, 1)
    ]


def by_hand():
    """The row of DDP on two devices: rank 1 is the slower one where no rank waits, rank 0 in timed blocks."""
    first_ms = [local - lag for local, lag in zip(LOCAL_MS, LAG_MS, strict=True)]
    rows = phases(SINGLE, timed=SINGLE_MS) + phases(timed=DDP_MS, no_sync=first_ms, comm=COMM_MS)
    rows += phases(rank=1, timed=[ms - 10 for ms in DDP_MS], no_sync=LOCAL_MS, comm=COMM_MS)
    for r, row in enumerate(phases(anatomy=[1.1 * ms for ms in DDP_MS]), 1):
        detail = {"forward_ms": 10.0 + r, "last_ready_ms": 60.0, "local_last_ready_ms": 40.0}
        rows.append(row | {"detail": json.dumps(detail)})
    return row_of(CAP, rows)


@pytest.mark.parametrize(
    ("name", "by_round"),
    [
        ("anatomy_slowdown_pct", [10.0] * 6),
        ("rank_skew_ms", LAG_MS),
        ("forward_ms", [10.0 + r for r in ROUNDS]),
        ("compute_slowdown", [1.5] * 6),
    ],
)
def test_columns_of_a_pass_are_medians_of_what_its_rounds_say(name, by_round):
    """And its interval scipy's: six rounds reach 95% with two of their values, or points beside them."""
    row = by_hand()
    assert row[name] == pytest.approx(np.median(by_round))
    exact = scipy_stats.quantile_test(by_round, p=0.5).confidence_interval(0.95)
    assert exact.low - 1e-9 <= row[f"{name}_low"] <= row[name] <= row[f"{name}_high"] <= exact.high + 1e-9
    if len(set(by_round)) > 1:
        assert row[f"{name}_low"] < row[name] < row[f"{name}_high"]


@pytest.mark.parametrize(
    ("name", "by_round"),
    [
        ("step_ms", DDP_MS),
        ("no_sync_step_ms", LOCAL_MS),
        ("comm_ms", COMM_MS),
        ("images_per_s", [32 * 1000 / ms for ms in DDP_MS]),
        ("speedup", [2 * single / ms for single, ms in zip(SINGLE_MS, DDP_MS, strict=True)]),
        ("efficiency", [single / ms for single, ms in zip(SINGLE_MS, DDP_MS, strict=True)]),
    ],
)
def test_typical_columns_are_close_to_the_geometric_mean(name, by_round):
    """Where no round stands out; the estimate itself has tests of its own."""
    row = by_hand()
    assert row[name] == pytest.approx(scipy_stats.gmean(by_round), rel=0.01)
    assert row[f"{name}_low"] < scipy_stats.gmean(by_round) < row[f"{name}_high"]


BY_HAND = {
    "step_ms": 125.0,
    "images_per_s": 32 * 1000 / 125,
    "speedup": 2 * 100 / 125,
    "efficiency": 100 / 125,
    "exposed_comm_ms": 125.0 - 110,
}


CONSTANT = phases(SINGLE, timed=[100.0] * 6) + phases(timed=[125.0] * 6, no_sync=[110.0] * 6, comm=[30.0] * 6)
"""Blocks of one device, and of DDP on two, of which each has a batch of 16; each round is like the other."""


def test_a_metric_of_rounds_and_of_their_fit_is_the_same_formula():
    """`single` is held against nothing, and what was not measured has neither."""
    times = times_of(make_frame(CONSTANT, BLOCKS))
    cases = read_case_results(make_case_rows([describe_planned_case(p) for p in PLAN], RoundTimes()))
    by_round, fitted = compute_metrics_by_round(cases, times), estimate_cases(cases, times.fit_steps())
    ddp, single = IDS[CAP], IDS[SINGLE]
    for name, value in BY_HAND.items():
        assert by_round[ddp][name] == pytest.approx(dict.fromkeys(ROUNDS, value)), name
        known = value if name == "exposed_comm_ms" else math.log(value)
        assert fitted[ddp][name].value == pytest.approx(known), name
    assert by_round[single]["speedup"] == {}
    assert by_round[single]["step_ms"] == dict.fromkeys(ROUNDS, 100.0)
    assert math.isnan(fitted[single]["speedup"].value)
    assert by_round[IDS[DP]]["images_per_s"] == {}
    assert math.isnan(fitted[IDS[DP]]["images_per_s"].value)


def test_the_share_of_a_step_that_communication_adds():
    """Hold it against a value by hand: 15 of 125 ms are 12%; it has an interval."""
    row = row_of(CAP, CONSTANT)
    assert row["exposed_comm_pct"] == pytest.approx(12.0)
    assert pd.isna(row_of(SINGLE, CONSTANT)["exposed_comm_pct"])
    row = by_hand()
    shares = [100 * (1 - local / ms) for ms, local in zip(DDP_MS, LOCAL_MS, strict=True)]
    assert row["exposed_comm_pct_low"] < np.mean(shares) < row["exposed_comm_pct_high"]
    assert row["exposed_comm_pct"] == pytest.approx(100 * row["exposed_comm_ms"] / row["step_ms"])


def test_what_has_no_interval_by_hand():
    row = by_hand()
    steps = [ms for ddp in DDP_MS for ms in (ddp, ddp, ddp - 10, ddp - 10)]
    assert row["step_ms_p50"] == pytest.approx(np.percentile(steps, 50)), "of all ranks and steps"
    assert row["step_ms_p75"] == pytest.approx(np.percentile(steps, 75))
    assert row["step_ms_p95"] == pytest.approx(np.percentile(steps, 95))
    assert row["images_per_s_sustained"] == pytest.approx(32 * 1000 / np.mean(DDP_MS))
    assert row["num_rounds"] == 6
    assert row["slowest_rank"] == 1
    assert row["bucket_cap_mb"] == "1"
    assert row["backend"] == "gloo"


def hiding(steps_ms):
    """The row of a case whose step is 100 ms under `no_sync` and whose communication alone takes 40 ms."""
    num = len(steps_ms)
    return row_of(CAP, phases(timed=steps_ms, no_sync=[100.0] * num, comm=[40.0] * num))


@pytest.mark.parametrize(("step_ms", "hidden"), [(130.0, 25.0), (150.0, -25.0), (140.0, 0.0), (70.0, 175.0)])
def test_exposed_and_hidden_communication_by_definition(step_ms, hidden):
    """The share is not clamped."""
    row = hiding([step_ms] * 5)
    assert row["exposed_comm_ms"] == pytest.approx(step_ms - 100.0)
    assert (row["comm_ms"], row["no_sync_step_ms"]) == pytest.approx((40.0, 100.0))
    assert row["hidden_pct"] == pytest.approx(hidden, abs=1e-9)


def test_below_five_rounds_there_is_no_interval_and_no_hidden_share():
    few, enough = (hiding([120.0, 121, 119, 122, 118][:n]) for n in (4, 5))
    assert few["step_ms"] == pytest.approx(120.5, abs=0.1)
    for name in ("step_ms", "images_per_s", "exposed_comm_ms"):
        assert few[name] == few[name]
        assert all(math.isnan(few[f"{name}{end}"]) for end in ("_low", "_high"))
        assert enough[f"{name}_low"] < enough[name] < enough[f"{name}_high"]
    assert math.isnan(few["hidden_pct"])
    assert enough["hidden_pct"] == pytest.approx(50.0, abs=0.5)


def test_what_synchronised_batch_norm_sends_is_exposed_and_nothing_is_said_of_hiding():
    """Its messages are not in `comm_ms`, so the two do not make a share."""
    (planned,) = (p for p in PLAN if p.case.case_id == IDS[CAP])
    synced = replace(planned, case=replace(planned.case, sync_batchnorm=True))
    rows = phases(timed=[130.0] * 6, no_sync=[100.0] * 6, comm=[40.0] * 6)
    rows = [row | {"case_id": synced.case.case_id} for row in rows]
    row = make_case_rows([describe_planned_case(synced)], times_of(make_frame(rows, BLOCKS))).iloc[0]
    assert row["exposed_comm_ms"] == pytest.approx(30.0)
    assert pd.isna(row["hidden_pct"])


def test_a_share_stays_between_0_and_100_with_its_interval():
    shares = [0.5, 1.0, 50.0, 50.0, 60.0, 99.5]
    traced = zip(phases(trace=[140.0] * 6), shares, strict=True)
    rows = [row | {"detail": json.dumps({"overlap_trace_pct": share})} for row, share in traced]
    row = row_of(CAP, rows + phases(timed=[130.0] * 6))
    assert row["overlap_trace_pct"] == 50.0
    assert 0 <= row["overlap_trace_pct_low"] < 50 < row["overlap_trace_pct_high"] <= 100


def test_buckets_are_launched_once_all_before_them_are_ready():
    key = ("ddp", 2, "1")
    rows = [
        block(key, r, 130.0, rank=rank, phase="anatomy")
        | {"detail": json.dumps({"ready_ms": [21.0 + r % 3, 10.0, 40.0 + rank]})}
        for r in range(1, 7)
        for rank in (0, 1)
    ]
    layout = BucketLayout(num_bytes=(400, 800, 1200), parameters=((0,), (1, 2), (3, 4, 5)))

    def found_in(rows, layout=layout):
        return make_bucket_rows({IDS[key]: layout}, times_of(make_frame(rows, BLOCKS)))

    found = found_in(rows)
    assert found["rank"].tolist() == [0, 0, 0, 1, 1, 1]
    assert found["bucket"].tolist() == [0, 1, 2] * 2
    assert found["bytes"].tolist() == [400, 800, 1200] * 2
    assert found["num_params"].tolist() == [1, 2, 3] * 2
    assert found["ready_ms"].tolist() == [22.0, 10.0, 40.0, 22.0, 10.0, 41.0]
    assert found["launch_ms"].tolist() == [22.0, 22.0, 40.0, 22.0, 22.0, 41.0]
    assert (found["ready_ms_low"] <= found["ready_ms"]).all()
    low, high = found[["ready_ms_low", "ready_ms_high"]].iloc[0]
    assert (low, high) == pytest.approx((21.0, 23.0), abs=0.2), "about the range of six blocks"
    assert found["launch_ms_high"].iloc[1] == found["ready_ms_high"].iloc[0]
    assert found["ready_ms_high"].iloc[1] == 10.0, "alike in all blocks"
    assert found[["start_ms", "done_ms", "done_ms_low"]].isna().all(axis=None), "nothing was traced"
    few = found_in(rows[:4])
    assert few["ready_ms"].notna().all()
    assert few[["ready_ms_low", "launch_ms_high"]].isna().all(axis=None), "few blocks give no interval"
    assert found_in(rows, BucketLayout((400, 800, 1200), ()))["num_params"].isna().all()


def test_bus_bandwidth_is_that_of_nccl_tests():
    """Bytes over time, times 2 (n - 1) / n: 6 MB in 3 ms over 4 ranks are 2 GB/s and 3 GB/s."""
    times_ms = (6_000_000, [3.0, 2.0, 9.0, 2.0, 9.0, 3.0]), (4096, [0.5])
    curve = Curve(num_ranks=4, backend="nccl", times_ms=times_ms)
    _, (small, large) = zip(*make_allreduce_rows([curve]).iterrows(), strict=True)
    assert small["bytes"] == 4096
    assert (large["bytes"], large["num_devices"], large["backend"]) == (6_000_000, 4, "nccl")
    assert (large["time_ms"], large["num_samples"]) == (3.0, 6)
    assert large["time_ms_low"] < 3.0 < large["time_ms_high"]
    assert large["busbw_gb_per_s"] == pytest.approx(3.0)


def test_the_worst_half_width_is_of_the_widest_case_and_unknown_where_one_is():
    def rows(*cases):
        names = ("mode", "status", "images_per_s", "images_per_s_low", "images_per_s_high")
        found = pd.DataFrame(cases, columns=names)
        return found.assign(case_id=[str(i) for i in range(len(cases))])

    single, ddp = ("single", "ok", 100, 90, 110), ("ddp", "ok", 50, 49, 52)
    unknown, failed = ("ddp", "ok", 50, math.nan, math.nan), ("ddp", "failed", 100, 10, 190)
    assert compute_rate_half_widths(rows(single, ddp)) == {"1": pytest.approx(0.03)}
    for cases, worst in (
        ((single, ddp), 0.1),
        ((ddp, failed), 0.03),
        ((ddp, unknown), None),
        ((failed,), None),
    ):
        width = Recorder.compute_half_width(SimpleNamespace(tables=SimpleNamespace(cases=rows(*cases))))
        assert math.isnan(width) if worst is None else width == pytest.approx(worst)
