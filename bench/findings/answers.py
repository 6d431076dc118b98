"""Answers a run: which wrapper, which settings, what communication adds, what torch.compile brings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..common.numbers import about, ratio
from ..common.numbers import with_interval as written
from ..common.text import listed
from ..plan.case_settings import DDP_DEFAULTS, KINDS
from ..plan.modes import COMPOSABLE
from ..plan.settings import MARGINS
from ..results.case_result import CaseResult
from ..results.comparisons import (
    EQUAL,
    FASTER,
    SLOWER,
    TOO_FEW,
    UNRESOLVED,
    Comparison,
    by_compile,
    default_of,
    over_eager,
)
from ..stats.fit import MIN_ROUNDS
from ..stats.interval import Interval
from .verdicts import CAP, COMMUNICATION, COMPILE, LITTLE_EXPOSED, RESOLVED, WRAPPER, Verdict
from .wording import compile_label, ddp_call, hidden_share, mode_name, place, setting_names, short_mode

ONE_DEVICE = "one device"

OWN_COST = "On one device nothing is communicated: what DDP costs there is its own work"

PUBLISHED = (
    "DP against DDP, published of 200 steps of GPT-2 on 2 TITAN RTX: with NVLink DP 111 s, DDP 102 s; "
    "without it DDP 131 s (transformers documentation)"
)
"""On CPU cores PyTorch has no DataParallel: what is measured there is this suite's own code."""

ALTERS = {name for name, kind in KINDS.items() if kind == "training"}
PASTED = {name for name in DDP_DEFAULTS if KINDS[name] == "argument"} | {"optimize_ddp"}
"""Settings that `ddp_call` can write."""


def verdicts(
    cases: Sequence[CaseResult], comparisons: Sequence[Comparison], *, margin: float = MARGINS["cpu"]
) -> list[Verdict]:
    """Answer what the run allows, at the largest device count that the cases have for themselves.

    By mode of torch.compile where there are several: each is a workload of its own.
    """
    return [
        replace(verdict, of=label)
        for label, group in by_compile_label(cases)
        for verdict in _answers(headline(group), comparisons, margin)
    ]


def by_compile_label(cases: Iterable[CaseResult]) -> list[tuple[str, list[CaseResult]]]:
    """Cases by mode of torch.compile, with its label where there are several, in order of appearance."""
    groups = by_compile(cases)
    return [(compile_label(mode) if len(groups) > 1 else "", group) for mode, group in groups.items()]


