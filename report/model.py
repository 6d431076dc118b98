"""Everything the page shows, as plain data: strings are final, figures hold numbers to draw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MOST_RUNS = 8
"""Runs that one drawing can tell apart by mark, line and colour."""


@dataclass(frozen=True)
class Point:
    """One mark of a figure; `low` and `high` are its 95% interval, None where unknown."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    hollow: bool = False
    note: str = ""


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
    """The words around a drawing; `key` is unique on the page, `beside` quotes another machine's figures."""

    key: str
    title: str
    caption: str
    how_to_read: str
    beside: str = ""

    @property
    def alt(self) -> str:
        """What a reader who cannot see the figure is told: what it shows, then its finding."""
        return f"{self.title}. {self.caption}"


@dataclass(frozen=True, kw_only=True)
class Chart(Figure):
    """Marks over a quantity."""

    x_label: str
    y_label: str
    ticks: tuple[Tick, ...]
    panels: tuple[Panel, ...]
    from_zero: bool = True
    log_x: bool = False
    log_y: bool = False

    @property
    def alt(self) -> str:
        """Its axes, then its finding."""
        return f"{self.y_label} against {self.x_label}. {self.caption}"


@dataclass(frozen=True)
class Part:
    """A piece of a bar: a label of the legend and a duration."""

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
    compute_end_ms: float | None
    end_ms: float | None


@dataclass(frozen=True, kw_only=True)
class Timeline(Figure):
    """Steps drawn over time, one track below the other on one scale."""

    tracks: tuple[Track, ...]


@dataclass(frozen=True)
class Spread:
    """Step times of one rank: percentiles 5, 25, 50, 75 and 95, and the longest; `style` as of a series."""

    label: str
    style: str
    num_steps: int
    low_ms: float
    quarter_ms: float
    median_ms: float
    three_quarters_ms: float
    high_ms: float
    longest_ms: float


@dataclass(frozen=True, kw_only=True)
class Spreads(Figure):
    """Distributions of step times, one below the other on one scale."""

    rows: tuple[Spread, ...]


Drawing = Chart | Bars | Timeline | Spreads


@dataclass(frozen=True)
class Column:
    """A column of a table.

    `kind` is empty, `number` (aligned to the right), `long` (broken into lines) or `links`.
    """

    name: str
    kind: str = ""


@dataclass(frozen=True)
class Link:
    """A place on the page, or a file beside it."""

    label: str
    href: str


@dataclass(frozen=True)
class Table:
    """A titled table of final strings; a missing value is an empty string.

    `below` explains what it holds; `links` are those of each row, shown in the column of that kind.
    """

    title: str
    note: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    below: tuple[str, ...] = ()
    links: tuple[tuple[Link, ...], ...] = ()


@dataclass(frozen=True)
class CaseRounds:
    """The timed blocks of one case: `rows` by round under `columns`, or in a `line` where there are many."""

    key: str
    label: str
    case_id: str
    num_rounds: int
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    line: str
    traces: tuple[Link, ...]


@dataclass(frozen=True)
class Download:
    """A file of the run, carried by the page as it is on disk."""

    key: str
    name: str
    media_type: str
    size: str
    text: str


@dataclass(frozen=True)
class RunFiles:
    """What the page offers of a run's files: traces by case; `left_out` says what is not carried and why."""

    downloads: tuple[Download, ...] = ()
    left_out: tuple[str, ...] = ()
    traces: Mapping[str, tuple[Link, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Fact:
    """One condition of a run; `code` marks text to be read letter by letter."""

    name: str
    value: str
    code: bool = False


@dataclass(frozen=True)
class Group:
    """Conditions that belong together."""

    title: str
    facts: tuple[Fact, ...]


@dataclass(frozen=True)
class Section:
    """Figures and tables under a heading of their own."""

    title: str
    notes: tuple[str, ...]
    figures: tuple[Drawing, ...]
    tables: tuple[Table, ...]


@dataclass(frozen=True)
class RunView:
    """One run on the page."""

    key: str
    title: str
    subtitle: tuple[str, ...]
    warnings: tuple[str, ...]
    verdict: tuple[str, ...]
    figures: tuple[Drawing, ...]
    paper: Section | None
    tables: tuple[Table, ...]
    rounds: tuple[CaseRounds, ...]
    files: RunFiles
    unmeasured: Table | None
    conditions: tuple[Group, ...]
    condition_tables: tuple[Table, ...]
    topology: str
    predicted: Section | None = None


@dataclass(frozen=True)
class Page:
    """The whole page; `differences` compares the conditions of several runs, `together` their numbers."""

    title: str
    runs: tuple[RunView, ...]
    differences: Table | None
    together: Section | None = None
