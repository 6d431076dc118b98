"""Says what holds DDP back at a device count: its own work, communication, a slow link, slow ranks."""

from __future__ import annotations

import math

import pandas as pd
import scipy

from ddp_bench.bench.findings.numbers import number, plural, short
from ddp_bench.bench.findings.wording import bits_per_s, link_name, place, ranged, text, truth
from ddp_bench.bench.layout import BucketLayout
from ddp_bench.bench.results.aggregate import typical_of
from ddp_bench.bench.results.comparisons import default_of
from ddp_bench.bench.results.round_times import RoundTimes
from ddp_bench.bench.results.schema import records

TCP_OVERHEAD = 1514 / 1448
"""Bytes on the wire for each byte that TCP delivers, full Ethernet frames."""

LINK_SLACK = 1.08
"""Communication over what the link allows, above which something else limits it."""

SKEW_SHARE = 0.05
"""Skew over the step below which ranks count as equally fast."""

OFTEN = 0.75
"""Share of the rounds in which a rank has to be the slowest to be named."""

BY_CHANCE = 0.05
"""Nor is a rank named that would be the slowest so often among equal ones with more than this probability."""


def scaling_loss(cases: pd.DataFrame, ddp: pd.DataFrame, blocks: pd.DataFrame) -> list[str]:
    """Say what DDP's step takes longer for than that of `single`, under weak scaling: parts that add up."""
    row = reference_case(ddp)
    one_device = cases[cases["num_devices"] == 1]
    single, wrapped = (one_device[one_device["mode"] == mode] for mode in ("single", "ddp"))
    if text(row["scaling"]) != "weak" or truth(row["oversubscribed"]) or row["num_devices"] == 1:
        return []
    if single.empty or wrapped.empty:
        return []
    typical = typical_of(RoundTimes.of(blocks.assign(detail=None)))
    step, local = ((row["case_id"], phase) for phase in ("timed", "no_sync"))
    alone, one = ((rows.iloc[0]["case_id"], "timed") for rows in (single, wrapped))
    parts = {
        "DDP's own work on one device": typical.difference_ms(one, alone),
        "compute beside that of the other devices": typical.difference_ms(local, one),
        "communication": typical.difference_ms(step, local),
    }
    if any(math.isnan(part.low) for part in parts.values()):
        return []
    listed = ", ".join(
        f"{name} {_signed(part.estimate)} ms ({_signed(part.low)} to {_signed(part.high)})"
        for name, part in parts.items()
    )
    whole, least = (number(typical.step_ms(case_id).estimate) for case_id, _ in (step, alone))
    return [f"A step of DDP on {place(row)} takes {whole} ms, of single {least} ms: {listed}."]


def _signed(value: float) -> str:
    return f"{'-' if value < 0 else '+'}{short(abs(value), 3)}"


def link_limit(ddp: pd.DataFrame) -> list[str]:
    """Say where communication takes longer than a lab's link would allow: then the cores limit it."""
    measured = ddp[ddp["comm_ms"].notna()]
    if measured.empty:
        return []
    row = reference_case(measured)
    layout = BucketLayout.of_cell(row["bucket_bytes"])
    allowed_ms = _link_ms(str(row["link"]), layout, int(row["num_devices"]))
    if allowed_ms is None or row["comm_ms"] <= LINK_SLACK * allowed_ms:
        return []
    link = link_name(str(row["link"]))
    takes = ranged(row, "comm_ms", "ms")
    said = f"Over {link}, communication alone takes {takes}"
    return [f"{said}; the link would allow {number(allowed_ms)} ms: here the cores limit it."]


def reference_case(ddp: pd.DataFrame) -> pd.Series:
    """DDP without settings, else its first case."""
    name = default_of(records(ddp))
    return ddp[ddp["case_id"] == name].iloc[0]


def slow_rank(ddp: pd.DataFrame, blocks: pd.DataFrame) -> list[str]:
    """Name the rank that others wait for, where ranks differ by a good part of the step; else nothing."""
    measured = ddp[(ddp["rank_skew_ms"] > SKEW_SHARE * ddp["step_ms_p50"]).fillna(value=False)]
    if measured.empty:
        return []
    row = reference_case(measured)
    own = blocks[(blocks["case_id"] == row["case_id"]) & (blocks["phase"] == "no_sync")].dropna(
        subset=["block_ms", "rank"]
    )
    if own.empty:
        return []
    slowest = own.loc[own.groupby("round")["block_ms"].idxmax()]
    rank = int(slowest["rank"].mode().iloc[0])
    often, rounds = int((slowest["rank"] == rank).sum()), len(slowest)
    share = 100 * row["rank_skew_ms"] / row["step_ms"]
    apart = f"{ranged(row, 'rank_skew_ms', 'ms')} per step ({share:.0f}% of it)"
    num_ranks = own["rank"].nunique()
    by_chance = min(num_ranks * scipy.stats.binom.sf(often - 1, rounds, 1 / num_ranks), 1.0)
    if often < OFTEN * rounds or by_chance > BY_CHANCE:
        said = f"Ranks: on {place(row)} the slowest rank's own work takes {apart} longer than the fastest's, "
        if often == rounds:
            return [f"{said}in all of {plural(rounds, 'round')}: too few to say whether it stays so."]
        return [f"{said}but it is not always the same rank: the machine is unsteady."]
    hosts = own.loc[own["rank"] == rank, "host"].dropna()
    host = f" on {hosts.iloc[0]}" if len(hosts) else ""
    said = f"Slow rank: on {place(row)} rank {rank}{host} was the slowest in {often} of {rounds} rounds; "
    return [f"{said}its own work takes {apart} longer than the fastest rank's, and the others wait for it."]


def _link_ms(link: str, layout: BucketLayout | None, num_ranks: int) -> float | None:
    """Return the least ms of a ring all-reduce over a lab's link: 2 (n - 1) / n of the bytes and headers."""
    rate = bits_per_s(link)
    if rate is None or layout is None:
        return None
    num_bytes = sum(layout.num_bytes) * 2 * (num_ranks - 1) / num_ranks
    return num_bytes * TCP_OVERHEAD * 8 / rate * 1000
