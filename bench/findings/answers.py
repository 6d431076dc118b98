"""Answers a run: which wrapper, which settings, what communication adds, what torch.compile brings."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from ..axes import DDP_KINDS
from ..results.case_columns import EXPOSED_COMM
from ..results.comparisons import (
    EQUAL,
    FASTER,
    SLOWER,
    TOO_FEW,
    UNRESOLVED,
    Comparison,
    compile_mode,
    default_of,
    over_eager,
)
from ..results.schema import records
from ..settings import MARGINS
from ..stats.interval import Interval
from ..stats.one_run import MIN_ROUNDS
from .numbers import finite
from .verdicts import (
    LITTLE_EXPOSED,
    RESOLVED,
    CommunicationVerdict,
    CompileVerdict,
    Ratio,
    SettingsVerdict,
    StandIn,
    Verdict,
    WrapperVerdict,
)
from .wording import (
    Row,
    are_shared,
    compile_label,
    ddp_call,
    estimate,
    hidden_share,
    is_stand_in,
    mode_name,
    place,
    setting_names,
    settings,
    text,
)

ONE_DEVICE = "one device"

ALTERS = {name for name, kind in DDP_KINDS.items() if kind == "training"}
PASTED = {name for name, kind in DDP_KINDS.items() if kind == "argument"} | {"optimize_ddp"}
"""Settings that `ddp_call` can write."""


def verdicts(
    cases: pd.DataFrame, comparisons: Sequence[Comparison], *, margin: float = MARGINS["cpu"]
) -> list[Verdict]:
    """Answer what the run allows, at the largest device count that the cases have for themselves.

    By mode of torch.compile where there are several: each is a workload of its own.
    """
    return [
        replace(verdict, of=label)
        for label, group in by_compile_label(cases)
        for verdict in _verdicts(group, comparisons, margin)
    ]


def by_compile_label(cases: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Cases by mode of torch.compile, with its label where there are several, in order of appearance."""
    modes = [compile_mode(row) for row in records(cases[["compile"]])]
    names = dict.fromkeys(modes)
    if len(names) < 2:
        return [("", cases)]
    return [(compile_label(name), cases[[mode == name for mode in modes]]) for name in names]


def _verdicts(cases: pd.DataFrame, comparisons: Sequence[Comparison], margin: float) -> list[Verdict]:
    rows = {str(row["case_id"]): row for row in records(headline(cases))}
    if not rows:
        return []
    known = [c for c in comparisons if c.case_id in rows and c.reference_id in rows]
    known = [c for c in known if not is_stand_in(rows[c.reference_id])]
    default = default_of(rows.values())
    with_dp = [c for c in known if rows[c.reference_id]["mode"] == "dp"]
    real = [row for row in rows.values() if not is_stand_in(row)]
    found = (
        _wrapper(rows, with_dp[0])
        if with_dp
        else _alone(rows[default] if default else real[0], margin, rows.values())
        if real
        else None,
        _settings(
            rows, [c for c in known if rows[c.case_id]["mode"] == rows[c.reference_id]["mode"] == "ddp"]
        ),
        _communication(rows[default]) if default else None,
    )
    return [verdict for verdict in found if verdict is not None]


def headline(cases: pd.DataFrame) -> pd.DataFrame:
    """The measured cases of the largest device count that they have for themselves; of one device, DDP.

    Where all share CPU cores, those of the largest count; GPUs that are shared answer nothing.
    """
    counts, shared = cases["num_devices"], are_shared(cases)
    measured = (cases["status"] == "ok") & cases["images_per_s"].notna()
    several = measured & (counts.fillna(0) > 1)
    choices = (
        several & ~shared,
        several & (cases["device_type"] != "cuda"),
        measured & ~shared & (cases["mode"] == "ddp"),
    )
    chosen = next((marks for marks in choices if marks.any()), choices[0])
    found: pd.DataFrame = cases[chosen & (counts == counts[chosen].max())]
    return found


