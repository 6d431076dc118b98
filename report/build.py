"""Writes a run as an HTML page, or as Markdown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..bench.common.cli import command, say
from ..bench.common.errors import UsageError
from ..bench.findings.findings import Conclusion
from ..bench.page.page import Page, data_link
from ..bench.page.render import html, markdown
from ..bench.predict.output import Predictions
from ..bench.results.archive import is_archive, opened
from ..bench.results.disk import read_bytes, reason, replace_file
from ..bench.results.published import scalings_of
from ..bench.results.run_folder import write_output
from ..bench.results.store import RunData, load_run
from ..bench.results.tables import table_bytes
from .page import Files, page
from .watched import watched_page

_MOST_PREDICTIONS_BYTES = 64 * 2**20
_MOST_DATA_BYTES = 2**18


def build(
    run: Path,
    out: Path | None,
    *,
    predictions: Path | None = None,
    compare_with: Path | None = None,
    as_markdown: bool = False,
) -> str:
    """Write a page of `run` to `out`, whole or not at all, and return its path; without `out` return it.

    The page is one self-contained HTML document, or a summary in Markdown; the same run gives the same bytes.
    `predictions` is a file of what `bench.predict --json` printed, `compare_with` a run whose
    efficiency takes the place of published ones. Raises UsageError for a folder that is no run, a file
    without predictions, runs that do not compare, or a page that cannot be written.
    """
    predicted = None
    if predictions is not None:
        content = read_bytes(predictions, most_bytes=_MOST_PREDICTIONS_BYTES, follow=True)
        predicted = Predictions.from_json(content, source=str(predictions))
    loaded = load_run(run)
    if compare_with is not None:
        loaded = _held_against(loaded, compare_with)
    made = page_of(loaded, out.parent if out else Path(), predictions=predicted)
    text = markdown(made) if as_markdown else html(made)
    if out is None:
        return text.rstrip("\n")
    written = text.encode(errors="backslashreplace")
    write_output(out, lambda part: part.write_bytes(written), option="--out")
    return str(out)


def _held_against(run: RunData, path: Path) -> RunData:
    """Return the run with the efficiencies of the run at `path` in place of published ones."""
    theirs = tuple(scalings_of(load_run(path), path.name))
    if not any(ours.compares_with(one) for ours in scalings_of(run) for one in theirs):
        raise UsageError(
            f"--compare-with {path}: its efficiency does not compare with that of {run.path}; both need DDP "
            "on as many GPUs of one model, the same built-in architecture, image size and precision, batches "
            "within a factor of 2, and 5 rounds"
        )
    return replace(run, published=theirs)


def page_of(
    run: RunData,
    page_folder: Path,
    *,
    predictions: Predictions | None = None,
    conclusion: Conclusion | None = None,
) -> Page:
    """Make the page of `run` for `page_folder`, with links to the run's files and its numbers."""
    with opened(run.path) as folder:
        # What an archive is unpacked to is gone when somebody reads the page.
        files = Files.of(folder, None if is_archive(run.path) else page_folder)
        cases = table_bytes(run.cases) if run.from_log else (folder / "cases.csv").read_bytes()
        if len(cases) <= _MOST_DATA_BYTES:
            files = replace(files, data=data_link("cases.csv", cases))
    if run.manifest.watched is not None:
        if predictions is not None:
            raise UsageError(
                f"{run.path} is a watched training: its page draws no predictions; leave them out"
            )
        return watched_page(run, files)
    return page(run, files, predictions, conclusion)


def write_page(folder: Path, page: Page | None = None) -> Path | None:
    """Write the page of a run whose files are up to date; None where it cannot be written, which is said.

    `page` is that of the run, where it is made already.
    """
    place = folder / "report.html"
    try:
        content = html(page or page_of(load_run(folder), folder)).encode(errors="backslashreplace")
        replace_file(place, lambda part: part.write_bytes(content))
    except (OSError, UsageError) as error:
        why = f"{place} cannot be written: {reason(error)}; every measurement is kept"
        say(f"error: {why}: make room, then {command('report', str(folder))} makes the page")
        return None
    return place
