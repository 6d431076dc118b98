"""What a visit to a case measures: its blocks of this round, in order, the same list on every rank."""

from __future__ import annotations

import random
from collections.abc import Callable

from bench.measure.anatomy import bucket_ready_ms, run_anatomy
from bench.measure.clock import Clock
from bench.measure.collectives import BucketReplay
from bench.measure.timed import BlockTimes, Trainer, run_block
from bench.measure.trace import run_trace
from bench.modes import Place
from bench.prepare import LiveCase
from bench.settings import Settings

INSTRUMENTED_EVERY = 5
"""Anatomy and trace are taken in the first round and every fifth after it: time is left for throughput."""

ANATOMY_STEPS = 2
"""DDP's logger tells of a step only in the next one."""

TRACE_STEPS = 1

COMM_REPETITIONS = 1

Work = Callable[[], BlockTimes]


def visit(
    live: LiveCase, *, round_index: int, settings: Settings, place: Place, clock: Clock
) -> list[tuple[str, Work | None]]:
    """Phase and work of each block; the work is None where this rank only waits."""
    phases = ["timed"]
    if live.communicates:
        phases.append("no_sync")
        # Neither of the two always follows the other: what a block leaves behind would look like exposure.
        random.Random(f"{settings.seed}/{round_index}/{live.case.case_id}").shuffle(phases)  # noqa: S311 - a schedule
        if live.case.comm_hook != "powersgd":  # its messages are not the buckets
            phases.append("comm")
    # Devices that share a core time each other: one look at those is enough.
    if round_index == 1 or (round_index % INSTRUMENTED_EVERY == 1 and not live.oversubscribed):
        phases.append("anatomy")
        if live.communicates or settings.trace:
            phases.append("trace")
    trainer = live.trainer
    if trainer is None:
        return [(phase, None) for phase in phases]
    return [(phase, _work(phase, live, trainer, settings, place, clock)) for phase in phases]


def _work(
    phase: str, live: LiveCase, trainer: Trainer, settings: Settings, place: Place, clock: Clock
) -> Work:
    steps = settings.steps or 1
    sizes = live.layout.num_bytes if live.layout is not None else ()
    if phase == "timed":
        return lambda: run_block(trainer.step, steps, clock)
    if phase == "no_sync":
        return lambda: run_block(trainer.local_step, steps, clock)
    if phase == "comm":
        return lambda: _replay(live, place, clock)
    if phase == "anatomy":
        return lambda: _anatomy(live, trainer, place)
    return lambda: run_trace(trainer, TRACE_STEPS, place.device, sizes, keep=settings.trace)


def _replay(live: LiveCase, place: Place, clock: Clock) -> BlockTimes:
    assert live.layout is not None  # noqa: S101 - a case that communicates has buckets
    replay = BucketReplay(live.layout.num_bytes, live.case.comm_hook, live.group, place.device)
    return run_block(replay.step, COMM_REPETITIONS, clock)


def _anatomy(live: LiveCase, trainer: Trainer, place: Place) -> BlockTimes:
    local_steps = 1 if live.communicates else 0
    times = run_anatomy(trainer, ANATOMY_STEPS, place.device, local_steps=local_steps)
    detail = dict(times.detail)
    ready = detail.pop("ready_ms")
    if live.layout is not None and live.layout.parameters:
        detail["ready_ms"] = bucket_ready_ms(ready, live.layout.parameters)
    return BlockTimes(times.block_ms, times.steps_ms, detail)
