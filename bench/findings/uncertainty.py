"""Names the cases of a run that were tried and have no number."""

from __future__ import annotations

import pandas as pd

from bench.findings.wording import case_name

_NAMED = 3
_REASON_LENGTH = 160


def unmeasured(cases: pd.DataFrame) -> list[str]:
    """Name cases that were tried and have no number, each with its reason."""
    broken = cases[~cases["status"].isin(["ok", "skipped"])]
    if broken.empty:
        return []
    named = [f"{case_name(row)}: {row['status']}{_reason(row)}" for _, row in broken[:_NAMED].iterrows()]
    more = f"; and {len(broken) - _NAMED} more" if len(broken) > _NAMED else ""
    were = "1 case was" if len(broken) == 1 else f"{len(broken)} cases were"
    return [f"{were} not measured: {'; '.join(named)}{more}."]


def _reason(row: pd.Series) -> str:
    reason = "" if pd.isna(row["reason"]) else " ".join(str(row["reason"]).split())
    short = reason if len(reason) <= _REASON_LENGTH else f"{reason[: _REASON_LENGTH - 1]}…"
    return f" ({short.rstrip('.')})" if short else ""
