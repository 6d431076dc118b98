"""What every rank runs: prepare every case, then rounds over all of them in random order.

All ranks walk the same plan; rank 0 conducts, records and decides when to stop.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bench.cluster import Cluster, RankInfo
from bench.console import Console
from bench.errors import UsageError
from bench.measure.clock import make_clock
from bench.measure.collectives import CURVE_BYTES, CURVE_REPETITIONS, allreduce_times
from bench.measure.device import set_precision
from bench.measure.timed import BlockTimes
from bench.modes import Unsupported
from bench.plan import Case, Planned, round_order
from bench.prepare import LiveCase, Prepared, prepare
from bench.proof import Prover
from bench.recorder import Recorder
from bench.settings import Settings
from bench.turns import TURNS_ENV, Player
from bench.visit import visit
from models.workload import Workload, make_module

MIN_ROUNDS_FOR_TARGET = 5
"""Fewer rounds can agree by chance."""


@dataclass(frozen=True)
class Report:
    """What one rank says after a piece of work: its result, or what went wrong."""

    status: str = "ok"
    reason: str = ""
    value: Any = None


class Session:
    """One rank's part of a run. `recorder` exists on rank 0 only."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        settings: Settings,
        plan: Sequence[Planned],
        workload: Workload,
        infos: Sequence[RankInfo],
        recorder: Recorder | None,
        console: Console,
    ) -> None:
        self._cluster = cluster
        self._settings = settings
        self._plan = plan
        self._workload = workload
        self._infos = infos
        self._recorder = recorder
        self._console = console
        self._clock = make_clock(cluster.place.device)
        self._started = time.perf_counter()
        self._live: list[LiveCase] = []
        # Rank 0 takes the turn for all: the others wait for it at the next barrier.
        self._player = Player(os.environ.get(TURNS_ENV) if cluster.is_first else None)
        self.rounds = 0
        self.stopped_because = ""

    def run(self) -> None:
        """Prepare, then measure until the rounds, the target or the time limit is reached."""
        set_precision(self._settings.precision, self._cluster.place.device)
        self._prepare_all()
        self._drop_equal_layouts()
        gc.collect()
        gc.freeze()
        if self._settings.allreduce_curve:
            self._allreduce_curves()
        while self._live and not self._finished():
            self.rounds += 1
            self._round(self.rounds)
        gc.unfreeze()
        self._console.progress_done()
        self._player.close()
        for live in self._live:
            live.close()

    def _prepare_all(self) -> None:
        torch.manual_seed(self._settings.seed)
        prover = Prover(self._workload, make_module(self._workload), self._cluster.place, self._settings.seed)
        runnable = [(i, p) for i, p in enumerate(self._plan) if p.skip_reason is None]
        for done, (index, planned) in enumerate(runnable):
            case = planned.case
            self._console.progress(f"preparing {case.case_id}", done, len(runnable), self._left_s())
            in_ddp = case.mode == "ddp"
            group = self._cluster.group(case.num_devices, case.backend) if in_ddp else None
            live = LiveCase(index, case, group, planned.oversubscribed)
            takes_part = self._cluster.rank < (case.num_devices if in_ddp else 1)

            def work(live: LiveCase = live) -> Prepared:
                return prepare(live, prover=prover, settings=self._settings, clock=self._clock)

            with self._player.turn():
                self._cluster.barrier()
                started_s = self._elapsed_s()
                reports = self._cluster.gather(self._attempt(work if takes_part else None))
            if self._keep(live, reports):
                self._live.append(live)
                self._record_prepared(live, started_s, reports)

    def _record_prepared(self, live: LiveCase, started_s: float, reports: Sequence[Report]) -> None:
        if self._recorder is None:
            return
        found: list[tuple[int, Prepared]] = [(i, r.value) for i, r in enumerate(reports) if r.value]
        facts: dict[str, Any] = {
            "device_name": self._infos[0].device_name,
            "link": self._infos[0].link,
            "peak_mem_mib": max((p.peak_mem_mib for _, p in found if p.peak_mem_mib), default=None),
        }
        if live.layout is not None:
            facts["num_buckets"] = len(live.layout.num_bytes)
            facts["bucket_bytes"] = "/".join(str(size) for size in live.layout.num_bytes)
        self._recorder.set_outcome(live.index, "ok", facts=facts)
        self._recorder.set_layout(live.case.case_id, live.layout)
        self._record(
            live.case, "warmup", 0, len(self._live) - 1, started_s, [(i, p.warmup) for i, p in found]
        )

    def _drop_equal_layouts(self) -> None:
        """Different caps can give one bucket layout: measure it once."""
        seen: dict[tuple[Any, ...], str] = {}
        for live in list(self._live):
            sizes = self._cluster.from_first(live.layout.num_bytes if live.layout is not None else None)
            key = (*(v for k, v in asdict(live.case).items() if k != "bucket_cap_mb"), sizes)
            twin = seen.setdefault(key, live.case.case_id)
            if sizes is None or twin == live.case.case_id:
                continue
            live.close()
            self._live.remove(live)
            if self._recorder is not None:
                self._recorder.set_outcome(
                    live.index, "skipped", f"same bucket layout as {twin}; see its row"
                )

    def _round(self, round_index: int) -> None:
        order = round_order(len(self._live), seed=self._settings.seed, round_index=round_index)
        for position, live in enumerate([self._live[i] for i in order]):
            what = f"round {round_index} {live.case.case_id}"
            self._console.progress(what, position, len(order), self._left_s())
            with self._player.turn():
                self._visit(live, round_index, position)
            if round_index > 1 and self._cluster.from_first(self._out_of_time()):
                break
        if self._recorder is not None:
            self._recorder.write()

    def _visit(self, live: LiveCase, round_index: int, position: int) -> None:
        blocks = visit(
            live,
            round_index=round_index,
            settings=self._settings,
            place=self._cluster.place,
            clock=self._clock,
        )
        for phase, work in blocks:
            self._cluster.barrier()
            started_s = self._elapsed_s()
            reports = self._cluster.gather(self._attempt(work))
            if not self._keep(live, reports):
                self._live.remove(live)
                return
            times = [(rank, r.value) for rank, r in enumerate(reports) if r.value is not None]
            self._record(live.case, phase, round_index, position, started_s, times)

    def _allreduce_curves(self) -> None:
        """All-reduce by itself at every rank count, up to the size of all gradients in one message."""
        groups = {(c.case.num_devices, c.case.backend): c.group for c in self._live if c.communicates}
        gradient_bytes = max((sum(c.layout.num_bytes) for c in self._live if c.layout is not None), default=0)
        largest = self._cluster.from_first(gradient_bytes)
        sizes = [size for size in CURVE_BYTES if size < 2 * largest]
        for (num_ranks, backend), group in sorted(groups.items(), key=lambda item: item[0]):
            times: dict[int, list[float]] = {size: [] for size in sizes}
            self._console.progress(f"all-reduce curve of {num_ranks} ranks", 0, 1, self._left_s())
            for repetition in range(CURVE_REPETITIONS):
                for size in sizes if repetition % 2 else sizes[::-1]:
                    self._cluster.barrier()
                    mine = None
                    if self._cluster.rank < num_ranks:
                        mine = allreduce_times(size, group, self._cluster.place.device, self._clock)
                    times[size].append(max(ms for ms in self._cluster.gather(mine) if ms is not None))
            if self._recorder is not None:
                self._recorder.add_allreduce(num_ranks, backend, times)

    def _attempt(self, work: Callable[[], Any] | None) -> Report:
        """Run `work`, turning what can go wrong with one case into a report about it."""
        if work is None:
            return Report()
        try:
            return Report(value=work())
        except UsageError:
            raise
        except Unsupported as reason:
            return Report("skipped", str(reason))
        except torch.OutOfMemoryError:
            return Report("oom", "out of GPU memory; use a smaller --batch-size or --image-size")
        except Exception as error:  # noqa: BLE001 - whatever a model raises fails its case, not the run
            first = str(error).strip().splitlines()
            return Report("failed", f"{type(error).__name__}: {first[0] if first else ''}")

    def _keep(self, live: LiveCase, reports: Sequence[Report]) -> bool:
        """Whether every rank fared well; otherwise the case ends here, on all of them."""
        bad = next((r for r in reports if r.status != "ok"), None)
        if bad is None:
            return True
        live.close()
        if self._cluster.place.device.type == "cuda":
            torch.cuda.empty_cache()
        if self._recorder is not None:
            self._recorder.set_outcome(live.index, bad.status, bad.reason)
        self._console.note(f"{live.case.case_id}: {bad.status}: {bad.reason}")
        return False

    def _record(
        self,
        case: Case,
        phase: str,
        round_index: int,
        position: int,
        started_s: float,
        times: Sequence[tuple[int, BlockTimes]],
    ) -> None:
        if self._recorder is None:
            return
        rows = []
        for rank, block in times:
            detail = dict(block.detail)
            trace = detail.pop("trace", None)
            if trace is not None:
                self._recorder.add_trace(case.case_id, rank, trace)
            rows.append(
                {
                    "case_id": case.case_id,
                    "phase": phase,
                    "round": round_index,
                    "position": position,
                    "rank": rank,
                    "host": self._infos[rank].host,
                    "started_s": round(started_s, 4),
                    "num_steps": len(block.steps_ms),
                    "block_ms": round(block.block_ms, 4),
                    "steps_ms": " ".join(f"{ms:.5g}" for ms in block.steps_ms),
                    "detail": json.dumps(detail) if detail else None,
                }
            )
        self._recorder.add_block(rows)

    def _finished(self) -> bool:
        reason = ""
        if self._recorder is not None and self.rounds:
            if self._settings.rounds is not None:
                reason = "all rounds done" if self.rounds >= self._settings.rounds else ""
            elif self.rounds >= MIN_ROUNDS_FOR_TARGET:
                width = self._recorder.half_width()
                reason = "precision target reached" if width <= self._settings.precision_target else ""
            if not reason and self._out_of_time():
                reason = "time limit reached"
        self.stopped_because = self._cluster.from_first(reason)
        return bool(self.stopped_because)

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self._started

    def _left_s(self) -> float | None:
        """Seconds until the time limit; None without one."""
        limit = self._settings.max_time
        return None if limit is None else limit - self._elapsed_s()

    def _out_of_time(self) -> bool:
        left = self._left_s()
        return left is not None and left <= 0
