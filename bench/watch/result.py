"""The end of a watch: what its rows say."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from ..common.cli import say


def finish(folder: Path, exit_code: int, quiet: bool) -> None:
    """Say on stderr what was seen."""
    files = (folder / "ranks").glob("*.jsonl")
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    counts = Counter(row["kind"] for row in rows)
    if not quiet:
        say(f"the command ended with {exit_code}; rows in {folder}: {dict(counts)}")
