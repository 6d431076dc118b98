"""What the gate does once its command line is read: find or measure two runs, compare, say and decide."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..common import cli, values
from ..common.console import Annotation, show_on_github
from ..common.errors import ExitCode, NotComparableError, NothingToCompareError, UsageError
from ..common.text import markdown
from ..page import terminal
from ..results.case_columns import GATED
from ..results.store import write_output
from . import output as gate_output
from .compare import Gate, compare
from .decide import Policy
from .interleave import measure_launches
from .junit import junit, junit_of_error
from .main import DEFAULT_LAUNCHES, DEFAULT_THRESHOLD
from .preflight import check_places, read_environment
from .runs import GateRun, read_run


def gate_runs(options: argparse.Namespace, given: Sequence[str]) -> int:
    """Do what `options` ask for, as they were `given` with what stood from `--` on. The exit status."""
    files = (("--html", options.html), ("--junit", options.junit))
    check_places(out=options.out, files=files)
    try:
        return _gate(options, given)
    except UsageError as error:
        if options.junit is not None:
            _write(options.junit, junit_of_error(error), "--junit")
        if isinstance(error, NotComparableError) and not options.quiet:
            reason, label = str(error), error.label
            show_on_github(
                [Annotation("warning", cli.speaker(), reason)],
                lambda: f"## {cli.speaker()}: {label}\n\n{markdown(reason)}",
            )
        if isinstance(error, NothingToCompareError) and options.allow_new:
            cli.say(f"{error.label}: {error}")
            return ExitCode.OK
        raise


def _gate(options: argparse.Namespace, given: Sequence[str]) -> int:
    rest = given[given.index("--") :] if "--" in given else []
    policy, in_turns = read_policy(options), options.interleave is not None
    looks: Sequence[int] = DEFAULT_LAUNCHES
    if options.launches is not None:
        looks = sorted(values.named("launches", values.csv(values.positive_int), options.launches))

    def gate_of(first: GateRun, second: GateRun) -> Gate:
        return compare(
            first,
            second,
            policy=policy,
            looks=looks if in_turns else (),
            asked=given if in_turns else None,
            environments=environments,
        )

    environments = (
        read_environment("--baseline-env", options.baseline_env),
        read_environment("--env", options.env),
    )
    if not in_turns:
        first, second = _runs(options, rest)
    elif options.runs:
        raise UsageError("--interleave measures by itself; leave the results folders out")
    else:
        first, second = measure_launches(
            options.interleave,
            rest[1:],
            looks=looks,
            gate_of=gate_of,
            python=options.python,
            out=options.out,
            quiet=options.quiet,
            environments=environments,
        )
    gate = gate_of(first, second)
    _tell(options, gate, first, second)
    return gate.exit_code


def _tell(options: argparse.Namespace, gate: Gate, first: GateRun, second: GateRun) -> None:
    """Write and print what was asked for."""
    if options.junit is not None:
        _write(options.junit, junit(gate, allow_missing=options.allow_missing), "--junit")

    def as_markdown() -> str:
        from .page import markdown

        return markdown(gate, first, second)

    if options.html is not None:
        from .page import html  # matplotlib takes a second

        _write(options.html, html(gate, first, second), "--html")
    if not options.quiet:
        show_on_github(gate_output.annotations_of(gate), as_markdown)
    if options.json:
        print(gate_output.as_json(gate))
    elif options.markdown:
        print(as_markdown())
    elif not options.quiet:
        terminal.show(gate_output.outline(gate))


def _write(place: Path, content: str, option: str) -> None:
    write_output(place, lambda part: part.write_text(content, "utf-8", "backslashreplace"), option=option)


def read_policy(options: argparse.Namespace) -> Policy:
    """Read what can fail the gate, of `5%,peak_mem_mib=1%`: one share for all, and others by name.

    Raises UsageError that names the metric and the fix.
    """
    named = {}
    for part in options.threshold.split(","):
        name, _, share = part.rpartition("=")
        if name and name not in GATED:
            raise UsageError(f"--threshold: unknown metric {name!r}; {values.did_you_mean(name, GATED)}")
        named[name] = values.named("threshold", values.fraction, share)
    return Policy(
        thresholds=dict.fromkeys(GATED, named.pop("", DEFAULT_THRESHOLD)) | named,
        named=frozenset(named),
        ratios_only=options.ratios_only,
        strict=options.strict,
        allow_missing=options.allow_missing,
    )


def _runs(options: argparse.Namespace, rest: Sequence[str]) -> tuple[GateRun, GateRun]:
    in_turns = (options.python, options.out, options.launches, options.env, options.baseline_env)
    if len(options.runs) != 2 or rest or any(in_turns):
        raise UsageError(f"name two results folders, or --interleave REF; see {cli.command('gate')} --help")
    first, second = options.runs
    runs = read_run(first), read_run(second)
    if first.samefile(second):
        raise UsageError(f"{first} and {second} are the same folder; name two runs")
    return runs
