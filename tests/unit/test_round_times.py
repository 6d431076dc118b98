"""Times by round, and of what trains on after the rounds."""

import json
import math

import made
import numpy as np
import pandas as pd
import pytest
import scipy
from gate_runs import STEADY, write_run

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.gate.runs import checked, read_run
from ddp_bench.bench.results import tables
from ddp_bench.bench.results.round_times import CaseTimes, RoundTimes
from ddp_bench.bench.results.schema import BLOCKS, typed_frame
from ddp_bench.bench.results.store import RunWriter, load_run
from ddp_bench.bench.results.typical import steady
from ddp_bench.bench.stats.one_run import SeriesNoise, fit

RNG = np.random.default_rng(3)


def block(case_id, phase, round_index, *, num_ranks=4):
    rows = []
    for rank in range(num_ranks):
        steps = RNG.uniform(90, 110, size=3)
        detail = {"last_ready_ms": 50.0 + rank, "local_last_ready_ms": 40.0, "ready_ms": [1.0 + rank, 2.0]}
        rows.append(
            made.block(case_id, round_index, 0.0, phase=phase, rank=rank, steps=3, host="h")
            | {"block_ms": round(float(steps.sum()), 4), "steps_ms": " ".join(f"{ms:.5g}" for ms in steps)}
            | {"detail": json.dumps(detail) if phase == "anatomy" else None}
        )
    return rows


BLOCKS_MADE = [
    block(case_id, phase, round_index)
    for round_index in (1, 2, 3)
    for case_id in ("a", "b")
    for phase in ("timed", "no_sync", "anatomy")
]
FRAME = typed_frame([row for rows in BLOCKS_MADE for row in rows], BLOCKS)


def test_it_says_of_every_block_what_pandas_says_of_all_rows():
    times = RoundTimes(BLOCKS_MADE)
    for phase in ("timed", "no_sync", "anatomy"):
        own = FRAME[FRAME["phase"] == phase]
        longest = (own["block_ms"] / own["num_steps"]).groupby([own["case_id"], own["round"]]).max()
        expected = {case_id: longest[case_id].to_dict() for case_id in ("a", "b")}
        found = times.step_ms(phase)
        assert {c: pytest.approx(r) for c, r in expected.items()} == found
    own = FRAME[(FRAME["case_id"] == "a") & (FRAME["phase"] == "no_sync")]
    per_step = own["block_ms"] / 3
    spread = per_step.groupby(own["round"]).max() - per_step.groupby(own["round"]).min()
    assert times.of_case("a").skew_ms == pytest.approx(dict(spread))
    slowest = own.loc[own.groupby("round")["block_ms"].idxmax(), "rank"].mode().iloc[0]
    assert times.of_case("a").slowest_rank() == slowest
    steps = [
        float(ms)
        for text in FRAME[(FRAME["case_id"] == "a") & (FRAME["phase"] == "timed")]["steps_ms"]
        for ms in text.split()
    ]
    assert times.of_case("a").percentile_ms(95) == pytest.approx(np.percentile(steps, 95), rel=1e-5)


def test_details_are_medians_over_ranks_and_moments_those_of_every_block():
    case = RoundTimes(BLOCKS_MADE).of_case("b")
    assert case.details == {"compute_slowdown": pytest.approx(dict.fromkeys((1, 2, 3), 51.5 / 40))}
    assert np.median(case.bucket_moments(2)[3]["ready_ms"], axis=0).tolist() == [4.0, 2.0]
    assert case.bucket_moments(3) == {}, "of another layout"


def test_a_frame_in_any_order_gives_the_same():
    mixed = RoundTimes.of(FRAME.sample(frac=1, random_state=1))
    for case_id, case in RoundTimes.of(FRAME).cases.items():
        other = mixed.of_case(case_id)
        assert other.step_ms == case.step_ms
        assert other.skew_ms == pytest.approx(case.skew_ms)
        assert sorted(other.steps_ms) == sorted(case.steps_ms)


