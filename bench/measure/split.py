"""Splits a model's layers over devices, so that the slowest device has as little work as it can."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from statistics import median

from torch import Tensor, nn

from ddp_bench.bench.measure.clock import make_clock

REPETITIONS = 3
"""Times that each layer is measured after one untimed: the median leaves one disturbance out."""


def layer_costs_ms(
    layers: Sequence[nn.Module],
    inputs: Tensor,
    loss: Callable[[Tensor], Tensor],
    *,
    within: contextlib.AbstractContextManager[object],
) -> list[float]:
    """Milliseconds of the forward and backward of each layer by itself, the loss as part of the last.

    `within` is the context of the arithmetic, as `autocast_of` makes it.
    """
    clock = make_clock(inputs.device)
    costs = []
    with within:
        for index, layer in enumerate(layers):
            last = index == len(layers) - 1
            x = inputs.detach()
            x.requires_grad_(index > 0 and x.is_floating_point())
            samples = []
            for _ in range(1 + REPETITIONS):
                clock.begin()
                # A copy: a layer may write to its input.
                outputs = layer(x.clone())
                total = loss(outputs) if last else outputs.float().sum()
                if total.requires_grad:
                    total.backward()
                clock.mark()
                samples += clock.read_ms()
            costs.append(median(samples[1:]))
            inputs = outputs
    for layer in layers:
        layer.zero_grad()
    return costs


def balanced(costs: Sequence[float], num_parts: int) -> tuple[int, ...]:
    """Lengths of `num_parts` runs of `costs`, none empty, whose largest sum is least; the first such.

    Raises ValueError for more parts than costs.
    """
    if not 1 <= num_parts <= len(costs):
        raise ValueError(f"{len(costs)} layers do not make {num_parts} stages")
    sums = [0.0, *itertools.accumulate(costs)]
    # best[n]: for the first n costs in the parts so far, the largest sum and the lengths.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for _ in range(num_parts):
        longer: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start, (largest, lengths) in best.items():
            for end in range(start + 1, len(costs) + 1):
                found = (max(largest, sums[end] - sums[start]), (*lengths, end - start))
                if end not in longer or found[0] < longer[end][0]:
                    longer[end] = found
        best = longer
    return best[len(costs)][1]