def ddp_at_headline(cases: pd.DataFrame) -> pd.DataFrame:
    """The DDP cases among `headline`."""
    here = headline(cases)
    return here[here["mode"] == "ddp"]


def ddp_reference(ddp: pd.DataFrame) -> Mapping[str, Any]:
    """DDP without settings, else its first case."""
    rows = records(ddp)
    name = default_of(rows)
    return next(row for row in rows if row["case_id"] == name)


def _wrapper(rows: Mapping[str, Row], one: Comparison) -> WrapperVerdict:
    ddp, dp = rows[one.case_id], rows[one.reference_id]
    best = dp if one.answer == SLOWER else ddp
    paste = {FASTER: "model = DDP(model)", SLOWER: "model = nn.DataParallel(model)"}
    speedup = estimate(best, "speedup")
    return WrapperVerdict(
        answer=one.answer,
        paste=paste.get(one.answer, ""),
        comparisons=(one,),
        ratio=Ratio.of(mode_name(ddp), mode_name(dp), one.ratio),
        where=f"on {place(ddp)}",
        margin=one.margin,
        is_advice=True,
        of_ideal=() if one.answer == TOO_FEW else _of_ideal(ddp, dp),
        strong=text(ddp["scaling"]) == "strong",
        one_device=Ratio.of(mode_name(best), ONE_DEVICE, speedup) if speedup and speedup.high < 1 else None,
    )


STAGES = ("replicate", "scatter", "gather", "reduce")


def _stand_in(rows: Iterable[Row]) -> StandIn | None:
    """None without DP's stand-in, or where a stage was not measured."""
    for row in rows:
        found = [(name, finite(row[f"dp_{name}_ms"])) for name in STAGES]
        stages = tuple((name, ms) for name, ms in found if ms is not None)
        step_ms = finite(row["step_ms"])
        if is_stand_in(row) and step_ms is not None and len(stages) == len(STAGES):
            return StandIn(step_ms=step_ms, stages_ms=stages)
    return None


def _alone(row: Row, margin: float, beside: Collection[Row]) -> WrapperVerdict | None:
    speedup = estimate(row, "speedup")
    if speedup is None:
        return None
    # Not a comparison of the run: whether rounds are too few for it, its interval alone says.
    compared = Comparison(str(row["case_id"]), ONE_DEVICE, speedup, margin, num_rounds=MIN_ROUNDS)
    return WrapperVerdict(
        answer=compared.answer,
        ratio=Ratio.of(mode_name(row), ONE_DEVICE, speedup),
        where=f"on {place(row)}",
        margin=margin,
        is_own_cost=row["num_devices"] == 1,
        of_ideal=() if row["num_devices"] == 1 else _of_ideal(row),
        strong=text(row["scaling"]) == "strong",
        beside_stand_in=any(map(is_stand_in, beside)),
        stand_in=_stand_in(beside),
    )


def _of_ideal(*rows: Row) -> tuple[tuple[str, Interval], ...]:
    return tuple((mode_name(row), share) for row in rows if (share := estimate(row, "efficiency")))


