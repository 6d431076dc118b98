"""Command line: `python -m report RUN [--markdown] [--out FILE]`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..bench.common.cli import Parser, format_command, make_main
from ..bench.common.errors import ExitCode, UsageError


@make_main("report")
def main(argv: list[str]) -> int:
    """Write what was asked for, print its path, and return the exit status: 0, or 2 for a user's mistake."""
    arguments = _make_parser().parse_args(argv)
    if arguments.others:
        both = format_command("gate", str(arguments.run), arguments.others[0], "--html", "FILE")
        raise UsageError(f"a page is of one run; to compare two: {both}")
    if arguments.markdown and arguments.predictions is not None:
        raise UsageError("--predictions are drawn; leave --markdown out")
    # Pandas and scipy take a second to import, which --help does without.
    from .build import build

    more = {"predictions": arguments.predictions, "compare_with": arguments.compare_with}
    print(build(arguments.run, arguments.out, **more, as_markdown=arguments.markdown))
    return ExitCode.OK


def _make_parser() -> Parser:
    parser = Parser(
        "report",
        "Write one self-contained HTML page about a run.",
        examples=(
            ("RUN", "writes RUN/report.html"),
            ("RUN --out page.html", "elsewhere"),
            ("RUN --markdown", "for a comment"),
        ),
        exit_codes="0 written, 2 for a wrong command line or a folder that is no run.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="results folder or archive of a run")
    parser.add_argument("others", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="page to write (default: RUN/report.html; of RUN.zip, RUN.html), or file of --markdown",
    )
    parser.add_argument(
        "--predictions",
        type=Path,
        metavar="FILE",
        help=f"draw what `{format_command('predict')} RUN --gpus 64 --network ib-400g --json` predicted",
    )
    parser.add_argument(
        "--compare-with",
        type=Path,
        metavar="RUN",
        help="compare the efficiency with that of this run, such as an archive, instead of published ones",
    )
    parser.add_argument(
        "--markdown",
        action="store_true",
        help="print answers and results, fit for a comment, or write them to --out",
    )
    return parser
