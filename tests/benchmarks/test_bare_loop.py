"""What a run knows after its time, against a bare loop over the same cases for the same time.

They alternate, so that both meet the same neighbours; one estimator makes the intervals of both. Run with
`python -m pytest tests/benchmarks/test_bare_loop.py --benchmark-only -n 0 -s`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import pandas as pd
import pytest
from commands import python

from ddp_bench.bench.cluster.process import rank_variables
from ddp_bench.bench.findings.wording import own_devices
from ddp_bench.bench.results.aggregate import rate_half_widths
from ddp_bench.bench.results.comparisons import Comparison, compared
from ddp_bench.bench.results.store import RunData, load_run
from ddp_bench.bench.results.typical import Typical

COMMAND = ("--modes", "dp,ddp", "--gpus", "1,2,4")
PAIRS = int(os.environ.get("BARE_LOOP_PAIRS", "2"))
MOST = 1.3
LOOP = Path(__file__).parent / "bare_loop.py"


def of_run(run: RunData) -> dict[str, float]:
    """Half-widths of a run: the median over the cases that own their devices, and of every comparison."""
    widths = rate_half_widths(own_devices(run.cases), with_single=True)
    comparisons = [c for c in run.compared if {c.case_id, c.reference_id} <= widths.keys()]
    return {"images/s": median(widths.values()), **_by_pair(comparisons)}


def of_loop(step_ms: dict[str, dict[str, float]], run: RunData) -> dict[str, float]:
    """The same half-widths from a loop's step times."""
    by_round = {c: {int(r): ms for r, ms in found.items()} for c, found in step_ms.items()}
    typical = Typical.of({"timed": by_round})
    batches = dict(zip(run.cases["case_id"], run.cases["global_batch"], strict=True))
    named = run.comparisons[["case_id", "reference_id"]].itertuples(index=False, name=None)
    pairs = [pair for pair in named if set(pair) <= by_round.keys()]
    rounds = {c: len(r) for c, r in by_round.items()}
    comparisons = compared(pairs, typical, units=batches, num_rounds=rounds, margin=0.05)
    widths = [typical.step_ms(c).half_width for c in by_round]
    return {"images/s": median(widths), **_by_pair(comparisons)}


def _by_pair(comparisons: Iterable[Comparison]) -> dict[str, float]:
    return {f"{one.case_id} / {one.reference_id}": one.ratio.half_width for one in comparisons}


def pair(folder: Path) -> pd.DataFrame:
    """One run, then one loop for as long: their half-widths and rounds."""
    folder.mkdir()
    start = time.time()
    ran = python("-m", "bench.run", *COMMAND, "--out", str(folder / "run"), "--quiet", timeout_s=900)
    took_s = time.time() - start
    assert ran.returncode == 0, ran.stderr
    run, out = load_run(folder / "run"), folder / "loop.json"
    looped = python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(LOOP)),
        *(str(folder / "run"), str(time.time() + took_s), str(out)),
        env=rank_variables({}, "cpu") | {"PYTHONPATH": os.pathsep.join(sys.path)},
        timeout_s=900,
    )
    assert looped.returncode == 0, looped.stderr
    step_ms = json.loads(out.read_text())
    table = pd.DataFrame({"suite": of_run(run), "loop": of_loop(step_ms, run)})
    table["suite / loop"] = table["suite"] / table["loop"]
    rounds = int(run.cases["num_rounds"].max()), max(map(len, step_ms.values()))
    print(f"{took_s:.0f} s each; rounds: suite {rounds[0]}, loop {rounds[1]}")
    print(table.to_string(float_format="{:.3f}".format))
    return table


@pytest.mark.timeout(3600)
def test_a_run_knows_nearly_as_much_as_a_bare_loop(benchmark: Any, tmp_path: Path) -> None:
    def pairs() -> list[pd.DataFrame]:
        return [pair(tmp_path / str(i)) for i in range(PAIRS)]

    tables = benchmark.pedantic(pairs, rounds=1)
    ratio = geometric_mean(value for table in tables for value in table["suite / loop"])
    benchmark.extra_info["half-widths, suite / loop"] = f"{ratio:.2f}"
    assert ratio <= MOST
