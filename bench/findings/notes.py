"""What is said below the answers, as records: why DDP scales so, what was not measured."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from ..results.aggregate import typical_of
from ..results.comparisons import FASTER, SLOWER, Comparison
from ..results.round_times import RoundTimes
from ..results.schema import records
from ..stats.interval import Interval
from ..text import listed
from .answers import by_compile_label, ddp_at_headline, ddp_reference, headline
from .numbers import number, per_second, plural, rate, with_interval
from .slow_ranks import SlowRank
from .verdicts import Finding
from .wording import (
    are_shared,
    case_parts,
    estimate,
    place,
    short_mode,
    text,
    truth,
    unit_of,
)

_REASONS = 3
_REASON_LENGTH = 160


@dataclass(frozen=True, kw_only=True)
class ScalingLoss(Finding):
    """What DDP's step takes longer for than that of `single`, under weak scaling: parts that add up."""

    place: str
    step_ms: float
    single_ms: float
    own_work_ms: Interval
    beside_others_ms: Interval
    communication_ms: Interval

    @property
    def sentence(self) -> str:
        parts = {
            "DDP's own work on one device": self.own_work_ms,
            "compute beside that of the other devices": self.beside_others_ms,
            "communication": self.communication_ms,
        }
        signed = {
            name: f"{'' if part.estimate < 0 else '+'}{with_interval(part)}" for name, part in parts.items()
        }
        added = ", ".join(f"{name} {part} ms" for name, part in signed.items())
        step, single = number(self.step_ms), number(self.single_ms)
        return f"A step of DDP on {self.place} takes {step} ms, of single {single} ms: {added}."


@dataclass(frozen=True, kw_only=True)
class Overlap(Finding):
    """Intervals of throughputs overlap of which one is faster."""

    unit: str

    @property
    def sentence(self) -> str:
        rates = per_second(self.unit)
        drift = f"ratios are taken within rounds, {rates} also hold the machine's drift"
        return f"Intervals of {rates} may overlap where one case is faster: {drift}."


@dataclass(frozen=True, kw_only=True)
class Shared(Finding):
    """Cases that share devices, in one line: they tell nothing about scaling."""

    place: str
    rates: tuple[tuple[str, Interval | None], ...]
    unit: str

    @property
    def sentence(self) -> str:
        rates = "; ".join(f"{mode} {rate(found, self.unit)}" for mode, found in self.rates)
        return f"On {self.place}, which tell nothing about scaling: {rates}."


@dataclass(frozen=True, kw_only=True)
class NothingMeasured(Finding):
    """No case ended with status ok."""

    @property
    def sentence(self) -> str:
        return "Nothing was measured: no case ended with status ok."


@dataclass(frozen=True, kw_only=True)
class LeftOut(Finding):
    """Cases without a number: those that were tried, or that were skipped; by reason."""

    what: str
    """`not measured` or `skipped`."""
    num_cases: int
    names: tuple[tuple[str, tuple[str, ...]], ...]
    """By reason what is concerned: `DDP on 2 GPUs with cap 1, cap 25`."""

    @property
    def sentence(self) -> str:
        told = "; ".join(f"{listed(names)}: {why}" for why, names in self.names[:_REASONS])
        others = len(self.names) - _REASONS
        more = f"; and for {plural(others, 'other reason')}" if others > 0 else ""
        return f"{plural(self.num_cases, 'case')} {self.what}: {told}{more}."


def notes(
    cases: pd.DataFrame,
    times: RoundTimes,
    comparisons: Sequence[Comparison] = (),
    slow: Sequence[SlowRank] = (),
) -> list[Finding]:
    """What stands below the answers of a run; none where there is nothing to add.

    In this order: why DDP scales as it does, which of the `slow` ranks others wait for, overlapping
    intervals, cases that share devices, cases without a number.
    """
    losses = [
        finding and replace(finding, of=label)
        for label, group in by_compile_label(cases)
        if not (ddp := ddp_at_headline(group)).empty
        for finding in [_scaling_loss(group, ddp, times)]
    ]
    measured = (cases["status"] == "ok").any()
    found = (
        *losses,
        *(one for one in slow if not one.is_uneven),
        _overlap(cases, comparisons),
        _shared(cases),
        None if measured else NothingMeasured(),
        _unmeasured(cases),
        _skipped(cases),
    )
    return [finding for finding in found if finding is not None]


