"""The gate once its command line is read: find or measure two runs, compare, report and decide."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ..common import cli, values
from ..common.console import Annotation, show_on_github
from ..common.errors import ExitCode, NotComparableError, NothingToCompareError, UsageError
from ..common.text import escape_markdown
from ..page import render, terminal
from ..results.case_columns import GATED_METRICS
from ..results.commands import name_training
from ..results.run_folder import write_output
from . import output as gate_output
from . import page as gate_page
from .compare import compare
from .decide import Policy
from .interleave import measure_launches, show_plan
from .junit import write_junit, write_junit_error
from .main import DEFAULT_LAUNCHES, DEFAULT_THRESHOLD
from .preflight import check_places, read_environment
from .result import Gate
from .runs import GateRun, read_run
from .sides import Request


def run_gate(options: argparse.Namespace, given: Sequence[str]) -> int:
    """Do what `options` ask for, as they were `given` with what stood from `--` on. The exit status."""
    files = (("--html", options.html), ("--junit", options.junit))
    check_places(out=options.out, files=files)
    try:
        return _compare_sides(options, given)
    except UsageError as error:
        if options.junit is not None:
            _write(options.junit, write_junit_error(error), "--junit")
        if isinstance(error, NotComparableError) and not options.quiet:
            prefix, reason = cli.get_message_prefix(), str(error)
            said = f"## {prefix}: {error.label}\n\n{escape_markdown(reason)}"
            show_on_github([Annotation("warning", prefix, reason)], lambda: said)
            if options.markdown:
                print(said)
        if isinstance(error, NothingToCompareError) and options.allow_new:
            cli.print_message(f"{error.label}: {error}")
            return ExitCode.OK
        raise


def _compare_sides(options: argparse.Namespace, given: Sequence[str]) -> int:
    rest = given[given.index("--") :] if "--" in given else []
    policy, asked = read_policy(options), _read_request(options, rest[1:])
    if asked is None:
        gate = compare(*_load_runs(options, rest), policy=policy)
    elif options.dry_run:
        show_plan(asked)
        return ExitCode.OK
    else:
        compare_pair = partial(compare, policy=replace(policy, looks=asked.looks), asked=given)
        gate = measure_launches(asked, gate_of=compare_pair, out=options.out, quiet=options.quiet)
    _report_gate(options, gate)
    return gate.exit_code


def _read_request(options: argparse.Namespace, arguments: Sequence[str]) -> Request | None:
    """Read what an interleaved gate is to measure; None of one between results folders. Raises UsageError."""
    if options.interleave is None:
        return None
    if options.runs:
        raise UsageError("--interleave measures by itself; leave the results folders out")
    looks: Sequence[int] = DEFAULT_LAUNCHES
    if options.launches is not None:
        looks = sorted(
            values.parse_option(
                "launches", values.make_csv_parser(values.parse_positive_int), options.launches
            )
        )
    most_s = options.max_time and values.parse_option("max-time", values.parse_duration_s, options.max_time)
    return Request(
        reference=options.interleave,
        arguments=arguments,
        looks=looks,
        python=options.python,
        environments=(
            read_environment("--baseline-env", options.baseline_env),
            read_environment("--env", options.env),
        ),
        max_time_s=most_s or math.inf,
    )


def _report_gate(options: argparse.Namespace, gate: Gate) -> None:
    """Write and print what was asked for."""
    if options.junit is not None:
        _write(options.junit, write_junit(gate), "--junit")
    if options.html is not None:
        _write(options.html, render.render_html(gate_page.make_page(gate)), "--html")
    if not options.quiet:
        show_on_github(gate_output.make_annotations(gate), lambda: gate_page.render_markdown(gate))
    if options.json:
        print(gate_output.encode_gate(gate))
    elif options.markdown:
        print(gate_page.render_markdown(gate))
    elif not options.quiet:
        page = gate_page.make_outline(gate)
        following = name_training(page.following, gate.baseline.manifest.watched)
        terminal.print_page(replace(page, following=following))


def _write(place: Path, content: str, option: str) -> None:
    write_output(place, lambda part: part.write_text(content, "utf-8", "backslashreplace"), option=option)


def read_policy(options: argparse.Namespace) -> Policy:
    """Read what can fail the gate, of `5%,peak_mem_mib=1%`: one share for all, and others by name.

    Raises UsageError that names the metric and the fix.
    """
    named = {}
    for part in options.threshold.split(","):
        name, _, share = part.rpartition("=")
        if name and name not in GATED_METRICS:
            raise UsageError(
                f"--threshold: unknown metric {name!r}; {values.suggest_known(name, GATED_METRICS)}"
            )
        named[name] = values.parse_option("threshold", values.parse_fraction, share)
    return Policy(
        threshold=named.pop("", DEFAULT_THRESHOLD),
        named=named,
        ratios_only=options.ratios_only,
        strict=options.strict,
        allow_missing=options.allow_missing,
    )


def _load_runs(options: argparse.Namespace, rest: Sequence[str]) -> tuple[GateRun, GateRun]:
    in_turns = (
        *(options.python, options.out, options.launches, options.env, options.baseline_env),
        *(options.max_time, options.dry_run),
    )
    if len(options.runs) != 2 or rest or any(in_turns):
        raise UsageError(
            f"name two results folders, or --interleave REF; see {cli.format_command('gate')} --help"
        )
    first, second = options.runs
    runs = read_run(first), read_run(second)
    if first.samefile(second):
        raise UsageError(f"{first} and {second} are the same folder; name two runs")
    return runs
