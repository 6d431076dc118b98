"""Before the first case on several devices: do they communicate at all? What does not is named in seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import GaveUpError
from ..worker import messages as m
from .case_runner import CaseRunner
from .failures import cause_in, placed
from .workers import LostError

CHECK_S = 20.0
"""Limit of one all-reduce of a few bytes; setting up communicators of eight GPUs takes one or two of them."""

HELP = "NCCL_DEBUG=INFO says more, NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1 leave paths out"


def check_links(run: CaseRunner, start_anew: Callable[[], Sequence[m.Begun]]) -> None:
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
    except LostError as lost:
        return lost.failure.reason if lost.failure else "a rank was lost"
    rank = cause_in(reports)
    return "" if rank is None else placed(reports[rank].reason, f"rank {rank}")


def _said(run: CaseRunner, ranks: range, backend: str, why: str) -> str:
    places = [run.places[rank] for rank in (ranks[0], ranks[-1])]
    ends = " and ".join(f"rank {one.rank} ({one.device} on {one.host})" for one in places)
    who = f"{ends} do" if len(ranks) == 2 else f"{len(ranks)} ranks, from {ends}, do"
    help_ = f"; {HELP}" if backend == "nccl" else ""
    return f"{who} not communicate by {backend}: {why}{help_}"
