"""What the gate does once its command line is read: find or measure two runs, compare, say and decide."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from ddp_bench.bench import cli, github
from ddp_bench.bench.cluster.process import interrupted_by_signals
from ddp_bench.bench.cluster.scratch import scratch_folder
from ddp_bench.bench.console import Console
from ddp_bench.bench.errors import ExitCode, UsageError
from ddp_bench.bench.gate import baseline
from ddp_bench.bench.gate import output as gate_output
from ddp_bench.bench.gate.checkouts import both_checkouts, planned_code
from ddp_bench.bench.gate.code import check_one_code
from ddp_bench.bench.gate.compare import Gate, compare
from ddp_bench.bench.gate.interleave import measure_in_turns
from ddp_bench.bench.gate.judge import METRICS
from ddp_bench.bench.gate.launches import merged
from ddp_bench.bench.gate.options import DEFAULT_LAUNCHES
from ddp_bench.bench.gate.runs import GateRun, read_run
from ddp_bench.bench.results.store import check_claimable
from ddp_bench.bench.run.main import parser as run_parser
from ddp_bench.bench.run.main import settings_of
from ddp_bench.bench.settings import Settings

AUTO = "auto"
"""As BASELINE: this machine's, of those that are kept."""


def gate_runs(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Do what `options` ask for; `rest` is what stood from `--` on. The exit status."""
    if options.save_baseline is not None:
        return _save(options, rest)
    thresholds = read_thresholds(options.threshold, options.config)
    if options.interleave is None:
        first, second = _runs(options, rest)
    else:
        first, second = _measured(options, rest[1:])
    gate = compare(
        first,
        second,
        thresholds=thresholds,
        ratios_only=options.ratios_only,
        allow_missing=options.allow_missing,
        allow_changed_model=options.allow_changed_model,
        interleaved=options.interleave is not None,
        strict=options.strict,
    )
    if not options.quiet:
        github.show(gate_output.annotations_of(gate), lambda: gate_output.markdown(gate))
    if options.json:
        print(gate_output.as_json(gate))
    elif options.markdown:
        print(gate_output.markdown(gate))
    elif not options.quiet:
        _print(gate)
    return gate.exit_code


def read_thresholds(default: str, config: Path | None = None) -> dict[str, float]:
    """The share allowed for every metric: `default`, then the file's `[thresholds]`.

    Raises UsageError that names the key and the fix.
    """
    names = [metric.name for metric in METRICS]
    found = dict.fromkeys(names, _share("--threshold", default))
    if config is None:
        return found
    content = cli.read_toml(config)
    other = [key for key in content if key != "thresholds"]
    if other:
        raise UsageError(f"--config {config}: unknown key {other[0]!r}; known: a table [thresholds]")
    table = content.get("thresholds", {})
    if not isinstance(table, dict):
        raise UsageError(f"--config {config}: thresholds is no table; write [thresholds] above its lines")
    for name, value in table.items():
        if name not in found:
            raise UsageError(f"--config {config}: unknown metric {name!r}; {cli.did_you_mean(name, names)}")
        found[name] = _share(f"--config {config}: {name}", str(value))
    return found


def _share(where: str, text: str) -> float:
    try:
        return cli.fraction(text)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def _save(options: argparse.Namespace, rest: Sequence[str]) -> int:
    if options.runs or rest or options.interleave is not None:
        raise UsageError("--save-baseline RUN stands alone; gate in a command of its own")
    print(f"Baseline of this kind of machine: {baseline.save(options.save_baseline, options.baselines)}")
    return ExitCode.OK


def _runs(options: argparse.Namespace, rest: Sequence[str]) -> tuple[GateRun, GateRun]:
    if len(options.runs) != 2 or rest or options.python or options.out or options.launches:
        raise UsageError(f"name two results folders, or --interleave REF; see {cli.command('gate')} --help")
    first, second = options.runs
    for path in options.runs:
        sides = [path / "baseline", path / "candidate"]
        if all(os.path.isdir(side) for side in sides):  # noqa: PTH112 - Path's raises where a name is too long
            raise UsageError(f"{path} holds both runs of a launch; name {sides[0]} {sides[1]}")
    if first == Path(AUTO):
        first = baseline.find(second, options.baselines)
    runs = read_run(first), read_run(second)
    if first.samefile(second):
        raise UsageError(f"{first} and {second} are the same folder; name two runs")
    return runs


def _measured(options: argparse.Namespace, arguments: Sequence[str]) -> tuple[GateRun, GateRun]:
    if options.runs:
        raise UsageError("--interleave measures by itself; leave the results folders out")
    num_launches = DEFAULT_LAUNCHES if options.launches is None else options.launches
    if num_launches < 1:
        raise UsageError(f"--launches {num_launches}: give 1 or more")
    # A mistake is said before anything starts.
    settings = settings_of(arguments, decided=("resume", "dry_run", "json", "out", "sustain"))
    arguments = from_any_folder(arguments, settings)
    with interrupted_by_signals(), contextlib.ExitStack() as stack:
        if options.out is None:
            folder = stack.enter_context(scratch_folder())
        else:
            check_claimable(options.out)
            folder = options.out
        console = Console(silent=options.quiet)
        stack.callback(console.progress_done)
        sides = both_checkouts(options.interleave, settings, arguments, options.python)
        checkouts = stack.enter_context(sides)
        for line in planned_code(*checkouts).lines():
            console.note(f"{cli.speaker()}: {line}")
        begun, launches = time.monotonic(), []
        for number in range(1, num_launches + 1):
            done = number - 1
            left_s = (time.monotonic() - begun) / done * (num_launches - done) if done else None
            console.progress("launch of baseline and candidate in turns", done, num_launches, left_s)
            place = folder / f"launch{number}"
            outs = measure_in_turns(checkouts, arguments, place, seed=number)
            launches.append([read_run(out) for out in outs])
        both = list(zip(*launches, strict=True))
        for runs in both:
            check_one_code([run.manifest for run in runs])
        return merged(both[0]), merged(both[1])


def from_any_folder(arguments: Sequence[str], settings: Settings) -> list[str]:
    """`bench.run` arguments that name the current folder's files from any folder, so from both sides'."""
    whole = list(arguments)
    config: Path | None = run_parser().parse_args(whole).config
    if config is not None:
        whole += ["--config", str(config.absolute())]
    if settings.data not in ("device", "host"):
        whole += ["--data", str(Path(settings.data).absolute())]
    return whole


def _print(gate: Gate) -> None:
    for line in gate_output.conditions(gate):
        print(line)
    if gate.comparisons:
        cli.print_table(gate_output.table(gate))
    for line in gate_output.notes(gate):
        print(line)
    print(gate_output.verdict(gate))
