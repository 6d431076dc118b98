"""Notes on cases that were skipped; and why a mode has no number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ..common.numbers import format_count
from ..common.text import format_list
from ..results.case_result import CaseResult
from .wording import name_case_parts

_REASONS = 3


def describe_cases(cases: Sequence[CaseResult]) -> list[str]:
    """Say what was not measured: cases that were skipped, and passes, a sentence each."""
    found = (
        "" if any(case.is_ok for case in cases) else "Nothing was measured: no case ended with status ok.",
        *_describe_skipped(cases),
        _describe_missing_passes(cases),
    )
    return [said for said in found if said]


def _describe_skipped(cases: Sequence[CaseResult]) -> list[str]:
    """Name skipped cases by place and settings, a sentence for each reason; untried counts as such."""
    skipped = [case for case in cases if case.status == "skipped"]
    tried = {case.num_devices for case in cases if case.status != "skipped"}
    counts = Counter(case.reason for case in skipped)
    by_reason: dict[str, dict[str, list[str]]] = {}
    for case in skipped:
        where, changed = name_case_parts(case)
        if case.num_devices not in tried:
            where, changed = format_count(case.num_devices, "device"), ""
        names = by_reason.setdefault(case.reason, {}).setdefault(where, [])
        names += [changed] if changed and changed not in names else []
    said = []
    for why, of in by_reason.items():
        named = [f"{where} with {format_list(names)}" if names else where for where, names in of.items()]
        said.append(f"{format_count(counts[why], 'case')} skipped, {format_list(named)}: {why}.")
    others = sum([*counts.values()][_REASONS:])
    more = [f"{format_count(others, 'other case')} skipped."] if others else []
    return said[:_REASONS] + more


def _describe_missing_passes(cases: Sequence[CaseResult]) -> str:
    """DDP cases whose communication was not reached, where it was measured in others."""
    ddp = [case for case in cases if case.is_ok and case.mode == "ddp" and case.num_devices > 1]
    ddp = [case for case in ddp if not case.oversubscribed]
    lacking = sum(case.exposed_comm_ms is None for case in ddp)
    if lacking in (0, len(ddp)):
        return ""
    return (
        f"Communication was not measured in {lacking:,d} of {format_count(len(ddp), 'DDP case')}: the time "
        "ended before their passes; a longer --max-time reaches them."
    )


def find_failed_modes(cases: Sequence[CaseResult], modes: Iterable[str]) -> list[str]:
    """Name those of `modes` of which a case failed and none was measured."""
    failed = {case.mode for case in cases if case.has_failed} - {case.mode for case in cases if case.is_ok}
    return [mode for mode in modes if mode in failed]


def explain_not_measured(cases: Sequence[CaseResult], modes: Iterable[str]) -> list[str]:
    """Say of each of `modes` without a measured case why its first failed; of a run without any, too.

    Modes with one reason share a sentence. Empty where every mode has a measured case, or only skipped ones
    beside those of another mode.
    """
    has_any = any(case.is_ok for case in cases)
    told: dict[str, list[str]] = {}
    # Without a number of any mode, the reference that nobody named may be the cause.
    for mode in find_failed_modes(cases, dict.fromkeys(modes if has_any else (*modes, "single"))):
        case = next(case for case in cases if case.has_failed and case.mode == mode)
        status = "" if case.status == "failed" else f"{case.status}: "
        told.setdefault(f"{status}{case.reason}", []).append(mode)
    if told or has_any:
        return [f"every case of {' and '.join(of)} failed: {why}" for why, of in told.items()]
    return [f"nothing was measured: {cases[0].reason}" if cases else "nothing was measured"]
