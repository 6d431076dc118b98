"""What every rank runs: prepare every case, then rounds over all of them in random order.

All ranks walk the same plan; rank 0 conducts, records and decides when to stop.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bench.cluster import Cluster, RankInfo
from bench.console import Console
from bench.errors import UsageError
from bench.measure.clock import make_clock
from bench.measure.device import peak_mib, set_precision, start_peak
from bench.measure.timed import BlockTimes, Trainer, run_block
from bench.modes import Unsupported, build_mode
from bench.plan import Case, Planned, round_order
from bench.proof import Prover
from bench.recorder import Recorder
from bench.settings import Settings
from models.data import open_source
from models.workload import Workload, make_module

MIN_WARMUP_STEPS = 3
"""DDP rebuilds its buckets after the first step and reports them after the second."""

MAX_WARMUP_STEPS = 10
STILL_FASTER = 0.95
"""Warm-up goes on while a step takes less than this share of every step before it."""


@dataclass
class LiveCase:
    """A case that is ready to be measured on this rank."""

    index: int
    case: Case
    trainer: Trainer | None
    """None on ranks that do not take part."""


@dataclass(frozen=True)
class Report:
    """What one rank says after a piece of work: its result, or what went wrong."""

    status: str = "ok"
    reason: str = ""
    value: Any = None


class Session:
    """One rank's part of a run. `recorder` and `console` exist on rank 0 only."""

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
        self.rounds = 0
        self.stopped_because = ""

    def run(self) -> None:
        """Prepare, then measure until the rounds, the target or the time limit is reached."""
        set_precision(self._settings.precision, self._cluster.place.device)
        torch.manual_seed(self._settings.seed)
        template = make_module(self._workload)
        prover = Prover(self._workload, template, self._cluster.place, self._settings.seed)
        runnable = [(i, p.case) for i, p in enumerate(self._plan) if p.skip_reason is None]
        for done, (index, case) in enumerate(runnable):
            self._console.progress(f"preparing {case.case_id}", done, len(runnable), self._left_s())
            self._prepare(index, case, prover)
        self._drop_equal_layouts()
        del prover, template
        gc.collect()
        gc.freeze()
        while self._live and not self._finished():
            self.rounds += 1
            self._round(self.rounds)
        gc.unfreeze()
        self._console.progress_done()
        for live in self._live:
            if live.trainer is not None:
                live.trainer.close()

    def _prepare(self, index: int, case: Case, prover: Prover) -> None:
        group = self._cluster.group(case.num_devices, case.backend) if case.mode == "ddp" else None
        takes_part = self._cluster.rank < (case.num_devices if case.mode == "ddp" else 1)
        live = LiveCase(index, case, None)

        def work() -> dict[str, Any]:
            facts: dict[str, Any] = {"proof_error": prover.prove(case, group)}
            device = self._cluster.place.device
            before = start_peak(device)
            module = copy.deepcopy(prover.template).to(device)
            mode = build_mode(case, module, self._cluster.place, group)
            live.trainer = Trainer(case, mode, self._workload, self._source(case))
            times = self._warm_up(live.trainer, group)
            layout = mode.bucket_layout()
            mode.settle()
            facts |= {"warmup": times, "peak_mem_mib": peak_mib(device, before)}
            if layout is not None:
                facts["num_buckets"] = len(layout.num_bytes)
                facts["bucket_bytes"] = "/".join(str(size) for size in layout.num_bytes)
            return facts

        started = self._elapsed_s()
        reports = self._cluster.gather(self._attempt(work if takes_part else None))
        if not self._settle_status(index, live, reports):
            return
        self._live.append(live)
        if self._recorder is not None:
            facts = dict(reports[0].value)
            facts.pop("warmup"), facts.pop("proof_error")
            peaks = [
                r.value["peak_mem_mib"] for r in reports if r.value and r.value["peak_mem_mib"] is not None
            ]
            facts["peak_mem_mib"] = max(peaks, default=None)
            facts["device_name"] = self._infos[0].device_name
            self._recorder.set_outcome(index, "ok", facts=facts)
            times = [(rank, r.value["warmup"]) for rank, r in enumerate(reports) if r.value]
            self._record(case, "warmup", 0, len(self._live) - 1, started, times)

    def _source(self, case: Case) -> Any:
        ranks = case.num_devices if case.mode == "ddp" else 1
        return open_source(
            self._workload,
            data=case.data,
            batch_size=case.batch_per_device * (1 if case.mode == "ddp" else case.num_devices),
            rank=self._cluster.rank,
            world_size=ranks,
            device=self._cluster.place.device,
            seed=self._settings.seed,
            num_workers=self._settings.data_workers,
        )

    def _warm_up(self, trainer: Trainer, group: Any) -> BlockTimes:
        steps: list[float] = []
        while len(steps) < MAX_WARMUP_STEPS:
            steps += run_block(trainer.step, 1, self._clock).steps_ms
            if len(steps) < MIN_WARMUP_STEPS:
                continue
            settled = torch.tensor([float(steps[-1] >= STILL_FASTER * min(steps[:-1]))])
            if group is not None:
                # Ranks must take the same number of steps, or the next collective hangs.
                settled = settled.to(self._cluster.place.device)
                torch.distributed.all_reduce(settled, torch.distributed.ReduceOp.MIN, group)
            if settled.item():
                break
        return BlockTimes(sum(steps), tuple(steps))

    def _drop_equal_layouts(self) -> None:
        """Different caps can give one bucket layout: measure it once."""
        kept: list[LiveCase] = []
        seen: dict[tuple[Any, ...], str] = {}
        for live in self._live:
            layout = live.trainer.mode.bucket_layout() if live.trainer is not None else None
            sizes = self._cluster.from_first(layout.num_bytes if layout is not None else None)
            key = (*(v for k, v in asdict(live.case).items() if k != "bucket_cap_mb"), sizes)
            twin = seen.setdefault(key, live.case.case_id)
            if twin == live.case.case_id or sizes is None:
                kept.append(live)
                continue
            if live.trainer is not None:
                live.trainer.close()
            if self._recorder is not None:
                self._recorder.set_outcome(
                    live.index, "skipped", f"same bucket layout as {twin}; see its row"
                )
        self._live = kept

    def _round(self, round_index: int) -> None:
        order = round_order(len(self._live), seed=self._settings.seed, round_index=round_index)
        for position, which in enumerate([self._live[i] for i in order]):
            if which not in self._live:
                continue
            self._console.progress(
                f"round {round_index} {which.case.case_id}", position, len(order), self._left_s()
            )
            self._block(which, round_index, position)
            if round_index > 1 and self._cluster.from_first(self._out_of_time()):
                break
        if self._recorder is not None:
            self._recorder.write_cases()

    def _block(self, live: LiveCase, round_index: int, position: int) -> None:
        trainer, steps = live.trainer, self._settings.steps or 1
        self._cluster.barrier()
        started = self._elapsed_s()
        work = None if trainer is None else lambda: run_block(trainer.step, steps, self._clock)
        reports = self._cluster.gather(self._attempt(work))
        if not self._settle_status(live.index, live, reports):
            self._live.remove(live)
            return
        times = [(rank, r.value) for rank, r in enumerate(reports) if r.value is not None]
        self._record(live.case, "timed", round_index, position, started, times)

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

    def _settle_status(self, index: int, live: LiveCase, reports: Sequence[Report]) -> bool:
        bad = next((r for r in reports if r.status != "ok"), None)
        if bad is None:
            return True
        if live.trainer is not None:
            live.trainer.close()
            live.trainer = None
        if self._cluster.place.device.type == "cuda":
            torch.cuda.empty_cache()
        if self._recorder is not None:
            self._recorder.set_outcome(index, bad.status, bad.reason)
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
        self._recorder.add_block(
            [
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
                    "steps_ms": " ".join(f"{ms:.4g}" if ms < 1000 else f"{ms:.1f}" for ms in block.steps_ms),
                }
                for rank, block in times
            ]
        )

    def _finished(self) -> bool:
        reason = ""
        if self._recorder is not None and self.rounds:
            if self._settings.rounds is not None:
                reason = "all rounds done" if self.rounds >= self._settings.rounds else ""
            else:
                width = self._recorder.half_width(self._recorder.write_cases())
                if self.rounds >= 5 and width <= self._settings.precision_target:
                    reason = "precision target reached"
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