def test_a_case_without_blocks_has_nothing():
    case = RoundTimes().of_case("a")
    assert case.slowest_rank() is None
    assert np.isnan(case.percentile_ms(50))
    assert case.bucket_moments(2) == {}


def test_a_file_read_block_by_block_gives_the_same_times(tmp_path):
    writer = RunWriter(tmp_path)
    for rows in BLOCKS_MADE:
        writer.append("blocks.csv", rows)
    read, kept = RoundTimes(tables.read_blocks(tmp_path / "blocks.csv")), RoundTimes(BLOCKS_MADE)
    assert read.cases.keys() == kept.cases.keys()
    for case_id, case in kept.cases.items():
        assert read.of_case(case_id).step_ms == case.step_ms
        assert read.of_case(case_id).steps_ms == case.steps_ms
        assert read.of_case(case_id).details == case.details


@pytest.mark.parametrize(
    "line",
    [
        "a,timed,1,0,0,h,0,0,1,1,",
        "a,timed,1,0,0,h,0,1,nan,1,",
        "a,timed,one,0,0,h,0,1,1,1,",
        "a,timed,1,0,0,h,0,1,1,one,",
        "a,anatomy,1,0,0,h,0,1,1,1,{",
        'a,timed,1,0,0,h,0,1,1,1,"{""gpus"": 5}"',
        'a,timed,1,0,0,h,0,1,1,1,"{""gpus"": {""0"": [1]}}"',
        'a,timed,1,0,0,h,0,1,1,1,"{""gpus"": {""0"": {""power_w"": ""much""}}}"',
        "a,timed,1,0",
        f"a,timed,1,0,0,{'h' * 200_000},0,1,1,1,",
    ],
)
def test_a_file_that_is_not_whole_is_refused(line, tmp_path):
    path = tmp_path / "blocks.csv"
    path.write_text(",".join(c.name for c in BLOCKS) + "\n" + line + "\n")
    with pytest.raises(UsageError, match=r"blocks\.csv cannot be read"), tables.readable(path):
        RoundTimes(tables.read_blocks(path))


