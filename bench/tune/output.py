"""Writes the answer: a table of what was measured, one sentence, the line to paste, JSON."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from ddp_bench.bench.cli import print_table
from ddp_bench.bench.findings.numbers import short
from ddp_bench.bench.findings.wording import CPU_STAND_IN
from ddp_bench.bench.stats import Interval
from ddp_bench.bench.tune.answer import LEAST_GAIN, Answer, Measured
from ddp_bench.bench.tune.candidates import Candidate

COLUMNS = ("DDP with", "buckets", "predicted ms", "step ms [95%]", "faster", "above the bound", "rounds")

HOOKS = {"fp16": "fp16_compress_hook", "bf16": "bf16_compress_hook"}


def show(answer: Answer, folder: Path, *, device_type: str) -> None:
    """Print the answer of a tuning whose results are in `folder`."""
    table = Table(box=box.SIMPLE_HEAD, title="Measured in turns")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == COLUMNS[0] else "right")
    for row in rows(answer):
        table.add_row(*row)
    print_table(table)
    print(f"Answer: {sentence(answer)}.")
    line = paste(answer)
    if line:
        print(f"Paste:\n{line}")
    print(
        "In turns: the slowest left one after another. Faster: throughput over the default's in the same "
        f"round; intervals of {100 * answer.confidence:.1f}% each, so that all together hold with 95%. The "
        "bound: what the calibrated compute and communication would take in the best order if neither "
        f"slowed the other, times {answer.pace:.2f}: the default's measured step over its predicted one."
    )
    if device_type == "cpu":
        print(f"{CPU_STAND_IN}.")
    print(f"Results: {folder}")


def arguments(candidate: Candidate, default: Candidate) -> str:
    """Write what to give DistributedDataParallel, as `bucket_cap_mb=4, gradient_as_bucket_view=True`."""
    parts = [candidate.bucket_cap_mb.code()]
    if candidate.gradient_as_bucket_view != default.gradient_as_bucket_view:
        parts.append(f"gradient_as_bucket_view={candidate.gradient_as_bucket_view}")
    return ", ".join(part for part in parts if part)


def name(candidate: Candidate, default: Candidate) -> str:
    """Name a candidate in a sentence by what it differs in from the default."""
    parts = [arguments(candidate, default)]
    if candidate.comm_hook != default.comm_hook:
        parts.append(f"the {candidate.comm_hook} hook" if candidate.comm_hook != "none" else "no hook")
    if candidate.accumulate != default.accumulate:
        parts.append(f"{candidate.accumulate} micro-batches per step")
    return " with ".join(part for part in parts if part) or "the default"


def sentence(answer: Answer) -> str:
    """Say the answer in one sentence."""
    default, best, chosen = answer.default, answer.best, answer.chosen
    if answer.changes:
        said = name(chosen.candidate, default.candidate)
        return f"use {said}: {gain(chosen.ratio)} faster than the default; {_bound(answer, chosen)}"
    unchanged = f"change nothing; the default is {_bound(answer, default)}"
    if best is default:
        others = [m for m in answer.measured if m is not default]
        if not others:
            return f"nothing measured is faster than the default: {unchanged}"
        next_best = max(others, key=lambda m: m.ratio.estimate)
        said = _said(next_best, default)
        return f"nothing measured is faster than the default (next: {said}): {unchanged}{_more(next_best)}"
    said = _said(best, default)
    if not _tells(best.ratio):
        return f"too few rounds to tell the default from the best ({said}): give more --max-time"
    if best.ratio.low > 1:
        return f"the best ({said}) is faster by less than {100 * LEAST_GAIN:g}%: {unchanged}"
    return f"the default is within noise of the best ({said}): {unchanged}{_more(best)}"


def paste(answer: Answer) -> str:
    """Write the line for the user's code; empty where nothing changes."""
    if not answer.changes:
        return ""
    chosen, default = answer.chosen.candidate, answer.default.candidate
    given = arguments(chosen, default)
    lines = [f"model = DistributedDataParallel(model{', ' if given else ''}{given})"]
    if chosen.comm_hook != default.comm_hook and chosen.comm_hook in HOOKS:
        lines.append(f"model.register_comm_hook(None, default_hooks.{HOOKS[chosen.comm_hook]})")
    if chosen.accumulate != default.accumulate:
        lines.append(
            f"# synchronise every {chosen.accumulate} micro-batches: the others under model.no_sync()"
        )
    return "\n".join(lines)


def gain(ratio: Interval) -> str:
    """Write a ratio of throughputs as `8.1% [6.9, 9.2]`."""
    low, high = 100 * (ratio.low - 1), 100 * (ratio.high - 1)
    interval = f"[{low:.1f}, {high:.1f}]" if _tells(ratio) else "[unknown]"
    return f"{100 * (ratio.estimate - 1):.1f}% {interval}"


def rows(answer: Answer) -> list[tuple[str, ...]]:
    """Fill the table of `COLUMNS`, one row per candidate."""
    default = answer.default.candidate
    return [
        (
            name(m.candidate, default),
            str(m.candidate.num_buckets),
            short(m.candidate.predicted_ms),
            f"{short(m.step_ms.estimate)} [{_ends(m.step_ms)}]",
            "" if m is answer.default else gain(m.ratio),
            f"{100 * m.above_bound:+.0f}%",
            str(len(m.images_per_s)),
        )
        for m in answer.measured
    ]


def as_json(answer: Answer) -> dict[str, Any]:
    """Turn the answer into plain data; NaN is not known."""
    default = answer.default.candidate
    return {
        "answer": sentence(answer),
        "change": answer.changes,
        "paste": paste(answer) or None,
        "chosen": _plain(answer.chosen),
        "confidence": answer.confidence,
        "pace": answer.pace,
        "candidates": [{"name": name(m.candidate, default), **_plain(m)} for m in answer.measured],
    }


def _plain(m: Measured) -> dict[str, Any]:
    return {
        **asdict(m.candidate),
        "bucket_cap_mb": str(m.candidate.bucket_cap_mb),
        "step_ms": asdict(m.step_ms),
        "throughput_over_default": asdict(m.ratio),
        "above_bound_pct": 100 * m.above_bound,
        "num_rounds": len(m.images_per_s),
    }


def _ends(found: Interval) -> str:
    # A comma at thousands would read as that between the ends.
    return ", ".join(short(end).replace(",", "") for end in (found.low, found.high))


def _tells(ratio: Interval) -> bool:
    """Whether its interval says anything: two or three rounds leave it wider than the figure itself."""
    return ratio.high - ratio.low < 1


def _said(m: Measured, default: Measured) -> str:
    return f"{name(m.candidate, default.candidate)}, {gain(m.ratio)}"


def _more(m: Measured) -> str:
    """Say how many rounds would tell, where a gain worth a change is still possible.

    The width of an interval goes with one over the root of their number.
    """
    had = len(m.images_per_s)
    if not _tells(m.ratio) or m.ratio.high < 1 + LEAST_GAIN or m.ratio.half_width <= LEAST_GAIN:
        return ""
    needed = math.ceil(had * (m.ratio.half_width / LEAST_GAIN) ** 2)
    return f"; to know it to ±{100 * LEAST_GAIN:g}% takes some {needed} rounds, this had {had} (--max-time)"


def _bound(answer: Answer, m: Measured) -> str:
    percent = round(100 * m.above_bound)
    least = f"the bound of {short(answer.bound_ms(m))} ms"
    return f"{percent}% above {least}" if percent > 0 else f"at {least}"
