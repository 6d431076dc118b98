from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from report_runs import PHASES, bucket, case, communicating, dashed, measured, run
from sample_runs import CHOSEN, EVERY_SAMPLE, sample

from ddp_bench.bench.stats import Interval
from ddp_bench.report.anatomy import breakdown, is_causal, one_step
from ddp_bench.report.draw.figures import svg
from ddp_bench.report.drawings import Bars, Bucket, Part, Timeline, Track
from ddp_bench.report.select import workloads


def bars(cases: list[dict[str, Any]]) -> Bars:
    figure = breakdown(workloads(run(cases).cases)[0], key="k")
    assert figure is not None
    return figure


def parts_of(row: dict[str, Any]) -> dict[str, float]:
    (bar,) = bars([row]).bars
    return {part.label: part.ms for part in bar.parts}


def test_exposed_communication_is_taken_out_of_the_backward() -> None:
    (bar,) = bars([communicating(2, 200.0)]).bars
    assert bar.label == "DDP, 2 GPUs, cap default: 100 ms"
    assert bar.parts == (
        Part("data", 1.0),
        Part("forward", 30.0),
        Part("backward", 40.0),
        Part("exposed communication", 20.0),
        Part("optimizer", 9.0),
    )


@pytest.mark.parametrize(
    ("exposed_ms", "backward", "exposed"), [(80.0, None, 80.0), (-5.0, 60.0, None), (None, None, None)]
)
def test_exposed_communication_never_makes_a_part_negative(
    exposed_ms: float | None, backward: float | None, exposed: float | None
) -> None:
    found = parts_of(communicating(2, 200.0) | {"exposed_comm_ms": exposed_ms})
    assert found.get("backward") == backward
    assert found.get("exposed communication") == exposed


def test_backward_that_could_not_be_split_says_so() -> None:
    figure = bars([communicating(2, 200.0) | {"exposed_comm_ms": None}])
    assert Part("backward with communication", 60.0) in figure.bars[0].parts
    assert "backward with communication" in figure.how_to_read
    assert "backward" in parts_of(case("ddp", 1, 98.0, **measured(**PHASES)))


def test_dp_is_shown_by_its_stages_and_what_is_left() -> None:
    stages = {"scatter": 2.0, "replicate": 5.0, "apply": 25.0, "gather": 1.0, "backward": 50.0, "reduce": 8.0}
    columns = {f"dp_{name}_ms": value for name, value in stages.items()}
    dp = case("dp", 2, 200.0, impl="cpu_standin", device_type="cpu", **measured(**PHASES, **columns))
    figure = bars([dp | measured(dp_device0_pct=25.0)])
    (bar,) = figure.bars
    assert bar.label == "DP, 2 CPU cores: 100 ms"
    assert {part.label: part.ms for part in bar.parts} == {
        "scatter": 2.0,
        "replicate": 5.0,
        "apply (forward)": 25.0,
        "gather": 1.0,
        "backward": 50.0,
        "reduce": 8.0,
        "rest": pytest.approx(9.0),
    }
    assert figure.caption == (
        dashed(
            "DP, 2 CPU cores: backward takes most, 50% of the step; only "
            "device 0 works during 25.0 (24.8--25.2)% of it."
        )
    )


def test_stage_that_was_not_measured_is_left_out_not_zero() -> None:
    dp = case("dp", 2, 20_000 / 90, dp_apply_ms=25.0, dp_backward_ms=58.0, step_ms_p50=90.0)
    assert parts_of(dp) == pytest.approx({"apply (forward)": 25.0, "backward": 58.0, "rest": 7.0})


def test_a_bar_is_as_long_as_the_timed_step() -> None:
    """Instruments and other rounds make the anatomy pass longer or shorter: only its shares are taken."""
    slower = measured(data_ms=2.0, forward_ms=60.0, backward_ms=100.0, optimizer_ms=18.0)
    slow = communicating(2, 200.0) | slower
    assert parts_of(slow) == pytest.approx(
        {"data": 1.0, "forward": 30.0, "backward": 40.0, "exposed communication": 20.0, "optimizer": 9.0}
    )


def test_caption_states_shares_with_intervals() -> None:
    figure = bars([case("single", 1, 100.0, **measured(**PHASES)), communicating(2, 200.0)])
    assert figure.caption == (
        dashed(
            "DDP, 2 GPUs, cap default: backward takes most, 40% of the step; exposed communication adds "
            "20.0 (19.8--20.2) ms, 20% of the step."
        )
    )
    assert figure.alt == f"Where a step goes. {figure.caption}"