def headline(cases: Sequence[CaseResult]) -> list[CaseResult]:
    """The measured cases of the largest device count that they have for themselves; of one device, DDP.

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


def _answers(
    cases: Sequence[CaseResult], comparisons: Iterable[Comparison], margin: float
) -> Iterator[Verdict]:
    by_id = {case.case_id: case for case in cases}
    known = [one for one in comparisons if {one.case_id, one.reference_id} <= by_id.keys()]
    over_dp, over_ddp = ([one for one in known if by_id[one.reference_id].mode == m] for m in ("dp", "ddp"))
    default = default_of(cases)
    alone = default or next((case for case in cases if not case.is_stand_in), None)
    if over_dp and not by_id[over_dp[0].reference_id].is_stand_in:
        yield _wrapper(by_id, over_dp[0])
    elif alone and alone.speedup:
        yield _alone(alone, alone.speedup, margin, [case for case in cases if case.is_stand_in])
    if of_ddp := [one for one in over_ddp if by_id[one.case_id].mode in ("ddp", *COMPOSABLE)]:
        yield _settings(by_id, of_ddp)
    if default and default.exposed_comm_ms and default.step_ms:
        yield _communication(default, default.exposed_comm_ms, default.step_ms)


def _compared(
    question: str, one: Comparison, names: tuple[str, str], where: str = "", **more: Any
) -> Verdict:
    """The answer that a comparison gives, turned so that its ratio is above 1."""
    is_slower, is_found = one.ratio.estimate < 1, one.answer in (FASTER, SLOWER) and not one.within_margin
    faster, slower = reversed(names) if is_slower else names
    return Verdict(
        question=question,
        answer=one.answer,
        comparisons=(one,),
        faster=faster,
        slower=slower,
        where=where,
        ratio=one.ratio.inverted() if is_slower else one.ratio,
        faster_id="" if not is_found else one.reference_id if is_slower else one.case_id,
        **more,
    )


def _wrapper(by_id: dict[str, CaseResult], one: Comparison) -> Verdict:
    ddp, dp = by_id[one.case_id], by_id[one.reference_id]
    best = dp if one.answer == SLOWER else ddp
    paste = {FASTER: "model = DDP(model)", SLOWER: "model = nn.DataParallel(model)"}.get(one.answer, "")
    alone, names = best.speedup, (mode_name(ddp), mode_name(dp))
    loses = alone is not None and alone.high < 1
    said = f"One device is {ratio(alone.inverted())} as fast as {mode_name(best)}" if alone and loses else ""
    notes = (said,) if said else ()
    return _compared(WRAPPER, one, names, f" on {place(ddp)}", paste=paste, notes=notes)


def _alone(case: CaseResult, speedup: Interval, margin: float, stand_ins: Sequence[CaseResult]) -> Verdict:
    """A mode against one device, where there is no DP to hold it against."""
    # Not a comparison of the run: whether rounds are too few for it, its interval alone says.
    one = Comparison(case.case_id, ONE_DEVICE, speedup, margin, MIN_ROUNDS)
    own = OWN_COST if case.num_devices == 1 and one.answer in (FASTER, SLOWER) else ""
    background = (*map(_stages, stand_ins[:1]), PUBLISHED if stand_ins else "")
    names = f"{mode_name(case)} on {place(case)}", ONE_DEVICE
    where = "; DP is not measurable without GPUs" if stand_ins else ""
    said = {"notes": (own,) if own else (), "background": tuple(filter(None, background))}
    return _compared(WRAPPER, one, names, where, **said, without_dp=case.device_type == "cpu")


def _stages(stand_in: CaseResult) -> str:
    """What the stages of DP's stand-in take of its step; empty where one was not measured."""
    names = ("replicate", "scatter", "gather", "reduce")
    stages = {name: ms for name in names if (ms := stand_in.interval(f"dp_{name}_ms")) is not None}
    if len(stages) < len(names):
        return ""
    largest = sorted(stages.items(), key=lambda stage: -stage[1].estimate)
    parts = ", ".join(f"{name} {written(ms, 'ms', digits=2)}" for name, ms in largest)
    few = " (few rounds: no intervals)" * any(math.isnan(ms.low) for ms in stages.values())
    return f"Stages of DP's stand-in, in a pass of their own: {parts}{few}"


def _settings(by_id: dict[str, CaseResult], comparisons: Sequence[Comparison]) -> Verdict:
    """What to change about DDP, or to take in its place, or that nothing measured is worth it."""
    default = by_id[comparisons[0].reference_id]
    changed = {one.case_id: by_id[one.case_id].changed(default) for one in comparisons}
    named = {case_id: _choice(by_id[case_id], axes) for case_id, axes in changed.items()}
    only_caps = all(axes.keys() == {"bucket_cap_mb"} for axes in changed.values())
    same = [one for one in comparisons if not ALTERS & changed[one.case_id].keys()]
    proved = (one for one in comparisons if not by_id[one.case_id].not_proved)
    winners = [one for one in proved if one.answer == FASTER and not one.within_margin]
    fastest = max(winners, key=lambda one: one.ratio.estimate, default=None)
    best = max((one for one in winners if one in same), key=lambda one: one.ratio.estimate, default=fastest)
    # One that gains the margin at most is no reason to change anything, whether or not it is slower.
    unresolved = [one for one in comparisons if one.answer == UNRESOLVED and one.ratio.high > 1 + one.margin]
    few = [one for one in comparisons if one.answer == TOO_FEW]
    known = [one for one in comparisons if one.answer != TOO_FEW]
    shown = best or max(known, key=lambda one: one.ratio.high, default=comparisons[0])
    left = [named[one.case_id] for one in (*unresolved, *few)]
    beside = [name for name in left if name != named[shown.case_id]]
    notes, paste = [], ""
    if best and best not in same:
        notes.append(f"{named[best.case_id]} changes the training: check the loss")
    elif best and by_id[best.case_id].mode == "ddp":
        axes = {axis: value for axis, value in by_id[best.case_id].changed().items() if axis not in ALTERS}
        paste = ddp_call(axes) if axes.keys() <= PASTED else ""
    if fastest and fastest is not best:
        notes.append(f"{named[fastest.case_id]} is {ratio(fastest.ratio)} as fast, but changes the training")
    if beside and (best or unresolved):
        notes.append(f"Open beside it: {listed(beside)}")
    return Verdict(
        question=CAP,
        answer=FASTER if best else UNRESOLVED if unresolved else TOO_FEW if few else EQUAL,
        paste=paste,
        notes=tuple(notes),
        comparisons=tuple(comparisons),
        faster=named[shown.case_id],
        slower=setting_names(default.changed()) or "the default",
        ratio=shown.ratio,
        faster_id=best.case_id if best else "",
        noun="cap" if only_caps else "setting",
        num_tried=len(known),
        open_settings=tuple(left),
    )


