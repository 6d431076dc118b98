"""Command line: `python -m report RUN [RUN …] [--out report.html]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from bench.errors import USAGE_EXIT_CODE, UsageError
from report.build import build

if TYPE_CHECKING:
    from collections.abc import Sequence


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see python -m report --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Build the page, print its path, return the exit status: 0, or 2 for a mistake of the user."""
    parser = _Parser(prog="report", description="Write one self-contained HTML page about one or more runs.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="results folder of a run")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="page to write (default: RUN/report.html, for one run)"
    )
    try:
        arguments = parser.parse_args(argv)
        print(build(arguments.runs, _out(arguments.runs, arguments.out)))
    except UsageError as error:
        print(f"report: error: {error}", file=sys.stderr)
        return USAGE_EXIT_CODE
    return 0


def _out(runs: Sequence[Path], out: Path | None) -> Path:
    if out is not None:
        return out
    if len(runs) > 1:
        raise UsageError(f"{len(runs)} runs make one page of their own; say where with --out FILE")
    return runs[0] / "report.html"


if __name__ == "__main__":
    sys.exit(main())
