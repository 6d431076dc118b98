"""How long a plan takes, from one measured step; nothing is run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .plan import Planned
from .settings import ResolvedSettings

LEAST_WARMUP_S = 2.0
"""Of a case on a GPU, where there is time: its clock rises with load, and its allocator settles."""

WARMUP_SHARE = 0.1
"""Share of the time limit that all of these together take at most."""


def least_warmup_s(plan: Sequence[Planned], settings: ResolvedSettings) -> float:
    """Least seconds that each case of a plan warms up; 0 on CPU cores, where a few steps are enough."""
    if settings.device != "cuda":
        return 0.0
    runnable = sum(p.skip_reason is None for p in plan)
    limit = math.inf if settings.max_time is None else settings.max_time
    return min(LEAST_WARMUP_S, WARMUP_SHARE * limit / max(runnable, 1))


def step_s_of(planned: Planned, *, step_s: float, single_batch: int) -> float:
    """Expected seconds of a step of a case, from those of `single_batch` samples on one device.

    Ranks that share a device are taken to run one after the other; communication is not counted.
    """
    sharing = planned.case.num_devices if planned.oversubscribed else 1
    return step_s * planned.case.batch_per_device * planned.case.accumulate * sharing / single_batch


def timed_block_s(planned: Planned, settings: ResolvedSettings, *, step_s: float, single_batch: int) -> float:
    """Expected seconds of a timed block of a case; arguments as of `step_s_of`."""
    own_s = step_s_of(planned, step_s=step_s, single_batch=single_batch)
    return settings.steps_per_block(own_s) * own_s


def estimate_s(
    plan: Sequence[Planned], *, step_s: float, single_batch: int, settings: ResolvedSettings
) -> float:
    """Expected seconds of measuring, from one measured step of `single_batch` samples on one device.

    Without communication (`step_s_of`), so a lower bound, cut off at the time limit.
    """
    run = [p for p in plan if not p.skip_reason]
    least = least_warmup_s(plan, settings)
    warmup = sum(max(5 * step_s_of(p, step_s=step_s, single_batch=single_batch), least) for p in run)
    per_round = sum(timed_block_s(p, settings, step_s=step_s, single_batch=single_batch) for p in run)
    limit = math.inf if settings.max_time is None else settings.max_time
    wanted = math.inf if settings.rounds is None else warmup + settings.rounds * per_round
    # The first round is always finished.
    return max(warmup + per_round, min(wanted, limit))