def test_of_a_run_too_large_for_memory_the_longest_ranks_are_loaded(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", {key: [*series] * 20 for key, series in STEADY.items()})
    whole = load_run(folder)
    gate = read_run(folder)
    size = (folder / "blocks.csv").stat().st_size
    assert size > (folder / "cases.csv").stat().st_size
    monkeypatch.setattr(tables, "MOST_TABLE_BYTES", size - 1)
    large = load_run(folder)
    assert (whole.longest_only, large.longest_only) == (False, True)
    assert len(large.blocks) < len(whole.blocks)
    assert large.times.step_ms("timed") == whole.times.step_ms("timed")
    pd.testing.assert_frame_equal(large.cases, whole.cases)
    assert checked(large).cases == gate.cases, "the gate judges it all the same"


def trained(step_ms, *, steps=10):
    """A case on two ranks whose sustained blocks took so long per step; the second rank is the longer one."""
    times = CaseTimes()
    for number, ms in enumerate(step_ms, 1):
        rows = [
            made.block("c", number, ms * share, phase="sustained", rank=rank, steps=steps)
            for rank, share in enumerate((0.5, 1.0))
        ]
        times.add(rows)
    return times


@pytest.mark.parametrize(
    ("step_ms", "units", "rate", "change_pct"),
    [
        # 20 blocks: two at 8 ms, eight at 9 ms, ten at 10 ms, so the last half of the time is 10 ms alone.
        ([8.0] * 2 + [9.0] * 8 + [10.0] * 10, 50, 5000, -20),
        ([10.0] * 10 + [8.0] * 13, 8, 1000, 25),
        # Half of the blocks 8 ms, half 12.5 ms: as many steps of both take 10 ms in the geometric mean.
        ([10.0] * 10 + [8.0, 12.5] * 4, 1, 100, 0),
    ],
    ids=["slower", "faster", "a mean of logs"],
)
def test_the_last_half_against_the_first_tenth(step_ms, units, rate, change_pct):
    found = steady(trained(step_ms), units=units)
    assert found["steady_images_per_s"].estimate == pytest.approx(rate)
    assert found["steady_change_pct"].estimate == pytest.approx(change_pct)
    if change_pct:
        assert found["steady_change_pct"].low == pytest.approx(change_pct), "blocks alike leave no doubt"


def test_parts_are_of_the_time_not_of_the_blocks():
    """One block of 100 steps takes half of the time of all: the last half are the ten short ones."""
    times = trained([10.0] * 10)
    times.sustained_ms = {0: 1000.0, **dict.fromkeys(range(1, 11), 100.0)}
    times.step_ms["sustained"] = {0: 20.0, **dict.fromkeys(range(1, 11), 10.0)}
    found = steady(times, units=1)
    assert found["steady_images_per_s"].estimate == pytest.approx(100)
    assert found["steady_change_pct"].estimate == pytest.approx(100)


def test_what_is_not_there_is_missing():
    assert steady(CaseTimes(), units=1) == {}
    assert steady(trained([10.0]), units=1) == {}, "one block has no last half"
    few = steady(trained([10.0] * 8), units=1)
    assert few["steady_images_per_s"].estimate == pytest.approx(100)
    assert all(math.isnan(end) for found in few.values() for end in (found.low, found.high))


def test_noise_of_a_series_is_that_of_a_fit_of_one_column():
    values = np.cumsum(np.random.default_rng(1).normal(size=30)) / 50
    mean = float(values.mean())
    (wanted,) = fit(np.exp(values)[:, None]).intervals([lambda log_ms: float(log_ms[0])])
    found = SeriesNoise.of(values).interval(mean, 30)
    assert (found.low, found.estimate, found.high) == pytest.approx(
        (wanted.low, wanted.estimate, wanted.high), rel=1e-6
    )


def test_the_variance_of_a_mean_is_that_of_the_series_matrix():
    """Var(mean) = sum over i, j of rho^|i - j| / n^2, and of a difference both."""
    values = list(np.random.default_rng(2).normal(size=12))
    noise = SeriesNoise.of(values)

    def of_mean(size):
        return float(scipy.linalg.toeplitz(noise.correlation ** np.arange(size)).sum()) / size**2

    half = noise.interval(3.0, 2, 12).high - 3.0
    t = scipy.stats.t.ppf(0.975, noise.freedom)
    assert half == pytest.approx(t * math.sqrt(noise.variance * (of_mean(2) + of_mean(12))))


def ar1(rng, size, correlation):
    values = rng.normal(size=size)
    for i in range(1, size):
        values[i] = correlation * values[i - 1] + math.sqrt(1 - correlation**2) * values[i]
    return values


def covers(interval, value):
    return interval.low <= value <= interval.high


@pytest.mark.parametrize(
    ("correlation", "least"), [(0.0, 0.95), (0.3, 0.95), (0.5, 0.93), (0.8, 0.80)], ids=str
)
def test_intervals_cover_under_correlated_noise(correlation, least):
    """30 blocks of 1% noise, as --sustain 5m has; after the first tenth 3% slower, in the last half 5%."""
    rng = np.random.default_rng(7)
    level = 10 * np.array([1.0] * 3 + [1.03] * 12 + [1.05] * 15)
    hits = np.zeros(2)
    trials = 300
    for _ in range(trials):
        found = steady(trained(level * np.exp(0.01 * ar1(rng, 30, correlation))), units=1)
        hits += [
            covers(found["steady_images_per_s"], 1000 / 10.5),
            covers(found["steady_change_pct"], 100 * (1 / 1.05 - 1)),
        ]
    assert (hits / trials >= least - 0.03).all(), hits / trials
