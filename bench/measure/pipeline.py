"""The anatomy of a pipeline: how long each stage computes, and how long it waits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ..case import Case
from ..modes.pipeline import PipelineMode
from ..predict.timeline import bubble_share
from ..results.measured import BlockTimes
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
            own = [_ms(clock, its) for its in marks]
            bubbles.append(_bubbles(_of_all_stages(own, device, group), case))
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


def _of_all_stages(own: list[float], device: torch.device, group: Any) -> list[list[float]]:
    sent = torch.tensor(own, device=device)
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, sent, group)
    return [stage.tolist() for stage in received]


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
