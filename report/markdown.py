"""The page's first answers as Markdown, for the summary of a CI job. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.text import markdown as escaped

if TYPE_CHECKING:
    from report.model import Page, RunView, Table


def markdown(page: Page) -> str:
    """Warnings, verdict, results and what was not measured of every run, in GitHub's dialect."""
    parts = [part for run in page.runs for part in _run(run)]
    above = [page.differences] if page.differences is not None else []
    above += page.together.tables if page.together is not None else ()
    parts = [part for table in above for part in (f"## {escaped(table.title)}", _table(table))] + parts
    return "\n\n".join(parts) + "\n"


def _run(run: RunView) -> list[str]:
    parts = [f"## {escaped(run.title)}", " · ".join(escaped(part) for part in run.subtitle)]
    parts += [f"> {escaped(warning)}" for warning in run.warnings]
    parts.append("\n".join(f"- {escaped(sentence)}" for sentence in run.verdict))
    for table in (*run.tables[:1], run.unmeasured):
        if table is not None:
            parts += [f"### {escaped(table.title)}", _table(table)]
    return [part for part in parts if part]


def _table(table: Table) -> str:
    names = [escaped(column.name) for column in table.columns]
    rules = ["---:" if column.kind == "number" else "---" for column in table.columns]
    rows = [[escaped(cell) for cell in row] for row in table.rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (names, rules, *rows))
