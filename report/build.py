"""Writes a run as an HTML page, or as Markdown."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..bench.common.text import markdown as escaped
from ..bench.predict.output import Predictions
from ..bench.results.archive import is_archive, opened
from ..bench.results.disk import read_bytes
from ..bench.results.store import load_run, write_output
from .page import Files, Page, data_link, page
from .table import Cell
from .watched import watched_page

_TEMPLATES = FileSystemLoader(Path(__file__).parent / "templates")
"""By path: the name `report` may be a package of the user's by now."""

_MOST_PREDICTIONS_BYTES = 64 * 2**20
_MOST_DATA_BYTES = 2**18


def build(run: Path, out: Path, *, predictions: Path | None = None) -> Path:
    """Write one self-contained page of `run` to `out`, whole or not at all, and return its path.

    The same run gives the same bytes. `predictions` is a file of what `bench.predict --json` printed. Raises
    UsageError for a folder that is no run, a file without predictions, or a page that cannot be written.
    """
    _write(out, render(load(run, out.parent, predictions=predictions)))
    return out


def load(run: Path, page_folder: Path, *, predictions: Path | None = None) -> Page:
    """Read what a page in `page_folder` shows of `run`. Raises UsageError for a folder that is no run."""
    predicted = None
    if predictions is not None:
        content = read_bytes(predictions, most_bytes=_MOST_PREDICTIONS_BYTES, follow=True)
        predicted = Predictions.from_json(content, source=str(predictions))
    loaded = load_run(run)
    with opened(run) as folder:
        # What an archive is unpacked to is gone when somebody reads the page.
        files = Files.of(folder, None if is_archive(run) else page_folder)
        cases = folder / "cases.csv"
        if cases.stat().st_size <= _MOST_DATA_BYTES:
            files = replace(files, data=data_link(cases.name, cases.read_bytes()))
    if loaded.manifest.watched is not None:
        return watched_page(loaded, files)
    return page(loaded, files, predicted)


def _environment(*, html: bool) -> Environment:
    environment = Environment(
        loader=_TEMPLATES,
        autoescape=html,  # noqa: S701 - Markdown is escaped by a filter of its own
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"options": _options, "css": _css_text, "unbroken": _unbroken}
    environment.filters |= {"md": escaped, "md_cell": _markdown_cell}
    return environment


def render(page: Page) -> str:
    """Return the page as HTML; the template only places what the page holds."""
    environment = _environment(html=True)
    # The policy lets this one script run, by its hash; no text of a run can become another.
    script, _, _ = _TEMPLATES.get_source(environment, "report.js")
    sha256 = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template = environment.get_template("report.html.j2")
    return template.render(page=page, script=script, script_sha256=sha256)


def markdown(page: Page) -> str:
    """Return a summary for a pull request, in GitHub's dialect: answers first, numbers folded."""
    rendered = _environment(html=False).get_template("report.md.j2").render(page=page)
    return re.sub(r"\n{3,}", "\n\n", rendered).strip("\n") + "\n"


def _options(command: str) -> list[str]:
    """Split a command before its options, where a line may break."""
    return re.split(r" (?=--)", command)


def _unbroken(shown: str) -> str:
    """Keep an interval on one line: a word joiner follows its dash."""
    return shown.replace("\N{EN DASH}", "\N{EN DASH}\N{WORD JOINER}")


def _css_text(text: str) -> str:
    """Write a string of CSS in which no character has a meaning."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\{ord(c):x} " for c in text)


def _markdown_cell(cell: Cell) -> str:
    return escaped(cell if isinstance(cell, str) else " ".join(link.label for link in cell))


def write_markdown(run: Path, out: Path | None) -> str:
    """Write the summary of `run` to `out` and return its path; without `out` return the summary."""
    text = markdown(load(run, Path()))
    if out is None:
        return text.rstrip("\n")
    _write(out, text)
    return str(out)


def _write(out: Path, content: str) -> None:
    """Write a file whole or not at all. Raises UsageError where it cannot be written."""
    write_output(
        out, lambda part: part.write_bytes(content.encode(errors="backslashreplace")), option="--out"
    )
