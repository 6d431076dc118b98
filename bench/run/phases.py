"""What is measured of a case in a round: one block per phase, in one order on every rank."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ddp_bench.bench.case import HALF_HOOKS, Case
from ddp_bench.bench.measure.anatomy import bucket_ready_ms, run_anatomy
from ddp_bench.bench.measure.calibration import longest, run_calibration
from ddp_bench.bench.measure.clock import Clock
from ddp_bench.bench.measure.collectives import BucketReplay
from ddp_bench.bench.measure.telemetry import Telemetry, gpus_of
from ddp_bench.bench.measure.timed import LEAD_IN_STEPS, BlockTimes, Trainer, run_block
from ddp_bench.bench.measure.trace import run_trace
from ddp_bench.bench.modes import Place
from ddp_bench.bench.plan import Planned, is_base
from ddp_bench.bench.results.gpu_load import DEVICE_ALLOCS
from ddp_bench.bench.results.recorder import Block
from ddp_bench.bench.run.prepare import LiveCase
from ddp_bench.bench.run.sustain import blocks_left, is_sustained
from ddp_bench.bench.settings import ResolvedSettings

INSTRUMENTED_EVERY = 5
"""With `--rounds`, anatomy and trace come in the first round and every fifth; on GPUs traces come last."""

ANATOMY_STEPS = 2
"""Steps of an anatomy block: DDP's logger tells of a step only in the next one."""

TRACE_STEPS = 1
"""Steps of a trace block: overlap within a step is what it is for, and a trace of each rank is large."""

AFTER_ROUNDS = 0
"""The round of a trace that comes after all rounds: a run that is resumed for more of them has it already."""

MOST_BLOCKS = 3
"""Blocks whose steps still ask a GPU's driver for memory only lead in; after so many one counts as it is."""

STEPS_ALONE = ("timed", "no_sync", "sustained")
"""Phases whose blocks are steps and nothing else; those of `sustained` follow each other without a pause."""

Work = Callable[[], BlockTimes]


def fixed_phases(
    case: Case, *, oversubscribed: bool, round_index: int, settings: ResolvedSettings
) -> list[str]:
    """The phases of a case in a round of a run with `--rounds`, in their order."""
    found = ["timed"]
    if case.communicates:
        found.append("no_sync")
        found = [*shuffled(found, f"{settings.seed}/{round_index}/{case.case_id}"), "comm"]
    # Devices that share a core time each other: one look at those is enough.
    if round_index == 1 or (round_index % INSTRUMENTED_EVERY == 1 and not oversubscribed):
        found.append("anatomy")
        if is_traced(case, settings, last=False):
            found.append("trace")
    wanted = {"timed", *settings.passes} - case.unmeasured
    found = [phase for phase in found if phase in wanted]
    return [*found, "calibration"] if is_calibrated(case, settings) else found


def shuffled(phases: list[str], seed: str) -> list[str]:
    """Timed steps and those under `no_sync` in random order, what looks inside after them.

    Neither of the two always follows the other: what a block leaves behind would look like exposure.
    """
    plain = [phase for phase in phases if phase in ("timed", "no_sync")]
    random.Random(seed).shuffle(plain)
    return plain + [phase for phase in phases if phase not in plain]


def is_traced(case: Case, settings: ResolvedSettings, *, last: bool) -> bool:
    """Whether the trace pass looks into it: after the `last` round on GPUs, within the rounds elsewhere.

    CUPTI stays attached to a process, or goes at a time of its own, and slows what is timed meanwhile:
    pytorch#144455, kineto#1264.
    """
    wanted = "trace" in settings.passes and (case.communicates or settings.trace)
    return wanted and "trace" not in case.unmeasured and last == (case.device_type == "cuda")


def is_calibrated(case: Case, settings: ResolvedSettings) -> bool:
    """Whether the calibration pass looks into it: the largest count, the first value of each axis."""
    return (
        settings.calibrate
        and case.communicates
        and "calibration" not in case.unmeasured
        and case.num_devices == max(settings.gpus)
        and is_base(case, settings)
    )


def is_measured(planned: Planned, settings: ResolvedSettings, measured: Container[Block]) -> bool:
    """Whether every block that a run of fixed length wants of a case is there."""
    return settings.rounds is not None and all(
        (planned.case.case_id, phase, r) in measured
        for phase, r in _fixed_blocks(planned, settings, settings.rounds)
    )


def _fixed_blocks(planned: Planned, settings: ResolvedSettings, num_rounds: int) -> list[tuple[str, int]]:
    """Phase and round of every block of a case in a run with `--rounds`."""
    case, shared = planned.case, planned.oversubscribed
    found = [
        (phase, r)
        for r in range(1, num_rounds + 1)
        for phase in fixed_phases(case, oversubscribed=shared, round_index=r, settings=settings)
    ]
    return [*found, ("trace", AFTER_ROUNDS)] if is_traced(case, settings, last=True) else found


