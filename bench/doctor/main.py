"""Is this machine fit to measure on?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.table import Table
from rich.text import Text

from ..common.cli import Parser, make_main
from ..common.console import print_table
from ..common.errors import ExitCode
from ..common.text import escape_controls, to_json
from .gpu import GPU_CHECKS
from .host import CheckResult, Host, find_worst
from .resources import RESOURCE_CHECKS

CHECKS = {**GPU_CHECKS, **RESOURCE_CHECKS}
STYLES = {"ok": "green", "unknown": "dim", "caution": "yellow", "bad": "bold red"}


def make_parser() -> Parser:
    """Make the command line's parser."""
    made = Parser(
        "doctor",
        __doc__,
        examples=(
            ("", "every check"),
            ("--quiet", "what needs care"),
            ("--json", "for a program"),
        ),
        exit_codes="0 when nothing is bad, 1 when something is, 2 for a wrong command line.",
        details="It only reads, and changes nothing. Every line is ok, caution, bad or unknown (not readable "
        "here); caution and bad say what to do.",
    )
    made.add_argument("--quiet", action="store_true", help="only what is caution or bad")
    made.add_argument("--json", action="store_true", help="findings as JSON on stdout")
    return made


@make_main("doctor")
def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    options = make_parser().parse_args(argv)
    found = examine()
    grave = find_worst(answer.status for answer in found.values())
    shown = {n: a for n, a in found.items() if not options.quiet or a.status in ("caution", "bad")}
    if options.json:
        lines = [
            {"name": n, "status": a.status, "text": a.text, "advice": a.advice} for n, a in shown.items()
        ]
        print(to_json({"status": grave, "findings": lines}))
    else:
        print_checks(shown)
        if not options.quiet:
            print(summarize_checks(found.values()))
    return ExitCode.FAILED if grave == "bad" else ExitCode.OK


def examine(root: Path = Path("/")) -> dict[str, CheckResult]:
    """Make every check, in reading order, and return what it found, by its name.

    It takes a few seconds, most of them for importing torch. `root` is where /proc and /sys are found.
    """
    with Host(root) as host:
        return {name: answer for name, check in CHECKS.items() if (answer := check(host)) is not None}


def print_checks(found: Mapping[str, CheckResult]) -> None:
    """Print one line per answer, and what to do under it."""
    if not found:
        return
    table = Table.grid(padding=(0, 2))
    for name, answer in found.items():
        text = Text(escape_controls(answer.text))
        if answer.advice:
            text.append(f"\ndo: {escape_controls(answer.advice)}", style="italic")
        table.add_row(Text(answer.status, style=STYLES[answer.status]), Text(name), text)
    print_table(table)


def summarize_checks(found: Iterable[CheckResult]) -> str:
    """Count the answers and say what they mean for a measurement."""
    counts = Counter(answer.status for answer in found)
    numbers = ", ".join(f"{counts[status]} {status}" for status in ("bad", "caution", "unknown", "ok"))
    if counts["bad"]:
        meaning = "not fit to measure on until what is bad is mended"
    elif counts["caution"]:
        meaning = "fit to measure on; the cautions limit what its numbers can be compared with"
    else:
        meaning = "fit to measure on"
    return f"{numbers}: {meaning}"
