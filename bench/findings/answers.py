"""Answers all questions of a run, at the largest device count that its cases have for themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..results.case_result import CaseResult
from ..results.comparisons import by_compile, default_of
from ..results.store import RunData
from .communication import answer_communication, describe_straggler
from .settings import answer_compile, answer_settings
from .verdicts import Verdict
from .wording import compile_label
from .wrapper import answer_wrapper


def answer_questions(run: RunData) -> list[Verdict]:
    """Answer what the run allows, by mode of torch.compile where there are several: each is a workload."""
    found = []
    for label, group in by_compile_label(run.results):
        here = headline(group)
        ids, ddp = {case.case_id for case in here}, default_of(here)
        known = [one for one in run.compared if {one.case_id, one.reference_id} <= ids]
        answers = (
            answer_wrapper(here, known, run.manifest.margin),
            answer_settings(here, known),
            answer_communication(ddp, describe_straggler(ddp, run.manifest, run.times)),
        )
        found += [replace(one, of=label) for one in answers if one]
    return [*found, *answer_compile(run.results, run.compared)]


def by_compile_label(cases: Iterable[CaseResult]) -> list[tuple[str, list[CaseResult]]]:
    """Group cases by mode of torch.compile, with a label where there are several, as they appear."""
    groups = by_compile(cases)
    return [(compile_label(mode) if len(groups) > 1 else "", group) for mode, group in groups.items()]


def headline(cases: Sequence[CaseResult]) -> list[CaseResult]:
    """Select measured cases of the largest device count that they have for themselves; of one device, DDP.

    Where all share CPU cores, those of the largest count; GPUs that are shared answer nothing.
    """
    measured = [case for case in cases if case.is_ok and case.images_per_s is not None]
    several = [case for case in measured if case.num_devices > 1]
    choices = (
        [case for case in several if not case.oversubscribed],
        [case for case in several if not case.answers_nothing],
        [case for case in measured if not case.oversubscribed and case.mode == "ddp"],
    )
    chosen: list[CaseResult] = next(filter(None, choices), [])
    most = max((case.num_devices for case in chosen), default=0)
    return [case for case in chosen if case.num_devices == most]
