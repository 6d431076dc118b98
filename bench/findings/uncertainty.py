"""Names what a run leaves open: cases without a number, and what it did not try."""

from __future__ import annotations

import pandas as pd

from bench.findings.wording import case_name
from bench.settings import DDP_AXES, DDP_DEFAULTS

_NAMED = 3
_REASON_LENGTH = 160
_COMMON_AXES = ("bucket_cap_mb", "gradient_as_bucket_view", "static_graph", "comm_hook", "accumulate")


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
