"""Work that all ranks do together: announced, guarded, begun at once, and its outcome shared."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ddp_bench.bench.cluster.ranks import Cluster, waiting_for
from ddp_bench.bench.cluster.turns import TURNS_ENV
from ddp_bench.bench.measure.memory import release_memory
from ddp_bench.bench.recovery.attempt import NO_GROUP, Report, attempt
from ddp_bench.bench.recovery.failures import LEAST_S
from ddp_bench.bench.recovery.watchdog import Watchdog
from ddp_bench.bench.results.recorder import Recorder

IDLE_LIMIT_S = 600.0
"""Time limit of what ranks do between cases: rank 0 writes tables, all build the model."""


class RestartError(RuntimeError):
    """These ranks can measure no further: all of them have to start again."""


class Lockstep:
    """Runs work on this rank in step with the others."""

    def __init__(
        self, cluster: Cluster, watchdog: Watchdog, recorder: Recorder | None, elapsed_s: float
    ) -> None:
        self._cluster = cluster
        self._watchdog = watchdog
        self._recorder = recorder
        self._started_s = time.perf_counter() - elapsed_s

    def elapsed_s(self) -> float:
        """Seconds since the run began, attempts before this one included, breaks between them not."""
        return time.perf_counter() - self._started_s

    def run(
        self,
        index: int | None,
        what: str,
        work: Callable[[], Any] | None,
        *,
        limit_s: float,
        group: dist.ProcessGroup | None = None,
        **more: Any,
    ) -> tuple[float, Sequence[Report]]:
        """Do `work` (None: only wait) for case `index`; its start and every rank's report, in rank order.

        What `work` gave, and where it raised, rank 0 alone hears of all: a trace has 300 KiB.
        `group` is what the case's ranks communicate through, on those ranks.
        """
        if self._recorder is not None:
            self._recorder.note(index, what, **more)
        self._watchdog.arm(what, limit_s)
        self._cluster.barrier()
        started_s = self.elapsed_s()
        mine = replace(attempt(work), launched=_launched(group))
        if mine.is_cause:
            self._watchdog.tell(
                mine.status, mine.reason, place=mine.place, traceback=mine.traceback, at_once=mine.restart
            )
        found = self._cluster.gather_to_first(
            replace(mine, value=None, traceback=""), {"value": mine.value, "traceback": mine.traceback}
        )
        reports = [replace(told, **(more or {})) for told, more in found]
        self.idle()
        return started_s, reports

    def settle(
        self, reports: Sequence[Report], group: dist.ProcessGroup | None, release: Callable[[], None]
    ) -> None:
        """After a failure, wait for what the ranks have launched on `group` and `release` what they hold.

        Raises RestartError where that would never end: ranks that launched different numbers of collectives
        wait for each other, and the next case's all-reduces would pair with theirs.
        """
        if any(report.restart for report in reports) or not are_in_step(reports):
            raise RestartError
        device = self._cluster.place.device
        what = "what a failed case had launched"
        _, settled = self.run(None, what, lambda: _settle(group, device, release), limit_s=LEAST_S)
        if any(report.status != "ok" for report in settled):
            raise RestartError

    def wait_for_turn(self, ask: Callable[[], None], *, limit_s: float) -> None:
        """Wait on all ranks until `ask`, done on the first one, says that this run has the machine."""
        if TURNS_ENV not in os.environ:
            return
        if self._recorder is not None:
            self._recorder.note(None, "waiting for its turn")
        self._watchdog.arm("the wait for this run's turn", limit_s)
        with waiting_for("its turn: another run on this machine has it"):
            ask()
        self._cluster.barrier()
        self.idle()

    def idle(self) -> None:
        """Tell the watchdog that no case is under way."""
        self._watchdog.arm("the work between cases", IDLE_LIMIT_S)

    def between(self) -> None:
        """Tell the journal that no case is under way."""
        if self._recorder is not None:
            self._recorder.note(None, "between rounds")


def are_in_step(reports: Sequence[Report]) -> bool:
    """Whether all ranks of the case's process group have launched the same number of collectives."""
    counts = {report.launched for report in reports} - {NO_GROUP}
    return len(counts) <= 1 and None not in counts


def _launched(group: dist.ProcessGroup | None) -> int | None:
    """How many collectives this rank has launched on `group`; None where the backend does not tell."""
    if group is None:
        return NO_GROUP
    try:
        # Counted at the launch of each collective, by gloo and NCCL alike; there is no public way.
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        return None


def _settle(group: dist.ProcessGroup | None, device: torch.device, release: Callable[[], None]) -> None:
    """Let what is under way end, then give its memory back."""
    if group is not None:
        # Gloo's barrier waits for all work launched before it; NCCL's kernels the device waits for.
        with_nccl = dist.get_backend(group) == "nccl"
        dist.barrier(group, device_ids=[device.index] if with_nccl else None)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    release()
    gc.collect()
    release_memory(device)
