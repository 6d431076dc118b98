"""Communication measured beside cases: links, all-reduces by themselves, NCCL's choices."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from ..common.errors import NotMeasuredError
from ..machine.conditions import parse_nccl_log
from ..plan.case import get_wire_share
from ..results.journal import Curve
from ..worker import messages as m
from .case_runner import CaseRunner
from .failures import RestartError, add_location, compute_preparing_limit_s, find_cause, find_failure

CHECK_TIMEOUT_S = {"cpu": 20.0, "cuda": 60.0}
"""Limit of the first all-reduce by kind of device; communicators of eight GPUs take a second or two, their
contexts tens of seconds where the driver begins with each process (no persistence mode)."""

CHECK_TIMEOUT_S_PER_RANK = 0.1
"""More for each rank: they meet one after another."""

HELP = (
    "NCCL_DEBUG=INFO says more, CUDA_VISIBLE_DEVICES=0,1 tries one pair, NCCL_P2P_DISABLE=1 leaves a path out"
)


def check_links(run: CaseRunner) -> None:
    """All-reduce once over all ranks of the plan. Raises NotMeasuredError where that fails."""
    cases = [p.case for p in run.plan if p.skip_reason is None and p.case.num_ranks > 1 and p.case.backend]
    if not cases:
        return
    largest = max(cases, key=lambda case: case.num_ranks)
    num_ranks, backend = largest.num_ranks, largest.backend
    link = m.Link(group=(num_ranks, backend))
    limit_s = max(
        CHECK_TIMEOUT_S[run.settings.device] + CHECK_TIMEOUT_S_PER_RANK * num_ranks,
        run.settings.case_timeout or 0,
    )
    try:
        reports = run.ask(link, "the first all-reduce", limit_s, num_ranks=len(run.workers))
    except RestartError as lost:
        why = str(lost) or "a rank was lost"
        if lost.failure is not None and lost.failure.status == "timeout":
            why += "; where it is only slow, a longer --case-timeout waits for it"
    else:
        if (cause := find_cause(reports)) is None:
            return
        why = add_location(cause[1].reason, f"rank {cause[0]}")
    ends = " to ".join(
        f"rank {run.places[k].rank} ({run.places[k].device} on {run.places[k].host})"
        for k in (0, num_ranks - 1)
    )
    help_ = f"; {HELP}" if backend.startswith("nccl") else ""
    raise NotMeasuredError(f"{num_ranks} ranks, {ends}, do not communicate by {backend}: {why}{help_}")


CURVE_BYTES = tuple(4096 * 4**i for i in range(9))
"""4 KiB to 256 MiB."""

CURVE_REPETITIONS = 5
"""Repetitions of a message size; the median counts."""

MIN_REPETITIONS = 2
"""Every size is measured so often, however slow: one time alone may be a disturbed one."""

MAX_CURVE_S = 10.0
"""A curve takes no more than the least repetitions after so many seconds, and no larger messages than the
gradients need where these would take longer."""


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
        times = _time_curve(partial(_time_once, run, group), largest, time.monotonic)
        run.recorder.append_event(Curve(num_ranks=group[0], backend=group[1], times_ms=[*times.items()]))


def ask_nccl(run: CaseRunner) -> None:
    """Have NCCL say how it sends the run's buckets, in processes of their own, once all is timed.

    For the largest number of ranks. What is not known is left out of the manifest, and the user hears of it.
    """
    if not run.settings.backend.startswith("nccl") or run.recorder.manifest.nccl is not None:
        return
    layouts = run.recorder.journal.state.layouts
    cases = [p.case for p in run.plan if p.case.communicates and p.case.case_id in layouts]
    num_ranks = max((case.num_ranks for case in cases), default=0)
    own = [case for case in cases if case.num_ranks == num_ranks]
    sizes = {int(get_wire_share(c.comm_hook) * size) for c in own for size in layouts[c.case_id].num_bytes}
    if not sizes:
        return
    run.await_turn()
    name, backend = f"nccl/{run.recorder.launch}", run.settings.backend
    asked = m.AskNccl(name=name, num_ranks=num_ranks, sizes=tuple(sorted(sizes)), backend=backend)
    logs = run.ask_all(asked, "asking NCCL how it sends the buckets", num_ranks=num_ranks)
    if (found := parse_nccl_log(logs)) is None:
        run.console.print_note("How NCCL sends the buckets is not known: its log does not say it")
    else:
        run.recorder.update_manifest(nccl=found)


def _time_once(run: CaseRunner, group: m.GroupKey, size: int) -> float | None:
    """Milliseconds of the longest rank; None where any failed. Raises RestartError, which ends the curve."""
    num_ranks, limit_s = group[0], compute_preparing_limit_s(run.settings)
    curve, what = m.Curve(group=group, num_bytes=size), f"the all-reduce curve of {num_ranks} ranks"
    reports = run.ask(curve, what, limit_s, num_ranks=num_ranks, curve=group)
    if (failure := find_failure(reports)) is not None:
        try:
            run.release_ranks(reports, None, group)
        except RestartError:
            run.recorder.record_start(None, what, group)  # who goes on leaves out what is under way
            raise RestartError(failure) from None
        return None
    return max(curve.read_reply(reports[rank]) for rank in range(num_ranks))


def _time_curve(
    once: Callable[[int], float | None], largest: int, now_s: Callable[[], float]
) -> dict[int, list[float]]:
    """Milliseconds by message size, as many of each as there is time for.

    `once` measures a size in bytes, `largest` are the bytes of all gradients, `now_s` is a clock.
    """
    times: dict[int, list[float]] = {}
    began_s = now_s()
    for repetition in range(CURVE_REPETITIONS):
        if repetition >= MIN_REPETITIONS and now_s() - began_s > MAX_CURVE_S:
            break
        for size in sorted(times or CURVE_BYTES, reverse=repetition % 2 == 1):
            if size >= 2 * largest and times:
                if repetition >= MIN_REPETITIONS:
                    continue
                known = max(times)
                needed_s = MIN_REPETITIONS * times[known][0] * size / known / 1000
                if repetition == 0 and now_s() - began_s + needed_s > MAX_CURVE_S:
                    break
            if (ms := once(size)) is not None:
                times.setdefault(size, []).append(ms)
    return times
