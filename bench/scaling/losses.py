"""What a step on several devices loses against one device alone, by cause. Pure."""

from __future__ import annotations

from dataclasses import dataclass

BANDWIDTH = "exposed communication for bandwidth"
LATENCY = "exposed communication for latency"
HANDLING = "copying buckets, and what the simulation lacks"
RANK_SPREAD = "rank spread, waiting for the slowest"
BESIDE_OTHERS = "compute of a rank beside others"


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Milliseconds of a step; together they are what it takes beyond the same work on one device alone.

    Exposed communication, less what would remain if it took no time, is split as the all-reduces by
    themselves are: time that grows with bytes, time that does not. It holds compute slowed by communication.
    """

    bandwidth_ms: float
    latency_ms: float
    handling_ms: float
    rank_spread_ms: float
    sharing_ms: float

    def shares_pct(self) -> list[tuple[str, float]]:
        """Cause and share of the time lost, largest first; empty where nothing is lost."""
        parts = {
            BANDWIDTH: self.bandwidth_ms,
            LATENCY: self.latency_ms,
            HANDLING: self.handling_ms,
            RANK_SPREAD: self.rank_spread_ms,
            BESIDE_OTHERS: self.sharing_ms,
        }
        lost = {cause: ms for cause, ms in parts.items() if ms > 0}
        total_ms = sum(lost.values())
        ordered = sorted(lost.items(), key=lambda part: -part[1])
        return [(cause, 100 * ms / total_ms) for cause, ms in ordered]


def split_losses(
    *,
    exposed_ms: float,
    handling_ms: float,
    latency_ms: float,
    comm_ms: float,
    rank_spread_ms: float,
    sharing_ms: float,
) -> Losses:
    """Exposed communication split by the share that latency has of the all-reduces alone (`comm_ms`)."""
    share = min(latency_ms / comm_ms, 1.0) if comm_ms > 0 else 0.0
    network_ms = max(exposed_ms - handling_ms, 0.0)
    return Losses(
        bandwidth_ms=network_ms * (1 - share),
        latency_ms=network_ms * share,
        handling_ms=exposed_ms - network_ms,
        rank_spread_ms=rank_spread_ms,
        sharing_ms=sharing_ms,
    )
