"""The comparisons that a run answers: named by its plan before it measures, decided by one interval."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from ..axes import DDP_AXES, DDP_DEFAULTS
from ..settings import IMAGES
from ..stats.interval import Interval
from ..stats.one_run import MIN_ROUNDS
from .typical import Typical

FASTER, SLOWER, EQUAL, UNRESOLVED, TOO_FEW = ANSWERS = (
    "faster",
    "slower",
    "no difference",
    "unresolved",
    "too few rounds",
)
"""What may be said of a case against its reference; only the first three are answers."""

OPEN = (UNRESOLVED, TOO_FEW)
"""Answers that more rounds would settle."""

METRIC = "images_per_s"

ONE = Interval(1.0, 1.0, 1.0)
"""What a case has over itself."""


@dataclass(frozen=True)
class Comparison:
    """Throughput of a case over that of its reference, and what the interval says at the margin."""

    case_id: str
    reference_id: str
    ratio: Interval
    margin: float
    """A fraction: what the user calls equal."""
    num_rounds: int
    """Rounds of the one with fewer."""

    @property
    def answer(self) -> str:
        """One of `ANSWERS`."""
        if self.num_rounds < MIN_ROUNDS or math.isnan(self.ratio.low):
            return TOO_FEW
        if self.ratio.excludes(1.0):
            return FASTER if self.ratio.low > 1 else SLOWER
        return EQUAL if self.within_margin else UNRESOLVED

    @property
    def within_margin(self) -> bool:
        """Whether the whole interval lies within what the user calls equal."""
        return 1 / (1 + self.margin) <= self.ratio.low and self.ratio.high <= 1 + self.margin

    @property
    def is_narrow(self) -> bool:
        """Whether the interval is narrow enough for the margin, wherever it lies."""
        return self.half_width <= math.log1p(self.margin) / 2

    @property
    def half_width(self) -> float:
        """Half the interval of the ratio's logarithm; infinite where it is unknown."""
        low, high = self.ratio.low, self.ratio.high
        return math.inf if math.isnan(low) else math.log(high / low) / 2

    def row(self, unit: str = IMAGES) -> dict[str, Any]:
        """A row of comparisons.csv of a run that counts `unit`."""
        return {
            "case_id": self.case_id,
            "reference_id": self.reference_id,
            "metric": METRIC,
            "unit": unit,
            **self.ratio.columns("ratio"),
            "margin": self.margin,
            "answer": self.answer,
            "num_rounds": self.num_rounds,
        }


def of_table(rows: Iterable[Mapping[Any, Any]]) -> list[Comparison]:
    """The comparisons that a comparisons.csv holds."""
    return [
        Comparison(
            str(row["case_id"]),
            str(row["reference_id"]),
            Interval(*(float(row[name]) for name in ("ratio", "ratio_low", "ratio_high"))),
            float(row["margin"]),
            int(row["num_rounds"]),
        )
        for row in rows
    ]


def pairs_of(rows: Iterable[Mapping[Any, Any]]) -> list[tuple[str, str]]:
    """The pairs to compare, (case, reference), of rows of cases.csv or of a plan.

    At every device count that the cases have for themselves: on GPUs DDP over DP, and every other case over
    DDP's default. Counts that share devices are compared only where there is no other. So for eager and
    compiled cases by themselves; then each mode of torch.compile, by `single` and DDP's default, over eager.
    """
    by_mode = by_compile(rows)
    within = [pair for own in by_mode.values() for pair in _within(own)]
    return within + _across([*by_mode.values()])


def by_compile(rows: Iterable[Mapping[Any, Any]]) -> dict[str, list[Mapping[Any, Any]]]:
    """Rows by their mode of torch.compile, in order of appearance: a run has eager cases first."""
    found: dict[str, list[Mapping[Any, Any]]] = {}
    for row in rows:
        found.setdefault(compile_mode(row), []).append(row)
    return found


def compile_mode(row: Mapping[Any, Any] | pd.Series) -> str:
    """The mode of torch.compile of a case; `off` where the row does not say."""
    mode = row.get("compile")
    return mode if isinstance(mode, str) and mode else "off"


def _across(groups: Sequence[Sequence[Mapping[Any, Any]]]) -> list[tuple[str, str]]:
    """Pairs of cases that differ in torch.compile alone: those of the other groups over the first's."""
    first, *others = groups or [[]]
    plain = {_but_compile(row): str(row["case_id"]) for row in first}
    found = []
    for group in others:
        counts = sorted({int(row["num_devices"]) for row in _on_own_devices(group)})
        defaults = {default_of([row for row in group if row["num_devices"] == count]) for count in counts}
        compared = [row for row in group if row["mode"] == "single" or str(row["case_id"]) in defaults]
        found += [
            (str(row["case_id"]), plain[_but_compile(row)]) for row in compared if _but_compile(row) in plain
        ]
    return found


