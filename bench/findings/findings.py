"""Concludes a run: its answers, what else was found, how far to trust it, and the command to run next."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ..common.cli import NextStep
from ..common.text import escape_controls
from ..machine.load import describe_busy_cores
from ..results.case_result import CaseResult
from ..results.comparisons import find_default
from ..results.store import RunData
from .answers import ONE_DEVICE, answer_questions, select_headline
from .cautions import Caution, find_cautions
from .communication import StepExplanation, explain_ddp_step
from .confidence import Trust, assess_confidence, describe_repeatability
from .next_step import propose_next_step
from .notes import describe_cases
from .verdicts import CAP, COMMUNICATION, Verdict


@dataclass(frozen=True)
class Conclusion:
    """Findings of a run, for the terminal and for its page."""

    cases: tuple[CaseResult, ...]
    verdicts: tuple[Verdict, ...]
    step: StepExplanation | None
    """Parts of a step of DDP without settings, where anything is known of it."""
    notes: tuple[str, ...]
    """Things to know beside the answers."""
    cautions: tuple[Caution, ...]
    trust: Trust | None
    """Trust in the answers; None without any."""
    next_step: NextStep | None

    @property
    def fastest_id(self) -> str:
        """Return the case with the highest rate of those that an answer names as the faster one.

        It is empty without one, and where one device has it while no case on several is known to be slower.
        """
        named = {one.faster_id for one in self.verdicts}
        found = [
            (case.images_per_s.estimate, case)
            for case in self.cases
            if case.images_per_s and (ONE_DEVICE if case.mode == "single" else case.case_id) in named
        ]
        if not found:
            return ""
        _, fastest = max(found, key=lambda one: one[0])
        others = (case.speedup for case in self.cases if case.is_ranked and case.num_devices > 1)
        slower = [one.high < 1 for one in others if one]
        return "" if fastest.mode == "single" and not (slower and all(slower)) else fastest.case_id


def conclude_run(run: RunData) -> Conclusion:
    """Conclude a loaded run."""
    manifest, cases, verdicts = run.manifest, run.results, answer_questions(run)
    has_straggler = any(one.notes for one in verdicts if one.question == COMMUNICATION)
    faster = next((one for one in verdicts if one.question == CAP and one.faster_id and one.paste), None)
    default = find_default(select_headline(cases))
    step = explain_ddp_step(default, run, has_straggler=has_straggler, faster=faster)
    cautions = find_cautions(run)
    on_cpu = any(case.device_type == "cpu" for case in cases)
    notes = (
        *([step.consists_of] if step and not step.savings else []),
        *(f"{note}." for one in verdicts for note in one.notes),
        *describe_cases(cases),
    )
    return Conclusion(
        cases=tuple(cases),
        verdicts=tuple(verdicts),
        step=step,
        # Reasons and hosts are text of others, and this goes to a terminal.
        notes=tuple(map(escape_controls, notes)),
        cautions=tuple(cautions),
        trust=assess_confidence(
            verdicts,
            cautions,
            on_cpu=on_cpu,
            load=describe_busy_cores(manifest) if on_cpu else "",
            repeats=describe_repeatability(cases, run.compared, run.earlier),
        ),
        next_step=propose_next_step(run, verdicts, step, cautions),
    )


def summarize_run(run: RunData, conclusion: Conclusion | None = None) -> dict[str, Any]:
    """Return what `ddp-bench run --json` prints; `conclusion` is of this run, where it was concluded before.

    Of an answer: the question, such as wrapper or communication; of a comparison one of `ANSWERS`, else
    resolved; a sentence; a line of code that follows from it, which may be empty. `trust` is what the answers
    are worth, by what they claim, and None where there are none. `step` has milliseconds of each step.
    """
    found = conclusion or conclude_run(run)
    return {
        "results": str(run.path),
        "answers": [
            {"question": one.question, "answer": one.answer, "sentence": one.said, "paste": one.paste}
            for one in found.verdicts
        ],
        "findings": found.notes,
        "step": found.step,
        "next": found.next_step,
        "trust": found.trust,
        "cautions": found.cautions,
        "timing": run.manifest.timing,
        "cases": json.loads(run.cases.to_json(orient="records")),
    }
