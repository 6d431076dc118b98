"""Communication that runs on compute's own cores, on a network of another rate. Pure.

Gloo moves bytes with threads of the CPU. Where a device is a core, these take their share of it, and
compute takes longer while an all-reduce is in flight: its slow-down less 1 is in proportion to the bytes
moved per second (matrix products beside 47 MB all-reduces of two ranks over links of 0.2 to 4 Gbit/s: 1.08,
1.18, 1.40, 1.81, 2.34 and 2.66 at 0.2, .5, 1, 2, 3, 4). Three things limit that. Communication alone cannot
be faster than the core that it needs. The scheduler shares a core equally among threads that are busy,
which bounds the slow-down of compute. And beside compute an all-reduce has a third of a core, so it is held
up from where it needs more: in training at 4 Gbit/s, where it takes 0.42 to 0.52 of a core by itself,
bursts of two ranks slowed by 1.29 (ResNet-18), 1.28 (34) and 1.22 (50) beside compute, and compute by 1.96,
2.10 and 1.95; from what was measured at 1 Gbit/s this says 1.28, 1.46 and 1.39, and 2.00, 2.02 and 2.09.
Three ranks on two cores: 1.42 and 3.0 where 1.61 and 2.21 were measured. Beside matrix products, for a
reason that is not known, all-reduces slowed by 7% at most, and compute at 4 Gbit/s by 2.66 where this says
2.3.
"""

from __future__ import annotations

from bench.scaling.cost import CostCurve, ring_factor
from bench.scaling.timeline import Slowdown

THREADS = 3.0
"""On a core: two of gloo, one that reduces and one that sends and receives, beside one that computes. Each
has a third while all are busy (sched(7): equal weights)."""


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
    hindered = max(THREADS * core_share * faster / longer, 1.0) / max(THREADS * core_share, 1.0)
    wanted = 1 + (slowdown.compute - 1) * faster / longer / hindered
    compute = min(wanted, max(THREADS, slowdown.compute))
    starved = (1 - 1 / wanted) / (1 - 1 / compute) if compute > 1 else 1.0
    return Slowdown(compute=compute, comm=max(slowdown.comm * hindered, starved)), wire.scaled(longer)
