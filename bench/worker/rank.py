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

from ...models.data import find_images
from ...models.profile import count_outputs, list_trainable, profile_workload
from ...models.registry import count_classes, make_workload
from ...models.step import has_fused_optimizer, has_image_inputs, set_float32_precision
from ...models.workload import make_module
from ..common.errors import USER_EXCEPTIONS, UsageError, UserCodeError
from ..common.process import note_waiting
from ..common.tracebacks import find_user_code, format_traceback
from ..machine.host import count_oom_kills, get_versions, raise_open_file_limit
from ..machine.load import read_load
from ..machine.provenance import describe_workload_code
from ..measure.allreduce import measure_allreduce_ms
from ..measure.clock import make_clock
from ..measure.faults import classify_error
from ..measure.groups import (
    check_link,
    count_launched,
    make_group,
    set_default_group,
    wait_for_work,
)
from ..measure.memory import release_cache, release_memory
from ..modes import require_compiler
from ..plan.settings import ResolvedSettings
from ..proof.agreement import find_differing_gradients
from ..proof.making import Maker
from ..proof.proof import Prover
from ..results.block_times import Fault
from . import messages as m
from .devices import (
    describe_rank,
    describe_rank_host,
    find_devices,
    read_nccl_log,
    start_sampling,
    take_place,
)
from .facts import Begun, Inspected, Prepared
from .held_case import PreparedCase, Shared, build
from .stores import ADDRESS_KEY, join_default_group, join_store, open_store


