"""Makes a calibration from one known throughput of one GPU: what is not measured is counted, or fitted.

The model tells its gradients and, by FLOPs, when each is ready. What communication and compute do to each
other is fitted to published clusters; `results/published.csv` has their rows, `docs/accuracy.md` the errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from .calibration import Calibration, Identity, Parameter
from .timeline import Slowdown

if TYPE_CHECKING:
    from ...models.profile import Gradient

FORWARD_SHARE = 1 / 3
"""A backward does twice the arithmetic of its forward: gradients of inputs and of weights."""

OVERLAP_SLOWDOWN = Slowdown(compute=1.189, comm=15.0)
"""While both run. Compute: 18.9% longer, on average over published measurements. An all-reduce: fitted to
the rows of `results/published.csv` that are not left out. NCCL's kernels start as soon as a bucket is ready
here, and hold their part of the GPU until the last rank has come: which part of it that is was not shown.
The ports of two nodes are not slowed (`compute_port_factor`)."""

WRAPPER_MS = 0.019
"""Milliseconds that DDP adds to a step of one GPU by each trainable tensor: hooks, bucket copies, buffers.
Fitted to PyTorch's DDP table, ResNet-50 on one V100 with and without DDP (97.3 and 100.3 ms, 161 tensors)."""

FITTED_NOTE = "what an all-reduce and compute do to each other is fitted to published clusters"

ERROR_PCT = 6.0
"""Error in percent: of 100 published rows that nothing was fitted to at least 95 are that near."""

PUBLISHED: dict[str, Any] = {
    "compute_slowdown": (OVERLAP_SLOWDOWN.compute,),
    "comm_slowdown": (OVERLAP_SLOWDOWN.comm,),
    "model_error_pct": ERROR_PCT,
}
"""Fields of a calibration that one device cannot tell."""


def calibrate_from_rate(
    identity: Identity, gradients: Sequence[Gradient], *, per_second: float, with_ddp: bool = True
) -> Calibration:
    """Calibrate from units per second of one device; `with_ddp` if DDP's wrapper is part of its step.

    Assumes that a third of the step is forward and the rest backward, that gradients become ready as the
    share of FLOPs behind them grows, or of bytes where FLOPs are not known, and that no rank is slower.
    """
    step_ms = 1000 * identity.batch_per_device * identity.units_per_sample / per_second
    backward_ms = step_ms * (1 - FORWARD_SHARE)
    known = any(one.forward_flops for one in gradients)
    done = [*accumulate(one.forward_flops if known else one.num_bytes for one in gradients)]
    wrapper_ms = WRAPPER_MS * len(gradients)
    source = "DDP" if with_ddp else f"the plain model; DDP adds {wrapper_ms:.1f} ms, as on a V100"
    return Calibration(
        identity=identity,
        num_ranks=1,
        parameters=tuple(
            Parameter(name=one.name, num_bytes=one.num_bytes, ready_ms=share / done[-1] * backward_ms)
            for one, share in zip(gradients, done, strict=True)
        ),
        forward_ms=(step_ms * FORWARD_SHARE,),
        backward_ms=(backward_ms,),
        optimizer_ms=(0.0,),
        residual_ms=(0.0 if with_ddp else wrapper_ms,),
        notes=(
            f"none; the given rate is taken as that of {source}",
            "gradients are ready as the model's FLOPs say",
            FITTED_NOTE,
        ),
        **PUBLISHED,
    )
