"""Answers all questions of a run, at the largest device count that its cases have for themselves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ..common.numbers import format_integer, format_interval, format_ratio
from ..common.text import format_list
from ..plan.modes import SPECS
from ..results.case_result import CaseResult
from ..results.comparisons import (
    FASTER,
    SLOWER,
    TOO_FEW,
    Comparison,
    find_default,
    group_variants,
    name_within,
)
from ..results.store import RunData
from ..stats.fit import MIN_ROUNDS
from ..stats.interval import Interval
from .communication import answer_communication
from .late_ranks import describe_straggler
from .published import answer_published
from .settings import answer_compile, answer_settings
from .verdicts import BATCH, RESOLVED, WRAPPER, Verdict, answer_by_ratio
from .wording import name_devices, name_mode, name_variants

HEADING, ONE_DEVICE = "DP, DDP or one device", "one device"
BATCH_HEADING = "Fastest batch size"

BATCH_NOTE = "Another batch size changes the training: check the loss"


def answer_questions(run: RunData) -> list[Verdict]:
    """Answer what the run allows, by batch size and mode of torch.compile: each variant is a workload."""
    found: list[Verdict | None] = []
    for label, group in label_variants(run.results):
        here = select_headline(group)
        ids, ddp = {case.case_id for case in here}, find_default(here)
        known = [one for one in run.compared if {one.case_id, one.reference_id} <= ids]
        wrapper, settings = answer_wrapper(here, known, run), answer_settings(here, known)
        if wrapper and settings and settings.paste:  # a setting that is faster and trains the same
            wrapper = replace(wrapper, text=f"{wrapper.text}. {settings.split_sentence()[0]}")
        straggler = describe_straggler(ddp, run.manifest, run.times)
        answers = wrapper, settings, answer_communication(ddp, run.typical, straggler)
        found += [one and replace(one, scope=label) for one in answers]
    found += [answer_batch(run.results, run.compared), *answer_compile(run.results, run.compared)]
    return [one for one in (*found, answer_published(run)) if one is not None]


def label_variants(cases: Iterable[CaseResult]) -> list[tuple[str, list[CaseResult]]]:
    """Group cases by batch size and mode of torch.compile, with a label where there are several."""
    groups = [*group_variants(cases).values()]
    return [*zip(name_variants([group[0] for group in groups]), groups, strict=True)]


def select_headline(cases: Sequence[CaseResult]) -> list[CaseResult]:
    """Select measured cases of the largest device count that they have for themselves; of one device, DDP.

    Where all share CPU cores, those of the largest count; GPUs that are shared answer nothing.
    """
    measured = [case for case in cases if case.is_ok and case.images_per_s is not None]
    several = [case for case in measured if case.num_devices > 1]
    choices = (
        [case for case in several if not case.oversubscribed],
        [case for case in several if not case.shares_gpu],
        [case for case in measured if not case.oversubscribed and case.mode == "ddp"],
    )
    chosen: list[CaseResult] = next(filter(None, choices), [])
    most = max((case.num_devices for case in chosen), default=0)
    return [case for case in chosen if case.num_devices == most]


def select_batches(cases: Sequence[CaseResult]) -> list[CaseResult]:
    """Select cases that differ in batch size alone, measured or not: DDP's default at the headline count.

    Without one it is `single`; of several modes of torch.compile the first.
    """
    cases = [case for case in cases if case.compile == cases[0].compile]
    singles = (case for case in cases if case.is_ok and case.mode == "single")
    chosen = find_default(select_headline(cases)) or next(singles, None)
    alike = [case for case in cases if chosen and name_within(case) == name_within(chosen)]
    return [*{case.batch: case for case in reversed(alike)}.values()][::-1]


def answer_batch(cases: Sequence[CaseResult], comparisons: Sequence[Comparison]) -> Verdict | None:
    """Say which batch size is the fastest per sample and which is the largest that fits, if several."""
    alike = select_batches(cases)
    by_id = {case.case_id: case for case in alike if case.is_ok}
    largest = max(by_id.values(), key=lambda case: case.batch or 0, default=None)
    if largest is None:
        return None
    where = f" for {name_mode(largest)} on {name_devices(largest)}"
    out = [format_integer(case.batch) for case in alike if case.status == "oom"]
    lacking = f"{format_list(out)} ran out of memory"
    known = [one for one in comparisons if {one.case_id, one.reference_id} <= by_id.keys()]
    best = max(known, key=lambda one: one.ratio.estimate, default=None)
    if best is None:
        text = f"only {largest.batch_name} fits{where}: {lacking}"
        only = Verdict(question=BATCH, answer=RESOLVED, text=text, heading=BATCH_HEADING)
        return only if out and len(by_id) == 1 else None
    fits = f"The largest batch size that fits is {format_integer(largest.batch)}"
    fits += f"; {lacking}" if out else ""
    names = by_id[best.case_id].batch_name, by_id[best.reference_id].batch_name
    of_several = f", the best of {len(by_id)} sizes" if len(by_id) > 2 else ""
    where = f" per sample{where}{of_several}"
    return answer_by_ratio(BATCH, best, names, where, heading=BATCH_HEADING, notes=(fits, BATCH_NOTE))


def answer_wrapper(
    cases: Sequence[CaseResult], comparisons: Sequence[Comparison], run: RunData
) -> Verdict | None:
    """Compare DDP with DP, else with one device; None where neither was measured beside it."""
    by_id = {case.case_id: case for case in cases}
    for one in comparisons:
        ddp, dp = by_id[one.case_id], by_id[one.reference_id]
        if dp.mode == "dp" and not dp.is_stand_in:
            best = dp if one.answer == SLOWER else ddp
            alone, notes = best.speedup, []
            if alone and alone.high < 1:
                notes = [f"One device is {format_ratio(alone.invert())} as fast as {name_mode(best)}"]
            lines = {FASTER: "model = DDP(model)", SLOWER: "model = nn.DataParallel(model)"}
            how: dict[str, Any] = {"paste": lines.get(one.answer, ""), "notes": (*notes,)}
            names = name_mode(ddp), name_mode(dp)
            return answer_by_ratio(WRAPPER, one, names, f" on {name_devices(ddp)}", heading=HEADING, **how)
    case = find_default(cases) or next((case for case in cases if not case.is_stand_in), None)
    if case is None or case.speedup is None:
        return None
    # Not a comparison of the run: whether rounds are too few for it, its interval alone says.
    one = Comparison(case.case_id, ONE_DEVICE, case.speedup, run.manifest.margin, MIN_ROUNDS)
    if case.num_devices == 1 and one.answer == SLOWER:
        share = Interval(1 - case.speedup.estimate, 1 - case.speedup.high, 1 - case.speedup.low)
        of_step = f"{format_interval(share.scale(100), '%')} of each step"
        alike = (one.case_id for one in run.results if (one.mode, one.variant) == ("single", case.variant))
        columns = (case.case_id, "timed"), (next(alike, ""), "timed")
        ms = run.typical.estimate_total(dict(zip(columns, (1.0, -1.0), strict=True))).compute_interval()
        cost = "" if math.isnan(ms.low) else f"{format_interval(ms, 'ms')}, "
        return Verdict(
            question=WRAPPER,
            answer=SLOWER,
            heading=f"{SPECS[case.mode].label} or {ONE_DEVICE}",
            text=f"{name_mode(case)} itself costs {cost}{of_step} on one device",
            in_words=f"costs {of_step}",
            comparisons=(one,),
            faster_id="" if one.within_margin else ONE_DEVICE,
        )
    is_told = case.num_devices > 1 and one.answer != TOO_FEW
    ideal = f", {100 * case.speedup.estimate / case.num_devices:.0f}% of ideal" if is_told else ""
    return answer_by_ratio(
        WRAPPER,
        one,
        (f"{name_mode(case)} on {name_devices(case)}", ONE_DEVICE),
        ideal,
        turns=False,
        heading=f"{SPECS[case.mode].label} or {ONE_DEVICE}",
    )