class Rank:
    """A rank of a job; `do` carries a command out."""

    def __init__(self, number: int, local_rank: int) -> None:
        self.number = number
        self._local_rank = local_rank
        self.store: Store | None = None
        self._groups: dict[m.GroupKey, dist.ProcessGroup | None] = {}
        self._live: dict[int, PreparedCase] = {}
        self._control: dist.ProcessGroup | None = None
        self._alone: dist.ProcessGroup | None = None
        self._of_this_run = contextlib.ExitStack()

    def do(self, command: m.Command[Any]) -> m.Report:
        """Carry a command out, in step with the other ranks where they are to; what came of it."""
        try:
            found = m.Report(value=self._do_in_step(command))
        except USER_EXCEPTIONS as error:  # whatever a model raises fails its case alone
            found = make_report(error, is_of_a_case=not isinstance(command, SETUP_COMMANDS))
        group = self._find_group(command)
        return replace(found, launched=m.NO_GROUP if group is None else count_launched(group))

    def _do_in_step(self, command: m.Command[Any]) -> Any:
        if isinstance(command, m.STEP_COMMANDS):
            if getattr(command, "gives_caches_back", False):
                release_cache(self.place.device)
            with note_waiting("the other ranks"):
                dist.barrier(self._control)
        # What collectives of the workload's use: the case's own group; as before where no case computes.
        own = (self._find_group(command) or self._alone) if isinstance(command, CASE_COMMANDS) else None
        with set_default_group(own):
            return self.compute_reply(command)

    def compute_reply(self, command: m.Command[Any]) -> Any:  # noqa: C901, PLR0911, PLR0912 - a table
        match command:
            case m.Open():
                return self._open(command)
            case m.Look():
                return find_devices(command.device, self._local_rank)
            case m.Inspect():
                return self._inspect(command.settings)
            case m.Begin():
                return self._begin(command)
            case m.Wait():
                return None  # only the beginning concerns this rank
            case m.Load():
                return read_load()
            case m.Group(group=(num_ranks, backend) as key):
                self._groups[key] = make_group(range(num_ranks), backend)
                return None
            case m.Link(group=(num_ranks, backend)):
                return check_link(range(num_ranks), backend, self.place.device)
            case m.Prepare():
                return self._prepare(command)
            case m.Block():
                live = self._live[command.index]
                with live.enter_training():
                    return live.measure(command.phase, command.steps)
            case m.Agree():
                live = self._live[command.index]
                subject = self._shared.prover.make_subject(live.case)
                return find_differing_gradients(live.trainer, subject.peers)
            case m.Curve():
                group = self._groups.get(command.group)
                return measure_allreduce_ms(command.num_bytes, group, self.place.device, self._shared.clock)
            case m.AskNccl():
                release_memory(self.place.device)
                return read_nccl_log(command, self.place.device)
            case m.Settle():
                return self._drop_case(command)
        raise AssertionError(command)

    def _open(self, asked: m.Open) -> int:
        """Open the launcher's store. Raises UsageError where it cannot be reached."""
        if asked.address:
            self.store = join_store()
            self.store.set(ADDRESS_KEY, asked.address)
            return 0
        self.store, port = open_store()
        return port

    def _inspect(self, settings: ResolvedSettings) -> Inspected:
        workload, outputs, num_images = make_workload(settings), 0, None
        if settings.data not in ("device", "host"):
            from ...models.folder import check_folder  # torchvision takes seconds to import

            outputs = count_outputs(workload) or 0
            num_images = len(find_images(workload, settings.data, outputs))
            check_folder(Path(settings.data))
        return Inspected(
            model=profile_workload(workload),
            image_size=workload.image_size,
            num_images=num_images,
            unit=workload.unit,
            units_per_sample=workload.units_per_sample,
            has_fused_optimizer=settings.get_first("fused_optimizer") and has_fused_optimizer(workload),
            takes_images=settings.get_first("channels_last") and has_image_inputs(workload),
            num_outputs=outputs or count_classes(workload),
            versions=get_versions(),
            workload=None if settings.workload is None else describe_workload_code(settings.workload),
            parameters=tuple(list_trainable(make_module(workload))) if settings.calibrate else (),
        )

    def _begin(self, asked: m.Begin) -> Begun:
        settings = asked.settings
        workload = dataclasses.replace(
            make_workload(settings, asked.num_outputs), channels_last=settings.get_first("channels_last")
        )
        raise_open_file_limit(asked.num_connections)
        self.place, bound_cores = take_place(asked, self.number, self._local_rank)
        self.store = join_default_group(asked, self.number, self.store)
        self._control = dist.group.WORLD
        self._alone = make_group(range(1), settings.backend or "gloo")
        torch.backends.cudnn.benchmark = settings.get_first("cudnn_benchmark")
        self._of_this_run.enter_context(set_float32_precision(settings.precision, self.place.device))
        maker = Maker(
            workload,
            settings.seed,
            self.place.device,
            data_workers=settings.data_workers,
            alone=self._alone,
            num_outputs=asked.num_outputs,
        )
        self._shared = Shared(
            place=self.place,
            settings=settings,
            clock=make_clock(self.place.device),
            prover=Prover(maker, self.place, self._control),
            telemetry=start_sampling(settings, asked.cases, self.place),
        )
        place = describe_rank(self.place, self._local_rank, bound_cores)
        machine, conditions = describe_rank_host(asked, place) if self._local_rank == 0 else (None, {})
        return Begun(place=place, machine=machine, conditions=conditions, oom_kills=count_oom_kills())

    def _prepare(self, asked: m.Prepare) -> Prepared:
        case, group, prover = asked.case, self._find_group(asked), self._shared.prover
        require_compiler(case, self.place.device)
        stages = prover.splitter.make_stages(case, prover.make_subject(case).peers, asked.by_device)
        gradients = None
        if asked.proves:
            shown = prover.prove(case, group, stages)
            effect = prover.split_effect.measure_effect(prover.make_subject(case, stages))
            gradients = dataclasses.replace(shown, split_effect=effect)
        live = self._live[asked.index] = build(case, group, self._shared, stages)
        found = live.warm_up(asked.least_s, proves=asked.proves)
        return replace(found, by_device=stages and stages.by_device, gradients=gradients)

    def _drop_case(self, asked: m.Settle) -> None:
        wait_for_work(self._groups.get(asked.group), self.place.device)
        if asked.index is not None and (live := self._live.pop(asked.index, None)) is not None:
            live.trainer.close()
        if asked.forgets:
            self._shared.prover.forget()
        gc.collect()
        release_memory(self.place.device)

    def _find_group(self, command: m.Command[Any]) -> dist.ProcessGroup | None:
        """Find the process group through which the ranks of a command's case communicate."""
        match command:
            case m.Prepare(case=case):
                return self._groups.get((case.num_ranks, case.backend))
            case m.Block(index=index) | m.Agree(index=index) if index in self._live:
                return self._live[index].group
            case m.Curve(group=group):
                return self._groups.get(group)
        return None


def make_report(error: BaseException, *, is_of_a_case: bool = True) -> m.Report:
    """Make a rank's answer where its work raised, with where that was.

    A mistake of the user ends the run; what loading the user's code raises is one only before all cases.
    """
    if isinstance(error, UsageError) and not (is_of_a_case and isinstance(error, UserCodeError)):
        cause = error.__cause__ if isinstance(error, UserCodeError) else None
        text = "" if cause is None else format_traceback(cause)
        mistake = Fault("usage", str(error))
        return m.Report(fault=mistake, exit_code=error.exit_code, label=error.label, traceback=text)
    fault = classify_error(error)
    if fault.status == "skipped":
        return m.Report(fault=fault)
    # Where memory ran out says little, and the reason says what helps.
    place = find_user_code(error) if fault.status == "failed" else ""
    return m.Report(fault=fault, place=place, traceback=format_traceback(error))


SETUP_COMMANDS = (m.Open, m.Look, m.Inspect, m.Begin)
"""Commands that concern the run as a whole."""

CASE_COMMANDS = (m.Prepare, m.Block, m.Agree)
"""Commands in which a case computes."""
