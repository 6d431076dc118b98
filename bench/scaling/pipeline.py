"""When each stage of a pipeline computes: PyTorch's GPipe and 1F1B schedules without communication.

Sources: Huang et al. 2019, "GPipe"; Narayanan et al. 2019, "PipeDream" (1F1B).
"""

from __future__ import annotations

from collections.abc import Sequence

Operation = tuple[str, int]
"""`F` or `B`, and the micro-batch."""


def operations(schedule: str, stage: int, num_stages: int, num_micro_batches: int) -> list[Operation]:
    """What a stage does, in its order: under GPipe all forwards first, under 1F1B as few as it can."""
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
    """Share of the stages' time in which they wait for each other, a fraction.

    Args:
        schedule: `gpipe` or `1f1b`.
        forward_ms: of one micro-batch, by stage.
        backward_ms: of one micro-batch, by stage.
        num_micro_batches: of a step.

    Equal stages give (n - 1) / (m + n - 1), as in the GPipe paper, section 2.3.
    """
    n = len(forward_ms)
    left = [operations(schedule, stage, n, num_micro_batches) for stage in range(n)]
    free_at = [0.0] * n
    done: dict[tuple[str, int, int], float] = {}
    while any(left):
        for stage in range(n):
            while left[stage] and (start := _start(left[stage][0], stage, n, done)) is not None:
                kind, micro_batch = left[stage].pop(0)
                takes_ms = (forward_ms if kind == "F" else backward_ms)[stage]
                free_at[stage] = max(free_at[stage], start) + takes_ms
                done[kind, stage, micro_batch] = free_at[stage]
    busy_ms = num_micro_batches * (sum(forward_ms) + sum(backward_ms))
    return 1 - busy_ms / (n * max(free_at))


def _start(
    operation: Operation, stage: int, num_stages: int, done: dict[tuple[str, int, int], float]
) -> float | None:
    """When what an operation needs of its neighbour is there; None while that is not known."""
    kind, micro_batch = operation
    before = stage - 1 if kind == "F" else stage + 1
    if not 0 <= before < num_stages:
        return 0.0
    return done.get((kind, before, micro_batch))
