"""Sums a run up for programs: answers, findings, cautions, timing, and the rows of its cases."""

from __future__ import annotations

import json
from typing import Any

from ..bench.findings.findings import Conclusion, conclude_run
from ..bench.results.store import RunData


def summary_of(run: RunData, conclusion: Conclusion | None = None) -> dict[str, Any]:
    """Return what `ddp-bench run --json` prints; `conclusion` is of this run, where it was concluded before.

    Of an answer: the question, such as wrapper or communication; of a comparison one of `ANSWERS`, else
    resolved; a sentence; a line of code that follows from it, which may be empty. `trust` is what the answers
    are worth, by what they claim, and None where there are none.
    """
    found = conclusion or conclude_run(run)
    return {
        "results": str(run.path),
        "answers": [
            {"question": one.question, "answer": one.answer, "sentence": one.said, "paste": one.paste}
            for one in found.verdicts
        ],
        "findings": [*found.notes, *found.background],
        "next": found.next_step,
        "trust": found.trust,
        "cautions": found.cautions,
        "timing": run.manifest.timing,
        "cases": json.loads(run.cases.to_json(orient="records")),
    }
