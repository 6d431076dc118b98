"""Runs in, page out: the only module of the report that reads or writes files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined

from bench.errors import UsageError
from bench.store import load_run, replace_file
from report import figures, view

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from report.model import Page


def build(runs: Sequence[Path], out: Path) -> Path:
    """Write one self-contained page of `runs` to `out`, whole or not at all, and return its path.

    The same runs give the same bytes. Raises UsageError for a folder that is no run, or a page that
    cannot be written.
    """
    html = render(view.page([load_run(run) for run in runs]))
    try:
        replace_file(out, lambda part: part.write_text(html, encoding="utf-8", errors="backslashreplace"))
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}; name a writable file with --out") from None
    return out


def render(page: Page) -> str:
    """The page as HTML; the template only places what the view model holds."""
    environment = Environment(
        loader=PackageLoader("report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    drawn = [
        figure for run in page.runs for figure in (*run.figures, *(run.paper.figures if run.paper else ()))
    ]
    drawings = {figure.key: figures.svg(figure) for figure in drawn}
    return environment.get_template("report.html.j2").render(page=page, drawings=drawings)
