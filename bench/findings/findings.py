"""Concludes a run: its three answers, what else was found, and the command to run next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ddp_bench.bench.findings.answers import Verdict, by_compile_label, headline, verdicts
from ddp_bench.bench.findings.bottlenecks import link_limit, scaling_loss, slow_rank
from ddp_bench.bench.findings.compiled import compile_verdicts
from ddp_bench.bench.findings.next_step import NextStep, next_step
from ddp_bench.bench.findings.numbers import rate
from ddp_bench.bench.findings.uncertainty import unmeasured
from ddp_bench.bench.findings.wording import estimate, mode_label, place, unit_of
from ddp_bench.bench.manifest import Manifest
from ddp_bench.bench.results.comparisons import Comparison
from ddp_bench.bench.text import visible


@dataclass(frozen=True)
class Conclusion:
    """What is said of a run, on the terminal and on its page."""

    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...]
    next_step: NextStep | None

    @property
    def sentences(self) -> list[str]:
        following = self.next_step
        return [
            *(visible(verdict.said) for verdict in self.verdicts),
            *self.notes,
            *([f"Next, {following.why}: {following.command}"] if following is not None else []),
        ]


def conclude(
    folder: Path,
    manifest: Manifest,
    cases: pd.DataFrame,
    blocks: pd.DataFrame,
    comparisons: Sequence[Comparison],
    *,
    resumable: bool = True,
) -> Conclusion:
    """Conclude a run from its files in `folder`; `resumable` where its journal is among them."""
    found = (
        *verdicts(cases, comparisons, margin=manifest.margin),
        *compile_verdicts(cases, comparisons),
    )
    following = next_step(folder, manifest, cases, comparisons, found, resumable=resumable)
    return Conclusion(found, tuple(notes(cases, blocks)), following)


def notes(cases: pd.DataFrame, blocks: pd.DataFrame) -> list[str]:
    """Return sentences about a run that stand below its answers; none where there is nothing to add.

    In this order: why DDP scales as it does, what limits communication, a slow rank, cases that share
    devices, cases without a number.
    """
    measured = (cases["status"] == "ok").any()
    sentences = [
        *(
            f"{label.capitalize()}: {sentence}" if label else sentence
            for label, group in by_compile_label(cases)
            for sentence in _bottlenecks(group, blocks)
        ),
        *_shared(cases, headline(cases)),
        *([] if measured else ["Nothing was measured: no case ended with status ok."]),
        *unmeasured(cases),
    ]
    # Reasons and hosts are text of others, and this goes to a terminal.
    return [visible(sentence) for sentence in sentences]


def _bottlenecks(cases: pd.DataFrame, blocks: pd.DataFrame) -> list[str]:
    here = headline(cases)
    ddp = here[here["mode"] == "ddp"]
    if ddp.empty:
        return []
    return [*scaling_loss(cases, ddp, blocks), *link_limit(ddp), *slow_rank(ddp, blocks)]


def _shared(cases: pd.DataFrame, here: pd.DataFrame) -> list[str]:
    """Fold the cases that share devices into one line: they tell nothing about scaling."""
    shared = cases[(cases["status"] == "ok") & cases["oversubscribed"].fillna(value=False).astype(bool)]
    shared = shared[~shared["case_id"].isin(here["case_id"])]
    if shared.empty:
        return []
    rows = [row for _, row in shared.drop_duplicates(["mode", "num_devices"]).iterrows()]
    rates = "; ".join(
        f"{mode_label(row)} {rate(estimate(row, 'images_per_s'), unit_of(row))}" for row in rows
    )
    return [f"On {place(rows[0])}, which tell nothing about scaling: {rates}."]
