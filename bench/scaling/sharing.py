"""Communication that runs on compute's own cores, on a network of another rate. Pure.

Gloo moves bytes with threads of the CPU. Where a device is a core, these take their share of it, and compute
takes longer while an all-reduce is in flight. Measured with matrix products beside 47 MB all-reduces of two
ranks over links of 0.2 to 4 Gbit/s (slow-downs 1.08, 1.18, 1.40, 1.81, 2.34 and 2.66 at 0.2, .5, 1, 2, 3, 4),
the compute's slow-down less 1 grows in proportion to the bytes moved per second, and the all-reduce hardly
slows (at most 7%): a busy core is interrupted less often, for more bytes at a time. Two things end that:
communication alone cannot be faster than the core that it needs, and the scheduler shares a core equally
among threads that are busy.
"""

from __future__ import annotations

from bench.scaling.cost import CostCurve, ring_factor
from bench.scaling.timeline import Slowdown

MOST_SLOWDOWN = 3.0
"""Of compute: two threads of gloo, one that reduces and one that sends and receives, beside one that computes
leave it a third of a core (sched(7): equal weights)."""


def on_shared_cores(
    slowdown: Slowdown,
    *,
    core_share: float,
    calibrated: tuple[CostCurve, int],
    asked: tuple[CostCurve, int],
    num_bytes: float,
) -> tuple[Slowdown, CostCurve]:
    """Slow-downs on the asked network, and its all-reduce cost where a core moves the bytes.

    Args:
        slowdown: measured on the calibrated network.
        core_share: of a core, taken by communication alone there; 0 where that is not known.
        calibrated: all-reduce cost there, with its number of ranks.
        asked: cost and ranks on the other network, as its link alone would have it.
        num_bytes: of all gradients: where the two rates are compared.
    """
    (own, own_ranks), (wire, ranks) = calibrated, asked
    if not own.points or not wire.points or min(own_ranks, ranks) < 2:
        return slowdown, wire
    faster = own(num_bytes) / ring_factor(own_ranks) / (wire(num_bytes) / ring_factor(ranks))
    longer = max(core_share * faster, 1.0)
    wanted = 1 + (slowdown.compute - 1) * faster / longer
    compute = min(wanted, max(MOST_SLOWDOWN, slowdown.compute))
    starved = (1 - 1 / wanted) / (1 - 1 / compute) if compute > 1 else 1.0
    return Slowdown(compute=compute, comm=max(slowdown.comm, starved)), wire.scaled(longer)
