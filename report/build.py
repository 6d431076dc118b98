"""Runs in, page out."""

from __future__ import annotations

import base64
import hashlib
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined

from bench.errors import UsageError
from bench.results.store import load_run, replace_file
from report import files, view
from report.draw import figures

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from report.drawings import Drawing
from report.model import Page


def build(runs: Sequence[Path], out: Path, *, predictions: Path | None = None) -> Path:
    """Write one self-contained page of `runs` to `out`, whole or not at all, and return its path.

    The same runs give the same bytes. `predictions` is a file that `bench.predict --out` wrote. Raises
    UsageError for a folder that is no run, a file that holds no predictions, or a page that cannot be
    written.
    """
    html = render(load(runs, out.parent, predictions=predictions))
    write(out, html)
    return out


def write(out: Path, text: str) -> None:
    """Write a file whole or not at all. Raises UsageError where it cannot be written."""
    try:
        replace_file(out, lambda part: part.write_text(text, encoding="utf-8", errors="backslashreplace"))
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}; name a writable file with --out") from None


def load(runs: Sequence[Path], page_folder: Path, *, predictions: Path | None = None) -> Page:
    """What a page in `page_folder` shows of `runs`. Raises UsageError for a folder that is no run."""
    outlook = None if predictions is None else files.predictions(predictions)
    return view.page([load_run(run) for run in runs], files.offered(runs, page_folder), outlook)


def drawings(page: Page) -> list[Drawing]:
    """Every figure of the page, in its order."""
    own = [
        figure
        for run in page.runs
        for figures in (run.figures, *(s.figures for s in (run.paper, run.predicted) if s is not None))
        for figure in figures
    ]
    return [*(page.together.figures if page.together else ()), *own]


def render(page: Page) -> str:
    """The page as HTML; the template only places what the view model holds."""
    environment = Environment(
        loader=PackageLoader("report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # The policy lets this one script run, by its hash; no text of a run can become another.
    script, _, _ = PackageLoader("report").get_source(environment, "report.js")
    sha256 = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template("report.html.j2").render(
        page=page,
        drawings={figure.key: figures.svg(figure) for figure in drawings(page)},
        script=script,
        script_sha256=sha256,
    )
