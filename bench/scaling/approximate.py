"""A calibration from little: one throughput and the model's arithmetic, or a coarse one cut finer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from bench.errors import UsageError
from bench.scaling.calibration import Calibration, Identity, Parameter

FORWARD_SHARE = 1 / 3
"""A backward does twice the arithmetic of its forward: gradients of inputs and of weights."""

OVERLAPPED_SLOWDOWN = 1.189
"""Compute beside communication, on average over published measurements (40% at most)."""

Shape = tuple[str, int, float]
"""A parameter in reducer order: name, bytes, FLOPs of its module's forward."""


def from_throughput(
    identity: Identity,
    shapes: Sequence[Shape],
    *,
    images_per_s: float,
    compute_slowdown: float = OVERLAPPED_SLOWDOWN,
    comm_slowdown: float = 1.0,
) -> Calibration:
    """The calibration that a single device's published throughput allows.

    Assumes that a third of the step is forward, the rest backward, the optimizer counting to the backward's
    end as nothing; that gradients become ready as the share of FLOPs behind them grows; no spread between
    ranks. No figure of several devices enters.

    Args:
        identity: batch per device and the rest, as published.
        shapes: the model's parameters in reducer order (see `models.gradients`).
        images_per_s: of one device.
        compute_slowdown: of compute while an all-reduce is in flight.
        comm_slowdown: of an all-reduce while compute runs.
    """
    if not shapes or images_per_s <= 0:
        raise UsageError("a throughput above 0 images/s and the model's parameters are needed")
    step_ms = identity.batch_per_device * 1000 / images_per_s
    backward_ms = step_ms * (1 - FORWARD_SHARE)
    return Calibration(
        identity=identity,
        num_ranks=1,
        num_nodes=1,
        parameters=tuple(
            Parameter(name=name, num_bytes=size, ready_ms=share * backward_ms)
            for (name, size, _), share in zip(shapes, flop_shares(shapes), strict=True)
        ),
        forward_ms=(step_ms * FORWARD_SHARE,),
        backward_ms=(backward_ms,),
        optimizer_ms=(0.0,),
        compute_slowdown=(compute_slowdown,),
        comm_slowdown=(comm_slowdown,),
        single_step_ms=(step_ms,),
        notes=("ready times from the model's FLOPs, not measured",),
    )


def flop_shares(shapes: Sequence[Shape]) -> list[float]:
    """Share of the FLOPs done when each gradient is ready, rising to 1; by bytes where none are counted."""
    weights = [flops for *_, flops in shapes]
    if not any(weights):
        weights = [float(size) for _, size, _ in shapes]
    total = sum(weights)
    return [done / total for done in accumulate(weights)]


def refined(parameters: Sequence[Parameter], shapes: Sequence[Shape]) -> tuple[Parameter, ...] | None:
    """Parameters cut finer: those of `shapes`, ready between the moments at which `parameters` are.

    Between two known moments readiness follows the FLOPs. None where a boundary of `parameters` is none of
    `shapes`: then the order or the model is another.
    """
    ends = list(accumulate(p.num_bytes for p in parameters))
    cuts = list(accumulate(size for _, size, _ in shapes))
    if not set(ends) <= set(cuts) or cuts[-1] != ends[-1]:
        return None
    found: list[Parameter] = []
    before_ms, start = 0.0, 0
    for parameter, end in zip(parameters, ends, strict=True):
        stop = cuts.index(end) + 1
        inside = shapes[start:stop]
        found += [
            Parameter(
                name=name, num_bytes=size, ready_ms=before_ms + share * (parameter.ready_ms - before_ms)
            )
            for (name, size, _), share in zip(inside, flop_shares(inside), strict=True)
        ]
        before_ms, start = max(parameter.ready_ms, before_ms), stop
    return tuple(found)
