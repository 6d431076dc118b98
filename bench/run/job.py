"""A run as its workers allow it: settings resolved and checked, cases planned by what they tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..common.cli import format_command, print_message
from ..common.errors import UsageError
from ..common.numbers import MIB, format_count, format_mib
from ..machine.gpus import SHARES_GPUS, describe_gpus
from ..machine.launch import Launch
from ..plan import sweep as plan
from ..plan.buckets import compute_cap_limits
from ..plan.case import explain_too_few, split_batch
from ..plan.resolve import fill_device_defaults
from ..plan.settings import NCCL_BACKENDS, ResolvedSettings, Settings
from ..plan.sweep import Machine, Planned
from ..results.disk import MAX_CSV_BYTES, MAX_TABLE_BYTES
from ..stats.fit import MIN_ROUNDS
from ..worker import messages as m
from ..worker.facts import Devices, Inspected
from .failures import INSPECTOR_RANK, START_TIMEOUT_S
from .schedule import INSTRUMENTED, list_passes
from .workers import Workers


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run, validated and planned for this machine."""

    settings: ResolvedSettings
    machine: Machine
    plan: tuple[Planned, ...]
    inspected: Inspected
    ranks: tuple[Devices, ...] = ()
    """Devices of each rank that a launcher has started."""


def plan_on_workers(workers: Workers, asked: Settings) -> Job:
    """Have the workers tell what there is, and plan what was asked for. Raises UsageError, RestartError."""
    workers.open()
    ranks = range(1 if workers.launched is None else len(workers))
    look = dict.fromkeys(ranks, m.Look(device=asked.device))
    devices = [*workers.ask_workers(look, "start-up", START_TIMEOUT_S).values()]

    def inspect(settings: ResolvedSettings) -> Inspected:
        if not workers.restart_for_device(settings.device):
            workers.open()
        return workers.ask_worker(INSPECTOR_RANK, m.Inspect(settings=settings), "start-up", START_TIMEOUT_S)

    return make_job(asked, devices, inspect, workers.launched)


def make_job(
    asked: Settings,
    devices: Sequence[Devices],
    inspect: Callable[[ResolvedSettings], Inspected],
    launched: Launch | None = None,
) -> Job:
    """Resolve and plan what was asked for, by the devices of the first rank or of each that was `launched`.

    `inspect` tells of the workload of resolved settings. Raises UsageError for what cannot run here.
    """
    first = devices[0]
    if asked.device == "cuda" and not first.gpus:
        raise UsageError("--device cuda: torch finds no CUDA device here; use --device cpu or auto")
    if asked.device == "auto" and not first.gpus and (present := describe_gpus()):
        print_message(
            f"the driver shows {format_count(len(present), 'GPU')}, torch finds no CUDA device: CPU cores "
            f"are measured; see {format_command('doctor')}, or say --device cpu"
        )
    machine = _describe_machine(devices, launched)
    started = launched.world_size if launched and machine.num_nodes > 1 else 0
    num_devices = max(machine.devices_per_node, started)
    if asked.backend == "auto" and not first.nccl:
        asked = replace(asked, backend="gloo")
    settings = fill_device_defaults(
        asked, device_type=machine.device_type, num_local_devices=num_devices, gpu=first.kind
    )
    _check(settings, machine, first)
    found = inspect(settings)
    settings = _apply_workload_limits(asked, settings, found)
    planned = plan.expand_cases(
        settings,
        machine,
        arch=found.model.arch or "",
        image_size=found.image_size,
        unit=found.unit,
        units_per_sample=found.units_per_sample,
    )
    if machine.device_type == "cpu":
        _warn_shared_cores(planned, devices, is_launched=launched is not None)
    for split in (split_batch(p.case) for p in planned if p.skip_reason is None):
        num_images = found.num_images or split.batch_size * split.num_sources
        if why := explain_too_few(settings.data, num_images, split.batch_size, split.num_sources):
            raise UsageError(why)
    if settings.race and not any(p.case.communicates for p in planned):
        raise UsageError("a race is one of DDP's settings on 2 devices or more; give --modes ddp --gpus 2")
    check_sizes(planned, settings, found.model.gradient_bytes or 0)
    ranks = tuple(devices) if launched else ()
    return Job(settings=settings, machine=machine, plan=tuple(planned), inspected=found, ranks=ranks)


CASE_BYTES, ROW_BYTES, STEP_BYTES, BUCKET_BYTES = 2000, 80, 6, 200
"""Sizes of a row of cases.csv, a row of blocks.csv and each step in it, and a row of buckets.csv; rough."""


