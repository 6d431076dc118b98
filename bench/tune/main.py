"""Find the DDP setting that trains a model fastest: a run with the preset `tune`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..cli import speaker
from ..run import main as run


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command and of every rank; the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    description = (
        "Find the DDP setting that trains a model fastest: a race, in which the slowest leave one after "
        f"another. It is `{speaker('run')} --preset tune`: other options override what the preset "
        "says, such as --bucket-cap-mb."
    )
    return run.main(["--preset", "tune", *arguments], name="tune", description=description)
