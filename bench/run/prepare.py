"""Makes a case ready to measure on this rank: proven, built, warmed up."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from ddp_bench.bench.case import Case
from ddp_bench.bench.cluster.messages import may_be_sent
from ddp_bench.bench.cluster.ranks import Cluster
from ddp_bench.bench.layout import BucketLayout
from ddp_bench.bench.manifest import RankPlace
from ddp_bench.bench.measure.clock import Clock
from ddp_bench.bench.measure.compiling import Compilation, CompileWatch
from ddp_bench.bench.measure.memory import DeviceMemory, MemoryWatch, release_memory
from ddp_bench.bench.measure.timed import BlockTimes, Trainer, run_block
from ddp_bench.bench.modes import Mode, build_mode, devices_of, require_compiler
from ddp_bench.bench.plan import Planned
from ddp_bench.bench.results.schema import LEAST
from ddp_bench.bench.run.proof import Prover
from ddp_bench.bench.run.reference import split_of
from ddp_bench.bench.run.together import together
from ddp_bench.bench.run.update_proof import NOT_TOLD, PROOF_STEPS, FirstSteps, UpdateError, prove_update
from ddp_bench.bench.settings import Settings
from ddp_bench.models.data import BatchSource, PrefetchSource, open_source
from ddp_bench.models.step import placed
from ddp_bench.models.workload import Workload

MIN_WARMUP_STEPS = 3
"""Least steps of warm-up: DDP rebuilds its buckets after the first and reports them after the second."""

MAX_WARMUP_STEPS = 10
"""Most steps of warm-up: what still gets faster after these is part of the measurement."""

UNSETTLED_STEPS = 2
"""First steps that are no load: they compile, load kernels, and record CUDA graphs."""

STILL_FASTER = 0.95
"""Warm-up goes on while a step takes less than this share of every step before it."""


@dataclass
class LiveCase:
    """A case as this rank holds it; `trainer` is None on ranks that do not take part."""

    index: int
    case: Case
    group: dist.ProcessGroup | None
    oversubscribed: bool
    trainer: Trainer | None = None
    layout: BucketLayout | None = None
    longest_step_s: float = 0.0
    """Of the warm-up, over all ranks."""
    layers_by_device: tuple[int, ...] = ()
    step_s: float = 0.0
    """A usual one at the end of the warm-up, on the slowest rank."""

    @property
    def communicates(self) -> bool:
        """Whether its ranks exchange gradients."""
        return self.case.communicates

    def close(self) -> None:
        if self.trainer is not None:
            self.trainer.close()
            self.trainer = None


@dataclass(frozen=True)
class Prepared:
    """What a rank tells rank 0 of a case that it has prepared."""

    warmup: BlockTimes
    memory: tuple[DeviceMemory, ...]
    """Of each device that it trains on; empty where it cannot be told."""
    compilation: Compilation | None = None
    """None for an eager case."""
    gradient_error: float | None = None
    split_effect: float | None = None
    """Of the loss, told by rank 0: see `Prover.split_effect`."""
    update: UpdateError = NOT_TOLD
    """Told by rank 0."""


may_be_sent(Prepared, DeviceMemory, UpdateError)


def prepare(
    live: LiveCase, *, prover: Prover, settings: Settings, clock: Clock, least_warmup_s: float
) -> Prepared:
    """Prove the case, build it and warm it up. Raises ProofError, Unsupported, or what the model raises."""
    case, place = live.case, prover.place
    require_compiler(case, place.device)
    stages = prover.splitter.stages(case, live.group)
    gradient_error = prover.prove(case, live.group, stages)
    split_effect = together(place, live.group, lambda: prover.split_effect(case), elsewhere=None)
    release_memory(place.device)  # torch before 2.15 leaves cycles, which would count as other cases'
    watch = MemoryWatch(devices_of(case, place))
    compiling = None if case.compile == "off" else CompileWatch()
    module = placed(copy.deepcopy(prover.template), case, place.device)
    equal = prover.equal_replicas
    mode = build_mode(case, module, place, live.group, equal_replicas=equal, stages=stages)
    live.trainer = _trainer(case, mode, prover.workload, _source(case, prover, settings))
    first = FirstSteps(case, live.trainer, keeps=place.rank == 0, kinds=prover.switched_off)
    live.layers_by_device = stages.by_device if stages is not None else ()
    with mode.compiles_as_asked():
        first_ms = [*_step_ms(live.trainer, clock)]
        first.after_step()
        first_ms += _step_ms(live.trainer, clock)
        first.after_step()
        warmup = _warm_up(live.trainer, first, first_ms, live.group, place.device, clock, least_warmup_s)
        compilation = None if compiling is None else compiling.taken()
        memory = watch.taken()
        update = prove_update(case, first, prover, live.group)
        if compilation is not None and case.communicates:
            live.trainer.local_step()  # may need graphs of its own, which no block should wait for
    live.trainer.check_loss()
    live.layout = mode.bucket_layout()
    mode.settle()
    return Prepared(warmup, memory, compilation, gradient_error, split_effect, update)


def facts_of(live: LiveCase, first: RankPlace, found: Sequence[Prepared]) -> dict[str, Any]:
    """What is known of a case once every rank has prepared it, for its row in cases.csv.

    Args:
        live: the case, with the first rank's layout.
        first: the first rank; all are alike.
        found: by the ranks that take part, in their order.
    """
    facts: dict[str, Any] = {
        "device_name": first.device_name,
        "link": first.link,
        "gradient_error": _cell(found[0].gradient_error),
        "split_effect": _cell(found[0].split_effect),
        "update_error": _cell(found[0].update.error),
        **_memory_columns([prepared.memory for prepared in found], live.case.mode),
    }
    if live.layout is not None:
        facts["num_buckets"] = len(live.layout.num_bytes)
        facts["bucket_bytes"] = str(live.layout)
    if live.layers_by_device:
        facts["layers_by_device"] = "/".join(map(str, live.layers_by_device))
    compiled = found[0].compilation
    if compiled is not None:
        facts |= {name: getattr(compiled, name) for name in ("compile_s", "num_graphs", "graph_breaks")}
        if live.case.has_python_reducer:
            facts["num_buckets"] = compiled.num_buckets
    return facts


def _cell(error: float | None) -> float | None:
    """An error as a file holds it: what is next to nothing is 0."""
    return 0.0 if error is not None and error < LEAST else error


def _memory_columns(by_rank: Sequence[Sequence[DeviceMemory]], mode: str) -> dict[str, Any]:
    if not all(by_rank):
        return {}
    devices = [device for rank in by_rank for device in rank]
    peaks = [device.peak_mib for device in devices]
    columns: dict[str, Any] = {
        "peak_mem_mib": max(peaks),
        "reserved_mem_mib": max(device.reserved_mib for device in devices),
        "mem_by_device_mib": "/".join(f"{mib:.1f}" for mib in peaks),
    }
    if mode == "dp" and any(peaks[1:]):
        columns["dp_device0_mem_ratio"] = peaks[0] / fmean(peaks[1:])
    return columns


def _trainer(case: Case, mode: Mode, workload: Workload, source: BatchSource) -> Trainer:
    if not case.is_staged:
        return Trainer(case, mode, workload, source)
    from ddp_bench.bench.measure.pipeline import PipelineTrainer  # imported with such a case

    return PipelineTrainer(case, mode, workload, source)


def _source(case: Case, prover: Prover, settings: Settings) -> BatchSource:
    split = split_of(case)
    source = open_source(
        prover.workload,
        data=case.data,
        batch_size=split.batch_size,
        rank=prover.place.rank if split.num_sources > 1 else 0,
        world_size=split.num_sources,
        device=prover.place.device,
        seed=settings.seed,
        num_workers=settings.data_workers,
    )
    return PrefetchSource(source, prover.place.device) if settings.copies_ahead else source


def _warm_up(
    trainer: Trainer,
    first: FirstSteps,
    first_ms: Sequence[float],
    group: dist.ProcessGroup | None,
    device: torch.device,
    clock: Clock,
    least_s: float,
) -> BlockTimes:
    """Go on after the first steps, which took `first_ms`, until it is warm."""
    # Where dropout comes back after the proof, the compiler may run anew.
    num_least = MIN_WARMUP_STEPS + (PROOF_STEPS if first.switched_off else 0)
    steps = list(first_ms)
    while len(steps) < num_least or not _is_warm(steps, group, device, least_s):
        steps += _step_ms(trainer, clock)
        first.after_step()
    return BlockTimes(sum(steps), tuple(steps))


def _step_ms(trainer: Trainer, clock: Clock) -> Sequence[float]:
    return run_block(trainer.step, 1, clock).steps_ms


def _is_warm(
    steps_ms: Sequence[float], group: dist.ProcessGroup | None, device: torch.device, least_s: float
) -> bool:
    """Whether the warm-up is over; ranks must take the same number of steps, or the next collective hangs."""
    settled = len(steps_ms) >= MAX_WARMUP_STEPS or steps_ms[-1] >= STILL_FASTER * min(steps_ms[:-1])
    settled = settled and sum(steps_ms[UNSETTLED_STEPS:]) >= 1000 * least_s
    if group is None:
        return settled
    agreed: Any = torch.tensor([float(settled)], device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN, group)
    return bool(agreed.item())


def equal_layouts(
    cases: Sequence[LiveCase],
    cluster: Cluster,
    plan: Sequence[Planned],
    earlier_layouts: Mapping[int, Sequence[int]],
) -> list[tuple[LiveCase, str]]:
    """Those of `cases` whose bucket layout an earlier one has, with its case id; the same on every rank.

    Args:
        cases: prepared, in the plan's order.
        cluster: all ranks; the first one's layouts count.
        plan: of the run.
        earlier_layouts: bucket sizes in bytes that an earlier attempt found, by place in the plan.
    """
    here = {live.index for live in cases}
    seen: dict[tuple[Any, ...], str] = {}
    for index, sizes in earlier_layouts.items():
        if index not in here:
            case = plan[index].case
            seen[(*case.apart_from_cap, tuple(sizes))] = case.case_id
    found = []
    for live in cases:
        own = cluster.from_first(live.layout.num_bytes if live.layout is not None else None)
        if own is None:
            continue
        first = seen.setdefault((*live.case.apart_from_cap, tuple(own)), live.case.case_id)
        if first != live.case.case_id:
            found.append((live, first))
    return found
