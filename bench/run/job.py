"""A run before its ranks: validated, planned, shown, described for its manifest, launched."""

from __future__ import annotations

import dataclasses
import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch

from ddp_bench.bench import plan
from ddp_bench.bench.cli import command, speaker
from ddp_bench.bench.cluster.devices import SeenGpus, num_gpus, seen_gpus, this_machine
from ddp_bench.bench.cluster.meeting import host_name
from ddp_bench.bench.cluster.messages import may_be_sent
from ddp_bench.bench.cluster.numa import is_narrowed
from ddp_bench.bench.cluster.process import is_first, is_rank
from ddp_bench.bench.cluster.ranks import agreed, allowed_cores, gpus_by_rank
from ddp_bench.bench.cluster.turns import interleaved_id
from ddp_bench.bench.console import format_s
from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.expected_time import estimate_s
from ddp_bench.bench.findings.numbers import plural, short
from ddp_bench.bench.findings.wording import devices, samples_noun, workload_parts
from ddp_bench.bench.gpus import gpus
from ddp_bench.bench.layout import BucketCaps
from ddp_bench.bench.machine import versions
from ddp_bench.bench.manifest import FirstHost, Host, Manifest, Model, OwnVersion, RankPlace
from ddp_bench.bench.measure.timed import probe
from ddp_bench.bench.plan import Machine, Planned
from ddp_bench.bench.provenance import own_git_state, own_version, workload_code
from ddp_bench.bench.recovery.failures import STARTED_ENV
from ddp_bench.bench.recovery.reopen import check_same, has_nothing_left, resumable_manifest, settings_of
from ddp_bench.bench.recovery.watchdog import meet_and_watch
from ddp_bench.bench.resolve import GpuKind, with_device_defaults
from ddp_bench.bench.results import store
from ddp_bench.bench.results.journal import read
from ddp_bench.bench.results.store import FolderLock
from ddp_bench.bench.run import sustain
from ddp_bench.bench.run.fork_server import ForkServer
from ddp_bench.bench.run.launch import launch
from ddp_bench.bench.run.schedule import expected_half_width
from ddp_bench.bench.settings import ResolvedSettings, Settings
from ddp_bench.bench.text import visible
from ddp_bench.models.data import check_folder
from ddp_bench.models.profile import profile_workload
from ddp_bench.models.registry import default_image_size, load_workload, resnet_workload
from ddp_bench.models.step import as_set, has_fused_optimizer, takes_images
from ddp_bench.models.workload import Workload

