"""All-reduce by itself at every rank count of a run, over message sizes."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import partial

from ddp_bench.bench.cluster.ranks import Cluster
from ddp_bench.bench.measure.clock import make_clock
from ddp_bench.bench.measure.collectives import CURVE_BYTES, CURVE_REPETITIONS, allreduce_ms
from ddp_bench.bench.recovery.lockstep import Lockstep
from ddp_bench.bench.results.recorder import Recorder
from ddp_bench.bench.run.prepare import LiveCase

LEAST_REPETITIONS = 2
"""Every size is measured so often, however slow: one time alone may be a disturbed one."""

LONG_S = 10.0
"""A curve takes no more than the least repetitions after so many seconds: the time is for training steps."""

FURTHER_SHARE = 0.05
"""Share of the time limit for messages of twice all gradients and more: another model may need them."""

USUAL_S = 200.0
"""A run without a time limit is taken to measure for so long, the default on a CPU."""


def measure_curves(
    cases: Sequence[LiveCase],
    lockstep: Lockstep,
    cluster: Cluster,
    recorder: Recorder | None,
    *,
    done: Container[tuple[int, str]],
    limit_s: float,
    max_time_s: float | None,
) -> None:
    """Measure every curve (rank count, backend) that is not `done`, at least up to all gradients in one.

    Args:
        cases: with the groups that exchange gradients.
        lockstep: what runs work on all ranks together.
        cluster: this rank among the others.
        recorder: on the first rank.
        done: curves that need no measuring.
        limit_s: after which a curve is given up.
        max_time_s: the whole run may measure for so long; None where it has no limit.
    """
    device = cluster.place.device
    clock = make_clock(device)
    groups = {(c.case.num_devices, c.case.backend): c.group for c in cases if c.communicates}
    gradient_bytes = max((sum(c.layout.num_bytes) for c in cases if c.layout is not None), default=0)
    largest = cluster.from_first(gradient_bytes)
    for key in sorted(groups.keys(), key=str):
        if key in done:
            continue
        num_ranks, backend = key

        def once(size: int, key: tuple[int, str] = key) -> float | None:
            """The longest rank's; None where any failed."""
            work = partial(allreduce_ms, size, groups[key], device, clock)
            _, reports = lockstep.run(
                None,
                f"the all-reduce curve of {key[0]} ranks",
                work if cluster.rank < key[0] else None,
                limit_s=limit_s,
                group=groups[key],
                curve=key,
            )
            if any(r.status != "ok" for r in reports):
                lockstep.settle(reports, groups[key], lambda: None)
            times = [r.value for r in reports if r.value is not None]
            slowest = cluster.from_first(max(times, default=0.0))
            return slowest if all(r.status == "ok" for r in reports) else None

        # A GPU gets an untimed run before each timed one.
        runs = 2 if device.type == "cuda" else 1
        times = _curve(
            once,
            largest,
            lambda: cluster.from_first(lockstep.elapsed_s()),
            further_s=FURTHER_SHARE * (max_time_s or USUAL_S) / len(groups) / runs,
        )
        if recorder is not None:
            recorder.add_allreduce(num_ranks, backend, times)


def _curve(
    once: Callable[[int], float | None], largest: int, now_s: Callable[[], float], *, further_s: float
) -> dict[int, list[float]]:
    """Milliseconds by message size, as many of each as there is time for; every rank decides alike.

    Args:
        once: measures a size in bytes.
        largest: bytes of all gradients.
        now_s: of one clock for all ranks.
        further_s: for sizes of twice `largest` and more, measured `LEAST_REPETITIONS` times, by their
            expected times.
    """
    times: dict[int, list[float]] = {}
    began_s = now_s()
    for size in CURVE_BYTES:
        known = max(times, default=0)
        if size >= 2 * largest and known:
            further_s -= LEAST_REPETITIONS * times[known][0] * size / known / 1000
            if further_s < 0:
                break
        ms = once(size)
        if ms is not None:
            times[size] = [ms]
    for repetition in range(1, CURVE_REPETITIONS):
        if repetition >= LEAST_REPETITIONS and now_s() - began_s > LONG_S:
            break
        for size in sorted(times, reverse=repetition % 2 == 1):
            if repetition >= LEAST_REPETITIONS and size >= 2 * largest:
                continue
            ms = once(size)
            if ms is not None:
                times[size].append(ms)
    return times
