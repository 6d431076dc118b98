"""Concludes a run: its answers, what else was found, how far to trust it, and the command to run next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ..manifest import Manifest
from ..results.comparisons import Comparison
from ..results.round_times import RoundTimes
from ..results.store import RunData
from ..text import visible
from .answers import compile_verdicts, verdicts
from .cautions import (
    Caution,
    in_evaluation,
    not_proved,
    other_load,
    said_load,
    slow_links,
    throttled,
    trust,
    unequal_clocks,
    unequal_weights,
    uneven_ranks,
)
from .next_step import NextStep, next_step
from .notes import notes
from .repeats import evidence
from .slow_ranks import SlowRank, slow_ranks
from .stability import cautions as of_rounds
from .verdicts import Finding, Verdict
from .wording import own_devices


@dataclass(frozen=True)
class Conclusion:
    """What is said of a run, on the terminal and on its page."""

    verdicts: tuple[Verdict, ...]
    found: tuple[Finding, ...]
    cautions: tuple[Caution, ...]
    trust: str
    """How far to trust the answers; empty without any."""
    next_step: NextStep | None

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be known beside the answers."""
        # Reasons and hosts are text of others, and this goes to a terminal.
        return tuple(visible(one.said) for one in self.found)

    @property
    def sentences(self) -> list[str]:
        """The answers, how far to trust them, and what to run next."""
        following = self.next_step
        return [
            *(visible(verdict.said) for verdict in self.verdicts),
            *([self.trust] if self.trust else []),
            *([f"Next, {following.why}: {following.command}"] if following is not None else []),
        ]


def run_cautions(
    manifest: Manifest, cases: pd.DataFrame, times: RoundTimes, slow: Iterable[SlowRank] = ()
) -> list[Caution]:
    """Return what to know before trusting a run, most general first, one per kind; `slow` as found in it."""
    given = manifest.settings
    ok = own_devices(cases[(cases["status"] == "ok") & cases["images_per_s"].notna()])
    found = (
        not_proved(cases),
        in_evaluation(manifest),
        other_load(manifest, cases),
        unequal_weights(cases),
        throttled(ok),
        unequal_clocks(ok),
        *of_rounds(cases, times, target=None if given.rounds else given.precision_target),
        uneven_ranks(slow),
        slow_links(manifest, cases),
    )
    return [caution for caution in found if caution is not None]


def conclude(
    folder: Path,
    manifest: Manifest,
    cases: pd.DataFrame,
    times: RoundTimes,
    comparisons: Sequence[Comparison],
    *,
    resumable: bool = True,
    earlier: Sequence[tuple[pd.DataFrame, Sequence[Comparison]]] = (),
) -> Conclusion:
    """Conclude a run from its files in `folder`; `resumable` where its journal is among them.

    `earlier` runs of the same plan on this machine, their cases and comparisons, tell how far to trust it.
    """
    answered = (
        *verdicts(cases, comparisons, margin=manifest.margin),
        *compile_verdicts(cases, comparisons),
    )
    slow = slow_ranks(manifest, cases, times)
    cautions = run_cautions(manifest, cases, times, slow)
    on_cpu = bool((cases["device_type"] == "cpu").any())
    answers = [one.answer for one in answered]
    return Conclusion(
        verdicts=answered,
        found=tuple(notes(cases, times, comparisons, slow)),
        cautions=tuple(cautions),
        trust=trust(
            cautions,
            answers,
            on_cpu=on_cpu,
            load=said_load(manifest) if on_cpu else "",
            evidence=evidence(cases, comparisons, earlier),
        ),
        next_step=next_step(folder, manifest, cases, comparisons, answered, resumable=resumable),
    )


def conclude_run(run: RunData) -> Conclusion:
    """Conclude a loaded run."""
    return conclude(
        run.path,
        run.manifest,
        run.cases,
        run.times,
        run.compared,
        resumable=run.resumable,
        earlier=run.earlier,
    )