may_be_sent(Settings, BucketCaps)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A validated run, the same on every rank."""

    settings: ResolvedSettings
    machine: Machine
    workload: Workload
    plan: list[Planned]

    @property
    def binds_cores(self) -> bool:
        """Whether ranks are kept on the cores next to their GPUs: not where a launcher has chosen cores."""
        return self.settings.numa_bind and (STARTED_ENV in os.environ or not is_narrowed(allowed_cores()))


def prepare(asked: Settings, machine: Machine | None = None) -> Job:
    """Resolve the device, the workload and the plan. Raises UsageError for what cannot run here.

    `machine` is what an earlier job of this process found: a rank that has its own core sees no other.
    """
    device_type = _device_type(asked.device)
    if machine is not None:
        num_devices = machine.devices_per_node
    else:
        num_devices = num_gpus() if device_type == "cuda" else len(allowed_cores())
    gpu = _gpu_kind() if device_type == "cuda" else None
    settings = with_device_defaults(asked, device_type=device_type, num_local_devices=num_devices, gpu=gpu)
    _check_precision(settings)
    workload = _workload(settings)
    # A launcher of ours has checked the folder for its ranks.
    if settings.data not in ("device", "host") and STARTED_ENV not in os.environ:
        check_folder(Path(settings.data))
    # Launched ranks meet here: what one of them alone can refuse comes before.
    machine = machine or _machine(device_type, num_devices)
    num_devices = machine.devices_per_node
    if machine.num_nodes > 1:
        num_devices = max(num_devices, (machine.ranks_per_node or 0) * machine.num_nodes)
    settings = with_device_defaults(asked, device_type=device_type, num_local_devices=num_devices, gpu=gpu)
    settings = _as_the_workload_allows(asked, settings, workload)
    planned = plan.expand(
        settings,
        machine,
        arch=workload.name,
        image_size=workload.image_size,
        unit=workload.unit,
        units_per_sample=workload.units_per_sample,
    )
    if settings.race and not any(p.case.mode == "ddp" and p.case.num_devices > 1 for p in planned):
        raise UsageError("a race is one of DDP's settings on 2 devices or more; give --modes ddp --gpus 2")
    if settings.out is not None and not is_rank():
        store.check_claimable(Path(settings.out))
    return Job(settings=settings, machine=machine, workload=as_set(workload, planned[0].case), plan=planned)


def print_plan(job: Job) -> None:
    """Every case, why it is skipped, the order of the first round and the expected time."""
    runnable = [p for p in job.plan if p.skip_reason is None]
    order = plan.round_order(len(runnable), seed=job.settings.seed, round_index=1)
    place = {runnable[i].case.case_id: position + 1 for position, i in enumerate(order)}
    width = max(len(p.case.case_id) for p in job.plan)
    here = devices(job.machine.devices_per_node, job.machine.device_type)
    noun = samples_noun(asdict(job.plan[0].case))
    of_single = job.plan[0].case
    trained = workload_parts(of_single.stored(), of_single.batch_per_device)
    print(visible(f"{len(job.plan)} cases, {len(runnable)} to measure, on {here}; {', '.join(trained)}:"))
    for p in job.plan:
        what = f"skipped: {p.skip_reason}" if p.skip_reason else f"place {place[p.case.case_id]} in round 1"
        more = ", oversubscribed" if p.oversubscribed and not p.skip_reason else ""
        print(f"  {p.case.case_id:<{width}}  {p.case.global_batch:>5} {noun}/step  {what}{more}")
    # Eager: a plan should not take the minutes of a compiler, nor need one.
    first = dataclasses.replace(job.plan[0].case, compile="off")
    steps_ms = probe(job.workload, first, torch.device(job.machine.device_type))
    step_s = median(steps_ms) / 1000
    expected = estimate_s(
        job.plan, step_s=step_s, single_batch=job.plan[0].case.global_batch, settings=job.settings
    )
    steps = plural(job.settings.steps_per_block(step_s), "step")
    print(
        f"Rounds in random order (seed {job.settings.seed}), {steps} per block; a step of "
        f"single takes {step_s * 1000:.0f} ms here (probe of {len(steps_ms)} steps)."
    )
    limit = "" if job.settings.max_time is None else f", limit {format_s(job.settings.max_time)}"
    print(f"Expected time: about {format_s(expected)} of measuring{limit}, plus start-up.")
    if sustained_s := sustain.expected_s(job.plan, job.settings):
        print(
            f"After that {format_s(sustained_s)} of training without a pause (--sustain), in all "
            f"{format_s(expected + sustained_s)}."
        )
    if (known := expected_half_width(job.plan, job.settings, steps_ms, expected_s=expected)) is not None:
        print(
            f"Comparisons will be known to about ±{short(100 * known, 2)}% by then, if all cases scatter as "
            f"the probe does; what counts as equal is {100 * job.settings.margin:g}% (--margin)."
        )


def new_manifest(
    job: Job,
    arguments: Sequence[str],
    infos: Sequence[RankPlace],
    machines: Sequence[FirstHost],
) -> Manifest:
    """What manifest.json says of a run that begins; `machines` are its hosts, the first rank's first."""
    profile = profile_workload(job.workload)
    return Manifest(
        name=job.settings.name,
        run_id=uuid.uuid4().hex[:12],
        interleaved_id=interleaved_id(),
        preset=job.settings.preset,
        created_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        argv=tuple(arguments),
        command=command("run", *arguments),
        settings=job.settings,
        seed=job.settings.seed,
        plan_hash=plan.plan_hash(job.plan),
        versions=versions(),
        ddp_bench=OwnVersion(version=own_version()),
        git=own_git_state(),
        workload=None if job.settings.workload is None else workload_code(job.settings.workload),
        environment=machines[0],
        hosts={str(one.host): msgspec.convert(msgspec.to_builtins(one), Host) for one in machines},
        model=Model(arch=job.workload.name, **asdict(profile)),
        ranks=tuple(infos),
        link=infos[0].link,
    )


def resumed_settings(folder: Path, changes: Mapping[str, Any]) -> Settings:
    """The settings of the run in `folder` with `changes`; of many ranks only the first needs the folder.

    Raises UsageError, on every rank, where there is no such run.
    """
    if not is_rank():
        return settings_of(folder, changes)
    meet_and_watch()
    return agreed(lambda: settings_of(folder, changes))


def is_complete(folder: Path) -> bool:
    """Whether the run in `folder` has nothing left to do; every rank hears the same."""

    def look() -> bool:
        return has_nothing_left(read(folder))

    return agreed(look) if is_rank() else look()


