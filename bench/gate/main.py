"""Gate a run against a baseline: 0 pass, 1 regression, 2 bad input, 3 undecided, 4 not measured."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ddp_bench.bench import cli
from ddp_bench.bench.gate.options import parsed


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command; the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    return cli.guarded("gate", lambda: _main(given))


def _main(given: list[str]) -> int:
    split = given.index("--") if "--" in given else len(given)
    options = parsed(given[:split], has_run="--" in given)
    from ddp_bench.bench.gate.command import gate_runs  # pandas and scipy take a second

    return gate_runs(options, given[split:])
