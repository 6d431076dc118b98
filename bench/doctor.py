"""Is this machine fit to measure on? Reads, never changes: every line is ok, caution, bad or unknown."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.health import Finding, Machine, Status, diagnose, worst
from bench.readings import read_machine

BAD_EXIT_CODE = 1
WIDTH_WITHOUT_TERMINAL = 160
STYLES = {"ok": "green", "unknown": "dim", "caution": "yellow", "bad": "bold red"}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m bench.doctor",
        description=__doc__,
        epilog="Exit status: 0 when nothing is bad, 1 when something is, 2 for a wrong command line.",
    )
    made.add_argument("--quiet", action="store_true", help="only the lines that are caution or bad")
    made.add_argument("--json", action="store_true", help="lines and readings as JSON on stdout")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command; the exit code."""
    options = parser().parse_args(argv)
    machine = read_machine()
    found = diagnose(machine)
    grave = worst(finding.status for finding in found)
    shown = [f for f in found if not options.quiet or f.status in ("caution", "bad")]
    if options.json:
        print(as_json(machine, shown, grave))
    else:
        show(shown)
        if not options.quiet:
            print(summary(found))
    return BAD_EXIT_CODE if grave == "bad" else 0


def show(found: Sequence[Finding]) -> None:
    """One line per finding, what to do under it."""
    if not found:
        return
    table = Table.grid(padding=(0, 2))
    for finding in found:
        text = Text(finding.text)
        if finding.advice:
            text.append(f"\ndo: {finding.advice}", style="italic")
        table.add_row(Text(finding.status, style=STYLES[finding.status]), Text(finding.name), text)
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL).print(table)


def summary(found: Sequence[Finding]) -> str:
    """The last line: counts, and what they mean for a measurement."""
    counts = Counter(finding.status for finding in found)
    numbers = ", ".join(f"{counts[status]} {status}" for status in ("bad", "caution", "unknown", "ok"))
    if counts["bad"]:
        meaning = "not fit to measure on until what is bad is mended"
    elif counts["caution"]:
        meaning = "fit to measure on; the cautions limit what its numbers can be compared with"
    else:
        meaning = "fit to measure on"
    return f"{numbers}: {meaning}"


def as_json(machine: Machine, found: Sequence[Finding], status: Status) -> str:
    """Findings and readings; null is "could not be read", "unlimited" is no limit."""
    whole = {"status": status, "findings": [asdict(f) for f in found], "readings": asdict(machine)}
    return json.dumps(_plain(whole), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return "unlimited" if value == math.inf else value


if __name__ == "__main__":
    sys.exit(main())
