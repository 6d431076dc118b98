"""Gate a run against a baseline: 0 pass, 1 regression, 2 bad input, 3 undecided, 4 not measured."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench import cli, github
from bench.cluster.process import interrupted_by_signals
from bench.cluster.scratch import scratch_folder
from bench.console import Console
from bench.errors import ExitCode, UsageError
from bench.gate import baseline
from bench.gate import output as gate_output
from bench.gate.checkouts import both_checkouts, planned_code
from bench.gate.code import check_one_code
from bench.gate.compare import Gate, compare
from bench.gate.interleave import measure_in_turns
from bench.gate.judge import DEFAULT_THRESHOLD, METRICS
from bench.gate.launches import DEFAULT_LAUNCHES, merged
from bench.gate.runs import GateRun, read_run
from bench.results.store import check_claimable
from bench.run.__main__ import parser as run_parser
from bench.run.__main__ import settings_of
from bench.settings import Settings
from ddp_bench import load

AUTO = "auto"


def parser() -> cli.Parser:
    """The command line."""
    made = cli.Parser(
        prog=cli.command("gate"),
        description=__doc__,
        epilog="A regression needs both: an interval of candidate / baseline that excludes no change, and a "
        "change beyond the threshold. Intervals are Bonferroni-corrected over all comparisons.",
    )
    what = made.add_argument_group("what to compare")
    what.add_argument(
        "runs",
        type=Path,
        nargs="*",
        metavar="BASELINE CANDIDATE",
        help="results folders: held against, judged; BASELINE may be auto, this machine's in --baselines",
    )
    what.add_argument(
        "--interleave",
        metavar="REF",
        help="measure now: the code as it stands against git reference REF of the repository that holds the "
        "--workload (. is the code as it stands, too), in turns, with the bench.run arguments after --; "
        "without --workload, of ddp-bench's own repository",
    )
    what.add_argument(
        "--save-baseline",
        type=Path,
        metavar="RUN",
        help="keep RUN in --baselines as its machine's; nothing else",
    )
    what.add_argument(
        "--baselines",
        type=Path,
        default=baseline.ROOT,
        metavar="DIR",
        help=f"a baseline per kind of machine (default {baseline.ROOT})",
    )
    how = made.add_argument_group("how to judge")
    how.add_argument(
        "--threshold",
        default=f"{100 * DEFAULT_THRESHOLD:g}%",
        metavar="SHARE",
        help="change that matters (default %(default)s)",
    )
    how.add_argument(
        "--config", type=Path, metavar="FILE.toml", help="thresholds per metric, in a table [thresholds]"
    )
    how.add_argument(
        "--ratios-only",
        action="store_true",
        help="gate speed-up and efficiency alone: they compare across machines",
    )
    how.add_argument(
        "--strict",
        action="store_true",
        help="end with 3 where anything is inconclusive; without it a gate passes if something was decided "
        "and nothing regressed",
    )
    how.add_argument(
        "--allow-missing", action="store_true", help="pass though cases of the baseline are missing"
    )
    how.add_argument(
        "--allow-changed-model",
        action="store_true",
        help="compare though the model's name, parameters or gradient bytes differ; the change is named",
    )
    measure = made.add_argument_group("how to measure, with --interleave")
    measure.add_argument(
        "--launches",
        type=int,
        metavar="N",
        help=f"start both anew N times (default {DEFAULT_LAUNCHES}); a process can be a few percent "
        "faster or slower for as long as it lives",
    )
    measure.add_argument("--python", metavar="PATH", help="the baseline's interpreter (another environment)")
    measure.add_argument("--out", type=Path, metavar="DIR", help="keep the results folders here")
    form = made.add_argument_group("output").add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="for a job summary or a pull-request comment")
    form.add_argument("--json", action="store_true", help="everything as JSON")
    form.add_argument("--quiet", action="store_true", help="nothing but errors and the exit status")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command; the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    return cli.guarded("gate", lambda: _main(given))


def _main(given: list[str]) -> int:
    split = given.index("--") if "--" in given else len(given)
    options = _options(given[:split], has_run="--" in given)
    if options.save_baseline is not None:
        return _save(options, given[split:])
    thresholds = read_thresholds(options.threshold, options.config)
    if options.interleave is None:
        first, second = _runs(options, given[split:])
    else:
        first, second = _measured(options, given[split + 1 :])
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


def _options(given: Sequence[str], *, has_run: bool) -> argparse.Namespace:
    made = parser()
    options, unknown = made.parse_known_args(given)
    if unknown and options.interleave is not None and not has_run:
        example = cli.command("gate", "--interleave", options.interleave, "--", *unknown[:1])
        raise UsageError(f"{cli.UNRECOGNIZED}{unknown[0]}; those of bench.run stand behind --: {example} …")
    if unknown:
        made.error(f"{cli.UNRECOGNIZED}{' '.join(unknown)}")
    return options


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
        if all(side.is_dir() for side in sides):
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


if __name__ == "__main__":
    sys.exit(load("bench.gate.__main__").main())
