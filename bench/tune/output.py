"""The answer on stdout: a table of what was measured, the sentence, the line to paste."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.table import Table

from bench.cli import print_table
from bench.findings.wording import CPU_STAND_IN
from bench.tune.answer import Answer
from bench.tune.wording import paste, rows, sentence

COLUMNS = ("DDP with", "buckets", "predicted ms", "step ms [95%]", "faster", "above the bound", "rounds")


def show(answer: Answer, folder: Path, *, device_type: str) -> None:
    """Print the answer of a tuning whose results are in `folder`."""
    table = Table(box=box.SIMPLE_HEAD, title="Measured in turns")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == COLUMNS[0] else "right")
    for row in rows(answer):
        table.add_row(*row)
    print_table(table)
    print(f"Answer: {sentence(answer)}.")
    line = paste(answer)
    if line:
        print(f"Paste:\n{line}")
    print(
        "In turns: the slowest left one after another. Faster: throughput over the default's in the same "
        f"round; intervals of {100 * answer.confidence:.1f}% each, so that all together hold with 95%. The "
        "bound: what the calibrated compute and communication would take in the best order if neither "
        f"slowed the other, times {answer.pace:.2f}: the default's measured step over its predicted one."
    )
    if device_type == "cpu":
        print(f"{CPU_STAND_IN}.")
    print(f"Results: {folder}")
