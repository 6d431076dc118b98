"""Facts of a case that is ready, for its row in cases.csv: results of its proofs and of its warm-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..plan.case import Case
from ..results.block_times import ProofResult, memory_columns
from ..results.columns import LEAST
from ..worker.facts import Warmed


def proof_facts(shown: ProofResult, update: ProofResult) -> dict[str, Any]:
    """Return what both proofs of a case found, for its row in cases.csv."""
    doubt = shown.not_proved or update.not_proved
    errors = {
        "gradient_error": shown.error,
        "split_effect": shown.split_effect,
        "update_error": update.error,
    }
    return {
        # As a file holds it: what is next to nothing is 0.
        **{name: 0.0 if error is not None and error < LEAST else error for name, error in errors.items()},
        "not_proved": doubt and doubt.reason,
        "proved_by": doubt and doubt.remedy,
    }


def facts_of(case: Case, warmed: Sequence[Warmed]) -> dict[str, Any]:
    """Return what the warm-up of a case on every rank tells, for its row in cases.csv."""
    facts: dict[str, Any] = memory_columns([one.memory for one in warmed], case.mode)
    layout, compiled = warmed[0].layout, warmed[0].compilation
    if layout is not None:
        facts["num_buckets"] = len(layout.num_bytes)
        facts["bucket_bytes"] = str(layout)
    if compiled is not None:
        facts |= asdict(compiled)
    return facts
