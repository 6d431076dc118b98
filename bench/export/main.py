"""A run in the format of another tool: dashboards and regression trackers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .. import cli
from ..errors import ExitCode, UsageError
from ..results.schema import EXPORTED

ZIP = "zip"

DEFAULT = "images_per_s"
"""Where a format takes one metric and none is named."""


class Format(NamedTuple):
    """A format that a run can be written in, and the options that change it."""

    meaning: str
    takes: tuple[str, ...] = ()


FORMATS = {
    "pytorch": Format("records of PyTorch's OSS benchmark database, schema v3", ("host_names",)),
    "bencher": Format("Bencher Metric Format, for `bencher run --adapter json`"),
    "github-action": Format("custom JSON of github-action-benchmark, one metric", ("metric",)),
    "pytest-benchmark": Format("JSON for `pytest-benchmark compare`, in seconds per step", ("host_names",)),
    ZIP: Format("one file to hand on, without names of hosts, folders and users; commands read it as a run"),
}
"""By the name of the function that writes it, in `formats`; zip by `results.public`."""

PARSERS: dict[str, Callable[[str], Any]] = {"metric": cli.choice(EXPORTED), "host_names": bool}
"""Of the options that a format may take."""


def parser() -> cli.Parser:
    """The command line."""
    formats = "\n".join(f"  {name:<17} {one.meaning}" for name, one in FORMATS.items())
    made = cli.Parser(
        prog=cli.command("export"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"formats:\n{formats}\n\nCases that are not `ok`, and what was not measured, are left out. "
        "Exit status: 0, or 2 where\nthe run cannot be written so. docs/export.md has an example of each.",
    )
    made.add_argument("run", type=Path, metavar="RUN", help="results folder or archive of a run")
    add = made.add_argument
    add("--format", metavar="NAME", help=f"one of {', '.join(FORMATS)}")
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help="write to this file instead of to standard output (zip: beside RUN)",
    )
    add(
        "--metric",
        metavar="COLUMN",
        help=f"github-action: {', '.join(EXPORTED)} (default {DEFAULT}); images_per_s and speedup are for "
        "the action's tool customBiggerIsBetter, the others for customSmallerIsBetter",
    )
    add("--host-names", action="store_true", help="pytorch, pytest-benchmark: name the machines, too")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command; the exit status."""
    return cli.guarded("export", lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    options = parser().parse_args(argv)
    if options.format is None:
        raise UsageError(f"--format is missing; known: {', '.join(FORMATS)}")
    name = cli.named("format", cli.choice(FORMATS), options.format)
    asked = _asked(options, name)
    # pandas takes a second
    from ..results import public
    from ..results.store import load_run, shown, write_output
    from . import formats

    run = load_run(options.run)
    if name == ZIP:
        print(shown(public.write_zip(run, options.out)))
        return ExitCode.OK
    text: str = vars(formats)[name.replace("-", "_")](run, **asked)
    if options.out is None:
        print(text)
    else:
        write_output(options.out, lambda part: part.write_text(f"{text}\n", encoding="utf-8"), option="--out")
    if name == "github-action":
        better = "Bigger" if EXPORTED[asked.get("metric", DEFAULT)].higher_is_better else "Smaller"
        print(f"For github-action-benchmark's tool: custom{better}IsBetter", file=sys.stderr)
    return ExitCode.OK


def _asked(given: argparse.Namespace, name: str) -> dict[str, Any]:
    """Parse the options of one format. Raises UsageError for one that another format takes."""
    asked = {option: value for option in PARSERS if (value := getattr(given, option)) not in (None, False)}
    for option in asked:
        if option not in FORMATS[name].takes:
            takers = " or ".join(one for one, known in FORMATS.items() if option in known.takes)
            raise UsageError(
                f"--{option.replace('_', '-')} is for --format {takers}, not {name}; leave it out"
            )
    return {option: cli.named(option, PARSERS[option], value) for option, value in asked.items()}
