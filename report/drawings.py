"""Holds what a figure shows, as plain data to draw; the words around it are final."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ddp_bench.bench.stats import Interval

MOST_RUNS = 8
"""Runs that one drawing can tell apart by mark, line and colour."""


@dataclass(frozen=True)
class Point:
    """One mark of a figure; `low` and `high` are its 95% interval, None where unknown.

    `tip` is shown to who points at it.
    """

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    hollow: bool = False
    note: str = ""
    tip: str = field(default="", compare=False)

    @classmethod
    def at(cls, x: float, value: Interval, *, hollow: bool = False, tip: str = "") -> Point:
        """Make a mark of `value` at `x`, without an interval where that is unknown."""
        low, high = (end if math.isfinite(end) else None for end in (value.low, value.high))
        return cls(x, value.estimate, low, high, hollow, tip=tip)

    @property
    def interval(self) -> Interval:
        """Its value with the interval, NaN where unknown."""
        low, high = (math.nan if end is None else end for end in (self.low, self.high))
        return Interval(self.y, low, high)


@dataclass(frozen=True)
class Series:
    """Marks of one kind; `style` names their look, `joined` draws a line through them.

    Styles: `single`, `dp`, `ddp`, `other`, `ideal`, `break`, and `run1`, `run2`, … for one of several.
    `area` draws intervals as an area along the line instead of bars.
    """

    label: str
    style: str
    points: tuple[Point, ...]
    joined: bool = True
    area: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes of a chart; panels are stacked and share the x axis.

    `y_label` replaces the chart's where panels show different quantities.
    """

    title: str
    series: tuple[Series, ...]
    y_label: str = ""


@dataclass(frozen=True)
class Tick:
    """A labelled place on the x axis."""

    x: float
    label: str


@dataclass(frozen=True, kw_only=True)
class Figure:
    """The words around a drawing; `key` is unique on the page."""

    key: str
    title: str
    caption: str
    how_to_read: str

    @property
    def alt(self) -> str:
        """Say to a reader who cannot see the figure what it shows, then its finding."""
        return f"{self.title}. {self.caption}"

    @property
    def axis_note(self) -> str:
        """Warn of axes that leave out zero, as they are drawn; empty where none does."""
        return ""


@dataclass(frozen=True, kw_only=True)
class Chart(Figure):
    """Marks over a quantity; `direct` writes the name of each series beside its end, without a legend."""

    x_label: str
    y_label: str
    ticks: tuple[Tick, ...]
    panels: tuple[Panel, ...]
    from_zero: bool = True
    log_x: bool = False
    log_y: bool = False
    direct: bool = False

    @property
    def alt(self) -> str:
        """Say its axes, then its finding."""
        return f"{self.y_label} against {self.x_label}. {self.caption}"

    @property
    def axis_note(self) -> str:
        """Warn of vertical axes that leave out zero; a logarithmic one has none."""
        without = [low > 0 or high < 0 for low, high in map(self.y_limits, self.panels)]
        if self.log_y or not any(without):
            return ""
        axes = "The vertical axis does" if len(without) == 1 else "Vertical axes do"
        return f" {axes} not start at zero{'' if all(without) else ' in every panel'}."

    def y_limits(self, panel: Panel) -> tuple[float, float]:
        """The ends of a panel's vertical axis; never below zero where nothing drawn is."""
        seen = [y for s in panel.series for p in s.points for y in (p.y, p.low, p.high) if y is not None]
        low, high = min(seen), max(seen)
        if self.log_y:
            return low / 1.3, high * 1.3
        if self.from_zero:
            return 0.0, 1.08 * high
        pad = 0.2 * (high - low) or 0.05 * high
        return (max(low - pad, 0.0) if low >= 0 else low - pad), high + pad


@dataclass(frozen=True)
class Part:
    """A part of a bar: a label of the legend and a duration."""

    label: str
    ms: float


@dataclass(frozen=True)
class Bar:
    """A case as the sum of its parts, in the order of the step."""

    label: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, kw_only=True)
class Bars(Figure):
    """Stacked bars of milliseconds, one below the other."""

    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Bucket:
    """One bucket's moments in milliseconds since the start of the backward; None where not measured."""

    label: str
    ready_ms: float | None
    launch_ms: float | None
    start_ms: float | None
    done_ms: float | None


@dataclass(frozen=True)
class Track:
    """One step of one case: its buckets, and from when to when communication was exposed."""

    title: str
    buckets: tuple[Bucket, ...]
    compute_end: Interval | None
    """In ms, as the other."""
    end: Interval | None

    @property
    def compute_end_ms(self) -> float | None:
        """When the last gradient is ready."""
        return None if self.compute_end is None else self.compute_end.estimate

    @property
    def end_ms(self) -> float | None:
        """When the last all-reduce is done."""
        return None if self.end is None else self.end.estimate

    @property
    def is_drawable(self) -> bool:
        """Whether any moment is known."""
        return self.compute_end_ms is not None or self.end_ms is not None


@dataclass(frozen=True, kw_only=True)
class Timeline(Figure):
    """Steps drawn over time, one track below the other on one scale."""

    tracks: tuple[Track, ...]


@dataclass(frozen=True)
class Ratio:
    """A row of a forest plot; `style` as of a series."""

    label: str
    interval: Interval
    style: str
    hollow: bool = False
    num_rounds: int | None = None


@dataclass(frozen=True, kw_only=True)
class Forest(Figure):
    """Ratios to one reference, one below the other on a logarithmic axis; `margin` counts as equal."""

    x_label: str
    margin: float
    rows: tuple[Ratio, ...]


Drawing = Chart | Bars | Timeline | Forest
