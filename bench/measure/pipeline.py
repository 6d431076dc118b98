"""The anatomy of a pipeline: how long each stage computes, and how long it waits."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ..case import Case
from ..modes.pipeline import PipelineMode
from ..results.block_times import BlockTimes
from .clock import Clock, make_clock
from .timed import Trainer, hooked, lead_in, no_gc

CHUNKS = ("forward_one_chunk", "backward_one_chunk")
"""Methods of PyTorch's stage that compute on one micro-batch, without what they wait for."""


def run_pipeline_anatomy(
    trainer: Trainer, case: Case, num_steps: int, device: torch.device, group: Any
) -> BlockTimes:
    """`num_steps` steps with a mark around each micro-batch of each stage; its ranks call it together.

    The detail holds `bubble_pct`, 100 x (1 - what all stages compute / (stages x time of the longest)), and
    `bubble_of_stages_pct`, what the schedule makes of the measured times of one micro-batch.
    """
    clock = make_clock(device)
    steps: list[float] = []
    bubbles: list[tuple[float, float]] = []
    mode = trainer.mode
    assert isinstance(mode, PipelineMode)  # as its case says
    parts = [(mode, "train"), *((mode.stage, method) for method in CHUNKS)]
    marks: list[list[tuple[Any, Any]]] = [[] for _ in parts]
    hooks = [(*part, partial(_noted, clock, its)) for part, its in zip(parts, marks, strict=True)]
    lead_in(trainer.step, device)
    with no_gc(), hooked(hooks):
        for _ in range(num_steps):
            start = time.perf_counter_ns()
            trainer.step()
            clock.wait()
            steps.append((time.perf_counter_ns() - start) / 1e6)
            own = torch.tensor([_ms(clock, its) for its in marks], device=device)
            found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
            dist.all_gather(found, own, group)
            bubbles.append(_bubbles([stage.tolist() for stage in found], case))
    measured, of_stages = (100 * median(values) for values in zip(*bubbles, strict=True))
    detail = {"bubble_pct": round(measured, 3), "bubble_of_stages_pct": round(of_stages, 3)}
    return BlockTimes(sum(steps), tuple(steps), detail)


def _bubbles(stages: list[list[float]], case: Case) -> tuple[float, float]:
    """Shares measured and by the schedule, from (window, forwards, backwards) in ms of each stage."""
    busy_ms = sum(forwards + backwards for _, forwards, backwards in stages)
    # A stage waits in its window for the one before it: that of the first stage holds the whole batch.
    measured = 1 - busy_ms / (len(stages) * stages[0][0])
    m = case.num_micro_batches
    forward_ms, backward_ms = ([stage[kind] / m for stage in stages] for kind in (1, 2))
    return measured, bubble_share(case.pipeline_schedule, forward_ms, backward_ms, m)


def _ms(clock: Clock, marks: list[tuple[Any, Any]]) -> float:
    """The time between pairs of marks, which are forgotten."""
    total = sum(clock.ms(start, end) for start, end in marks)
    marks.clear()
    return total


@contextlib.contextmanager
def _noted(clock: Clock, marks: list[tuple[Any, Any]]) -> Iterator[None]:
    start = clock.now()
    yield
    marks.append((start, clock.now()))


Operation = tuple[str, int]
"""Of a pipeline's stage: `F` or `B`, and the micro-batch."""


def operations(schedule: str, stage: int, num_stages: int, num_micro_batches: int) -> list[Operation]:
    """What a stage does, in its order: under GPipe all forwards first, under 1F1B as few as it can.

    Sources: Huang et al. 2019, "GPipe"; Narayanan et al. 2019, "PipeDream" (1F1B).
    """
    m = num_micro_batches
    ahead = m if schedule == "gpipe" else min(m, num_stages - stage)
    forwards, backwards = [("F", i) for i in range(m)], [("B", i) for i in range(m)]
    found = forwards[:ahead]
    for i in range(m - ahead):
        found += [backwards[i], forwards[ahead + i]]
    return found + backwards[m - ahead :]


def bubble_share(
    schedule: str, forward_ms: Sequence[float], backward_ms: Sequence[float], num_micro_batches: int
) -> float:
    """Share of the stages' time in which they wait for each other, a fraction; communication takes none.

    `schedule` is `gpipe` or `1f1b`; forwards and backwards are those of one micro-batch, by stage. Equal
    stages give (n - 1) / (m + n - 1), as in the GPipe paper, section 2.3.
    """
    n = len(forward_ms)
    orders = [operations(schedule, stage, n, num_micro_batches) for stage in range(n)]

    @functools.cache
    def end_ms(stage: int, place: int) -> float:
        """When an operation is done: it begins after the one before it, and once its neighbour's is done."""
        kind, micro_batch = orders[stage][place]
        neighbour = stage - 1 if kind == "F" else stage + 1
        begins = [end_ms(stage, place - 1)] if place else [0.0]
        if 0 <= neighbour < n:
            begins.append(end_ms(neighbour, orders[neighbour].index((kind, micro_batch))))
        return max(begins) + (forward_ms if kind == "F" else backward_ms)[stage]

    # Place by place: the recursion stays flat.
    last_ms = [[end_ms(stage, place) for stage in range(n)] for place in range(2 * num_micro_batches)][-1]
    busy_ms = num_micro_batches * (sum(forward_ms) + sum(backward_ms))
    return 1 - busy_ms / (n * max(last_ms))
