"""What a device reaches at most: the rate of a large matrix product."""

from __future__ import annotations

from statistics import median

import torch

from ddp_bench.bench.measure.clock import make_clock
from ddp_bench.bench.measure.timed import AUTOCAST_DTYPES, run_block

MATRIX_SIZE = {"cuda": 8192, "cpu": 512}
"""Rows and columns of both factors: enough for every SM, and few milliseconds on a CPU core."""

MEASURED_S = {"cuda": 0.1, "cpu": 0.02}
"""About so long it is repeated: a run's start must not wait for more."""

WARM_UP_S = 0.1
"""Untimed repetitions on a GPU, whose clock is low before."""

LEAST_REPETITIONS, MOST_REPETITIONS = 3, 100
"""The first for a median; the second keeps fewer launches pending than a CUDA stream's queue holds."""


class DeviceMeter:
    """Measures one device, whose memory it holds meanwhile, in the arithmetic of a run.

    The caller has let `float32_precision` choose between TF32 and IEEE float32.
    """

    def __init__(self, device: torch.device, precision: str) -> None:
        dtype = AUTOCAST_DTYPES.get(precision, torch.float32)
        size = MATRIX_SIZE[device.type]
        generator = torch.Generator(device).manual_seed(0)
        # Random numbers: a GPU multiplies zeros at less power and thus at a higher clock.
        self._factors = [
            torch.randn(size, size, dtype=dtype, device=device, generator=generator) for _ in range(2)
        ]
        self._product = torch.empty(size, size, dtype=dtype, device=device)
        self._device = device

    def measured(self) -> dict[str, float]:
        """Matrix rate in TFLOP/s: the median of the repetitions, the least and the most."""
        flops = 2 * len(self._product) ** 3
        rates = [flops / ms / 1e9 for ms in self._times_ms()]
        return {
            "matrix_tflop_per_s": median(rates),
            "matrix_tflop_per_s_low": min(rates),  # too few milliseconds for an interval
            "matrix_tflop_per_s_high": max(rates),
        }

    def _multiply(self) -> None:
        torch.mm(*self._factors, out=self._product)

    def _times_ms(self) -> tuple[float, ...]:
        """Milliseconds of repetitions in a row, after the first, which loads libraries."""
        clock = make_clock(self._device)
        run_block(self._multiply, 1, clock)
        once_ms = run_block(self._multiply, 1, clock).block_ms
        if self._device.type == "cuda":
            run_block(self._multiply, _repetitions(WARM_UP_S, once_ms), clock)
        return run_block(self._multiply, _repetitions(MEASURED_S[self._device.type], once_ms), clock).steps_ms


def _repetitions(seconds: float, once_ms: float) -> int:
    wanted = 1000 * seconds / once_ms if once_ms > 0 else MOST_REPETITIONS
    return int(min(max(wanted, LEAST_REPETITIONS), MOST_REPETITIONS))