def _choice(case: CaseResult, changed: dict[str, str]) -> str:
    """What is named of a case beside DDP's default: its wrapper where it is another, and its settings."""
    names = setting_names(changed)
    return names if case.mode == "ddp" else " with ".join(filter(None, (short_mode(case), names)))


def _communication(case: CaseResult, exposed: Interval, step: Interval) -> Verdict:
    """What communication adds to DDP's step, and how much of it is hidden."""
    answer = RESOLVED
    if math.isnan(exposed.low):
        answer = TOO_FEW
    elif exposed.low <= 0 <= exposed.high:
        answer = EQUAL if exposed.high < LITTLE_EXPOSED * step.estimate else UNRESOLVED
    hidden, skew = hidden_share(case), case.rank_skew_ms
    note = ""
    if answer == RESOLVED and hidden is not None and hidden.high < 0:
        on_cpu = case.device_type == "cpu"
        why = "all-reduces run on the cores that compute" if on_cpu else "it slows the compute"
        apart = f": ranks' own work is {written(skew, 'ms')} apart" if skew and skew.low > 0 else ""
        note = f"Why communication adds more than it takes alone: {why}, or ranks wait{apart}"
    return Verdict(
        question=COMMUNICATION,
        answer=answer,
        background=(note,) if note else (),
        exposed_ms=exposed,
        step_ms=step.estimate,
        alone_ms=case.comm_ms,
        hidden_pct=hidden,
        is_vague=hidden is None and case.hidden_pct is not None,
    )


def compile_verdicts(cases: Sequence[CaseResult], comparisons: Sequence[Comparison]) -> list[Verdict]:
    """Say for each mode of torch.compile what it brings to DDP on most devices, else to one device."""
    by_id = {case.case_id: case for case in cases if case.is_ok}
    found: dict[str, list[Comparison]] = {}
    for one in over_eager(comparisons, by_id.values()):
        found.setdefault(by_id[one.case_id].compile, []).append(one)
    return [_compiled(own, by_id) for own in found.values()]


def _compiled(comparisons: Sequence[Comparison], by_id: dict[str, CaseResult]) -> Verdict:
    most = max(comparisons, key=lambda one: by_id[one.case_id].num_devices)
    single = [one for one in comparisons if by_id[one.case_id].mode == "single" and one is not most]
    ours, eager = by_id[most.case_id], by_id[most.reference_id]
    given = "" if ours.compile == "default" else f'mode="{ours.compile}"'
    wrapped = "; model = DDP(model)" if ours.mode == "ddp" else ""
    names = (compile_label(ours.compile), compile_label(eager.compile))
    notes = [f"For single, {names[0]} is {ratio(one.ratio)} as fast as {names[1]}" for one in single]
    notes += [f"Compiling took {about(ours.compile_s)}"] if ours.compile_s is not None else []
    is_found = most.answer == FASTER and not most.within_margin
    paste = f"model.compile({given}){wrapped}" if is_found else ""
    where = f" for {mode_name(ours)} on {place(ours)}"
    return _compared(COMPILE, most, names, where, paste=paste, notes=tuple(notes))
