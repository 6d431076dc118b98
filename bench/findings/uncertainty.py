"""Names the cases of a run that were tried and have no number, and modes without a case that has one."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from ddp_bench.bench.findings.wording import case_name, text

_NAMED = 3
_REASON_LENGTH = 160


def unmeasured(cases: pd.DataFrame) -> list[str]:
    """Name cases that were tried and have no number, each with its reason, or all with that of all."""
    broken = _failed(cases)
    if broken.empty:
        return []
    told: dict[str, list[str]] = {}
    for _, row in broken.iterrows():
        told.setdefault(f"{row['status']}{_reason(row)}", []).append(case_name(row))
    named, left = [], _NAMED
    for why, names in told.items():
        if left > 0:
            named.append(f"{', '.join(names[:left])}: {why}")
            left -= len(names[:left])
    more = f"; and {len(broken) - _NAMED} more" if len(broken) > _NAMED else ""
    were = "1 case was" if len(broken) == 1 else f"{len(broken)} cases were"
    return [f"{were} not measured: {'; '.join(named)}{more}."]


def failed_modes(cases: pd.DataFrame, modes: Iterable[str]) -> list[str]:
    """Name those of `modes` of which a case failed and none was measured."""
    failed = set(_failed(cases)["mode"])
    measured = set(cases.loc[cases["status"] == "ok", "mode"])
    return [mode for mode in modes if mode in failed - measured]


def why_not_measured(cases: pd.DataFrame, modes: Iterable[str]) -> list[str]:
    """Say of each of `modes` without a measured case why its first failed; of a run without any, too.

    Modes with one reason share a sentence. Empty where every mode has a measured case, or only skipped ones
    beside those of another mode.
    """
    has_any = bool((cases["status"] == "ok").any())
    told: dict[str, list[str]] = {}
    # Without a number of any mode, the reference that nobody named may be the cause.
    for mode in failed_modes(cases, dict.fromkeys(modes if has_any else (*modes, "single"))):
        row = _failed(cases[cases["mode"] == mode]).iloc[0]
        status = "" if row["status"] == "failed" else f"{row['status']}: "
        told.setdefault(f"{status}{text(row['reason'])}", []).append(mode)
    if told or has_any:
        return [f"every case of {' and '.join(of)} failed: {why}" for why, of in told.items()]
    return [
        f"nothing was measured: {text(cases['reason'].iloc[0])}" if len(cases) else "nothing was measured"
    ]


def _failed(cases: pd.DataFrame) -> pd.DataFrame:
    found: pd.DataFrame = cases[~cases["status"].isin(["ok", "skipped"])]
    return found


def _reason(row: pd.Series) -> str:
    reason = "" if pd.isna(row["reason"]) else " ".join(str(row["reason"]).split())
    short = reason if len(reason) <= _REASON_LENGTH else f"{reason[: _REASON_LENGTH - 1]}…"
    return f" ({short.rstrip('.')})" if short else ""
