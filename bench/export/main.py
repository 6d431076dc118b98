"""A run in the format of another tool: dashboards and regression trackers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import cli
from ..errors import ExitCode, UsageError
from ..results.schema import EXPORTED

ZIP = "zip"

DEFAULT = "images_per_s"
"""Where a format takes one metric and none is named."""


FORMATS = {
    "pytorch": "records of PyTorch's OSS benchmark database, schema v3",
    "bencher": "Bencher Metric Format, for `bencher run --adapter json`",
    "github-action": "custom JSON of github-action-benchmark, one metric",
    "pytest-benchmark": "JSON for `pytest-benchmark compare`, in seconds per step",
    ZIP: "one file to hand on, without names of hosts, folders and users; commands read it as a run",
}
"""By the name of the function that writes it, in `formats`; zip by `results.archive`."""

TAKERS = {"metric": ("github-action",), "host_names": ("pytorch", "pytest-benchmark")}
"""The formats that take an option."""


def parser() -> cli.Parser:
    """The command line."""
    formats = "\n".join(f"  {name:<17} {meaning}" for name, meaning in FORMATS.items())
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
        help="write to this file instead of to standard output (zip needs it)",
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
    from ..results import archive
    from ..results.store import load_run, write_output
    from . import formats

    run = load_run(options.run)
    if name == ZIP:
        if options.out is None or options.out.suffix != archive.SUFFIX:
            raise UsageError(f"--format zip needs --out FILE{archive.SUFFIX}, by which an archive is known")
        content = archive.packed(archive.public_members(run))
        write_output(options.out, lambda part: part.write_bytes(content), option="--out")
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
    asked = {option: value for option in TAKERS if (value := getattr(given, option))}
    for option in asked:
        if name not in TAKERS[option]:
            takers = " or ".join(TAKERS[option])
            raise UsageError(
                f"--{option.replace('_', '-')} is for --format {takers}, not {name}; leave it out"
            )
    if given.metric:
        asked["metric"] = cli.named("metric", cli.choice(EXPORTED), given.metric)
    return asked
