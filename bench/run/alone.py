"""What is measured beside cases: the devices by themselves, and all-reduces by themselves."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence

from ddp_bench.bench.findings.numbers import plural
from ddp_bench.bench.manifest import DeviceRates
from ddp_bench.bench.plan import Planned
from ddp_bench.bench.results.recorder import Recorder
from ddp_bench.bench.run.cases import LiveCase
from ddp_bench.bench.run.failures import preparing_s
from ddp_bench.bench.run.workers import Workers
from ddp_bench.bench.settings import ResolvedSettings
from ddp_bench.bench.worker import messages as m

CURVE_BYTES = tuple(4096 * 4**i for i in range(9))
"""4 KiB to 256 MiB."""

CURVE_REPETITIONS = 5
"""Of a message size; the median counts."""

LEAST_REPETITIONS = 2
"""Every size is measured so often, however slow: one time alone may be a disturbed one."""

LONG_S = 10.0
"""A curve takes no more than the least repetitions after so many seconds: the time is for training steps."""

FURTHER_SHARE = 0.05
"""Share of the time limit for messages of twice all gradients and more: another model may need them."""

USUAL_S = 200.0
"""A run without a time limit is taken to measure for so long, the default on a CPU."""


def measure_rates(
    workers: Workers,
    recorder: Recorder,
    plan: Sequence[Planned],
    settings: ResolvedSettings,
    say: Callable[[str], None],
) -> list[DeviceRates]:
    """Measure the matrix rate of every rank, by the number of devices measured at the same moment.

    A case on n devices is held against what those n devices reach together: cores that share a memory
    bus, and ranks that share a device, reach less than one of them alone. A count that fails on any rank
    is left out, and `say` hears why: no case needs these rates.
    """
    runnable = {planned.case.num_devices for planned in plan if planned.skip_reason is None}
    # DataParallel may use more devices than there are ranks.
    counts = sorted(count for count in runnable if count <= len(workers))
    found: list[DeviceRates] = []

    def told(what: str, command: m.Command, num_ranks: int) -> list[object]:
        recorder.note(None, what)
        commands = {rank: command if rank < num_ranks else m.Wait() for rank in range(len(workers))}
        return [*workers.values(commands, object, what, preparing_s(settings)).values()][:num_ranks]

    # Memory and libraries come before the first count, so that all measure at the same moment.
    told("memory for the devices' rates", m.Meter(on=True), max(counts, default=0))
    for num_devices in counts:
        what = f"the rates of {plural(num_devices, 'device')}"
        values = told(what, m.Rate(), num_devices)
        reasons = [value for value in values if isinstance(value, str)]
        if reasons:
            say(f"{what} are not known: {reasons[0]}")
        else:
            rates = [value for value in values if isinstance(value, dict)]
            found += [DeviceRates(num_devices=num_devices, rank=r, **value) for r, value in enumerate(rates)]
    told("giving their memory back", m.Meter(on=False), len(workers))
    return found


def measure_curves(
    cases: Sequence[LiveCase],
    workers: Workers,
    recorder: Recorder,
    settings: ResolvedSettings,
    *,
    done: Container[tuple[int, str]],
    settle: Callable[[dict[int, m.Report], int | None, int, str], None],
) -> None:
    """Measure every curve (rank count, backend) that is not `done`, at least up to all gradients in one.

    Args:
        cases: that exchange gradients, with their groups made.
        workers: of the run.
        recorder: of the run.
        settings: of the run.
        done: curves that need no measuring.
        settle: brings the ranks together again where an all-reduce failed.
    """
    keys = sorted({(live.case.num_devices, live.case.backend) for live in cases}, key=str)
    largest = max((sum(live.layout.num_bytes) for live in cases if live.layout is not None), default=0)
    for num_ranks, backend in keys:
        if (num_ranks, backend) in done:
            continue
        what = f"the all-reduce curve of {num_ranks} ranks"

        def once(size: int, key: tuple[int, str] = (num_ranks, backend), what: str = what) -> float | None:
            """The longest rank's; None where any failed."""
            command = m.Curve(num_ranks=key[0], backend=key[1], num_bytes=size)
            commands = {rank: command if rank < key[0] else m.Wait() for rank in range(len(workers))}
            recorder.note(None, what, curve=key)
            reports = workers.ask(commands, what, preparing_s(settings))
            if any(r.status != "ok" for r in reports.values()):
                settle(reports, None, *key)
                return None
            return max(float(r.value) for r in reports.values() if r.value is not None)

        # A GPU gets an untimed run before each timed one.
        runs = 2 if settings.device == "cuda" else 1
        further_s = FURTHER_SHARE * (settings.max_time or USUAL_S) / len(keys) / runs
        times = _curve(once, largest, time.monotonic, further_s=further_s)
        recorder.add_allreduce(num_ranks, backend, times)


def _curve(
    once: Callable[[int], float | None], largest: int, now_s: Callable[[], float], *, further_s: float
) -> dict[int, list[float]]:
    """Milliseconds by message size, as many of each as there is time for.

    Args:
        once: measures a size in bytes.
        largest: bytes of all gradients.
        now_s: seconds of a clock.
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