def _settings(rows: Mapping[str, Row], comparisons: Sequence[Comparison]) -> SettingsVerdict | None:
    if not comparisons:
        return None
    default = rows[comparisons[0].reference_id]
    changed = {c.case_id: settings(rows[c.case_id], default) for c in comparisons}
    named = {case_id: setting_names(axes) for case_id, axes in changed.items()}
    standing = setting_names(settings(default)) or "the default"
    same = [c for c in comparisons if not ALTERS & changed[c.case_id].keys()]
    winners = [c for c in comparisons if c.answer == FASTER and not c.within_margin]
    best = max([c for c in winners if c in same] or winners, key=lambda c: c.ratio.estimate, default=None)
    # One that gains the margin at most is no reason to change anything, whether or not it is slower.
    unresolved = [c for c in comparisons if c.answer == UNRESOLVED and c.ratio.high > 1 + c.margin]
    few = [c for c in comparisons if c.answer == TOO_FEW]
    known = [c for c in comparisons if c.answer != TOO_FEW]
    nearest = max(known, key=lambda c: c.ratio.high, default=None)
    slower = [c for c in comparisons if c.answer == SLOWER and not c.within_margin]
    worst = min(slower, key=lambda c: c.ratio.estimate, default=None)
    paste = ""
    if best in same and best is not None:
        given = {axis: value for axis, value in settings(rows[best.case_id]).items() if axis not in ALTERS}
        paste = ddp_call(given) if given.keys() <= PASTED else ""
    left = UNRESOLVED if unresolved else TOO_FEW if few else EQUAL
    return SettingsVerdict(
        answer=left if best is None else FASTER,
        paste=paste,
        comparisons=tuple(comparisons),
        standing=standing,
        noun="cap"
        if {axis for axes in changed.values() for axis in axes} == {"bucket_cap_mb"}
        else "setting",
        best=Ratio.of(named[best.case_id], standing, best.ratio) if best else None,
        alters=best is not None and best not in same,
        nearest=(named[nearest.case_id], nearest.ratio) if nearest else None,
        num_known=len(known),
        unresolved=tuple(named[c.case_id] for c in unresolved),
        few=tuple(named[c.case_id] for c in few),
        worst=Ratio.of(named[worst.case_id], standing, worst.ratio) if worst else None,
    )


def _communication(row: Row) -> CommunicationVerdict | None:
    exposed, step = estimate(row, EXPOSED_COMM), estimate(row, "step_ms")
    if exposed is None or step is None:
        return None
    answer = RESOLVED
    if math.isnan(exposed.low):
        answer = TOO_FEW
    elif exposed.low <= 0 <= exposed.high:
        answer = EQUAL if exposed.high < LITTLE_EXPOSED * step.estimate else UNRESOLVED
    hidden = hidden_share(row)
    return CommunicationVerdict(
        answer=answer,
        exposed_ms=exposed,
        step_ms=step.estimate,
        place=place(row),
        alone_ms=estimate(row, "comm_ms"),
        hidden_pct=hidden,
        skew_ms=estimate(row, "rank_skew_ms"),
        on_cpu=text(row["device_type"]) == "cpu",
        is_vague=hidden is None and estimate(row, "hidden_pct") is not None,
    )


def compile_verdicts(cases: pd.DataFrame, comparisons: Sequence[Comparison]) -> list[Verdict]:
    """Say for each mode of torch.compile what it brings to DDP on most devices, else to one device."""
    rows = {str(row["case_id"]): row for row in records(cases[cases["status"] == "ok"])}
    found: dict[str, list[Comparison]] = {}
    for one in over_eager(comparisons, rows.values()):
        found.setdefault(compile_mode(rows[one.case_id]), []).append(one)
    return [_compiled(own, rows) for own in found.values()]


def _compiled(comparisons: Sequence[Comparison], rows: Mapping[str, Row]) -> CompileVerdict:
    most = max(comparisons, key=lambda one: int(rows[one.case_id]["num_devices"]))
    single = [one for one in comparisons if rows[one.case_id]["mode"] == "single" and one is not most]
    ours = rows[most.case_id]
    mode = compile_mode(ours)
    given = "" if mode == "default" else f'mode="{mode}"'
    wrapped = "; model = DDP(model)" if ours["mode"] == "ddp" else ""

    def ratio(one: Comparison) -> Ratio:
        label, other = (compile_label(compile_mode(rows[i])) for i in (one.case_id, one.reference_id))
        return Ratio.of(label, other, one.ratio)

    return CompileVerdict(
        answer=most.answer,
        paste=f"model.compile({given}){wrapped}" if most.answer == FASTER and not most.within_margin else "",
        comparisons=(most, *single),
        ratio=ratio(most),
        where=f"for {mode_name(ours)} on {place(ours)}",
        margin=most.margin,
        single=tuple(ratio(one) for one in single),
        compile_s=finite(ours.get("compile_s")),
    )
