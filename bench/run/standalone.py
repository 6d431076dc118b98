"""What is measured beside cases: links, all-reduces by themselves, NCCL's choices."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from ..case import wire_share
from ..conditions import choices_in
from ..errors import GaveUpError
from ..worker import messages as m
from ..worker.facts import Begun
from .case_runner import CaseRunner
from .failures import RestartError, cause_in, placed, preparing_s

CHECK_S = 20.0
"""Limit of one all-reduce of a few bytes; setting up communicators of eight GPUs takes one or two of them."""

HELP = "NCCL_DEBUG=INFO says more, NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1 leave paths out"


def check_links(run: CaseRunner, start_anew: Callable[[], Sequence[Begun]]) -> None:
    """All-reduce once over all ranks of the plan; where that fails, over neighbours, to name those that fail.

    `start_anew` gives the run other workers, for a rank that hangs in a collective does nothing more.
    Raises GaveUpError, which names ranks and their devices.
    """
    runnable = [p.case for p in run.plan if p.skip_reason is None and p.case.num_ranks > 1]
    backends = [case.backend for case in runnable if case.backend]
    if not backends:
        return
    num_ranks, backend = max(case.num_ranks for case in runnable), backends[0]
    why = _failure(run, range(num_ranks), backend)
    if not why:
        return
    if run.workers.launched is None and num_ranks > 2:
        for first in range(num_ranks - 1):
            run.began(start_anew())
            pair = range(first, first + 2)
            if found := _failure(run, pair, backend):
                raise GaveUpError(_said(run, pair, backend, found))
        why = f"{why}; each pair of neighbours does"
    raise GaveUpError(_said(run, range(num_ranks), backend, why))


def _failure(run: CaseRunner, ranks: range, backend: str) -> str:
    """Why these ranks do not communicate; empty where they do."""
    what = "the first all-reduce"
    run.recorder.note(None, what)
    link = m.Link(first=ranks.start, num_ranks=len(ranks), backend=backend)
    try:
        reports = run.workers.ask(dict.fromkeys(range(len(run.workers)), link), what, CHECK_S)
    except RestartError as lost:
        return lost.failure.reason if lost.failure else "a rank was lost"
    rank = cause_in(reports)
    return "" if rank is None else placed(reports[rank].reason, f"rank {rank}")


def _said(run: CaseRunner, ranks: range, backend: str, why: str) -> str:
    places = [run.places[rank] for rank in (ranks[0], ranks[-1])]
    ends = " and ".join(f"rank {one.rank} ({one.device} on {one.host})" for one in places)
    who = f"{ends} do" if len(ranks) == 2 else f"{len(ranks)} ranks, from {ends}, do"
    help_ = f"; {HELP}" if backend == "nccl" else ""
    return f"{who} not communicate by {backend}: {why}{help_}"


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


def measure_curves(run: CaseRunner) -> None:
    """Measure every all-reduce curve that is asked for and missing, at least up to all gradients in one."""
    settings = run.settings
    if not settings.allreduce_curve and not settings.calibrate:
        return
    cases = [live for live in run.live if live.case.communicates]
    groups = sorted({live.group for live in cases}, key=str)
    largest = max((sum(live.layout.num_bytes) for live in cases if live.layout is not None), default=0)
    for group in groups:
        if group in run.recorder.journal.state.curves:
            continue
        # A GPU gets an untimed run before each timed one.
        runs = 2 if settings.device == "cuda" else 1
        further_s = FURTHER_SHARE * (settings.max_time or USUAL_S) / len(groups) / runs
        times = _curve(partial(_once, run, group), largest, time.monotonic, further_s=further_s)
        run.recorder.add_allreduce(*group, times)


def ask_nccl(run: CaseRunner) -> None:
    """Have NCCL say how it sends the run's buckets, in processes of their own, once all is timed.

    For the largest number of ranks. What is not known is left out of the manifest, and the user hears of it.
    """
    if run.settings.backend != "nccl" or run.recorder.manifest.nccl is not None:
        return
    layouts = run.recorder.journal.state.layouts
    cases = [p.case for p in run.plan if p.case.communicates and p.case.case_id in layouts]
    num_ranks = max((case.num_ranks for case in cases), default=0)
    own = [case for case in cases if case.num_ranks == num_ranks]
    sizes = {int(wire_share(c.comm_hook) * size) for c in own for size in layouts[c.case_id].num_bytes}
    if not sizes:
        return
    what = "asking NCCL how it sends the buckets"
    run.recorder.note(None, what)
    run.next_turn()
    name = f"nccl/{run.recorder.launch}"
    asked = m.AskNccl(name=name, num_ranks=num_ranks, sizes=tuple(sorted(sizes)), backend="nccl")
    found = choices_in(run.between(asked, what, num_ranks=num_ranks))
    if found is None:
        run.console.note("How NCCL sends the buckets is not known: its log does not say it")
    else:
        run.recorder.tell(nccl=found)


def _once(run: CaseRunner, group: m.GroupKey, size: int) -> float | None:
    """Milliseconds of the longest rank; None where any failed."""
    num_ranks, what = group[0], f"the all-reduce curve of {group[0]} ranks"
    run.recorder.note(None, what, curve=group)
    curve = m.Curve(group=group, num_bytes=size)
    reports = run.workers.ask(run.told(curve, num_ranks), what, preparing_s(run.settings))
    if any(r.status != "ok" for r in reports.values()):
        run.settle(reports, None, group)
        return None
    return max(curve.reply_in(reports[rank]) for rank in range(num_ranks))


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
