"""Says what to change at a device count and what it gains: every other case against DDP's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from bench.findings.wording import gain, mode_name, place, setting_names, settings, times
from bench.results.round_times import ByRound
from bench.settings import DDP_AXES
from bench.stats import Interval, paired_ratio

_CAVEATS = {
    "static_graph": "only for a graph that is the same in every step",
    "sync_buffers": "ranks then keep batch-norm statistics of their own",
    "sync_batchnorm": "batch-norm then normalises over other images",
    "comm_hook": "gradients are rounded or compressed on the way, so check the loss",
}
_NOISE_HIDES_ANYTHING_PCT = 100
_ALTERS_TRAINING = {"sync_buffers", "sync_batchnorm", "comm_hook"}


@dataclass(frozen=True)
class Alternative:
    """A measured alternative: its throughput over the reference's, and what choosing it means.

    `alters` tells that it is another training: other gradients, statistics or global batch.
    """

    name: str
    ratio: Interval
    alters: bool
    caveats: tuple[str, ...]
    by_round: ByRound

    @property
    def wins(self) -> bool:
        """Tell whether it is faster beyond the noise."""
        return self.ratio.low > 1

    @property
    def words(self) -> str:
        """Return the gain and what comes with it."""
        caveats = f" ({'; '.join(self.caveats)})" if self.caveats else ""
        return f"{gain(self.ratio)} images/s{caveats}"


def reference_case(here: pd.DataFrame) -> pd.Series:
    """Return what a user gets by default: DDP without settings, else the first DDP case, else the first."""
    ddp = here[here["mode"] == "ddp"]
    if ddp.empty:
        return here.iloc[0]
    return next((row for _, row in ddp.iterrows() if not settings(row)), ddp.iloc[0])


def alternatives(ok: pd.DataFrame, throughput: Mapping[str, ByRound], count: int) -> list[Alternative]:
    """Compare every other case at `count` devices, and one device alone, with the reference there.

    The best of several is picked after the fact: intervals hold for all of them at once (Bonferroni).
    """
    here = ok[ok["num_devices"] == count]
    base = reference_case(here)
    others = here[here["case_id"] != base["case_id"]]
    alone = ok[(ok["mode"] == "single") & (count > 1)]
    rows = [row for _, row in pd.concat([others, alone]).iterrows() if row["case_id"] in throughput]
    if base["case_id"] not in throughput or not rows:
        return []
    confidence = 1 - 0.05 / len(rows)
    reference = throughput[base["case_id"]]
    return [
        _alternative(row, base, throughput[row["case_id"]], reference, confidence=confidence)
        for row in rows
        if throughput[row["case_id"]].keys() & reference.keys()
    ]


def advice(ok: pd.DataFrame, throughput: Mapping[str, ByRound], count: int) -> list[str]:
    """Say what to change on `count` devices and its gain, or that nothing measured is worth it."""
    here = ok[ok["num_devices"] == count]
    base = reference_case(here)
    found = alternatives(ok, throughput, count)
    if count == 1 or not found:
        return []
    same = _best([a for a in found if not a.alters])
    other = _best([a for a in found if a.alters])
    said = f"What to change on {place(base)}: "
    if same is not None and same.wins:
        said += f"{same.name} instead of {_standing(base)}, {same.words}.{_next_to(same, found)}"
    elif len(here) == 1:
        axes = "--bucket-cap-mb default,1,5,25 or --modes dp,ddp"
        said += f"unknown, only {_standing(base)} was measured there; {axes} adds alternatives."
    else:
        said += _nothing(base, found)
    least = same.ratio.estimate if same is not None and same.wins else 1.0
    if other is not None and other.wins and other.ratio.estimate > least:
        said += f" Changing the training itself gains more: {other.name}, {other.words}."
    return [said]


def _nothing(base: pd.Series, found: list[Alternative]) -> str:
    same = [a for a in found if not a.alters] or found
    nearest = max(same, key=lambda a: a.ratio.estimate)
    which = f"none of {len(same)} alternatives is" if len(same) > 1 else "the one alternative is not"
    said = f"nothing, {which} faster than {_standing(base)} beyond the noise; the nearest, {nearest.name}, "
    said += f"runs at {times(nearest.ratio)} its rate."
    hidden_pct = 100 * (max(a.ratio.high for a in same) - 1)
    if hidden_pct > _NOISE_HIDES_ANYTHING_PCT:
        return f"{said} The noise could hide any gain."
    return f"{said} A gain of up to {hidden_pct:.0f}% could hide in the noise." if hidden_pct > 0.5 else said


def _next_to(best: Alternative, found: list[Alternative]) -> str:
    """Say whether this run cannot tell the second best from the best."""
    runner_up = _best([a for a in found if a is not best and not a.alters])
    if runner_up is None or not runner_up.wins:
        return ""
    apart = paired_ratio(best.by_round, runner_up.by_round)
    return "" if apart.excludes(1.0) else f" {runner_up.name} cannot be told apart from it."


def _best(found: list[Alternative]) -> Alternative | None:
    winners = [a for a in found if a.wins] or found
    return max(winners, key=lambda a: a.ratio.estimate, default=None)


def _alternative(
    row: pd.Series, base: pd.Series, by_round: ByRound, reference: ByRound, *, confidence: float
) -> Alternative:
    changed = settings(row, base) if base["mode"] == "ddp" else settings(row)
    if row["mode"] == "single":
        name = f"{place(row)} alone ({mode_name(row)})"
    elif row["mode"] == base["mode"]:
        name = setting_names(changed) or str(row["case_id"])
    else:
        name = ", ".join(part for part in (mode_name(row), setting_names(changed)) if part)
    caveats = [_CAVEATS[axis] for axis in DDP_AXES if axis in changed and axis in _CAVEATS]
    batches = [int(case["global_batch"]) for case in (row, base)]
    other_batch = batches[0] != batches[1]
    if other_batch:
        caveats.append(f"a global batch of {batches[0]:,d} images instead of {batches[1]:,d}")
    return Alternative(
        name,
        paired_ratio(by_round, reference, confidence=confidence),
        other_batch or bool(_ALTERS_TRAINING & changed.keys()),
        tuple(caveats),
        by_round,
    )


def _standing(base: pd.Series) -> str:
    changed = setting_names(settings(base))
    if base["mode"] != "ddp":
        return mode_name(base)
    return f"DDP with {changed}" if changed else "DDP's defaults"
