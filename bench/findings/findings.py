"""Concludes a run: its answers, what else was found, how far to trust it, and the command to run next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..common.text import visible
from ..machine.manifest import Manifest
from ..results.case_result import CaseResult
from ..results.comparisons import Comparison
from ..results.round_times import RoundTimes
from ..results.store import RunData
from .answers import ONE_DEVICE, compile_verdicts, verdicts
from .causes import slow_ranks
from .cautions import Caution, Trust, of_conditions, said_load, trust
from .next_step import NextStep, next_step
from .notes import notes
from .repeats import evidence
from .stability import cautions as of_rounds
from .verdicts import Verdict


@dataclass(frozen=True)
class Conclusion:
    """What is said of a run, on the terminal and on its page."""

    cases: tuple[CaseResult, ...]
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...]
    """What is to be known beside the answers."""
    background: tuple[str, ...]
    """And what the page alone says."""
    cautions: tuple[Caution, ...]
    trust: Trust | None
    """How far to trust the answers; None without any."""
    next_step: NextStep | None

    @property
    def fastest_id(self) -> str:
        """The case with the highest rate of those that an answer names as the faster one; empty without."""
        named = {one.faster_id for one in self.verdicts}
        found = [
            (case.images_per_s.estimate, case.case_id)
            for case in self.cases
            if case.images_per_s and (ONE_DEVICE if case.mode == "single" else case.case_id) in named
        ]
        return max(found, default=(0.0, ""))[1]

    @property
    def lines(self) -> list[tuple[str, str]]:
        """Label and text of the answers, of how far to trust them, and of what to run next."""
        worth = self.trust.lines if self.trust else {}
        following = self.next_step
        return [
            *((one.title, one.sentence) for one in self.verdicts),
            *((f"trust: {claim}", said) for claim, said in worth.items()),
            *([("next", following.why), ("", following.command)] if following else []),
        ]


def run_cautions(manifest: Manifest, cases: Sequence[CaseResult], times: RoundTimes) -> list[Caution]:
    """Return what to know before trusting a run, most general first, one per kind."""
    measured = [case for case in cases if case.is_ok and case.images_per_s is not None]
    # Those that share devices are measured a few times only, and say nothing of scaling.
    ok = [case for case in measured if not case.oversubscribed] or measured
    return [*of_conditions(manifest, cases, ok), *of_rounds(ok, times)]


def conclude(
    folder: Path,
    manifest: Manifest,
    cases: Sequence[CaseResult],
    times: RoundTimes,
    comparisons: Sequence[Comparison],
    *,
    resumable: bool = True,
    earlier: Sequence[tuple[Sequence[CaseResult], Sequence[Comparison]]] = (),
) -> Conclusion:
    """Conclude a run from its files in `folder`; `resumable` where its journal is among them.

    `earlier` runs of the same plan on this machine, their cases and comparisons, tell how far to trust it.
    """
    answered = (
        *verdicts(cases, comparisons, margin=manifest.margin),
        *compile_verdicts(cases, comparisons),
    )
    slow = slow_ranks(manifest, cases, times)
    cautions = run_cautions(manifest, cases, times)
    on_cpu = any(case.device_type == "cpu" for case in cases)
    return Conclusion(
        cases=tuple(cases),
        verdicts=answered,
        # Reasons and hosts are text of others, and this goes to a terminal.
        notes=tuple(map(visible, notes(cases, answered, slow, comparisons))),
        background=tuple(f"{said}." for one in answered for said in one.background),
        cautions=tuple(cautions),
        trust=trust(
            cautions,
            [one.answer for one in answered],
            on_cpu=on_cpu,
            load=said_load(manifest) if on_cpu else "",
            evidence=evidence(cases, comparisons, earlier),
        ),
        next_step=next_step(folder, manifest, cases, answered, resumable=resumable),
    )


def conclude_run(run: RunData) -> Conclusion:
    """Conclude a loaded run."""
    return conclude(
        run.path,
        run.manifest,
        run.results,
        run.times,
        run.compared,
        resumable=run.resumable,
        earlier=run.earlier,
    )
