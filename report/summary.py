"""Sums a run up for programs: answers, findings, cautions, timing, and the rows of its cases."""

from __future__ import annotations

import json
from typing import Any

from ..bench.findings.cautions import Caution, Trust
from ..bench.findings.findings import Conclusion, conclude_run
from ..bench.findings.next_step import NextStep
from ..bench.machine.manifest import Record, Timing
from ..bench.results.store import RunData


class Answer(Record, frozen=True, omit_defaults=False):
    """What a run says of one question."""

    question: str
    """What is answered, such as wrapper or communication."""
    answer: str
    """Of a comparison one of `ANSWERS`; resolved: nothing was compared."""
    sentence: str
    paste: str
    """A line of code that follows from it; may be empty."""


class Summary(Record, frozen=True, omit_defaults=False):
    """What `ddp-bench run --json` prints at the end of a run."""

    results: str
    answers: tuple[Answer, ...]
    findings: tuple[str, ...]
    next: NextStep | None
    trust: Trust | None
    """What the answers are worth, by what they claim; null where there are none."""
    cautions: tuple[Caution, ...]
    timing: Timing
    cases: tuple[dict[str, Any], ...]


def summary_of(run: RunData, conclusion: Conclusion | None = None) -> Summary:
    """Sum a run up for a program; `conclusion` is of this run, where it was concluded before."""
    conclusion = conclusion or conclude_run(run)
    return Summary(
        results=str(run.path),
        answers=tuple(
            Answer(question=one.question, answer=one.answer, sentence=one.said, paste=one.paste)
            for one in conclusion.verdicts
        ),
        findings=(*conclusion.notes, *conclusion.background),
        next=conclusion.next_step,
        trust=conclusion.trust,
        cautions=conclusion.cautions,
        timing=run.manifest.timing,
        cases=tuple(json.loads(run.cases.to_json(orient="records"))),
    )
