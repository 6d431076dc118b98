"""Everything the page shows, as plain data: strings are final, figures hold numbers to draw."""

from __future__ import annotations

from dataclasses import dataclass


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
    """Marks of one kind. `style` is `single`, `dp`, `ddp` or `ideal`; `joined` draws a line through them."""

    label: str
    style: str
    points: tuple[Point, ...]
    joined: bool = True


@dataclass(frozen=True)
class Panel:
    """One pair of axes of a figure; panels are stacked and share the x axis."""

    title: str
    series: tuple[Series, ...]


@dataclass(frozen=True)
class Tick:
    """A labelled place on the x axis."""

    x: float
    label: str


@dataclass(frozen=True)
class Figure:
    """A figure and the words around it; `key` is unique on the page."""

    key: str
    title: str
    x_label: str
    y_label: str
    ticks: tuple[Tick, ...]
    panels: tuple[Panel, ...]
    caption: str
    how_to_read: str
    from_zero: bool = True
    log_x: bool = False
    log_y: bool = False

    @property
    def alt(self) -> str:
        """What a reader who cannot see the figure is told: its axes, then its finding."""
        return f"{self.y_label} against {self.x_label}. {self.caption}"


@dataclass(frozen=True)
class Column:
    """A column of a table; `kind` is empty, `number` (aligned to the right) or `long` (broken into lines)."""

    name: str
    kind: str = ""


@dataclass(frozen=True)
class Table:
    """A titled table of final strings; a missing value is an empty string."""

    title: str
    note: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]


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
class RunView:
    """One run on the page."""

    key: str
    title: str
    subtitle: tuple[str, ...]
    warnings: tuple[str, ...]
    verdict: tuple[str, ...]
    figures: tuple[Figure, ...]
    tables: tuple[Table, ...]
    unmeasured: Table | None
    conditions: tuple[Group, ...]
    condition_tables: tuple[Table, ...]
    topology: str


@dataclass(frozen=True)
class Page:
    """The whole page; `differences` compares the conditions of several runs."""

    title: str
    runs: tuple[RunView, ...]
    differences: Table | None