def _but_compile(row: Mapping[Any, Any]) -> tuple[Any, ...]:
    """What names a case among those of its mode of torch.compile; `optimize_ddp` is of compiled ones."""
    axes = [axis for axis in DDP_AXES if axis != "optimize_ddp"]
    changed = tuple("" if _is_default(row, axis) else str(row[axis]) for axis in axes)
    return (row["mode"], int(row["num_devices"]), *(changed if row["mode"] == "ddp" else ()))


def _on_own_devices(rows: Iterable[Mapping[Any, Any]]) -> list[Mapping[Any, Any]]:
    """Cases whose devices are theirs alone; all where none on several devices has them."""
    rows = list(rows)
    own = [row for row in rows if row["oversubscribed"] is not True]
    return own if any(row["num_devices"] > 1 for row in own) else rows


def _within(rows: Iterable[Mapping[Any, Any]]) -> list[tuple[str, str]]:
    """The pairs of cases of one mode of torch.compile."""
    several = _on_own_devices(row for row in rows if row["num_devices"] > 1 and row["mode"] != "single")
    found = []
    for count in sorted({int(row["num_devices"]) for row in several}):
        here = [row for row in several if row["num_devices"] == count]
        default = default_of(here)
        if default is None:
            continue
        # On CPU cores DP is this suite's own stand-in, of which nothing is learnt about DP against DDP.
        dp = [row for row in here if row["mode"] == "dp" and row.get("device_type") != "cpu"]
        found += [(default, str(row["case_id"])) for row in dp]
        others = [str(row["case_id"]) for row in here if row["mode"] != "dp"]
        found += [(case_id, default) for case_id in others if case_id != default]
    return found


def default_of(here: Iterable[Mapping[Any, Any]]) -> str | None:
    """The DDP case that a user gets without settings, else the first DDP case; None without one."""
    ddp = [row for row in here if row["mode"] == "ddp"]
    plain = [row for row in ddp if all(_is_default(row, axis) for axis in DDP_AXES)]
    return str((plain or ddp)[0]["case_id"]) if ddp else None


def _is_default(row: Mapping[Any, Any], axis: str) -> bool:
    value = row.get(axis)
    return value is None or value != value or str(value) == str(DDP_DEFAULTS[axis])  # noqa: PLR0124 - NaN


def compared(
    pairs: Sequence[tuple[str, str]],
    typical: Typical,
    *,
    units: Mapping[str, int],
    num_rounds: Mapping[str, int],
    margin: float,
) -> list[Comparison]:
    """Compare the pairs that were measured; all intervals hold at once with 95%. `units` are of a step."""
    known = [pair for pair in pairs if all(num_rounds.get(case_id) for case_id in pair)]
    return [
        Comparison(
            case_id,
            reference_id,
            steps.inverted(units[case_id] / units[reference_id]),
            margin,
            min(num_rounds[case_id], num_rounds[reference_id]),
        )
        for (case_id, reference_id), steps in zip(known, typical.ratios(known), strict=True)
    ]


def over_eager(comparisons: Iterable[Comparison], rows: Iterable[Mapping[Any, Any]]) -> list[Comparison]:
    """Those of the comparisons that hold a mode of torch.compile against another; `rows` are the cases."""
    mode = {str(row["case_id"]): compile_mode(row) for row in rows}
    known = [one for one in comparisons if one.case_id in mode and one.reference_id in mode]
    return [one for one in known if mode[one.case_id] != mode[one.reference_id]]


def over_default(comparisons: Iterable[Comparison], rows: Iterable[Mapping[Any, Any]]) -> dict[str, Interval]:
    """By case its rate over that of DDP's default; DP stands below the line in its comparison.

    Args:
        comparisons: of a run.
        rows: the cases that are looked at.
    """
    case = {str(row["case_id"]): row for row in rows}
    found: dict[str, Interval] = {}
    for one in comparisons:
        ours, reference = case.get(one.case_id), case.get(one.reference_id)
        if ours is None or reference is None or compile_mode(ours) != compile_mode(reference):
            continue
        if reference["mode"] == "dp":
            found[one.case_id] = ONE
            found[one.reference_id] = one.ratio.inverted()
        else:
            found[one.reference_id] = ONE
            found[one.case_id] = one.ratio
    return found