def unfinished(
    plan: Sequence[Planned],
    settings: ResolvedSettings,
    measured: Container[Block],
    *,
    dropped: Container[int],
    sustained_s: Mapping[str, float],
) -> list[tuple[int, Planned]]:
    """The cases of a plan that have something left to measure, with their places in it."""

    def is_done(planned: Planned) -> bool:
        done_s = sustained_s.get(planned.case.case_id, 0.0)
        trains_on = is_sustained(planned, settings) and blocks_left(settings, done_s)
        return is_measured(planned, settings, measured) and not trains_on

    return [
        (i, p) for i, p in enumerate(plan) if p.skip_reason is None and i not in dropped and not is_done(p)
    ]


def work_of(
    phase: str,
    live: LiveCase,
    settings: ResolvedSettings,
    place: Place,
    clock: Clock,
    telemetry: Telemetry | None = None,
) -> Work | None:
    """What this rank does in a block of `phase`; None where it only waits."""
    trainer = live.trainer
    if trainer is None:
        return None
    work = _work(phase, live, trainer, settings, place, clock)

    def checked() -> BlockTimes:
        with trainer.mode.compiles_as_asked():
            times = work()
        if phase == "timed" and telemetry is not None:
            times = telemetry.of(times, gpus_of(live.case, place))
        trainer.check_loss()
        return times

    return checked


def _work(
    phase: str, live: LiveCase, trainer: Trainer, settings: ResolvedSettings, place: Place, clock: Clock
) -> Work:
    steps = settings.steps_per_block(live.step_s)
    sizes = live.layout.num_bytes if live.layout is not None else ()
    if phase in STEPS_ALONE:
        step = trainer.local_step if phase == "no_sync" else trainer.step
        gpus = gpus_of(live.case, place) if place.device.type == "cuda" else []
        lead_in = 0 if phase == "sustained" else LEAD_IN_STEPS[place.device.type]
        block = partial(run_block, step, steps, clock, lead_in=lead_in, gpus=gpus)
        return partial(_settled, block, live.group, place.device) if lead_in else block
    if phase == "comm":
        return lambda: _replay(live, trainer, place, clock)
    if phase == "anatomy":
        return lambda: _anatomy(live, trainer, place)
    if phase == "calibration":
        return lambda: _calibration(live, trainer, place, clock)
    group = live.group if live.communicates else None
    return lambda: run_trace(trainer, TRACE_STEPS, place.device, sizes, group=group, keep=settings.trace)


def _settled(block: Work, group: Any, device: torch.device) -> BlockTimes:
    """A block in which no rank of `group` (None: this one alone) asked for memory, or the last of some."""
    for _ in range(MOST_BLOCKS - 1):
        times = block()
        asked = times.detail[DEVICE_ALLOCS]
        if not (asked if group is None else longest((asked,), group, device)[0]):
            return times
    return block()


def _replay(live: LiveCase, trainer: Trainer, place: Place, clock: Clock) -> BlockTimes:
    assert live.layout is not None  # a case that communicates has buckets
    sizes = live.layout.num_bytes
    if live.case.comm_hook in HALF_HOOKS:
        sizes = tuple(4 * count for count in live.layout.num_gradients)
    replay = BucketReplay(sizes, live.case.comm_hook, live.group, place.device)
    return replay.measured(clock, first=trainer.mode.broadcast_buffers)


def _calibration(live: LiveCase, trainer: Trainer, place: Place, clock: Clock) -> BlockTimes:
    assert live.layout is not None  # a case that communicates has buckets
    return run_calibration(trainer, live.layout, live.group, place.device, clock)


def _anatomy(live: LiveCase, trainer: Trainer, place: Place) -> BlockTimes:
    if live.case.is_staged:
        from ddp_bench.bench.measure.pipeline import run_pipeline_anatomy  # imported with such a case

        return run_pipeline_anatomy(trainer, live.case, ANATOMY_STEPS, place.device, live.group)
    local_steps = 1 if live.communicates and "no_sync" not in live.case.unmeasured else 0
    times = run_anatomy(trainer, ANATOMY_STEPS, place.device, local_steps=local_steps)
    detail = dict(times.detail)
    ready = detail.pop("ready_ms")
    if live.layout is not None and live.layout.parameters:
        detail["ready_ms"] = bucket_ready_ms(ready, live.layout.parameters)
    return BlockTimes(times.block_ms, times.steps_ms, detail)


def block_rows(
    case_id: str,
    phase: str,
    round_index: int,
    position: int,
    started_s: float,
    times: Sequence[tuple[str, int, BlockTimes]],
) -> list[dict[str, Any]]:
    """The rows of blocks.csv of one block: of each rank that took part its host, number and times."""
    rows = []
    for host, rank, block in times:
        detail = {name: value for name, value in block.detail.items() if name != "trace"}
        rows.append(
            {
                "case_id": case_id,
                "phase": phase,
                "round": round_index,
                "position": position,
                "rank": rank,
                "host": host,
                "started_s": round(started_s, 4),
                "num_steps": len(block.steps_ms),
                "block_ms": round(block.block_ms, 4),
                "steps_ms": " ".join(f"{ms:.5g}" for ms in block.steps_ms),
                "detail": json.dumps(detail) if detail else None,
            }
        )
    return rows
