"""The page's first answers as Markdown, for the summary of a CI job. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from report.model import Page, RunView, Table

_MARKUP = re.compile(r"[\\`*_<>#!|~&$@]|\](?=[\[(:])|://")


def markdown(page: Page) -> str:
    """Warnings, verdict, results and what was not measured of every run, in GitHub's dialect."""
    parts = [part for run in page.runs for part in _run(run)]
    if page.differences is not None:
        parts = [f"## {_plain(page.differences.title)}", _table(page.differences), *parts]
    return "\n\n".join(parts) + "\n"


def _run(run: RunView) -> list[str]:
    parts = [f"## {_plain(run.title)}", " · ".join(_plain(part) for part in run.subtitle)]
    parts += [f"> {_plain(warning)}" for warning in run.warnings]
    parts.append("\n".join(f"- {_plain(sentence)}" for sentence in run.verdict))
    for table in (*run.tables[:1], run.unmeasured):
        if table is not None:
            parts += [f"### {_plain(table.title)}", _table(table)]
    return [part for part in parts if part]


def _table(table: Table) -> str:
    names = [_plain(column.name) for column in table.columns]
    rules = ["---:" if column.kind == "number" else "---" for column in table.columns]
    rows = [[_plain(cell) for cell in row] for row in table.rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (names, rules, *rows))


def _plain(text: str) -> str:
    """Text on one line in which nothing is markup, a mention or a link."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    # Entities rather than backslashes: GitHub reads mentions and dollars after it has taken backslashes out.
    return _MARKUP.sub(lambda found: "".join(f"&#{ord(c)};" for c in found[0]), line)
