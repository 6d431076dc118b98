"""Says what a run leaves open: noise and its cost, cases without a number, what was not tried."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pandas as pd

from bench.findings.advice import alternatives, reference_case
from bench.findings.wording import about, case_name, ranged
from bench.results.round_times import ByRound
from bench.settings import DDP_AXES, DDP_DEFAULTS

TARGET = 0.02
"""Half an interval over its value that tells differences worth having; the default --precision-target."""

_A_DAY_S = 86_400
_NAMED = 3
_REASON_LENGTH = 160
_COMMON_AXES = ("bucket_cap_mb", "gradient_as_bucket_view", "static_graph", "comm_hook", "accumulate")


def uncertain(
    ok: pd.DataFrame, throughput: Mapping[str, ByRound], blocks: pd.DataFrame, counts: list[int]
) -> list[str]:
    """Name the widest interval, what cannot be told apart, and about how long a run would settle it."""
    if ok["images_per_s_low"].isna().any():
        return ["Uncertain: everything, one round gives no interval; measure several with --rounds 10."]
    half = (ok["images_per_s_high"] - ok["images_per_s_low"]) / (2 * ok["images_per_s"])
    worst, widest = ok.iloc[int(half.argmax())], float(half.max())
    num_rounds = len(throughput[worst["case_id"]])
    said = (
        f"Uncertain: the widest interval is that of {case_name(worst)}, {ranged(worst, 'images_per_s')} "
        f"images/s (±{100 * widest:.1f}%), after {num_rounds} rounds."
    )
    open_questions = [_undecided(ok, throughput, count) for count in counts if count > 1]
    said += "".join(question for question, _ in open_questions)
    width = max([widest, *(width for _, width in open_questions)])
    if width <= TARGET:
        return [f"{said} A difference of {100 * TARGET:.0f}% would be seen."]
    return [said + _cost(blocks, num_rounds, width)]


def _undecided(ok: pd.DataFrame, throughput: Mapping[str, ByRound], count: int) -> tuple[str, float]:
    """Name alternatives that may be faster or slower than the reference, with their widest half interval."""
    found = [r for r in alternatives(ok, throughput, count) if not r.ratio.excludes(1.0)]
    if not found:
        return "", 0.0
    base = reference_case(ok[ok["num_devices"] == count])
    names = [a.name for a in found[:_NAMED]]
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    # Two cases that share a single round have a ratio without an interval.
    width = max((w for r in found if math.isfinite(w := r.ratio.half_width)), default=0.0)
    return f" Not told apart from {case_name(base)}: {', '.join(names)}{more}.", width


def _cost(blocks: pd.DataFrame, num_rounds: int, width: float) -> str:
    """Estimate the rounds needed: an interval shrinks with the square root of their number."""
    factor = (width / TARGET) ** 2
    said = f" Telling {100 * TARGET:.0f}% apart would take about"
    ends = (blocks["started_s"] + blocks["block_ms"] / 1000).max()
    took_s = float(ends - blocks["started_s"].min())
    if factor * took_s > _A_DAY_S:
        return (
            f"{said[:-6]} more than a day at this noise: quiet the machine, python -m bench.doctor says how."
        )
    said += f" --rounds {num_rounds * factor:.0f} instead of {num_rounds}"
    return f"{said}: {about(factor * took_s)} instead of {about(took_s)}." if took_s > 0 else f"{said}."


def unmeasured(cases: pd.DataFrame) -> list[str]:
    """Name cases that were tried and have no number, each with its reason."""
    broken = cases[~cases["status"].isin(["ok", "skipped"])]
    if broken.empty:
        return []
    named = [f"{case_name(row)}: {row['status']}{_reason(row)}" for _, row in broken[:_NAMED].iterrows()]
    more = f"; and {len(broken) - _NAMED} more" if len(broken) > _NAMED else ""
    were = "1 case was" if len(broken) == 1 else f"{len(broken)} cases were"
    return [f"{were} not measured: {'; '.join(named)}{more}."]


def not_tried(cases: pd.DataFrame) -> list[str]:
    """Name what the run did not try: modes and common DDP settings without a second value."""
    several = cases[cases["num_devices"] > 1]
    if several.empty:
        return ["Not tried in this run: several devices, --gpus 1,2."]
    modes = [
        name for mode, name in (("dp", "DataParallel"), ("ddp", "DDP")) if mode not in set(cases["mode"])
    ]
    ddp = cases[cases["mode"] == "ddp"]
    fixed = [
        axis
        for axis in _COMMON_AXES
        if axis in DDP_AXES and len(ddp) and ddp[axis].fillna(DDP_DEFAULTS[axis]).nunique() < 2
    ]
    missing = [*modes, *([f"other values of {', '.join(fixed)}"] if fixed else [])]
    return [f"Not tried in this run: {'; '.join(missing)}."] if missing else []


def _reason(row: pd.Series) -> str:
    reason = "" if pd.isna(row["reason"]) else " ".join(str(row["reason"]).split())
    short = reason if len(reason) <= _REASON_LENGTH else f"{reason[: _REASON_LENGTH - 1]}…"
    return f" ({short.rstrip('.')})" if short else ""
