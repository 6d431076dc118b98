"""Command line: `python -m report RUN [RUN …] [--out FILE | --format markdown | --png DIR]`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..bench.cli import Parser, command, guarded, named, price
from ..bench.errors import ExitCode, UsageError


def main(argv: Sequence[str] | None = None) -> int:
    """Write what was asked for, print its path, and return the exit status: 0, or 2 for a user's mistake."""
    return guarded("report", lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    print(_write(_parser().parse_args(argv)))
    return ExitCode.OK


def _parser() -> Parser:
    parser = Parser(
        prog=command("report"), description="Write one self-contained HTML page about one or more runs."
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="results folder or archive of a run"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="page to write (default for one run: RUN/report.html), or file of --markdown",
    )
    parser.add_argument(
        "--predictions",
        type=Path,
        metavar="FILE",
        help=f"draw what `{command('predict')} RUN --out FILE` predicted from this run",
    )
    parser.add_argument(
        "--price-per-device-hour",
        metavar="PRICE",
        help="adds to the tables what an epoch of ImageNet's size costs, in the currency of PRICE",
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--format",
        choices=("html", "markdown"),
        default="html",
        help="markdown: print answers and results, fit for a comment, or write them to --out",
    )
    instead.add_argument(
        "--markdown",
        action="store_const",
        const="markdown",
        dest="format",
        help="the same as --format markdown",
    )
    instead.add_argument("--png", type=Path, metavar="DIR", help="write each figure as DIR/*.png instead")
    return parser


def _write(arguments: argparse.Namespace) -> str:
    # Pandas and scipy take a second to import, which --help does without.
    from .build import build, write_markdown, write_png

    runs, out, predictions = arguments.runs, arguments.out, arguments.predictions
    given = arguments.price_per_device_hour
    hourly = None if given is None else named("price_per_device_hour", price, given)
    markdown = arguments.format == "markdown"
    if predictions is not None and (markdown or len(runs) > 1):
        raise UsageError("--predictions are drawn with one run; without other runs and --format markdown")
    if markdown:
        return write_markdown(runs, out, price=hourly)
    if arguments.png is None:
        return str(build(runs, _page(runs, out), predictions=predictions, price=hourly))
    if out is not None:
        raise UsageError("--out names the page or the file of --markdown; leave it out beside --png")
    return "\n".join(map(str, write_png(runs, arguments.png, predictions=predictions)))


def _page(runs: Sequence[Path], out: Path | None) -> Path:
    if out is not None:
        return out
    if len(runs) > 1:
        raise UsageError(f"{len(runs)} runs make one page of their own; say where with --out FILE")
    from ..bench.results.archive import is_archive  # see _write

    (run,) = runs
    return run.with_suffix(".html") if is_archive(run) else run / "report.html"
