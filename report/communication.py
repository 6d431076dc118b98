"""The table of communication: several measures of it side by side."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from ddp_bench.bench.findings.numbers import TIMES, finite, plural, with_interval
from ddp_bench.bench.findings.wording import (
    case_label,
    device_noun,
    hidden_percent,
    hidden_share,
    ranged,
    text,
)
from ddp_bench.bench.results.case_columns import EXPOSED_COMM
from ddp_bench.bench.results.schema import records
from ddp_bench.report.table import NAME, Table, figures, table, words

HIDDEN = words("Hidden (%)", lambda row: hidden_percent(row, with_interval), "number")
EXPOSED = figures("Exposed", EXPOSED_COMM, "ms")

_APART_PCT = 10
_NAMED = 6


def communication(ok: pd.DataFrame) -> Table | None:
    """Show several measures of communication, what each means, and why trace and subtraction disagree."""
    ddp = ok[(ok["mode"] == "ddp") & (ok["num_devices"] > 1)]
    columns = (
        *NAME,
        figures("Communication alone", "comm_ms", "ms", meaning="what a step sends, DDP's buffers and then "
                "its buckets, back to back with no compute beside it"),
        figures("Buffers", "buffers_ms", "ms", meaning="the part of it that broadcasts DDP's buffers"),
        figures("Bus bandwidth", "bus_gb_per_s", "GB/s", meaning="bytes of the buckets / their part of "
                "communication alone x 2 (n - 1) / n, as nccl-tests defines it"),
        EXPOSED._replace(meaning="the step minus the same step without synchronising, in the same round: "
                          "time that communication adds"),
        HIDDEN._replace(meaning="100 x (1 - exposed / alone); none where it adds more than it takes "
                         "alone; empty where it is not known to 50 points"),
        figures("Overlap, trace", "overlap_trace_pct", "%", meaning="time in which both compute and "
                "communication run, over the time communication runs, per rank"),
        figures("Overlap, DDP window", "overlap_window_pct", "%", meaning="DDP's own logger: the part of its "
                "communication window that lies inside the backward"),
        figures("Compute slow-down", "compute_slowdown", TIMES, meaning="time to the last gradient beside "
                "communication, over the same time without it"),
        figures("Rank skew", "rank_skew_ms", "ms", meaning="slowest minus fastest rank's own work; the "
                "others wait for the slowest"),
        figures("Step without synchronising", "no_sync_step_ms", "ms", meaning="the step under no_sync: "
                "compute, optimizer and batch"),
    )  # fmt: skip
    note = (
        "Per step of every DDP case on several devices: several measures of the same thing side by side, "
        "because each leaves something out."
    )
    made = table("Communication", note, ddp, columns)
    return None if made is None else replace(made, below=(*made.below, *_disagreement(ddp)))


def _disagreement(ddp: pd.DataFrame) -> list[str]:
    """Say why the trace's overlap and the hidden share are not the same, where they are far apart."""
    apart = []
    for row in records(ddp):
        trace, hidden = finite(row["overlap_trace_pct"]), hidden_share(row)
        if trace is not None and hidden is not None and abs(trace - hidden.estimate) > _APART_PCT:
            apart.append((row, trace > hidden.estimate))
    if not apart:
        return []
    why = {
        True: " Hidden counts the time that communication adds to the step, so compute that it slows and "
        "waiting for other ranks count as exposed; the trace counts all time in which both run.",
        False: " Where the trace shows less, communication ran in gaps between operators, which it does not "
        "lengthen, or took longer under the profiler than alone.",
    }
    said = "".join(words for higher, words in why.items() if any(above == higher for _, above in apart))
    numbers = []
    for row, _ in apart[:_NAMED]:
        measured = (
            ("trace", ranged(row, "overlap_trace_pct", "%")),
            ("hidden", ranged(row, "hidden_pct", "%")),
            ("compute slowed", ranged(row, "compute_slowdown", TIMES)),
        )
        name = case_label(row, device_noun(text(row["device_type"])))
        numbers.append(f"{name}: " + ", ".join(f"{what} {value}" for what, value in measured if value))
    more = f"; {plural(len(apart) - _NAMED, 'more case')}" if len(apart) > _NAMED else ""
    far = f"The trace's overlap and the hidden share are more than {_APART_PCT} points apart in "
    return [f"{far}{plural(len(apart), 'case')}.{said}", f"{'; '.join(numbers)}{more}."]
