"""A run in the format of another tool: dashboards, regression trackers, Prometheus, nccl-tests."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_bench.bench import cli
from ddp_bench.bench.errors import ExitCode, UsageError
from ddp_bench.bench.export.options import METRICS, Options


@dataclass(frozen=True)
class Format:
    """A format that a run can be written in, and the options that change it."""

    meaning: str
    takes: frozenset[str] = frozenset()


FORMATS = {
    "pytorch": Format("records of PyTorch's OSS benchmark database, schema v3", frozenset({"host_names"})),
    "bencher": Format("Bencher Metric Format, for `bencher run --adapter json`"),
    "github-action": Format("custom JSON of github-action-benchmark, one metric", frozenset({"metric"})),
    "pytest-benchmark": Format(
        "JSON for `pytest-benchmark compare`, in seconds per step", frozenset({"host_names"})
    ),
    "prometheus": Format("text exposition format 0.0.4, also valid OpenMetrics"),
    "nccl-tests": Format(
        "allreduce.csv as all_reduce_perf's text, for `bench.predict --network`", frozenset({"gpus"})
    ),
}
"""By the name of the module that writes it."""


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
    made.add_argument("run", type=Path, metavar="RUN", nargs="?", help="a results folder")
    add = made.add_argument
    add("--format", metavar="NAME", help=f"one of {', '.join(FORMATS)}")
    add("--out", type=Path, metavar="FILE", help="write to this file instead of to standard output")
    add(
        "--metric",
        metavar="COLUMN",
        help=f"github-action: {', '.join(METRICS)} (default images_per_s); images_per_s and speedup are for "
        "the action's tool customBiggerIsBetter, the others for customSmallerIsBetter",
    )
    add(
        "--gpus", metavar="N", help="nccl-tests: devices of the all-reduce, where the run has several numbers"
    )
    add("--host-names", action="store_true", help="pytorch, pytest-benchmark: name the machines, too")
    add("--schema", metavar="NAME", help="without RUN: print a JSON Schema, as `cases`, `manifest` or `gate`")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command; the exit status."""
    return cli.guarded("export", lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    options = parser().parse_args(argv)
    if options.schema is not None:
        return _print_schema(options)
    if options.run is None:
        raise UsageError(f"the following arguments are required: RUN; see {cli.command('export')} --help")
    if options.format is None:
        raise UsageError(f"--format is missing; known: {', '.join(FORMATS)}")
    name = cli.named("format", cli.choice(FORMATS), options.format)
    asked = _options(options, name)
    from ddp_bench.bench.results.store import load_run, write_output  # pandas takes a second

    export = importlib.import_module(f"ddp_bench.bench.export.{name.replace('-', '_')}").export
    text: str = export(load_run(options.run), asked)
    if options.out is None:
        print(text)
    else:
        write_output(options.out, lambda part: part.write_text(f"{text}\n", encoding="utf-8"), option="--out")
    if name == "github-action":
        print(f"For github-action-benchmark's tool: {METRICS[asked.metric].tool}", file=sys.stderr)
    return ExitCode.OK


def _print_schema(options: argparse.Namespace) -> int:
    from ddp_bench.bench.export.json_schema import SCHEMAS, json_schema

    if any(value for name, value in vars(options).items() if name != "schema"):
        raise UsageError("--schema describes every run; leave out RUN and the other options")
    print(cli.to_json(json_schema(cli.named("schema", cli.choice(SCHEMAS), options.schema))))
    return ExitCode.OK


def _options(given: argparse.Namespace, name: str) -> Options:
    """Parse the options of one format. Raises UsageError for one that another format takes."""
    for option in ("metric", "gpus", "host_names"):
        if getattr(given, option) and option not in FORMATS[name].takes:
            takers = " or ".join(one for one, known in FORMATS.items() if option in known.takes)
            raise UsageError(
                f"--{option.replace('_', '-')} is for --format {takers}, not {name}; leave it out"
            )
    metric = given.metric or Options.metric
    return Options(
        host_names=given.host_names,
        metric=cli.named("metric", cli.choice(METRICS), metric),
        num_devices=None if given.gpus is None else cli.named("gpus", cli.positive_int, given.gpus),
    )
