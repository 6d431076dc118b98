"""Prints a page on a terminal; where that is narrow, tables leave columns out, and no cell is wrapped."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console as RichConsole
from rich.console import JustifyMethod
from rich.table import Table as RichTable
from rich.text import Text

from ..common.console import PIPED_WIDTH
from ..common.text import begin_sentence, escape_controls, escape_lines
from .page import Cell, Heading, Page, Table

TEXT_WIDTH = 100
"""Columns of a sentence; longer lines are hard to read."""

LABEL_WIDTH = 16
"""Columns of what stands before an answer, as `Communication`; more where that is longer."""

_GAP = 1
"""Columns between those of a table."""


def print_page(page: Page, *, place: str = "", piped_width: int = PIPED_WIDTH) -> None:
    """Print a page on stdout: answers first, then the numbers, what to do last, and the `place` of the page.

    Where stdout is no terminal, tables are at most `piped_width` columns wide.
    """
    width = RichConsole(file=sys.stdout).width if sys.stdout.isatty() else piped_width
    text_width = min(width, TEXT_WIDTH)
    trust = [f"{claim.capitalize()}? {worth}" for claim, worth in page.trust.items()]
    why, command = (page.following.why, page.following.command) if page.following else ("", "")
    after = [("" if i else "Confidence", line) for i, line in enumerate(trust)]
    after.append(("Next step", begin_sentence(why)))
    ran = [("This run", page.status * (page.tone is None)), ("Conditions", " · ".join(page.setup))]
    answers = [(card.title, card.sentence) for card in page.cards]
    labels = max([LABEL_WIDTH, *(len(escape_controls(label)) + 2 for label, _ in (*answers, *after))])

    def label_lines(found: Iterable[tuple[str, str]]) -> list[str]:
        told = ((label, said) for label, said in found if said)
        return [_fill_line(f"{escape_controls(label):<{labels}}", said, text_width) for label, said in told]

    if page.tone is not None:
        said = Text(_fill_line(f"{page.tone.sign} ", page.status, text_width), style=page.tone.style)
        RichConsole(file=sys.stdout).print(said, soft_wrap=True)
    first = _fill_line("", " · ".join(filter(None, (page.heading, *page.subtitle))), text_width)
    head = (first, *(_fill_line("", line, text_width) for line in (*page.facts, *page.warnings)))
    _print(*head)
    _print(*label_lines(answers), gap=any(head))
    for i, table in enumerate((*filter(None, [page.differences]), *page.tables)):
        _print(table.title, gap=any(head) or bool(answers) or i > 0)
        _show_table(table, width, text_width)
    explained = " The report explains the columns." if place and page.terms else ""
    _print(f"In parentheses: {page.intervals}.{explained}" if page.intervals and page.tables else "")
    _print(*(_fill_line("- ", note, text_width) for note in page.notes), gap=True)
    if page.savings:
        _print(_fill_line("", page.savings.note, text_width), f"{page.savings.title}:", gap=True)
        _show_table(page.savings, width, text_width)
    report = f"{'Report':<{labels}}{place}" if place else ""
    _print(*label_lines(after), f"  {command}" if command else "", *label_lines(ran), report, gap=True)


def _print(*lines: str, gap: bool = False) -> None:
    """Print the lines that are not empty, behind an empty one if there are any and a `gap` is asked for."""
    told = [escape_lines(line) for line in lines if line]
    if told:
        print(*([""] if gap else []), *told, sep="\n")


def _fill_line(label: str, said: str, width: int) -> str:
    """Return a text behind its label, `width` columns wide at most."""
    return textwrap.fill(
        escape_lines(said),
        width,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _show_table(table: Table, width: int, text_width: int) -> None:
    if any(column.kind == "long" for column in table.columns):  # no line is too long where each is a text
        rows = [[*map(_format_cell, row)] for row in table.rows]
        first = max(cell_len(row[0]) for row in rows)
        for label, *texts in rows:
            _print(_fill_line(f"  {label:>{first}}  ", ": ".join(filter(None, texts)), text_width))
        return
    kept = choose_columns(table, width)
    RichConsole(file=sys.stdout, width=max(width, _measure_width(table, kept))).print(make_grid(table, width))
    _print(*(_fill_line("", line, text_width) for line in table.below))


def make_grid(table: Table, width: int) -> RichTable:
    """Return a table for rich, with the columns that fit in `width`; no cell of it is wrapped."""
    made = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    kept = choose_columns(table, width)
    for i in kept:
        column = table.columns[i]
        justify: JustifyMethod = "right" if column.kind == "number" else "left"
        made.add_column(Text("\n".join(_split_heading(column))), justify=justify, no_wrap=True)
    for place, row in enumerate(table.rows):
        style = "bold green" if place == table.best else None
        made.add_row(*(Text(_format_cell(row[i])) for i in kept), style=style)
    return made


def choose_columns(table: Table, width: int) -> list[int]:
    """Choose the columns of a table that fit in `width`; of those that may go, as few as possible do."""
    kept = [*range(len(table.columns))]
    while _measure_width(table, kept) > width:
        last = max(kept, key=lambda i: table.columns[i].drop)
        if not table.columns[last].drop:
            break
        kept.remove(last)
    return kept


def _measure_width(table: Table, kept: Sequence[int]) -> int:
    cells = ((*_split_heading(table.columns[i]), *(_format_cell(row[i]) for row in table.rows)) for i in kept)
    return sum(max(map(cell_len, column)) + _GAP for column in cells) - _GAP


def _split_heading(column: Heading) -> list[str]:
    """Split a heading before its unit, which stands below it."""
    name, unit, rest = escape_controls(column.name).partition(" (")
    return [name, f"({rest}"] if unit else [name]


def _format_cell(cell: Cell) -> str:
    return escape_controls(cell if isinstance(cell, str) else " ".join(link.label for link in cell))
