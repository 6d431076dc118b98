"""Gate a run against a baseline: 0 pass, 1 regression, 2 bad input, 3 undecided, 4 not measured."""

from __future__ import annotations

from pathlib import Path

from ..common import cli
from ..common.errors import UsageError

DEFAULT_THRESHOLD = 0.05
"""Share of change that matters."""

DEFAULT_LAUNCHES = (6, 8, 12, 24)
"""After each a gate ends if it is decided: a quiet machine needs few, a noisy one many; docs/gate.md."""


def make_parser() -> cli.Parser:
    """Make the command line."""
    made = cli.Parser(
        "gate",
        "Say whether training became slower: compare two existing runs, or measure two commits or "
        "environments now, interleaved on this machine.",
        common=("interleave", "python", "threshold", "max_time", "dry_run", "html"),
        examples=(
            ("BASELINE CANDIDATE", "two results folders"),
            ("--interleave main -- --workload net:make --gpus 2", "your code against branch main"),
            ("--interleave . --python /old/venv/bin/python -- --gpus 2", "this PyTorch against an old one"),
        ),
        exit_codes="0 pass; 1 a regression, or a case of the baseline is missing; 2 a mistake in the command "
        "or the setup, with its fix; 3 undecided (noise hides a change), not comparable or nothing to "
        "compare; 4 a side could not be measured. docs/gate.md says what to do for each.",
        details="A case regresses if the interval of its change excludes 0% and the estimate is beyond the "
        "threshold. At most 1% of gates report a regression that is not there: docs/gate.md.",
    )
    what = made.add_argument_group("what to compare")
    what.add_argument(
        "runs",
        type=Path,
        nargs="*",
        metavar="BASELINE CANDIDATE",
        help="results folders or archives: the reference run, and the run under test",
    )
    what.add_argument(
        "--interleave",
        metavar="REF",
        help="measure both sides now: the candidate is your current code, the baseline commit or branch REF "
        "of the repository that holds the --workload. Without --workload it is the repository of ddp-bench. "
        "`.` uses the current code on both sides, to compare environments (--python, --env) or to test the "
        f"noise. Arguments after -- go to {cli.get_message_prefix('run')}",
    )
    how = made.add_argument_group("how to judge")
    how.add_argument(
        "--threshold",
        default=f"{100 * DEFAULT_THRESHOLD:g}%",
        metavar="SHARE[,METRIC=SHARE,…]",
        help="smallest change that matters; METRIC=SHARE: this metric can also fail the gate, in addition "
        "to the throughput (default %(default)s)",
    )
    how.add_argument(
        "--ratios-only",
        action="store_true",
        help="gate the speed-up alone, which can be compared across machines",
    )
    how.add_argument(
        "--strict",
        action="store_true",
        help="every metric can fail the gate, and a pass needs a decision on each, not on throughput alone",
    )
    how.add_argument(
        "--allow-missing", action="store_true", help="pass even if cases of the baseline are missing"
    )
    how.add_argument(
        "--allow-new",
        action="store_true",
        help="pass even if the baseline has no such workload or option, so there is nothing to compare",
    )
    measure = made.add_argument_group("how to measure, with --interleave")
    measure.add_argument(
        "--launches",
        metavar="N,…",
        help="restart both sides N times, because a process can be a few percent faster or slower from start "
        "to end; with several N, the gate ends after the first that decides "
        f"(default {','.join(map(str, DEFAULT_LAUNCHES))})",
    )
    measure.add_argument(
        "--max-time",
        metavar="TIME",
        help="limit such as 10m: end with the last launch that fits, with the verdict reached by then",
    )
    measure.add_argument(
        "--dry-run",
        action="store_true",
        help="start both sides once (about a minute), print the plan and its expected time; measure no round",
    )
    measure.add_argument(
        "--python",
        metavar="PATH",
        help="the baseline's interpreter, of another environment such as one with an old PyTorch. Install "
        "ddp-bench there to get its dependencies; both sides run the ddp-bench that you call (default: this "
        "interpreter)",
    )
    for name, side in (("--env", "candidate"), ("--baseline-env", "baseline")):
        measure.add_argument(
            name,
            metavar="NAME=VALUE",
            action="append",
            default=[],
            help=f"set an environment variable of the {side} alone; repeatable",
        )
    measure.add_argument("--out", type=Path, metavar="DIR", help="keep the results folders here")
    output = made.add_argument_group("output")
    output.add_argument("--html", type=Path, metavar="FILE", help="write a page of the comparison")
    output.add_argument(
        "--junit", type=Path, metavar="FILE", help="write JUnit XML for a CI system: a test case per case"
    )
    form = output.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="for a job summary or a pull-request comment")
    form.add_argument("--json", action="store_true", help="everything as JSON")
    form.add_argument("--quiet", action="store_true", help="nothing but errors and the exit status")
    return made


@cli.make_main("gate")
def main(given: list[str]) -> int:
    """Entry point of the command; the exit status, which `decide.py` decides."""
    split = given.index("--") if "--" in given else len(given)
    made = make_parser()
    options, unknown = made.parse_known_args(given[:split])
    if unknown and options.interleave is not None and "--" not in given:
        example = cli.format_command("gate", "--interleave", options.interleave, "--", *unknown[:1])
        run = cli.get_message_prefix("run")
        raise UsageError(f"{cli.UNRECOGNIZED}{unknown[0]}; put arguments of {run} after --: {example} …")
    if unknown:
        made.error(f"{cli.UNRECOGNIZED}{' '.join(unknown)}")
    from .command import run_gate

    return run_gate(options, given)