def _scaling_loss(cases: pd.DataFrame, ddp: pd.DataFrame, times: RoundTimes) -> ScalingLoss | None:
    row = ddp_reference(ddp)
    one_device = cases[cases["num_devices"] == 1]
    single, wrapped = (one_device[one_device["mode"] == mode] for mode in ("single", "ddp"))
    if text(row["scaling"]) != "weak" or truth(row["oversubscribed"]) or row["num_devices"] == 1:
        return None
    if single.empty or wrapped.empty:
        return None
    typical = typical_of(times)
    step, local = ((row["case_id"], phase) for phase in ("timed", "no_sync"))
    alone, one = ((rows.iloc[0]["case_id"], "timed") for rows in (single, wrapped))
    parts = [typical.difference_ms(*pair) for pair in ((one, alone), (local, one), (step, local))]
    if any(math.isnan(part.low) for part in parts):
        return None
    step_ms, single_ms = (typical.step_ms(case_id).estimate for case_id, _ in (step, alone))
    own_work, beside_others, communication = parts
    return ScalingLoss(
        place=place(row),
        step_ms=step_ms,
        single_ms=single_ms,
        own_work_ms=own_work,
        beside_others_ms=beside_others,
        communication_ms=communication,
    )


def _overlap(cases: pd.DataFrame, comparisons: Sequence[Comparison]) -> Overlap | None:
    rates = {str(row["case_id"]): estimate(row, "images_per_s") for row in records(headline(cases))}
    decided = (one for one in comparisons if one.answer in (FASTER, SLOWER))
    pairs = ((rates.get(one.case_id), rates.get(one.reference_id)) for one in decided)
    overlaps = any(a and b and a.low <= b.high and b.low <= a.high for a, b in pairs)
    return Overlap(unit=unit_of(cases.iloc[0])) if overlaps else None


def _shared(cases: pd.DataFrame) -> Shared | None:
    shared = cases[(cases["status"] == "ok") & are_shared(cases)]
    shared = shared[~shared["case_id"].isin(headline(cases)["case_id"])]
    if shared.empty:
        return None
    rows = records(shared.drop_duplicates(["mode", "num_devices"]))
    rates = tuple((short_mode(row), estimate(row, "images_per_s")) for row in rows)
    return Shared(place=place(rows[0]), rates=rates, unit=unit_of(rows[0]))


def _skipped(cases: pd.DataFrame) -> LeftOut | None:
    """Cases that were planned and never tried."""
    tried = set(cases.loc[cases["status"] != "skipped", "num_devices"])
    told = [
        (text(row["reason"]), *(case_parts(row) if count in tried else (plural(count, "device"), "")))
        for row in records(cases[cases["status"] == "skipped"])
        if (count := int(row["num_devices"]))
    ]
    return _left_out("skipped", told)


def _unmeasured(cases: pd.DataFrame) -> LeftOut | None:
    told = []
    for row in records(_failed(cases)):
        short = textwrap.shorten(text(row["reason"]), _REASON_LENGTH, placeholder=" …").rstrip(".")
        told.append((f"{row['status']} ({short})" if short else str(row["status"]), *case_parts(row)))
    return _left_out("not measured", told)


def _left_out(what: str, told: Sequence[tuple[str, str, str]]) -> LeftOut | None:
    alike: dict[tuple[str, str, bool], dict[str, None]] = {}
    for reason, where, changed in told:
        alike.setdefault((reason, where, bool(changed)), {})[changed] = None
    names: dict[str, list[str]] = {}
    for (reason, where, has_settings), their in alike.items():
        with_settings = f" with {listed(list(their))}" if has_settings else ""
        names.setdefault(reason, []).append(f"{where}{with_settings}")
    by_reason = tuple((reason, tuple(own)) for reason, own in names.items())
    return LeftOut(what=what, num_cases=len(told), names=by_reason) if told else None


def failed_modes(cases: pd.DataFrame, modes: Iterable[str]) -> list[str]:
    """Name those of `modes` of which a case failed and none was measured."""
    failed = set(_failed(cases)["mode"])
    measured = set(cases.loc[cases["status"] == "ok", "mode"])
    return [mode for mode in modes if mode in failed - measured]


def why_not_measured(cases: pd.DataFrame, modes: Iterable[str]) -> list[str]:
    """Say of each of `modes` without a measured case why its first failed; of a run without any, too.

    Modes with one reason share a sentence. Empty where every mode has a measured case, or only skipped ones
    beside those of another mode.
    """
    has_any = bool((cases["status"] == "ok").any())
    told: dict[str, list[str]] = {}
    # Without a number of any mode, the reference that nobody named may be the cause.
    for mode in failed_modes(cases, dict.fromkeys(modes if has_any else (*modes, "single"))):
        row = _failed(cases[cases["mode"] == mode]).iloc[0]
        status = "" if row["status"] == "failed" else f"{row['status']}: "
        told.setdefault(f"{status}{text(row['reason'])}", []).append(mode)
    if told or has_any:
        return [f"every case of {' and '.join(of)} failed: {why}" for why, of in told.items()]
    return [
        f"nothing was measured: {text(cases['reason'].iloc[0])}" if len(cases) else "nothing was measured"
    ]


def _failed(cases: pd.DataFrame) -> pd.DataFrame:
    found: pd.DataFrame = cases[~cases["status"].isin(["ok", "skipped"])]
    return found
