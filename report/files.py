"""Reads what the page can offer of a run's own files: texts that fit into it, traces that lie beside it."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from ddp_bench.bench.findings.numbers import mib, number
from ddp_bench.bench.results.disk import read_bytes
from ddp_bench.bench.results.store import FAILURES
from ddp_bench.bench.scaling.document import Predictions
from ddp_bench.bench.text import csv_cell, csv_text
from ddp_bench.report.model import Download, Hyperlink, RunFiles

MOST_BYTES = 2 * 2**20
"""A larger file is not carried: the page has to stay light enough to send."""

_MOST_PREDICTIONS_BYTES = 64 * 2**20

_CARRIED = {
    "cases.csv": "text/csv",
    "comparisons.csv": "text/csv",
    "blocks.csv": "text/csv",
    "manifest.json": "application/json",
}
_TRACE = re.compile(r"(?P<case_id>.+)-rank(?P<rank>\d+)\.json\.gz")


def offered(folders: Sequence[Path], page_folder: Path) -> tuple[RunFiles, ...]:
    """Return the files of every run in `folders` that a page in `page_folder` can carry or link to."""
    return tuple(_of_run(folder, page_folder, f"run{i}") for i, folder in enumerate(folders, start=1))


def predictions(path: Path) -> Predictions:
    """Read what `bench.predict --out` wrote. Raises UsageError where the file holds something else."""
    content = read_bytes(path, most_bytes=_MOST_PREDICTIONS_BYTES, follow=True)
    return Predictions.from_json(content, source=str(path))


def _of_run(folder: Path, page_folder: Path, key: str) -> RunFiles:
    downloads, left_out = [], []
    for name, media_type in _CARRIED.items():
        path = folder / name
        if not path.is_file():
            continue
        num_bytes = path.stat().st_size
        if num_bytes > MOST_BYTES:
            left_out.append(
                f"{name} is not carried by this page: it has {mib(num_bytes)}, and {mib(MOST_BYTES)} is the "
                "most that is. It lies in the run's folder."
            )
            continue
        written = read_bytes(path, most_bytes=MOST_BYTES).decode("utf-8", errors="replace")
        if media_type == "text/csv":
            written = _without_formulas(written)
        size = f"{number(num_bytes / 1024)} KiB"
        downloads.append(Download(f"{key}-{name.replace('.', '-')}", name, media_type, size, written))
    below = _below(folder, page_folder)
    traces = {} if below is None else _traces(folder, below)
    return RunFiles(tuple(downloads), tuple(left_out), traces, _failures(folder, below))


def _without_formulas(table: str) -> str:
    """Write the table as `bench.results.store` does, in case someone else has written it."""
    safe = io.StringIO()
    try:
        rows = ([csv_cell(csv_text(cell)) for cell in row] for row in csv.reader(io.StringIO(table)))
        csv.writer(safe, lineterminator="\n").writerows(rows)
    except csv.Error:
        return ""
    return safe.getvalue()


def _below(folder: Path, page_folder: Path) -> Path | None:
    """Return the way from the page to the run, where the run lies in the page's folder.

    Links are relative, so the page and the run have to move together.
    """
    try:
        return folder.resolve().relative_to(page_folder.resolve())
    except ValueError:
        return None


def _failures(folder: Path, below: Path | None) -> dict[str, Hyperlink]:
    """Return what is kept of failed cases, by its name in the run's folder."""
    names = sorted(f"{FAILURES}/{path.name}" for path in (folder / FAILURES).glob("*.txt"))
    return {
        name: Hyperlink(name, "" if below is None else f"./{quote((below / name).as_posix())}")
        for name in names
    }


def _traces(folder: Path, below: Path) -> dict[str, tuple[Hyperlink, ...]]:
    """Return links by case, lowest rank first."""
    found: dict[str, list[tuple[int, Hyperlink]]] = {}
    for path in sorted((folder / "traces").glob("*.json.gz")):
        if (match := _TRACE.fullmatch(path.name)) is not None:
            href = quote((below / "traces" / path.name).as_posix())
            rank = int(match["rank"])
            found.setdefault(match["case_id"], []).append((rank, Hyperlink(f"rank {rank}", f"./{href}")))
    return {
        case_id: tuple(link for _, link in sorted(of_case, key=lambda pair: pair[0]))
        for case_id, of_case in found.items()
    }
