"""All-reduce by itself at every rank count of a run, over message sizes."""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import partial

from bench.measure.clock import make_clock
from bench.measure.collectives import CURVE_BYTES, CURVE_REPETITIONS, allreduce_ms
from bench.ranks.cluster import Cluster
from bench.ranks.prepare import LiveCase
from bench.records.recorder import Recorder
from bench.recovery.piece import Pieces

LEAST_REPETITIONS = 2
LONG_S = 10.0
"""After so many seconds a curve is repeated no further: slow links scatter less."""


def measure_curves(
    cases: Sequence[LiveCase],
    pieces: Pieces,
    cluster: Cluster,
    recorder: Recorder | None,
    *,
    done: Container[tuple[int, str]],
    limit_s: float,
) -> None:
    """Measure every curve (rank count, backend) that is not `done`, up to all gradients in one message."""
    device = cluster.place.device
    clock = make_clock(device)
    groups = {(c.case.num_devices, c.case.backend): c.group for c in cases if c.communicates}
    gradient_bytes = max((sum(c.layout.num_bytes) for c in cases if c.layout is not None), default=0)
    largest = cluster.from_first(gradient_bytes)
    sizes = [size for size in CURVE_BYTES if size < 2 * largest]
    for key in sorted(groups.keys(), key=str):
        if key in done:
            continue
        num_ranks, backend = key
        times: dict[int, list[float]] = {size: [] for size in sizes}
        began_s = pieces.elapsed_s()
        for repetition in range(CURVE_REPETITIONS):
            long = cluster.from_first(pieces.elapsed_s() - began_s > LONG_S)
            if long and repetition >= LEAST_REPETITIONS:
                break
            for size in sizes if repetition % 2 else sizes[::-1]:
                work = partial(allreduce_ms, size, groups[key], device, clock)
                _, reports = pieces.run(
                    None,
                    f"the all-reduce curve of {num_ranks} ranks",
                    work if cluster.rank < num_ranks else None,
                    limit_s=limit_s,
                    curve=key,
                )
                # A size that failed, on any rank, has no time.
                if all(report.status == "ok" for report in reports):
                    times[size].append(max(r.value for r in reports if r.value is not None))
        if recorder is not None:
            recorder.add_allreduce(num_ranks, backend, {size: ms for size, ms in times.items() if ms})
