"""The step that no bucket layout can beat: compute and communication at full speed, in the best order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from statistics import median

from ..findings.numbers import short
from .calibration import Calibration
from .prediction import predict
from .scenario import Scenario, cost_band


def bound_ms(calibration: Calibration) -> float:
    """The least step of the calibrated ranks under any layout, ms.

    From parameter k on, everything is sent after k is ready and copied, so the backward lasts at least until
    then plus the least time in which the rest can be sent; for the last parameter that is its own all-reduce.
    It is copied back after that, and all of them are after the last gradient is ready.
    """
    c = calibration
    slowest = median(c.slowest_spread or (1.0,))
    comm_ms = cost_band(c, Scenario(num_devices=c.num_ranks)).estimate
    micro, copy_ms = c.compute(), median(c.copy_ms)
    compute = micro.scaled(slowest)
    num_bytes = [p.num_bytes for p in c.parameters]
    ready_ms = (min(p.ready_ms, micro.backward_ms) * slowest for p in c.parameters)
    launches = zip(accumulate(ready_ms, max), accumulate(num_bytes), strict=True)
    rests = least_comm_ms(num_bytes, comm_ms)
    total = sum(num_bytes)
    sent_ms = max(
        ready + copy_ms * copied / total + rest for (ready, copied), rest in zip(launches, rests, strict=True)
    )
    last_ms = max(compute.backward_ms + 2 * copy_ms, sent_ms + copy_ms * num_bytes[-1] / total)
    least_ms = compute.before_ms + last_ms + compute.after_ms
    return max(least_ms + median(c.residual_ms), compute.total_ms)


def least_comm_ms(num_bytes: Sequence[int], comm_ms: Callable[[float], float]) -> list[float]:
    """By k, the least time to send the gradients from k on, over all ways to cut them into messages."""
    count = len(num_bytes)
    sent = [0, *accumulate(num_bytes)]
    least = [math.inf] * count + [0.0]
    for k in range(count - 1, -1, -1):
        # The first message may have begun before k: what it holds of the rest still has to go out.
        least[k] = min(comm_ms(sent[end] - sent[k]) + least[end] for end in range(k + 1, count + 1))
    return least[:count]


def bound(calibration: Calibration) -> str:
    """Say how far DDP's default is from the least step under any buckets, both simulated."""
    scenario = Scenario(num_devices=calibration.num_ranks)
    default = predict(calibration, scenario, with_interval=False, model_error_pct=0.0)
    assert default.step_ms is not None  # an interval of no width is never refused
    least_ms = bound_ms(calibration)
    above = 100 * (default.step_ms.estimate / least_ms - 1)
    return (
        f"Bound: by simulation no bucket layout has a step below {short(least_ms)} ms; "
        f"that of DDP's default is {above:.0f}% above it."
    )
