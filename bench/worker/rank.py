"""One rank: what it holds, and what it does for each command of the conductor.

A group of gloo carries barriers and what ranks tell each other in proofs: a rank waiting in it sleeps, so its
device stays idle. Gradients go through groups of the case's own backend, and in a case its own is the default
one: of its ranks, or of the first rank alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch.distributed import Store  # type: ignore[attr-defined]  # the stub lacks it

from ...models.data import images_for
from ...models.profile import num_outputs, profile_workload
from ...models.registry import num_classes_of, workload_of
from ...models.step import float32_precision, has_fused_optimizer, takes_images
from ..common.errors import RAISED_BY_USERS, UsageError, UserCodeError
from ..common.tracebacks import formatted, place_of
from ..machine.host import oom_kills, raise_open_file_limit, versions
from ..machine.load import read_load
from ..machine.provenance import workload_code
from ..measure.calibration import trainable
from ..measure.clock import make_clock
from ..measure.faults import classify_error
from ..measure.groups import as_default, check_link, finish, new_group, num_launched, waiting_for
from ..measure.memory import release_cache, release_memory
from ..measure.standalone import allreduce_ms
from ..modes import require_compiler
from ..plan.settings import ResolvedSettings
from ..proof.agreement import differing_gradients
from ..proof.making import Maker
from ..proof.proof import Prover
from ..results.block_times import Fault, ProofResult
from . import messages as m
from .devices import look, nccl_log, place_of_rank, sampled, take_place, told_machine
from .facts import Begun, Inspected
from .held_case import HeldCase, Shared, build
from .stores import ADDRESS_KEY, joined_store, meet, opened_store


class Rank:
    """A rank of a job; `do` carries a command out."""

    def __init__(self, number: int, local_rank: int) -> None:
        self.number = number
        self._local_rank = local_rank
        self.store: Store | None = None
        self._groups: dict[m.GroupKey, dist.ProcessGroup | None] = {}
        self._live: dict[int, HeldCase] = {}
        self._bound_cores = ""
        self._control: dist.ProcessGroup | None = None
        self._alone: dist.ProcessGroup | None = None
        self._of_this_run = contextlib.ExitStack()

    def do(self, command: m.Command[Any]) -> m.Report:
        """Carry a command out, in step with the other ranks where they are to; what came of it."""
        try:
            found = m.Report(value=self._in_step(command))
        except RAISED_BY_USERS as error:  # whatever a model raises fails its case alone
            found = answer_to(error, is_of_a_case=not isinstance(command, BEFORE_CASES))
        group = self._group_of(command)
        return replace(found, launched=m.NO_GROUP if group is None else num_launched(group))

    def _in_step(self, command: m.Command[Any]) -> Any:
        if isinstance(command, m.IN_STEP):
            if getattr(command, "gives_caches_back", False):
                release_cache(self.place.device)
            with waiting_for("the other ranks"):
                dist.barrier(self._control)
        # What collectives of the workload's use: the case's own group; as before where no case computes.
        own = (self._group_of(command) or self._alone) if isinstance(command, OF_A_CASE) else None
        with as_default(own):
            return self.result(command)

    def result(self, command: m.Command[Any]) -> Any:  # noqa: C901, PLR0911, PLR0912 - a table
        match command:
            case m.Open():
                return self._open(command)
            case m.Look():
                return look(command.device, self._local_rank)
            case m.Inspect():
                return self._inspect(command.settings)
            case m.Begin():
                return self._begin(command)
            case m.Wait():
                return None  # only the beginning concerns this rank
            case m.Load():
                return read_load()
            case m.Group(group=(num_ranks, backend) as key):
                self._groups[key] = new_group(range(num_ranks), backend)
                return None
            case m.Link():
                return check_link(range(command.num_ranks), command.backend, self.place.device)
            case m.Split():
                return self._prover.splitter.split(command.case)
            case m.Prove():
                return self._prove(command)
            case m.Warm():
                stages = self._prover.splitter.stages(command.by_device)
                live = build(command.case, self._group_of(command), self._shared, stages)
                self._live[command.index] = live
                with live.computing():
                    return live.warm(command.least_s, compares=command.compares)
            case m.Compare():
                return self._live[command.index].compare()
            case m.Block():
                live = self._live[command.index]
                with live.computing():
                    return live.measure(command.phase, command.steps)
            case m.Agree():
                live = self._live[command.index]
                return differing_gradients(live.trainer, self._prover.subject(live.case).peers)
            case m.Curve():
                group = self._groups.get(command.group)
                return allreduce_ms(command.num_bytes, group, self.place.device, self._shared.clock)
            case m.AskNccl():
                release_memory(self.place.device)
                return nccl_log(command, self.place.device)
            case m.Settle():
                return self._settle(command)
            case m.Forget():
                self._prover.forget()
                return release_memory(self.place.device)
        raise AssertionError(command)

    def _open(self, asked: m.Open) -> int:
        """Raises UsageError where the launcher's store is not to be had."""
        if asked.address:
            self.store = joined_store()
            self.store.set(ADDRESS_KEY, asked.address)
            return 0
        self.store, port = opened_store()
        return port

    def _inspect(self, settings: ResolvedSettings) -> Inspected:
        workload, outputs, num_images = workload_of(settings), 0, None
        if settings.data not in ("device", "host"):
            from ...models.folder import check_folder  # torchvision takes seconds to import

            outputs = num_outputs(workload) or 0
            num_images = len(images_for(workload, settings.data, outputs))
            check_folder(Path(settings.data))
        return Inspected(
            model=profile_workload(workload),
            image_size=workload.image_size,
            num_images=num_images,
            unit=workload.unit,
            units_per_sample=workload.units_per_sample,
            has_fused_optimizer=settings.first("fused_optimizer") and has_fused_optimizer(workload),
            takes_images=settings.first("channels_last") and takes_images(workload),
            num_outputs=outputs or num_classes_of(workload),
            versions=versions(),
            workload=None if settings.workload is None else workload_code(settings.workload),
            parameters=tuple(trainable(workload)) if settings.calibrate else (),
        )

    def _begin(self, asked: m.Begin) -> Begun:
        settings = asked.settings
        workload = dataclasses.replace(
            workload_of(settings, asked.num_outputs), channels_last=settings.first("channels_last")
        )
        if not dist.is_initialized():
            raise_open_file_limit(asked.num_connections)
            self.place, self._bound_cores = take_place(asked, self.number, self._local_rank)
            self.store = meet(asked, self.number, self.store)
            self._control = dist.group.WORLD
            self._alone = new_group(range(1), settings.backend or "gloo")
        torch.backends.cudnn.benchmark = settings.first("cudnn_benchmark")
        self._of_this_run.enter_context(float32_precision(settings.precision, self.place.device))
        maker = Maker(
            workload,
            settings.seed,
            self.place.device,
            data_workers=settings.data_workers,
            alone=self._alone,
            num_outputs=asked.num_outputs,
        )
        self._prover = Prover(maker, self.place, self._control)
        self._shared = Shared(
            place=self.place,
            settings=settings,
            clock=make_clock(self.place.device),
            prover=self._prover,
            telemetry=sampled(settings, asked.cases, self.place),
        )
        place = place_of_rank(self.place, self._local_rank, self._bound_cores)
        machine, conditions = told_machine(asked, place) if self._local_rank == 0 else (None, {})
        return Begun(place=place, machine=machine, conditions=conditions, oom_kills=oom_kills())

    def _prove(self, asked: m.Prove) -> ProofResult | None:
        require_compiler(asked.case, self.place.device)
        prover = self._prover
        stages = prover.splitter.stages(asked.by_device)
        shown = prover.prove(asked.case, self._group_of(asked), stages)
        effect = prover.split_effect.of(prover.subject(asked.case, stages))
        return None if self.number else dataclasses.replace(shown, split_effect=effect)

    def _settle(self, asked: m.Settle) -> None:
        finish(self._groups.get(asked.group), self.place.device)
        if asked.index is not None and (live := self._live.pop(asked.index, None)) is not None:
            live.close()
        gc.collect()
        release_memory(self.place.device)

    def _group_of(self, command: m.Command[Any]) -> dist.ProcessGroup | None:
        """The process group through which the ranks of a command's case communicate."""
        match command:
            case m.Prove(case=case) | m.Warm(case=case):
                return self._groups.get((case.num_ranks, case.backend))
            case m.Block(index=index) | m.Compare(index=index) | m.Agree(index=index) if index in self._live:
                return self._live[index].group
            case m.Curve(group=group):
                return self._groups.get(group)
        return None


def answer_to(error: BaseException, *, is_of_a_case: bool = True) -> m.Report:
    """Make a rank's answer where its work raised, with where that was.

    A mistake of the user ends the run; what loading the user's code raises is one only before all cases.
    """
    if isinstance(error, UsageError) and not (is_of_a_case and isinstance(error, UserCodeError)):
        cause = error.__cause__ if isinstance(error, UserCodeError) else None
        text = "" if cause is None else formatted(cause)
        mistake = Fault("usage", str(error))
        return m.Report(fault=mistake, exit_code=error.exit_code, label=error.label, traceback=text)
    fault = classify_error(error)
    if fault.status == "skipped":
        return m.Report(fault=fault)
    # Where memory ran out says little, and the reason says what helps.
    place = place_of(error) if fault.status == "failed" else ""
    return m.Report(fault=fault, place=place, traceback=formatted(error))


BEFORE_CASES = (m.Open, m.Look, m.Inspect, m.Begin)
"""Commands that concern the run as a whole."""

OF_A_CASE = (m.Split, m.Prove, m.Warm, m.Compare, m.Block, m.Agree)
"""Commands in which a case computes."""