def test_nothing_measured_draws_nothing() -> None:
    assert breakdown(workloads(run([case("ddp", 2, 150.0)]).cases)[0], key="k") is None


def test_many_cases_leave_the_usual_ones() -> None:
    cases = [case("single", 1, 100.0, **measured(**PHASES))]
    cases += [communicating(n, 90.0 * n) for n in (2, 4, 8)]
    cases += [communicating(n, 80.0 * n, bucket_cap_mb="25") for n in (2, 4, 8)]
    cases += [communicating(n, 70.0 * n, static_graph=True, case_id=f"static{n}") for n in (2, 4, 8)]
    cases += [communicating(8, 480.0, bucket_cap_mb="1")]
    cases += [communicating(16, 900.0, oversubscribed=True)]
    figure = bars(cases)
    assert "share devices are in the tables only" in figure.how_to_read
    assert "Of many cases the usual are drawn" in figure.how_to_read
    shown = [bar.label.split(":")[0] for bar in figure.bars]
    assert shown == [
        "single, 1 GPU",
        "DDP, 2 GPUs, cap default",
        "DDP, 4 GPUs, cap default",
        "DDP, 8 GPUs, cap default",
        "DDP, 8 GPUs, cap 25 MiB",
        "DDP, 8 GPUs, cap 1 MiB",
    ]


def test_steps_of_several_micro_batches_do_not_flatten_the_rest() -> None:
    figure = bars([communicating(2, 200.0), communicating(2, 220.0, accumulate=8)])
    assert [bar.label for bar in figure.bars] == ["DDP, 2 GPUs, cap default: 100 ms"]


def test_of_many_caps_the_fastest_are_drawn() -> None:
    caps = [communicating(2, 100.0 + cap, bucket_cap_mb=str(cap)) for cap in range(1, 41)]
    drawn = bars([communicating(2, 90.0), *caps]).bars
    assert [bar.label.split("cap ")[1].split(":")[0] for bar in drawn] == [
        "default",
        *(f"{cap} MiB" for cap in range(33, 41)),
    ]


def drawn(cases: list[dict[str, Any]], buckets: list[dict[str, Any]]) -> Timeline | None:
    data = run(cases, buckets=buckets)
    return one_step(workloads(data.cases)[0], data.buckets, key="k")


DEFAULT = communicating(2, 200.0)


def test_a_step_is_drawn_on_the_rank_that_finishes_last() -> None:
    figure = drawn(
        [DEFAULT],
        [
            bucket(DEFAULT, 0, 10.0, 10.0, 11.0, 60.0),
            bucket(DEFAULT, 0, 12.0, 12.0, 13.0, 70.0, rank=1),
            bucket(DEFAULT, 1, 55.0, 55.0, 70.0, 85.0, rank=1, num_bytes=3 * 2**20),
            bucket(DEFAULT, 1, 50.0, 50.0, 60.0, 80.0, num_bytes=3 * 2**20),
        ],
    )
    assert figure is not None
    assert figure.tracks == (
        Track(
            "cap default (rank 1)",
            (Bucket("1.00 MiB", 12.0, 12.0, 13.0, 70.0), Bucket("3.00 MiB", 55.0, 55.0, 70.0, 85.0)),
            Interval(55.0, math.nan, math.nan),
            Interval(85.0, math.nan, math.nan),
        ),
    )
    assert figure.caption == (
        "DDP on 2 GPUs: with cap default (rank 1) the last gradient is ready after 55.0 ms, the last of "
        "2 all-reduces is done after 85.0 ms."
    )
    assert figure.caption in figure.alt


def test_moments_of_several_blocks_are_told_with_their_intervals() -> None:
    ends = {"ready_ms_low": 50.0, "ready_ms_high": 60.0, "done_ms_low": 80.0, "done_ms_high": 99.0}
    figure = drawn([DEFAULT], [bucket(DEFAULT, 0, 55.0, 55.0, 70.0, 85.0) | ends])
    assert figure is not None
    assert figure.caption.endswith(
        "the last gradient is ready after 55 (50\N{EN DASH}60) ms, its all-reduce is done after "
        "85 (80\N{EN DASH}99) ms."
    )