def launch_here(
    job: Job, arguments: Sequence[str], *, resume: Path | None, began_s: float, forks: ForkServer | None
) -> int:
    """Start the ranks on this machine; their exit code. `began_s`: when the command began, monotonic."""
    settings = job.settings
    given = list(arguments)
    if resume is None:
        out = (
            Path(settings.out) if settings.out else store.default_folder(host=host_name(), name=settings.name)
        )
        store.check_claimable(out)
        if not settings.out:
            given += ["--out", str(out)]  # every rank gets the one folder
    else:
        out = resume
        seen = [seen_gpus(0)] if job.machine.device_type == "cuda" else []
        then = resumable_manifest(out)
        now = Manifest(
            plan_hash=plan.plan_hash(job.plan),
            versions=versions(),
            environment=this_machine(seen),
            ranks=then.ranks,
        )
        check_same(out, then, now)
        FolderLock(out).release()
    return launch(
        given,
        folder=out,
        num_ranks=plan.world_size(job.plan),
        device_type=job.machine.device_type,
        began_s=began_s,
        forks=forks,
    )


def _workload(settings: Settings) -> Workload:
    if settings.workload is not None:
        return load_workload(
            settings.workload, settings.image_size or default_image_size("", settings.device)
        )
    arch = settings.arch or ""
    return resnet_workload(arch, settings.image_size or default_image_size(arch, settings.device))


def _device_type(wanted: str) -> str:
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise UsageError("--device cuda: torch finds no CUDA device here; use --device cpu or auto")
    if wanted == "auto" and not available and is_first() and (present := gpus()):
        print(
            f"{speaker()}: the driver shows {plural(len(present), 'GPU')}, torch finds no CUDA device: CPU "
            f"cores are measured; see {command('doctor')}, or say --device cpu",
            file=sys.stderr,
        )
    return "cuda" if available and wanted != "cpu" else "cpu"


def _machine(device_type: str, num_devices: int) -> Machine:
    machine = Machine(device_type=device_type, devices_per_node=num_devices)
    if not is_rank() or STARTED_ENV in os.environ:
        return machine
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    num_nodes = int(os.environ["WORLD_SIZE"]) // per_node
    machine = dataclasses.replace(machine, ranks_per_node=per_node, num_nodes=num_nodes)
    return as_seen(machine, gpus_by_rank(device_type))


def as_seen(machine: Machine, seen: Sequence[SeenGpus]) -> Machine:
    """`machine` with the GPUs of the ranks that a launcher has started; each may see its own alone."""
    if not seen:
        return machine
    on_first_host = {uuid for one in seen if one.host == seen[0].host for uuid in one.uuids}
    return dataclasses.replace(
        machine,
        devices_per_node=len(on_first_host),
        devices_per_process=len(seen[0].uuids),
        rank_devices=tuple(one.own for one in seen),
    )


def _gpu_kind() -> GpuKind:
    """The least of the GPUs that are visible."""
    found = [torch.cuda.get_device_properties(index) for index in range(num_gpus())]
    return GpuKind(
        capability=min((one.major, one.minor) for one in found),
        memory_gib=min(one.total_memory for one in found) / 2**30,
    )


def _as_the_workload_allows(
    asked: Settings, settings: ResolvedSettings, workload: Workload
) -> ResolvedSettings:
    """Leave out defaults that this workload has no use for. Raises UsageError where it was asked for."""
    fusible = not settings.fused_optimizer or has_fused_optimizer(workload)
    if asked.fused_optimizer and not fusible:
        raise UsageError("--fused-optimizer on: the workload's optimizer has no fused kernels; leave it off")
    channels_last = settings.channels_last and (bool(asked.channels_last) or takes_images(workload))
    return dataclasses.replace(
        settings,
        image_size=workload.image_size,
        fused_optimizer=settings.fused_optimizer and fusible,
        channels_last=channels_last,
    )


def _check_precision(settings: ResolvedSettings) -> None:
    if settings.device == "cpu" and settings.precision in ("tf32", "fp16"):
        raise UsageError(f"--precision {settings.precision} needs a CUDA device; use fp32 or bf16 on a CPU")
    if settings.precision == "fp16" and settings.fused_optimizer:
        # _fused_sgd makes its momentum unset, and the kernel returns early where loss scaling overflows.
        raise UsageError(
            "--fused-optimizer on: under fp16 torch's fused SGD goes on from unset momentum after an "
            "overflow; leave it off, or use --precision bf16"
        )
    if settings.device == "cpu" and settings.backend == "nccl":
        raise UsageError("--backend nccl needs CUDA devices; use gloo on a CPU")
