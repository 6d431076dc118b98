"""Says what holds DDP back at a device count: communication that the step waits for, and slow ranks."""

from __future__ import annotations

import pandas as pd

from bench.findings.advice import reference_case
from bench.findings.wording import bits_per_s, link_name, number, place, ranged, setting_names, settings
from bench.layout import BucketLayout

TCP_OVERHEAD = 1514 / 1448
"""Bytes on the wire for each byte that TCP delivers, full Ethernet frames."""

LINK_SLACK = 1.08
"""Communication over what the link allows, above which something else limits it."""

SKEW_SHARE = 0.05
"""Skew over the step below which ranks count as equally fast."""

OFTEN = 0.75
"""Share of the rounds in which a rank has to be the slowest to be named."""


def communication(ddp: pd.DataFrame) -> list[str]:
    """Say what communication takes and adds, of the cases of one device count."""
    measured = ddp[ddp["exposed_comm_ms"].notna() & ddp["comm_ms"].notna()]
    if measured.empty:
        return []
    row = reference_case(measured)
    link = "" if pd.isna(row["link"]) else f" over {link_name(str(row['link']))}"
    changed = setting_names(settings(row)) or "its defaults"
    share = 100 * row["exposed_comm_ms"] / row["step_ms_p50"]
    added = ranged(row, "exposed_comm_ms", "ms")
    sentence = f"Exposed: {place(row)}{link}, DDP with {changed}: communication "
    if row["exposed_comm_ms_low"] <= 0 <= row["exposed_comm_ms_high"]:
        sentence += f"adds nothing to the step that can be told from noise ({added})"
    else:
        sentence += f"adds {added} to the step, {share:.0f}% of it"
    sentence += f"; alone it would take {ranged(row, 'comm_ms', 'ms')}"
    if pd.notna(row["hidden_pct"]):
        sentence += f", so {ranged(row, 'hidden_pct', '%')} of it is hidden"
    sentence += "."
    if row["exposed_comm_ms_low"] > row["comm_ms_high"]:
        sentence += " That it adds more than it takes means that it also slows the compute beside it."
    allowed_ms = _link_ms(
        str(row["link"]), BucketLayout.of_cell(row["bucket_bytes"]), int(row["num_devices"])
    )
    if allowed_ms is not None and row["comm_ms"] > LINK_SLACK * allowed_ms:
        sentence += f" The link would allow {number(allowed_ms)} ms: here the cores limit communication."
    return [sentence]


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
    share = 100 * row["rank_skew_ms"] / row["step_ms_p50"]
    apart = f"{ranged(row, 'rank_skew_ms', 'ms')} per step ({share:.0f}% of it)"
    if often < OFTEN * rounds or rounds < 3:
        said = f"Ranks: on {place(row)} the slowest rank's own work takes {apart} longer than the fastest's, "
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
