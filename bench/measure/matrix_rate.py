"""What a device reaches at most: the rate of a large matrix product."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

from .clock import make_clock
from .timed import AUTOCAST_DTYPES, run_block

MATRIX_SIZE = {"cuda": 8192, "cpu": 512}
"""Rows and columns of both factors: enough for every SM, and few milliseconds on a CPU core."""

MEASURED_S = {"cuda": 0.1, "cpu": 0.02}
"""About so long it is repeated: a run's start must not wait for more."""

WARM_UP_S = 0.1
"""Untimed repetitions on a GPU, whose clock is low before."""

LEAST_REPETITIONS, MOST_REPETITIONS = 3, 100
"""The first for a median; the second keeps fewer launches pending than a CUDA stream's queue holds."""


def matrix_rate(device: torch.device, precision: str) -> dict[str, float]:
    """Matrix rate of a device in TFLOP/s: the median of the repetitions, the least and the most.

    The caller has let `float32_precision` choose between TF32 and IEEE float32. The first call in a process
    also loads libraries and takes memory, which torch's allocator keeps.
    """
    dtype = AUTOCAST_DTYPES.get(precision, torch.float32)
    size = MATRIX_SIZE[device.type]
    generator = torch.Generator(device).manual_seed(0)
    # Random numbers: a GPU multiplies zeros at less power and thus at a higher clock.
    factors = [torch.randn(size, size, dtype=dtype, device=device, generator=generator) for _ in range(2)]
    product = torch.empty(size, size, dtype=dtype, device=device)

    def multiply() -> None:
        torch.mm(*factors, out=product)

    rates = [2 * size**3 / ms / 1e9 for ms in _times_ms(multiply, device)]
    return {
        "matrix_tflop_per_s": median(rates),
        "matrix_tflop_per_s_low": min(rates),  # too few milliseconds for an interval
        "matrix_tflop_per_s_high": max(rates),
    }


def _times_ms(multiply: Callable[[], None], device: torch.device) -> tuple[float, ...]:
    """Milliseconds of repetitions in a row, after the first, which loads libraries."""
    clock = make_clock(device)
    run_block(multiply, 1, clock)
    once_ms = run_block(multiply, 1, clock).block_ms
    if device.type == "cuda":
        run_block(multiply, _repetitions(WARM_UP_S, once_ms), clock)
    return run_block(multiply, _repetitions(MEASURED_S[device.type], once_ms), clock).steps_ms


def _repetitions(seconds: float, once_ms: float) -> int:
    wanted = 1000 * seconds / once_ms if once_ms > 0 else MOST_REPETITIONS
    return int(min(max(wanted, LEAST_REPETITIONS), MOST_REPETITIONS))
