"""Writes a run as an HTML page, or as Markdown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..bench.common.cli import format_command, print_message
from ..bench.common.errors import UsageError
from ..bench.findings.findings import Conclusion
from ..bench.page.page import Page, make_data_link
from ..bench.page.render import render_html, render_markdown
from ..bench.predict.output import Predictions
from ..bench.results.archive import is_archive, open_run_folder
from ..bench.results.disk import describe_error, read_bytes, replace_file
from ..bench.results.published import list_scalings
from ..bench.results.run_folder import write_output
from ..bench.results.store import RunData, load_run
from ..bench.results.tables import encode_table
from .page import Files, make_page
from .watched import make_watched_page

_MAX_PREDICTIONS_BYTES = 64 * 2**20
_MAX_DATA_BYTES = 2**18


def build(
    run: Path,
    out: Path | None,
    *,
    predictions: Path | None = None,
    compare_with: Path | None = None,
    as_markdown: bool = False,
) -> str:
    """Write a page of `run` to `out`, whole or not at all, and return its path.

    Without `out` the page stands beside the run's files, and Markdown is what is returned. The page is one
    self-contained HTML document, or a summary in Markdown; the same run gives the same bytes.
    `predictions` is a file of what `bench.predict --json` printed, `compare_with` a run whose efficiency
    takes the place of published ones. Raises UsageError for a folder that is no run, a file without
    predictions, runs that do not compare, or a page that cannot be written.
    """
    if out is None and not as_markdown:
        out = run.with_suffix(".html") if is_archive(run) else run / "report.html"
    predicted = None
    if predictions is not None:
        content = read_bytes(predictions, most_bytes=_MAX_PREDICTIONS_BYTES, follow=True)
        predicted = Predictions.from_json(content, source=str(predictions))
    loaded = load_run(run)
    if compare_with is not None:
        loaded = _replace_reference(loaded, compare_with)
    made = build_page(loaded, out.parent if out else Path(), predictions=predicted)
    text = render_markdown(made) if as_markdown else render_html(made)
    if out is None:
        return text.rstrip("\n")
    written = text.encode(errors="backslashreplace")
    write_output(out, lambda part: part.write_bytes(written), option="--out")
    return str(out)


def _replace_reference(run: RunData, path: Path) -> RunData:
    """Return the run with the efficiencies of the run at `path` in place of published ones."""
    theirs = tuple(list_scalings(load_run(path), path.name))
    if not any(ours.can_compare(one) for ours in list_scalings(run) for one in theirs):
        raise UsageError(
            f"--compare-with {path}: its efficiency does not compare with that of {run.path}; both need DDP "
            "on as many GPUs of one model, the same built-in architecture, image size and precision, batches "
            "within a factor of 2, and 5 rounds"
        )
    return replace(run, published=theirs)


def build_page(
    run: RunData,
    page_folder: Path,
    *,
    predictions: Predictions | None = None,
    conclusion: Conclusion | None = None,
) -> Page:
    """Make the page of `run` for `page_folder`, with links to the run's files and its numbers."""
    with open_run_folder(run.path) as folder:
        # What an archive is unpacked to is gone when somebody reads the page.
        files = Files.from_folder(folder, None if is_archive(run.path) else page_folder)
        cases = encode_table(run.cases) if run.from_log else (folder / "cases.csv").read_bytes()
        if len(cases) <= _MAX_DATA_BYTES:
            files = replace(files, data=make_data_link("cases.csv", cases))
    if run.manifest.watched is not None:
        if predictions is not None:
            raise UsageError(
                f"{run.path} is a watched training: its page draws no predictions; leave them out"
            )
        return make_watched_page(run, files)
    return make_page(run, files, predictions, conclusion)


def write_page(folder: Path, page: Page | None = None) -> Path | None:
    """Write the page of a run whose files are up to date; None where it cannot be written, which is said.

    `page` is that of the run, where it is made already.
    """
    place = folder / "report.html"
    try:
        content = render_html(page or build_page(load_run(folder), folder)).encode(errors="backslashreplace")
        replace_file(place, lambda part: part.write_bytes(content))
    except (OSError, UsageError) as error:
        why = f"{place} cannot be written: {describe_error(error)}; every measurement is kept"
        print_message(f"error: {why}: make room, then {format_command('report', str(folder))} makes the page")
        return None
    return place
