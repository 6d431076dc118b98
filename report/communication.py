"""The table of communication: several measures of it side by side, and why two of them disagree."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from ddp_bench.bench.findings.numbers import TIMES, finite, plural, with_interval
from ddp_bench.bench.findings.wording import Row, case_label, device_noun, hidden_share, ranged, text
from ddp_bench.bench.results.schema import EXPOSED_COMM, records
from ddp_bench.report.fields import NAME, Field, interval, table
from ddp_bench.report.model import Table, TableColumn

_APART_PCT = 10
_NAMED = 6
_COLUMNS: tuple[tuple[Field, str], ...] = (
    (
        interval("Communication alone", "comm_ms", "ms"),
        "what a step sends, DDP's buffers and then its buckets, back to back with no compute beside it",
    ),
    (interval("Buffers", "buffers_ms", "ms"), "the part of it that broadcasts DDP's buffers"),
    (
        interval("Bus bandwidth", "bus_gb_per_s", "GB/s"),
        "bytes of the buckets / their part of communication alone x 2 (n - 1) / n, as nccl-tests defines it",
    ),
    (
        interval("Exposed", EXPOSED_COMM, "ms"),
        "the step minus the same step without synchronising, in the same round: time that communication adds",
    ),
    (
        (TableColumn("Hidden (%)", "number"), lambda row: with_interval(hidden_share(row), "")),
        (
            "100 x (1 - exposed / alone); negative where it adds more than it takes alone; "
            "empty where it is not known to 50 points"
        ),
    ),
    (
        interval("Overlap, trace", "overlap_trace_pct", "%"),
        "time in which both compute and communication run, over the time communication runs, per rank",
    ),
    (
        interval("Overlap, DDP window", "overlap_window_pct", "%"),
        "DDP's own logger: the part of its communication window that lies inside the backward",
    ),
    (
        interval("Compute slow-down", "compute_slowdown", TIMES),
        "time to the last gradient beside communication, over the same time without it",
    ),
    (
        interval("Rank skew", "rank_skew_ms", "ms"),
        "slowest minus fastest rank's own work; the others wait for the slowest",
    ),
    (
        interval("Step without synchronising", "no_sync_step_ms", "ms"),
        "the step under no_sync: compute, optimizer and batch",
    ),
)
_NOTE = (
    "Per step of every DDP case on several devices: several measures of the same thing side by side, because "
    "each leaves something out."
)
_WHY_TRACE_HIGHER = (
    "Hidden counts the time that communication adds to the step, so compute that it slows and waiting for "
    "other ranks count as exposed; the trace counts all time in which both run."
)
_WHY_TRACE_LOWER = (
    "Where the trace shows less, communication ran in gaps between operators, which it does not lengthen, "
    "or took longer under the profiler than alone."
)


def communication(ok: pd.DataFrame) -> Table | None:
    """Make the table, what its columns mean, and why the trace and the subtraction disagree where they do."""
    ddp = ok[(ok["mode"] == "ddp") & (ok["num_devices"] > 1)]
    made = table("Communication", _NOTE, ddp, NAME, [field for field, _ in _COLUMNS])
    if made is None:
        return None
    shown = {column.name for column in made.columns}
    meanings = (f"{column.name}: {meaning}." for (column, _), meaning in _COLUMNS if column.name in shown)
    return replace(made, below=(*meanings, *_disagreement(ddp)))


def _disagreement(ddp: pd.DataFrame) -> tuple[str, ...]:
    apart = [(row, gap) for row in records(ddp) if abs(gap := _gap_pct(row)) > _APART_PCT]
    if not apart:
        return ()
    why = [
        reason
        for reason, there in (
            (_WHY_TRACE_HIGHER, any(gap > 0 for _, gap in apart)),
            (_WHY_TRACE_LOWER, any(gap < 0 for _, gap in apart)),
        )
        if there
    ]
    named = [_numbers(row) for row, _ in apart[:_NAMED]]
    more = f"; {plural(len(apart) - _NAMED, 'more case')}" if len(apart) > _NAMED else ""
    say = f"The trace's overlap and the hidden share are more than {_APART_PCT} points apart in "
    return (f"{say}{plural(len(apart), 'case')}. {' '.join(why)}", f"{'; '.join(named)}{more}.")


def _gap_pct(row: Row) -> float:
    trace, hidden = finite(row["overlap_trace_pct"]), hidden_share(row)
    return 0.0 if trace is None or hidden is None else trace - hidden.estimate


def _numbers(row: Row) -> str:
    measured = (
        ("trace", ranged(row, "overlap_trace_pct", "%")),
        ("hidden", ranged(row, "hidden_pct", "%")),
        ("compute slowed", ranged(row, "compute_slowdown", TIMES)),
    )
    said = ", ".join(f"{name} {value}" for name, value in measured if value)
    return f"{case_label(row, device_noun(text(row['device_type'])))}: {said}"
