"""Work that all ranks do together: announced, guarded, begun at once, and its outcome shared."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.cluster.messages import may_be_sent
from bench.cluster.ranks import Cluster, waiting_for
from bench.cluster.turns import TURNS_ENV
from bench.errors import UsageError
from bench.measure.timed import BlockTimes, NonFiniteLossError
from bench.modes import Unsupported
from bench.recovery.watchdog import Watchdog
from bench.results.recorder import Recorder

IDLE_LIMIT_S = 600.0
"""Time limit of what ranks do between cases: rank 0 writes tables, all build the model."""

LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")
"""Words of gloo's errors on ranks whose peer has died; that peer has the reason."""


@dataclass(frozen=True)
class Report:
    """What one rank says after its work: its result, or what went wrong."""

    status: str = "ok"
    reason: str = ""
    value: Any = None


may_be_sent(Report, BlockTimes)


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
        self, index: int | None, what: str, work: Callable[[], Any] | None, *, limit_s: float, **more: Any
    ) -> tuple[float, Sequence[Report]]:
        """Do `work` (None: only wait) for case `index`; its start and every rank's report, in rank order."""
        if self._recorder is not None:
            self._recorder.note(index, what, **more)
        self._watchdog.arm(what, limit_s)
        self._cluster.barrier()
        started_s = self.elapsed_s()
        mine = _attempt(work)
        if mine.status in ("failed", "oom") and not any(sign in mine.reason for sign in LOST):
            self._watchdog.tell(mine.status, mine.reason)
        reports = self._cluster.gather(mine)
        self.idle()
        return started_s, reports

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


def _attempt(work: Callable[[], Any] | None) -> Report:
    """Run `work`, turning what can go wrong with one case into a report about it."""
    try:
        return Report(value=work() if work else None)
    except UsageError:
        raise
    except Unsupported as reason:
        return Report("skipped", str(reason))
    except torch.OutOfMemoryError:
        return Report("oom", "out of GPU memory; use a smaller --batch-size or --image-size")
    except MemoryError:
        return Report("oom", "out of host memory; use a smaller --batch-size or --image-size")
    except NonFiniteLossError as error:
        return Report("failed", str(error))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a model raises fails its case alone
        first = (str(error).strip().splitlines() or [""])[0]
        # torch's CPU allocator raises a plain RuntimeError
        status = "oom" if "can't allocate memory" in str(error) else "failed"
        return Report(status, f"{type(error).__name__}: {first}" if first else type(error).__name__)
