"""Finds what the page can link to of a run's own files."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote

from ddp_bench.bench.predict.output import Predictions
from ddp_bench.bench.results.disk import read_bytes
from ddp_bench.bench.results.store import FAILURES
from ddp_bench.report.model import Hyperlink, RunFiles

_MOST_PREDICTIONS_BYTES = 64 * 2**20

_FILES = ("cases.csv", "comparisons.csv", "blocks.csv", "manifest.json")
_TRACE = re.compile(r"(?P<case_id>.+)-rank(?P<rank>\d+)\.json\.gz")


def offered(folder: Path, page_folder: Path) -> RunFiles:
    """Return the files of the run in `folder`, with links where it lies in or below `page_folder`."""
    below = _below(folder, page_folder)
    return RunFiles(
        tuple(_linked(name, below) for name in _FILES if (folder / name).is_file()),
        {} if below is None else _traces(folder, below),
        {
            name: _linked(name, below)
            for name in sorted(f"{FAILURES}/{path.name}" for path in (folder / FAILURES).glob("*.txt"))
        },
    )


def predictions(path: Path) -> Predictions:
    """Read what `bench.predict --out` wrote. Raises UsageError where the file holds something else."""
    content = read_bytes(path, most_bytes=_MOST_PREDICTIONS_BYTES, follow=True)
    return Predictions.from_json(content, source=str(path))


def _below(folder: Path, page_folder: Path) -> Path | None:
    """Return the way from the page to the run, where the run lies in the page's folder.

    Links are relative, so the page and the run have to move together.
    """
    try:
        return folder.resolve().relative_to(page_folder.resolve())
    except ValueError:
        return None


def _linked(name: str, below: Path | None) -> Hyperlink:
    """Name a file of the run, and lead there where the page can."""
    return Hyperlink(name, "" if below is None else _address(below / name))


def _address(path: Path) -> str:
    return f"./{quote(path.as_posix())}"


def _traces(folder: Path, below: Path) -> dict[str, tuple[Hyperlink, ...]]:
    """Return links by case, lowest rank first."""
    found: dict[str, list[tuple[int, Hyperlink]]] = {}
    for path in sorted((folder / "traces").glob("*.json.gz")):
        if (match := _TRACE.fullmatch(path.name)) is not None:
            rank, href = int(match["rank"]), _address(below / "traces" / path.name)
            found.setdefault(match["case_id"], []).append((rank, Hyperlink(f"rank {rank}", href)))
    return {
        case_id: tuple(link for _, link in sorted(of_case, key=lambda pair: pair[0]))
        for case_id, of_case in found.items()
    }
