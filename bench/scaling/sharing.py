"""Communication that runs on compute's own cores, on a network of another rate. Pure.

Gloo moves bytes with threads of the CPU. Where a device is a core, moving a byte takes a share of it: on the
calibrated link that share shows as the slow-down of compute while an all-reduce is in flight, u = 1 - 1 /
slow-down. It grows with the bytes moved per second. Beyond 1 not the link but the core is what communication
waits for; and while both want the core, the scheduler gives each at least half.
"""

from __future__ import annotations

from bench.scaling.cost import CostCurve, ring_factor
from bench.scaling.timeline import Slowdown

FAIR = 0.5
"""Share of a core that either of two busy threads gets (sched(7): equal weights)."""


def on_shared_cores(
    slowdown: Slowdown,
    *,
    calibrated: tuple[CostCurve, int],
    asked: tuple[CostCurve, int],
    num_bytes: float,
) -> tuple[Slowdown, CostCurve]:
    """Slow-downs on the asked network, and its all-reduce cost where a core moves the bytes.

    Args:
        slowdown: measured on the calibrated network.
        calibrated: all-reduce cost there, with its number of ranks.
        asked: cost and ranks on the other network, as its link alone would have it.
        num_bytes: of all gradients: where the two rates are compared.
    """
    (own, own_ranks), (wire, ranks) = calibrated, asked
    if not own.points or not wire.points or min(own_ranks, ranks) < 2:
        return slowdown, wire
    share = 1 - 1 / slowdown.compute
    faster = own(num_bytes) / ring_factor(own_ranks) / (wire(num_bytes) / ring_factor(ranks))
    wanted = share * faster
    cost = wire.scaled(max(wanted, 1.0))
    busy = min(wanted, 1.0)
    while_both = min(busy, max(FAIR, share))
    return (
        Slowdown(compute=1 / (1 - while_both), comm=max(slowdown.comm, busy / while_both) if busy else 1.0),
        cost,
    )
