"""Is this machine fit to measure on?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.table import Table
from rich.text import Text

from ..common.cli import Parser, entry_point
from ..common.console import print_table
from ..common.errors import ExitCode
from ..common.text import to_json, visible
from .gpu import GPU_CHECKS
from .host import Answer, Host, worst
from .resources import RESOURCE_CHECKS

CHECKS = {**GPU_CHECKS, **RESOURCE_CHECKS}
STYLES = {"ok": "green", "unknown": "dim", "caution": "yellow", "bad": "bold red"}


def parser() -> Parser:
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
        details="It only reads, never changes. Every line is ok, caution, bad or unknown (not readable "
        "here); caution and bad say what to do.",
    )
    made.add_argument("--quiet", action="store_true", help="only what is caution or bad")
    made.add_argument("--json", action="store_true", help="findings as JSON on stdout")
    return made


@entry_point("doctor")
def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    options = parser().parse_args(argv)
    found = examine()
    grave = worst(answer.status for answer in found.values())
    shown = {n: a for n, a in found.items() if not options.quiet or a.status in ("caution", "bad")}
    if options.json:
        lines = [
            {"name": n, "status": a.status, "text": a.text, "advice": a.advice} for n, a in shown.items()
        ]
        print(to_json({"status": grave, "findings": lines}))
    else:
        show(shown)
        if not options.quiet:
            print(summary(found.values()))
    return ExitCode.FAILED if grave == "bad" else ExitCode.OK


def examine(root: Path = Path("/")) -> dict[str, Answer]:
    """Make every check, in reading order, and return what it found, by its name.

    It takes a few seconds, most of them for importing torch. `root` is where /proc and /sys are found.
    """
    with Host(root) as host:
        return {name: answer for name, check in CHECKS.items() if (answer := check(host)) is not None}


def show(found: Mapping[str, Answer]) -> None:
    """Print one line per answer, and what to do under it."""
    if not found:
        return
    table = Table.grid(padding=(0, 2))
    for name, answer in found.items():
        text = Text(visible(answer.text))
        if answer.advice:
            text.append(f"\ndo: {visible(answer.advice)}", style="italic")
        table.add_row(Text(answer.status, style=STYLES[answer.status]), Text(name), text)
    print_table(table)


def summary(found: Iterable[Answer]) -> str:
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