def check_sizes(planned: Sequence[Planned], settings: ResolvedSettings, gradient_bytes: int) -> None:
    """Raise UsageError where a table would become larger than can be read again.

    Without `--rounds` as many rounds count as an interval takes: the stop rule ends such a run in time.
    """
    run = [p.case for p in planned if p.skip_reason is None]
    num_blocks = sum(
        case.num_ranks * (1 + len({*list_passes(case, settings)} - {*INSTRUMENTED})) for case in run
    )
    num_buckets = sum(
        case.num_ranks * (1 + gradient_bytes // max(compute_cap_limits(case.bucket_cap_mb)[-1], MIB))
        for case in run
        if case.communicates and "anatomy" in list_passes(case, settings)
    )
    row_bytes = (ROW_BYTES + STEP_BYTES * settings.steps) * (settings.rounds or MIN_ROUNDS)
    for name, size, most, fewer in (
        ("cases.csv", CASE_BYTES * len(planned), MAX_TABLE_BYTES, "cases"),
        ("blocks.csv", row_bytes * num_blocks, MAX_CSV_BYTES, "rounds, ranks or cases"),
        ("buckets.csv", BUCKET_BYTES * num_buckets, MAX_CSV_BYTES, "ranks or cases"),
    ):
        if size > most:
            raise UsageError(
                f"{name} of {format_count(len(run), 'case')} would take about {format_mib(size)}, and at "
                f"most {format_mib(most)} can be read again; measure fewer {fewer} in a run"
            )


def _describe_machine(devices: Sequence[Devices], launched: Launch | None) -> Machine:
    first = devices[0]
    machine = Machine(
        device_type="cuda" if first.gpus else "cpu",
        devices_per_node=len(first.gpus or first.cores),
        # Torch warns of NCCL's other backends there: their one communicator has peers wait for each other.
        staged_backend="nccl-lazy" if "nccl-lazy" in first.nccl_backends else "",
        is_exclusive=first.is_exclusive,
    )
    if launched is None:
        return machine
    _check_names(devices)
    machine = replace(machine, rank_hosts=tuple(one.host for one in devices))
    if first.gpus:
        return add_visible_gpus(machine, devices)
    # Each rank may be bound to a core of its own.
    return replace(
        machine,
        devices_per_node=len({core for one in devices if one.host == first.host for core in one.cores}),
        devices_per_process=len(first.cores),
        rank_devices=tuple(f"{one.host} {one.cores[one.local_rank % len(one.cores)]}" for one in devices),
    )


def _check_names(devices: Sequence[Devices]) -> None:
    """Raise UsageError where hosts have one name: they would count as one, and so would their GPUs."""
    boots: dict[str, str] = {}
    for one in devices:
        if boots.setdefault(one.host, one.boot_id) != one.boot_id:
            raise UsageError(
                f"two hosts are both named {one.host!r}; set BENCH_HOST to another name on each of them"
            )


def _warn_shared_cores(planned: Sequence[Planned], devices: Sequence[Devices], *, is_launched: bool) -> None:
    """Say that CPU devices of a case are hardware threads of one physical core."""
    own = [(one.host, one.physical[one.local_rank % len(one.physical)]) for one in devices if one.physical]
    cores = own if is_launched else [*devices[0].physical]
    counts = {p.case.num_devices for p in planned if not (p.skip_reason or p.oversubscribed)}
    for count in sorted(counts):
        if (num_cores := len({*cores[:count]})) < min(count, len(cores)):
            print_message(
                f"from {count} devices on some are two hardware threads of one physical core, which slow "
                f"each other down; --gpus {num_cores} has a physical core for each"
            )
            return


def add_visible_gpus(machine: Machine, ranks: Sequence[Devices]) -> Machine:
    """`machine` with the GPUs of the ranks that a launcher has started; each may see its own alone."""
    on_first_host = {uuid for one in ranks if one.host == ranks[0].host for uuid in one.gpus}
    return replace(
        machine,
        devices_per_node=len(on_first_host),
        devices_per_process=len(ranks[0].gpus),
        rank_devices=tuple(one.own_gpu for one in ranks if one.gpus),
    )


def _apply_workload_limits(
    asked: Settings, settings: ResolvedSettings, workload: Inspected
) -> ResolvedSettings:
    """Leave out defaults that this workload has no use for. Raises UsageError where it was asked for."""
    fused = settings.get_first("fused_optimizer") and workload.has_fused_optimizer
    if asked.axes.get("fused_optimizer") == (True,) and not fused:
        raise UsageError("--fused-optimizer on: the workload's optimizer has no fused kernels; leave it off")
    channels_last = settings.get_first("channels_last") and (
        "channels_last" in asked.axes or workload.takes_images
    )
    axes = {**settings.axes, "fused_optimizer": (fused,), "channels_last": (channels_last,)}
    return replace(settings, image_size=workload.image_size, axes=axes)


def _check(settings: ResolvedSettings, machine: Machine, first: Devices) -> None:
    on_cpu, backend, nccl = settings.device == "cpu", settings.backend, first.nccl
    if on_cpu and settings.precision in ("tf32", "fp16"):
        raise UsageError(f"--precision {settings.precision} needs a CUDA device; use fp32 or bf16 on a CPU")
    if settings.precision == "fp16" and settings.get_first("fused_optimizer"):
        # _fused_sgd makes its momentum unset, and the kernel returns early where loss scaling overflows.
        raise UsageError(
            "--fused-optimizer on: under fp16 torch's fused SGD goes on from unset momentum after an "
            "overflow; leave it off, or use --precision bf16"
        )
    if on_cpu and backend.startswith("nccl"):
        raise UsageError(f"--backend {backend} needs CUDA devices; use gloo on a CPU")
    if backend.startswith("nccl") and not nccl:
        raise UsageError(f"--backend {backend}: this torch was built without NCCL; use gloo")
    if backend in NCCL_BACKENDS and backend not in first.nccl_backends:
        raise UsageError(f"--backend {backend}: this torch lacks it, 2.14 has it; use nccl")
    if settings.share_gpus and machine.num_nodes > 1:
        raise UsageError("--share-gpus on is for one machine; leave it out on several")
    several = machine.devices_per_node > 1
    if settings.share_gpus and backend.startswith("nccl") and several and nccl < SHARES_GPUS:
        # A host id of its own for each rank would make a real pair of GPUs talk through sockets too.
        raise UsageError(
            f"--share-gpus on: NCCL {'.'.join(map(str, nccl))} lets ranks share a GPU only where there is "
            "one; set CUDA_VISIBLE_DEVICES=0, or use a torch with NCCL 2.30"
        )
