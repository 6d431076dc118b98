import json

import numpy as np
import pandas as pd
import pytest
from gate_runs import STEADY, write_run

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.gate.runs import checked, read_run
from ddp_bench.bench.results import tables
from ddp_bench.bench.results.aggregate import step_ms_by_round
from ddp_bench.bench.results.round_times import RoundTimes
from ddp_bench.bench.results.schema import BLOCKS, typed_frame
from ddp_bench.bench.results.store import RunWriter, load_run

RNG = np.random.default_rng(3)


def block(case_id, phase, round_index, *, num_ranks=4):
    rows = []
    for rank in range(num_ranks):
        steps = RNG.uniform(90, 110, size=3)
        detail = {"last_ready_ms": 50.0 + rank, "local_last_ready_ms": 40.0, "ready_ms": [1.0 + rank, 2.0]}
        rows.append(
            {
                "case_id": case_id,
                "phase": phase,
                "round": round_index,
                "rank": rank,
                "host": "h",
                "num_steps": 3,
                "block_ms": round(float(steps.sum()), 4),
                "steps_ms": " ".join(f"{ms:.5g}" for ms in steps),
                "detail": json.dumps(detail) if phase == "anatomy" else None,
            }
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
        expected = step_ms_by_round(FRAME, phase)
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
    assert step_ms_by_round(large.blocks, "timed") == step_ms_by_round(whole.blocks, "timed")
    pd.testing.assert_frame_equal(large.cases, whole.cases)
    assert checked(large).cases == gate.cases, "the gate judges it all the same"
