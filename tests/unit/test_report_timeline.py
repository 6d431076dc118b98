from __future__ import annotations

from typing import Any

from report_runs import bucket, communicating, run

from report.anatomy import one_step
from report.draw.figures import svg
from report.drawings import Bucket, Timeline, Track
from report.select import workloads


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
            55.0,
            85.0,
        ),
    )
    assert figure.caption == (
        "DDP on 2 GPUs: with cap default (rank 1) the last gradient is ready after 55.0 ms, the last of "
        "2 all-reduces done after 85.0 ms, 30.0 ms exposed."
    )
    assert figure.caption in figure.alt


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
        "cap 25 MiB, shortest median step (rank 0)",
        "cap 100 MiB, one bucket (rank 0)",
    ]
    same = drawn([DEFAULT, one | {"images_per_s": 500.0}], rows)
    assert same is not None
    assert [track.title for track in same.tracks][1:] == [
        "cap 100 MiB, shortest median step, one bucket (rank 0)"
    ]


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


def test_compute_that_ends_last_exposes_nothing() -> None:
    figure = drawn([DEFAULT], [bucket(DEFAULT, 0, 50.0, 50.0, 50.0, 49.0)])
    assert figure is not None
    assert figure.caption.endswith("done after 49.0 ms, 0 ms exposed.")
