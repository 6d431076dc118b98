"""Says what was found, in plain sentences: the last lines of a run and the first of its report."""

from __future__ import annotations

import pandas as pd

from bench.findings.advice import advice, reference_case
from bench.findings.bottlenecks import communication, slow_rank
from bench.findings.uncertainty import not_tried, uncertain, unmeasured
from bench.findings.wording import mode_name, place, ranged, times, truth
from bench.results.aggregate import images_per_s_by_round
from bench.results.round_times import ByRound
from bench.stats import paired_ratio
from bench.text import visible

_MOST_COUNTS = 4


def findings(cases: pd.DataFrame, blocks: pd.DataFrame) -> list[str]:
    """Return sentences about the cases of a run, at least one.

    In this order: the fastest mode at each device count, scaling efficiency, what to change and its gain,
    what communication adds, slow ranks, what is uncertain, what has no number, what was not tried.
    """
    ok = cases[(cases["status"] == "ok") & cases["images_per_s"].notna()]
    if ok.empty:
        return ["Nothing was measured: no case ended with status ok.", *map(visible, unmeasured(cases))]
    throughput = images_per_s_by_round(blocks, dict(zip(ok["case_id"], ok["global_batch"], strict=True)))
    lacking = set(ok["case_id"]) - throughput.keys()
    if lacking:
        ok = ok[ok["case_id"].isin(list(throughput))]
    shared = ok["oversubscribed"].fillna(value=False).groupby(ok["num_devices"].astype(int)).any()
    # The largest count that owns its devices is what a reader came for; shared ones come last.
    counts = sorted(shared.index, key=lambda n: (bool(shared[n]), -n))
    at = {count: ok[ok["num_devices"] == count] for count in counts}
    ddp = {count: here[here["mode"] == "ddp"] for count, here in at.items()}
    sentences = [
        *(_fastest_mode(here, throughput) for here in at.values()),
        *(
            [f"blocks.csv lacks blocks of {len(lacking)} measured cases; nothing is said of them."]
            if lacking
            else []
        ),
        *_efficiency(at),
        *(sentence for count in counts for sentence in advice(ok, throughput, count)),
        *(sentence for rows in ddp.values() for sentence in communication(rows)),
        *(sentence for rows in ddp.values() for sentence in slow_rank(rows, blocks)),
        *(uncertain(ok, throughput, blocks, counts) if len(ok) else []),
        *unmeasured(cases),
        *not_tried(cases),
    ]
    # Reasons and hosts are text of others, and this goes to a terminal.
    return [visible(sentence) for sentence in sentences]


def _fastest_mode(here: pd.DataFrame, throughput: dict[str, ByRound]) -> str:
    # DDP stands with the settings a user gets by default, not with the luckiest of many.
    chosen = pd.DataFrame(reference_case(rows) for _, rows in here.groupby("mode", sort=False))
    chosen = chosen.sort_values("images_per_s", ascending=False)
    best = chosen.iloc[0]
    shared = ", which share fewer cores or GPUs" if truth(best["oversubscribed"]) else ""
    where = f"On {place(best)}{shared}"
    name = mode_name(best)
    rate = f"{ranged(best, 'images_per_s', 'images/s')}{_against_single(best)}"
    if len(chosen) == 1:
        return f"{where}, {name} gives {rate}; no other mode was measured there."
    other = chosen.iloc[1]
    ratio = paired_ratio(throughput[best["case_id"]], throughput[other["case_id"]])
    if ratio.excludes(1.0):
        return f"{where}, {name} is fastest: {rate}, {times(ratio)} the rate of {mode_name(other)}."
    return (
        f"{where}, {name} and {mode_name(other)} cannot be told apart: {times(ratio)}; {name} gives {rate}."
    )


def _against_single(row: pd.Series) -> str:
    if row["num_devices"] == 1 or pd.isna(row["speedup"]):
        return ""
    said = f", {ranged(row, 'speedup')}x single"
    return f"{said}: slower than one device alone" if row["speedup_high"] < 1 else said


def _efficiency(at: dict[int, pd.DataFrame]) -> list[str]:
    """Say the efficiency at the larger counts; those that do not share devices come first."""
    counts = [count for count in at if count > 1][:_MOST_COUNTS]
    by_mode: dict[str, list[str]] = {}
    for count in counts:
        for _, rows in at[count].groupby("mode", sort=False):
            row = reference_case(rows)
            if pd.notna(row["efficiency"]):
                kept = f"{ranged(row, 'efficiency', '%', 100)} on {place(row)}"
                by_mode.setdefault(mode_name(row), []).append(kept)
    if not by_mode:
        return []
    scaling = str(at[counts[0]]["scaling"].iloc[0])
    meaning = f"under {scaling} scaling, where 100% is every device adding as much as the first"
    said = "; ".join(f"{name} keeps {', '.join(kept)}" for name, kept in by_mode.items())
    return [f"Scaling efficiency: {meaning}, {said}."]
