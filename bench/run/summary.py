"""The end of a run on stdout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from bench.console import print_cases
from bench.findings.stability import Caution


def print_summary(
    cases: pd.DataFrame,
    sentences: Sequence[str],
    doubts: Sequence[Caution],
    timing: dict[str, Any],
    page: Path,
) -> None:
    """The table, the pace of the run, and what was found."""
    print_cases(cases)
    print(
        f"{timing['rounds']} rounds ({timing['stopped_because']}); start-up {timing['startup_s']:.0f} s, "
        f"{timing['timed_share_pct']:.0f}% of the {timing['total_s'] - timing['startup_s']:.0f} s after it "
        "were timed steps"
    )
    for sentence in sentences:
        print(sentence)
    for caution in doubts:
        print(f"Caution, {caution.kind}: {caution.sentence}")
    print(f"Report: {page}")


def summary_json(
    folder: Path,
    cases: pd.DataFrame,
    sentences: Sequence[str],
    doubts: Sequence[Caution],
    timing: dict[str, Any],
) -> str:
    """The same as JSON."""
    whole = {
        "results": str(folder),
        "findings": sentences,
        "cautions": [asdict(caution) for caution in doubts],
        "timing": timing,
        "cases": json.loads(cases.to_json(orient="records")),
    }
    return json.dumps(whole, indent=2)
