"""One rank: what it holds, and what it does for each command of the conductor.

A group of gloo carries barriers and what ranks tell each other in proofs: a rank waiting in it sleeps, so its
device stays idle. Gradients go through groups of the case's own backend, and in a case its own is the default
one: of its ranks, or of the first rank alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch.distributed import Store  # type: ignore[attr-defined]  # the stub lacks it

from ...models.data import Drawn
from ...models.profile import profile_workload
from ...models.workload import Workload, one_line
from ..case import Case
from ..cluster.load import LoadReading, read_load
from ..machine import versions
from ..measure.calibration import trainable
from ..measure.clock import float32_precision, make_clock
from ..measure.collectives import allreduce_ms
from ..measure.matrix_rate import matrix_rate
from ..measure.memory import release_cache, release_memory
from ..measure.telemetry import Telemetry, sampled
from ..measure.timed import probe
from ..modes import require_compiler
from ..provenance import workload_code
from ..results.measured import BlockTimes
from ..settings import ResolvedSettings
from ..sysfs import oom_kills
from . import messages as m
from .devices import place_of_rank, seen_gpus, take_place, told_machine
from .groups import ADDRESS_KEY, joined_store, meet, new_group, num_launched, opened_store
from .job import resolve_job, workload_of
from .outcome import attempt, is_broken_by
from .peers import as_default, waiting_for
from .prepare import HeldCase, warm
from .proof import Prover
from .update_proof import prove_update
from .work import measure


class Rank:
    """A rank of a job; `do` carries a command out, by the method that has its name."""

    def __init__(self, number: int, local_rank: int) -> None:
        self.number = number
        self._local_rank = local_rank
        self.store: Store | None = None
        self._workload: Workload | None = None
        self._telemetry: Telemetry | None = None
        self._groups: dict[m.GroupKey, dist.ProcessGroup | None] = {}
        self._live: dict[int, HeldCase] = {}
        self._drawn: Drawn = {}
        self._bound_cores = ""
        self._control: dist.ProcessGroup | None = None
        self._alone: dist.ProcessGroup | None = None
        self._of_this_run = contextlib.ExitStack()

    def do(self, command: m.Command) -> m.Report:
        """Carry a command out, in step with the other ranks where they are to; what came of it."""
        found = attempt(lambda: self._explained(command), is_of_a_case=not isinstance(command, BEFORE_CASES))
        return replace(found, launched=num_launched(self._group_of(command)))

    def _explained(self, command: m.Command) -> Any:
        if isinstance(command, IN_STEP):
            if getattr(command, "gives_caches_back", False):
                release_cache(self.place.device)
            with waiting_for("the other ranks"):
                dist.barrier(self._control)
        try:
            with as_default(self._default_group(command)):
                return getattr(self, f"_{command.name}")(command)
        except RuntimeError as error:
            live = self._live.get(command.index) if isinstance(command, m.Warm | m.Block) else None
            why = None if live is None or live.trainer is None else live.trainer.mode.why_stopped(error)
            if why:
                raise why from error
            raise

    def _open(self, asked: m.Open) -> int:
        """Raises UsageError where the launcher's store is not to be had."""
        if asked.address:
            self.store = joined_store()
            self.store.set(ADDRESS_KEY, asked.address)
            return 0
        self.store, port = opened_store()
        return port

    def _look(self, asked: m.Look) -> m.SeenGpus | None:
        is_gpu = asked.device != "cpu" and torch.cuda.is_available()
        return seen_gpus(self._local_rank) if is_gpu else None

    def _resolve(self, asked: m.Resolve) -> m.ResolvedJob:
        job, self._workload = resolve_job(asked.asked, asked.launched)
        return job

    def _probe(self, asked: m.Probe) -> list[float]:
        return probe(self._loaded(asked.settings), asked.case, torch.device(asked.case.device_type))

    def _profile(self, asked: m.Profile) -> m.Profiled:
        workload, settings = self._loaded(asked.settings), asked.settings
        return m.Profiled(
            model=profile_workload(workload),
            versions=versions(),
            workload=None if settings.workload is None else workload_code(settings.workload),
            parameters=tuple(trainable(workload)) if settings.calibrate else (),
        )

    def _loaded(self, settings: ResolvedSettings) -> Workload:
        """The workload, which this rank may have loaded to resolve the run."""
        workload = self._workload or workload_of(settings)
        return dataclasses.replace(workload, channels_last=settings.first("channels_last"))

    def _begin(self, asked: m.Begin) -> m.Begun:
        settings = asked.settings
        self._settings = settings
        workload = self._loaded(settings)
        if not dist.is_initialized():
            self.place, self._bound_cores = take_place(asked, self.number, self._local_rank)
            self._meet(asked)
        torch.backends.cudnn.benchmark = settings.first("cudnn_benchmark")
        self._of_this_run.enter_context(float32_precision(settings.precision, self.place.device))
        self._clock = make_clock(self.place.device)
        self._telemetry = sampled(settings, asked.cases, self.place)
        self._prover = Prover(
            workload,
            self.place,
            settings.seed,
            data_workers=settings.data_workers,
            control=self._control,
            alone=self._alone,
        )
        place = place_of_rank(self.place, self._local_rank, self._bound_cores)
        told = told_machine(asked, place) if self._local_rank == 0 else None
        return m.Begun(
            place=place,
            fingerprint=self._prover.maker.fingerprint(),
            machine=told[0] if told else None,
            conditions=told[1] if told else {},
            oom_kills=oom_kills(),
        )

    def _meet(self, asked: m.Begin) -> None:
        self.store = meet(asked, self.number, self.store)
        self._control = dist.group.WORLD
        self._alone = new_group(range(1), asked.settings.backend or "gloo")

    def _wait(self, _: m.Wait) -> None:
        """Only the beginning concerns this rank."""

    def _load(self, _: m.Load) -> LoadReading | None:
        return read_load()

    def _rate(self, _: m.Rate) -> dict[str, float] | str:
        """One line where it raises, as for want of memory, unless that breaks the device."""
        try:
            return matrix_rate(self.place.device, self._settings.precision)
        except Exception as error:
            if is_broken_by(error):
                raise
            return one_line(error)

    def _group(self, asked: m.Group) -> None:
        num_ranks, backend = asked.group
        self._groups[asked.group] = new_group(range(num_ranks), backend)

    def _link(self, asked: m.Link) -> None:
        """Its group is not kept: a communicator takes memory of its GPU."""
        group = new_group(range(asked.first, asked.first + asked.num_ranks), asked.backend)
        if group is not None:
            one = torch.ones((), device=self.place.device)
            dist.all_reduce(one, group=group)
            assert one.item() == asked.num_ranks
            dist.destroy_process_group(group)

    def _split(self, asked: m.Split) -> tuple[int, ...]:
        return self._prover.splitter.split(asked.case)

    def _prove(self, asked: m.Prove) -> m.Proven | None:
        require_compiler(asked.case, self.place.device)
        self._prover.equal_replicas = asked.equal_replicas
        stages = self._prover.splitter.stages(asked.by_device)
        shown = self._prover.prove(asked.case, self._case_group(asked.case), stages)
        if self.number:
            return None
        maker = self._prover.maker
        return m.Proven(
            shown=shown,
            split_effect=self._prover.effect.of(asked.case),
            making_s=maker.seconds if maker.is_slow else None,
        )

    def _warm(self, asked: m.Warm) -> m.Warmed:
        live = HeldCase(asked.case, self._case_group(asked.case))
        self._live[asked.index] = live
        found = warm(
            live, asked, prover=self._prover, settings=self._settings, clock=self._clock, drawn=self._drawn
        )
        # Another rank may need it for the next case: DP trains on everyone's GPU.
        release_memory(self.place.device)
        return found

    def _compare(self, asked: m.Compare) -> m.Shown:
        live = self._live[asked.index]
        assert live.first is not None  # it has been warmed up
        of = self._prover.subject(live.case, self._prover.splitter.stages(asked.by_device))
        try:
            return prove_update(live.first, of, self._prover)
        finally:
            live.first = None

    def _block(self, asked: m.Block) -> BlockTimes:
        return measure(
            self._live[asked.index],
            asked.phase,
            asked.steps,
            place=self.place,
            clock=self._clock,
            telemetry=self._telemetry,
            keeps_trace=self._settings.trace,
        )

    def _curve(self, asked: m.Curve) -> float:
        group = self._groups.get(asked.group)
        return allreduce_ms(asked.num_bytes, group, self.place.device, self._clock)

    def _asknccl(self, asked: m.AskNccl) -> str:
        from .nccl_job import asked as log_of  # runs on GPUs alone

        release_memory(self.place.device)
        return log_of(asked.name, asked.num_ranks, self.place.device, asked.sizes, asked.backend)

    def _freeze(self, _: m.Freeze) -> None:
        """All cases are ready."""
        self._prover.forget()
        release_memory(self.place.device)
        gc.collect()
        gc.freeze()

    def _settle(self, asked: m.Settle) -> None:
        """Let what is under way end, then give its memory back."""
        group, device = self._groups.get(asked.group), self.place.device
        if group is not None:
            # Gloo's barrier waits for all work launched before it; NCCL's kernels the device waits for.
            with_nccl = dist.get_backend(group).startswith("nccl")
            dist.barrier(group, device_ids=[device.index] if with_nccl else None)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if asked.index is not None and (live := self._live.pop(asked.index, None)) is not None:
            live.close()
        gc.collect()
        release_memory(device)

    def _case_group(self, case: Case) -> dist.ProcessGroup | None:
        return self._groups.get((case.num_ranks, case.backend))

    def _default_group(self, command: m.Command) -> dist.ProcessGroup | None:
        """What collectives of the workload's use: the case's own group; None where no case computes."""
        match command:
            case m.Split():
                return self._alone
            case m.Prove() | m.Warm():
                return self._case_group(command.case) or self._alone
            case m.Block() | m.Compare() if command.index in self._live:
                return self._live[command.index].group or self._alone
        return None

    def _group_of(self, command: m.Command) -> dist.ProcessGroup | None:
        """The process group through which the ranks of a command's case communicate."""
        match command:
            case m.Prove() | m.Warm():
                return self._case_group(command.case)
            case m.Block() | m.Compare():
                live = self._live.get(command.index)
                return None if live is None else live.group
            case m.Curve():
                return self._groups.get(command.group)
        return None


BEFORE_CASES = (m.Open, m.Look, m.Resolve, m.Probe, m.Profile, m.Begin)
"""Commands that concern the run as a whole."""

IN_STEP = (m.Wait, m.Rate, m.Link, m.Prove, m.Warm, m.Compare, m.Block, m.Curve, m.Settle)
"""Commands that all ranks begin together; who takes no part in one waits for its beginning."""
