"""Answers which settings train faster: DDP's against its default, and each mode of torch.compile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..common.numbers import format_percent, format_ratio, format_rough_duration, make_singular
from ..common.text import format_list
from ..plan.case_settings import DDP_DEFAULTS, KINDS
from ..plan.modes import COMPOSABLE
from ..results.case_result import CaseResult
from ..results.comparisons import EQUAL, FASTER, TOO_FEW, UNRESOLVED, Comparison, select_compile_comparisons
from .verdicts import CAP, COMPILE, TOO_FEW_ROUNDS, Verdict, answer_by_ratio, compute_width_ratio
from .wording import (
    name_compile_mode,
    name_devices,
    name_mode,
    name_settings,
    write_ddp_call,
)

TRAINING_SETTINGS = {name for name, kind in KINDS.items() if kind == "training"}
CODE_SETTINGS = {name for name in DDP_DEFAULTS if KINDS[name] == "argument"} | {"optimize_ddp"}
"""Settings that `write_ddp_call` can write."""

MIN_CAPS = 3
"""Bucket caps beside the default that make a search."""

MIN_GAIN = 0.001
"""A smaller gain is written as this one."""


def answer_settings(cases: Sequence[CaseResult], comparisons: Sequence[Comparison]) -> Verdict | None:
    """Name what to change about DDP, or to take in its place; None where nothing was compared with it."""
    by_id = {case.case_id: case for case in cases}
    comparisons = [
        one
        for one in comparisons
        if by_id[one.reference_id].mode == "ddp" and by_id[one.case_id].mode in ("ddp", *COMPOSABLE)
    ]
    if not comparisons:
        return None
    default = by_id[comparisons[0].reference_id]
    changed = {one.case_id: by_id[one.case_id].list_changed(default) for one in comparisons}
    named = {case_id: _name_alternative(by_id[case_id], axes) for case_id, axes in changed.items()}
    proved = [one for one in comparisons if not by_id[one.case_id].not_proved]
    faster = [one for one in comparisons if one.answer == FASTER and not one.within_margin]
    winners = [one for one in faster if one in proved]
    same = [one for one in comparisons if not TRAINING_SETTINGS & changed[one.case_id].keys()]
    fastest = max(winners, key=lambda one: one.ratio.estimate, default=None)
    best = max((one for one in winners if one in same), key=lambda one: one.ratio.estimate, default=fastest)
    # One that gains the margin at most is no reason to change anything, whether or not it is slower.
    unresolved = [one for one in proved if one.answer == UNRESOLVED and one.ratio.high > 1 + one.margin]
    few = [one for one in proved if one.answer == TOO_FEW]
    known = [one for one in proved if one.answer != TOO_FEW]
    shown = best or max(known, key=lambda one: one.ratio.estimate, default=comparisons[0])
    left = [named[one.case_id] for one in (*unresolved, *few)]
    beside = [name for name in left if name != named[shown.case_id]]
    kept = name_settings(default.list_changed()) or "the default"
    only_caps = all(axes.keys() == {"bucket_cap_mb"} for axes in changed.values())
    noun = "bucket caps" if only_caps else "settings"
    name, fact, label = named[shown.case_id], f"is {format_ratio(shown.ratio)} as fast", ""
    if best:
        answer, label, text = (
            FASTER,
            f"{name} is faster",
            f"{name} {fact} as {kept}{_compare_with_one_device(by_id[best.case_id])}",
        )
    elif unresolved:
        tried = f"the best of {len(known)} {noun}, {name}," if len(known) > 1 else name
        answer, text = UNRESOLVED, f"{UNRESOLVED}: {tried} {fact} as {kept}"
    elif few:
        answer, text = TOO_FEW, f"{TOO_FEW} to compare {format_list(left)} with {kept}: {TOO_FEW_ROUNDS}"
    else:
        answer, label = EQUAL, f"keep {kept}"
        gain = format_percent(max(max((one.ratio.high for one in known), default=1.0) - 1, MIN_GAIN))
        is_slower = all(one.ratio.high <= 1 for one in known)
        none = f"no other {make_singular(noun)} is {'' if is_slower else 'significantly '}faster"
        none += "" if is_slower else f"; a gain above {gain} is excluded (95% confidence)"
        alone = f"{name} {fact}" if known else "no other setting is proved to train right"
        text = f"{label}: {none if len(known) > 1 else alone}"
    notes, paste = [], ""
    if best and best not in same:
        notes.append(f"{named[best.case_id]} changes the training: check the loss")
    elif best and by_id[best.case_id].mode == "ddp":
        axes = {
            axis: value
            for axis, value in by_id[best.case_id].list_changed().items()
            if axis not in TRAINING_SETTINGS
        }
        paste = write_ddp_call(axes) if axes.keys() <= CODE_SETTINGS else ""
    if fastest and fastest is not best:
        notes.append(
            f"{named[fastest.case_id]} is {format_ratio(fastest.ratio)} as fast, but changes the training"
        )
    doubted = [one for one in faster if one not in proved]
    notes += [f"{named[one.case_id]} is {format_ratio(one.ratio)} as fast, but not proved" for one in doubted]
    if beside and (best or unresolved):
        notes.append(f"Still undecided: {format_list(beside)}")
    return Verdict(
        question=CAP,
        answer=answer,
        heading="DDP's settings",
        in_words=label,
        text=text,
        paste=paste,
        notes=tuple(notes),
        comparisons=tuple(comparisons),
        faster_id=best.case_id if best else "",
        width_ratio=compute_width_ratio(proved),
        no_cap_helps=answer == EQUAL and only_caps and len(known) >= MIN_CAPS,
    )


def _compare_with_one_device(case: CaseResult) -> str:
    """Add how fast a case on several devices is beside one device, where that is known."""
    if case.num_devices < 2 or case.speedup is None:
        return ""
    return f". With it {name_mode(case)} is {format_ratio(case.speedup)} as fast as one device"


def _name_alternative(case: CaseResult, changed: dict[str, str]) -> str:
    """Name a case beside DDP's default: its wrapper where it is another, and its settings."""
    names = name_settings(changed)
    return names if case.mode == "ddp" else " with ".join(filter(None, (name_mode(case), names)))


