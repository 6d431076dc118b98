"""A page as plain data: final strings, tables, and figures that draw themselves; it knows no run."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..common.cli import NextStep


class Link(NamedTuple):
    """A file beside the page, or a place on it; empty where the page cannot lead there."""

    label: str
    href: str


def make_data_link(name: str, csv: bytes) -> Link:
    """Make a link to a file that the page itself holds, which a browser saves under `name`."""
    return Link(name, f"data:text/csv;base64,{base64.b64encode(csv).decode()}")


Cell = str | tuple[Link, ...]


class Heading(NamedTuple):
    """The head of a column; `kind` is empty, `number` (right), `short`, `long` (in lines) or `links`."""

    name: str
    kind: str = ""
    drop: int = 0
    """Order in which a terminal that is too narrow drops columns, the highest first; 0 is never dropped."""

    @property
    def term(self) -> str:
        """The name without its unit, and what stands before a colon in it."""
        return self.name.partition(" (")[0].partition(":")[0]


@dataclass(frozen=True)
class Table:
    """A titled table; a missing value is an empty string. `below` explains what it holds."""

    title: str
    note: str
    columns: tuple[Heading, ...]
    rows: tuple[tuple[Cell, ...], ...]
    below: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    """The whole name of each row, where its first cell is a part of it: what the page's filter reads."""
    best: int | None = None
    """The row that stands out."""


@dataclass(frozen=True)
class Figure:
    """A figure and the words around it; `key` is unique on the page.

    `draw` fills an empty canvas of Matplotlib, `height_pt` points high. `note` says how to read it; `terms`
    are words of the page that it uses.
    """

    key: str
    title: str
    caption: str
    note: str
    height_pt: float
    draw: Callable[[Any], None]
    terms: tuple[str, ...] = ()

    @property
    def alt(self) -> str:
        """Say what the figure shows, then its finding."""
        return f"{self.title}. {self.caption}"


@dataclass(frozen=True)
class Section:
    """Figures and tables under a heading of their own."""

    key: str
    title: str
    notes: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()


class Card(NamedTuple):
    """One answer: `state` is `found`, `equal`, `open` or a tone's name, `label` says it, `paste` is code."""

    title: str
    state: str
    label: str
    sentence: str
    paste: str = ""


class Tone(NamedTuple):
    """The colour of a verdict, and the sign beside it for those who do not see colours."""

    name: str
    sign: str
    emoji: str
    """For Markdown, which has no colours."""
    style: str
    """Style on a terminal."""


GOOD = Tone("good", "✔", "✅", "bold green")
BAD = Tone("bad", "✘", "❌", "bold red")
UNSURE = Tone("unsure", "?", "⚠️", "bold yellow")


@dataclass(frozen=True, kw_only=True)
class Page:
    """A whole page: `title` names it, `heading` says of what it is; what is not given is not shown."""

    title: str
    headline: str = ""
    """The result; without it the first card's sentence stands there."""
    heading: str = ""
    status: str = ""
    """The decision, and behind a dot or a colon more about it."""
    tone: Tone | None = None
    """Tone of the status, where it is a verdict."""
    facts: Sequence[str] = ()
    """Sentences to know before the numbers."""
    subtitle: Sequence[str] = ()
    """Facts that go on from the heading."""
    setup: Sequence[str] = ()
    """Facts of how and where it was measured, which come last."""
    command: str = ""
    warnings: Sequence[str] = ()
    """Sentences that speak against the numbers."""
    cards: Sequence[Card] = ()
    trust: Mapping[str, str] = field(default_factory=dict)
    """Trust in the answers, by what they claim; empty where there are none."""
    following: NextStep | None = None
    differences: Table | None = None
    """Conditions that differ between two runs, which may be the cause of what the page says."""
    savings: Table | None = None
    """Time that changes would save, the largest first."""
    cautions: Sequence[tuple[str, str]] = ()
    """Things to know before trusting it: a kind and a sentence each, which trust sums up."""
    notes: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    sections: Sequence[Section] = ()
    """Sections between the notes and the numbers."""
    tables: Sequence[Table] = ()
    tables_heading: str = "All cases"
    folds: Sequence[Section] = ()
    files: Sequence[Link] = ()
    data: Link | None = None
    """The numbers as CSV within the page."""
    conditions: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    intervals: str = ""
    """Meaning of the numbers in parentheses."""
    are_bars: bool = False
    """True where figures draw these intervals as bars."""
    terms: Mapping[str, str] = field(default_factory=dict)
    """Meanings of the words of figures and the headings of tables: each is said where it first stands."""
