"""Writes runs as an HTML page, as Markdown, or as PNG figures."""

from __future__ import annotations

import base64
import contextlib
import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from textwrap import indent

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.findings.wording import unit_of_cases
from ddp_bench.bench.results.archive import opened
from ddp_bench.bench.results.store import load_run, write_output
from ddp_bench.bench.settings import IMAGES
from ddp_bench.bench.text import markdown as escaped
from ddp_bench.report import files, view
from ddp_bench.report.draw import figures
from ddp_bench.report.model import Card, Page, RunView, Section, Table

_TEMPLATES = FileSystemLoader(Path(__file__).parent / "templates")
"""By path: the name `report` may be a package of the user's by now."""


def build(
    runs: Sequence[Path], out: Path, *, predictions: Path | None = None, price: float | None = None
) -> Path:
    """Write one self-contained page of `runs` to `out`, whole or not at all, and return its path.

    The same runs give the same bytes. `predictions` is a file that `bench.predict --out` wrote, `price`
    that of a device for an hour. Raises UsageError for a folder that is no run, a file that holds no
    predictions, or a page that cannot be written.
    """
    _write(out, render(load(runs, out.parent, predictions=predictions, price=price)))
    return out


def _write(out: Path, text: str) -> None:
    """Write a file whole or not at all. Raises UsageError where it cannot be written."""
    write_output(
        out, lambda part: part.write_text(text, encoding="utf-8", errors="backslashreplace"), option="--out"
    )


def load(
    runs: Sequence[Path], page_folder: Path, *, predictions: Path | None = None, price: float | None = None
) -> Page:
    """Read what a page in `page_folder` shows of `runs`. Raises UsageError for a folder that is no run."""
    predicted = None if predictions is None else files.predictions(predictions)
    loaded = [load_run(run) for run in runs]
    with contextlib.ExitStack() as stack:
        offered = [files.offered(stack.enter_context(opened(run)), page_folder) for run in runs]
    units = [unit_of_cases(run.cases) for run in loaded]
    if price is not None and IMAGES not in units:
        raise UsageError(
            f"--price-per-device-hour is for an epoch of images, and {runs[0]} counts {units[0]}; "
            "leave it out"
        )
    return view.page(loaded, offered, predicted, price=price)


def render(page: Page) -> str:
    """Return the page as HTML; the template only places what the view model holds."""
    environment = Environment(
        loader=_TEMPLATES,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # The policy lets this one script run, by its hash; no text of a run can become another.
    script, _, _ = _TEMPLATES.get_source(environment, "report.js")
    sha256 = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template("report.html.j2").render(
        page=page,
        drawings={figure.key: figures.svg(figure) for figure in page.figures},
        script=script,
        script_sha256=sha256,
    )


def write_markdown(runs: Sequence[Path], out: Path | None, *, price: float | None = None) -> str:
    """Write the summary of `runs` to `out` and return its path; without `out` return the summary."""
    text = markdown(load(runs, Path(), price=price))
    if out is None:
        return text.rstrip("\n")
    _write(out, text)
    return str(out)


def write_png(runs: Sequence[Path], folder: Path, *, predictions: Path | None = None) -> list[Path]:
    """Write every figure of `runs` as `folder`/KEY.png, on white. Raises UsageError where it cannot."""
    drawn = load(runs, folder, predictions=predictions).figures
    if not drawn:
        raise UsageError("there is no figure to write: no case on several devices has a measurement")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for figure in drawn:
            write = partial(_write_bytes, figures.png(figure))
            write_output(folder / f"{figure.key}.png", write, option="--png")
    except OSError as error:
        raise UsageError(f"cannot write into {folder}: {error.strerror}; name a folder with --png") from None
    return [folder / f"{figure.key}.png" for figure in drawn]


def _write_bytes(content: bytes, part: Path) -> None:
    part.write_bytes(content)


def markdown(page: Page) -> str:
    """Return a summary for a pull request, in GitHub's dialect: answers first, numbers folded."""
    parts = [] if page.together is None else _together(page.together)
    if page.differences is not None:
        parts += _titled(page.differences)
    parts += [part for run in page.runs for part in _run(run)]
    return "\n\n".join(parts) + "\n"


def _together(section: Section) -> list[str]:
    parts = [f"**{escaped(finding)}**" for finding in section.findings]
    parts += [f"> {escaped(warning)}" for warning in section.warnings]
    if section.following is not None:
        why = section.following.why
        parts += [f"{escaped(why[:1].upper() + why[1:])}:", _code(section.following.command, "sh")]
    return [*parts, *(part for table in section.tables for part in _titled(table))]


def _titled(table: Table) -> tuple[str, str]:
    return f"## {escaped(table.title)}", _table(table)


def _run(run: RunView) -> list[str]:
    parts = [f"## {escaped(run.heading)}", f"**{escaped(run.status)}**"]
    parts.append("\n".join(f"- {line}" for card in run.cards for line in (_answer(card),)))
    if run.following is not None:
        parts += [f"Next, {escaped(run.following.why)}:", _code(run.following.command, "sh")]
    parts.append("\n>\n".join(f"> {escaped(warning)}" for warning in run.warnings))
    more = [f"- {escaped(note)}" for note in run.notes]
    more += [f"- {escaped(caution.name)}: {escaped(caution.value)}" for caution in run.cautions]
    parts.append("\n".join(more))
    for table in (*run.tables[:1], run.unmeasured):
        if table is not None:
            parts += [f"<details><summary>{escaped(table.title)}</summary>", _table(table), "</details>"]
    parts.append(" · ".join(escaped(part) for part in run.subtitle))
    return [part for part in parts if part]


def _answer(card: Card) -> str:
    paste = f"\n\n{indent(_code(card.paste, 'python'), '  ')}" if card.paste else ""
    return f"**{escaped(card.title)}: {escaped(card.label)}.** {escaped(card.sentence)}{paste}"


def _code(text: str, language: str) -> str:
    """Write a line of code; what would end the fence, as text."""
    return escaped(text) if "```" in text or "\n" in text else f"```{language}\n{text}\n```"


def _table(table: Table) -> str:
    names = [escaped(column.name) for column in table.columns]
    rules = ["---:" if column.kind == "number" else "---" for column in table.columns]
    rows = [[escaped(cell) for cell in row] for row in table.rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (names, rules, *rows))