def answer_compile(cases: Sequence[CaseResult], comparisons: Sequence[Comparison]) -> list[Verdict]:
    """Compare each mode of torch.compile with eager, for DDP on most devices, else for one device.

    Each batch size has comparisons of its own.
    """
    by_id = {case.case_id: case for case in cases if case.is_ok and not case.shares_gpu}
    by_variant: dict[tuple[float | None, str], list[Comparison]] = {}
    for one in select_compile_comparisons(comparisons, by_id.values()):
        by_variant.setdefault(by_id[one.case_id].variant, []).append(one)
    found = []
    for (_, mode), compared in by_variant.items():
        most = max(compared, key=lambda one: by_id[one.case_id].num_devices)
        ours, eager = by_id[most.case_id], by_id[most.reference_id]
        names = name_compile_mode(mode), name_compile_mode(eager.compile)
        single = [one for one in compared if by_id[one.case_id].mode == "single" and one is not most]
        notes = [
            f"For single, {names[0]} is {format_ratio(one.ratio)} as fast as {names[1]}" for one in single
        ]
        notes += (
            [f"Compiling took {format_rough_duration(ours.compile_s)}"] if ours.compile_s is not None else []
        )
        given = "" if mode == "default" else f'mode="{mode}"'
        paste = f"model.compile({given}){'; model = DDP(model)' * (ours.mode == 'ddp')}"
        is_found = most.answer == FASTER and not most.within_margin
        how: dict[str, Any] = {
            "heading": COMPILE,
            "scope": ours.batch_name,
            "paste": paste * is_found,
            "notes": tuple(notes),
        }
        where = f" for {name_mode(ours)} on {name_devices(ours)}"
        found.append(answer_by_ratio(COMPILE, most, names, where, **how))
    return found
