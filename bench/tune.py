"""Finds the bucket cap with which DDP trains fastest: a run with the preset `tune`."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command and of every rank; the exit code."""
    from ddp_bench.bench.cli import speaker
    from ddp_bench.bench.run.main import main as run

    description = (
        "Find the DDP setting that trains a model fastest: a race, in which the slowest leave one after "
        f"another. It is `{speaker('run')} --preset tune`: other options override what the preset "
        "says, such as --bucket-cap-mb."
    )
    arguments = sys.argv[1:] if argv is None else argv
    return run(["--preset", "tune", *arguments], name="tune", description=description)


if __name__ == "__main__":
    sys.exit(main())