def test_default_best_and_single_bucket_are_chosen_once_each() -> None:
    best = communicating(2, 230.0, bucket_cap_mb="25", num_buckets=2)
    other = communicating(2, 210.0, bucket_cap_mb="5", num_buckets=6)
    one = communicating(2, 160.0, bucket_cap_mb="100", num_buckets=1)
    alone = communicating(1, 90.0)
    cases = [alone, DEFAULT, other, best, one]
    rows = [bucket(row, 0, 5.0, 5.0, 6.0, 9.0) for row in cases]
    figure = drawn(cases, rows)
    assert figure is not None
    assert [track.title for track in figure.tracks] == [
        "cap default (rank 0)",
        "cap 25 MiB, shortest step (rank 0)",
        "cap 100 MiB, one bucket (rank 0)",
    ]
    same = drawn([DEFAULT, one | {"images_per_s": 500.0}], rows)
    assert same is not None
    assert [track.title for track in same.tracks][1:] == ["cap 100 MiB, shortest step, one bucket (rank 0)"]


def test_largest_count_with_devices_of_its_own_is_drawn() -> None:
    shared = communicating(4, 210.0, oversubscribed=True)
    rows = [bucket(row, 0, 5.0, 5.0, 6.0, 9.0) for row in (DEFAULT, shared)]
    own, only = drawn([DEFAULT, shared], rows), drawn([shared], rows)
    assert own is not None
    assert own.caption.startswith("DDP on 2 GPUs:")
    assert only is not None
    assert only.caption.startswith("DDP on 4 GPUs (shared):")


def test_missing_moments_are_left_out_never_zero() -> None:
    figure = drawn([DEFAULT], [bucket(DEFAULT, 0, 40.0, None, None, None)])
    assert figure is not None
    assert figure.tracks[0].buckets == (Bucket("1.00 MiB", 40.0, None, None, None),)
    assert figure.tracks[0].end_ms is None
    assert "exposed" not in figure.caption
    drawing = svg(figure)
    assert "gradients ready" in drawing
    assert "all-reduce<" not in drawing
    assert "exposed<" not in drawing


def test_without_moments_nothing_is_drawn() -> None:
    assert drawn([DEFAULT], []) is None
    assert drawn([DEFAULT], [bucket(DEFAULT, 0, None, None, None, None)]) is None


@pytest.mark.parametrize(
    ("ready", "launch", "start", "done"),
    [
        ((9.0, 50.0), (9.0, 50.0), (8.0, 51.0), (20.0, 70.0)),
        ((9.0, 50.0), (8.0, 50.0), (9.0, 51.0), (20.0, 70.0)),
        ((9.0, 50.0), (9.0, 50.0), (9.0, None), (20.0, 49.0)),
    ],
)
def test_readiness_that_contradicts_the_all_reduces_is_left_out(
    ready: tuple[float, ...],
    launch: tuple[float, ...],
    start: tuple[float | None, ...],
    done: tuple[float, ...],
) -> None:
    rows = [bucket(DEFAULT, i, ready[i], launch[i], start[i], done[i]) for i in range(2)]
    figure = drawn([DEFAULT], rows)
    assert figure is not None
    (track,) = figure.tracks
    assert [(b.ready_ms, b.launch_ms) for b in track.buckets] == [(None, None)] * 2
    assert [(b.start_ms, b.done_ms) for b in track.buckets] == list(zip(start, done, strict=True))
    assert track.compute_end_ms is None
    assert "contradicts the all-reduces" in figure.how_to_read
    drawing = svg(figure)
    assert "gradients ready" not in drawing
    assert "last gradient ready" not in drawing


def test_all_reduce_that_ends_before_it_starts_is_not_drawn() -> None:
    assert drawn([DEFAULT], [bucket(DEFAULT, 0, 5.0, 5.0, 60.0, 50.0)]) is None


@pytest.mark.parametrize("path", EVERY_SAMPLE)
def test_no_sample_breaks_causality_on_the_page(path: Path) -> None:
    data = sample(path)
    for workload in workloads(data.cases):
        figure = one_step(workload, data.buckets, key="k")
        assert figure is None or all(is_causal(track) for track in figure.tracks)
        for track in () if figure is None else figure.tracks:
            for b in track.buckets:
                moments = (b.ready_ms, b.launch_ms, b.start_ms, b.done_ms)
                known = [moment for moment in moments if moment is not None]
                assert known == sorted(known)


def test_samples_show_both_tracks_that_hold_and_tracks_that_do_not() -> None:
    loaded = [sample(path) for path in CHOSEN]
    figures = [one_step(w, data.buckets, key="k") for data in loaded for w in workloads(data.cases)]
    tracks = [track for figure in figures if figure is not None for track in figure.tracks]
    assert {track.compute_end_ms is None for track in tracks} == {False, True}
