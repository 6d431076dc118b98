"""Says whether heat, power or unequal clocks had a part in what a run measured."""

from __future__ import annotations

import pandas as pd

from ddp_bench.bench.cli import command
from ddp_bench.bench.findings.caution import Caution
from ddp_bench.bench.findings.numbers import plural
from ddp_bench.bench.findings.wording import text
from ddp_bench.bench.gpus import FAULTS
from ddp_bench.bench.results.schema import records

MOST_THROTTLED_PCT = 5.0
"""Share of samples with clocks held down below which nothing is said.

Clocks a fifth lower in so many samples make 1% of the rate, which is what a GPU's margin calls equal.
"""

UNEQUAL_CLOCKS = 1.02
"""Ratio of two cases' clocks above which they were compared at different speeds: twice a GPU's margin."""


def throttled(ok: pd.DataFrame) -> Caution | None:
    """Find the measured cases of which heat or power slowed a GPU."""
    slowed = ok[ok["throttled_pct"] > MOST_THROTTLED_PCT]
    if slowed.empty:
        return None
    worst = max(records(slowed), key=lambda row: float(row["throttled_pct"]))
    reasons = sorted({why for cell in slowed["throttle_reasons"] for why in text(cell).split(", ") if why})
    return Caution(
        kind="slowed GPUs",
        case_id=str(worst["case_id"]),
        text=f"{plural(len(slowed), 'case')} of {len(ok)} ran with a GPU slowed by {' and '.join(reasons)} "
        f"(at worst {worst['case_id']}: {worst['throttled_pct']:.0f}% of samples)",
        advice=_cooler(reasons),
    )


def _cooler(reasons: list[str]) -> str:
    if FAULTS.isdisjoint(reasons):
        return "raise the power limit (sudo nvidia-smi -pl), or compare only runs under this one"
    return f"look at cooling and power supply ({command('doctor')}), then measure again"


def unequal_clocks(ok: pd.DataFrame) -> Caution | None:
    """Find whether the cases of a run were measured at different clocks."""
    clocks = ok.loc[ok["sm_clock_mhz"] > 0, ["sm_clock_mhz", "case_id"]]
    ordered = sorted(clocks.itertuples(index=False, name=None))
    if not ordered or ordered[-1][0] <= UNEQUAL_CLOCKS * ordered[0][0]:
        return None
    (low_mhz, slow), *_, (high_mhz, fast) = ordered
    return Caution(
        kind="unequal clocks",
        case_id=str(slow),
        text=f"GPU clocks differ by {100 * (high_mhz / low_mhz - 1):.1f}% between cases "
        f"({slow}: {low_mhz:.0f} MHz, {fast}: {high_mhz:.0f} MHz): their comparison is partly one of clocks",
        advice="lock the clocks (sudo nvidia-smi -lgc) at a value that every case can hold",
    )
