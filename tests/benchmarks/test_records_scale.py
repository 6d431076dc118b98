"""How the records bear a large run: time and memory to plan, store, resume and summarise it. The full size:
`python -m pytest tests/benchmarks/test_records_scale.py --benchmark-only -s`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT

PLAY = Path(__file__).with_name("records.py")


def play(folder: Path, num_caps: int, num_rounds: int, num_ranks: int) -> dict[str, Any]:
    """In a process of its own, so that the memory is its own."""
    sizes = map(str, (num_caps, num_rounds, num_ranks))
    done = subprocess.run(
        [sys.executable, str(PLAY), *sizes, str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.campaign
def test_memory_and_work_grow_with_the_blocks_and_no_faster(tmp_path: Path) -> None:
    small, large = play(tmp_path / "small", 1, 8, 64), play(tmp_path / "large", 4, 8, 64)
    factor = large["blocks"] / small["blocks"]
    assert factor == pytest.approx(4, rel=0.05)
    # Rows kept as dictionaries would take above 500 bytes each: 18 MiB here, 5 GiB at full size.
    grown_bytes = (large["peak_mib"] - small["peak_mib"]) * 2**20
    assert grown_bytes / (large["blocks"] - small["blocks"]) < 250
    # With the square it would grow 16-fold. Processor time, so a busy machine does not matter.
    assert sum(large["cpu_s"].values()) / sum(small["cpu_s"].values()) < 2 * factor


@pytest.mark.timeout(1200)
def test_5000_cases_of_64_ranks_in_30_rounds(benchmark: Any, tmp_path: Path) -> None:
    found = benchmark.pedantic(lambda: play(tmp_path / "run", 104, 30, 64), rounds=1)
    parts = ", ".join(f"{part} {cpu_s:.0f} s" for part, cpu_s in found["cpu_s"].items())
    print(f"{found['cases']} cases, {found['blocks']:,} blocks: {parts}; {found['peak_mib']:.0f} MiB")
    benchmark.extra_info |= found
    assert found["blocks"] > 9_500_000
    assert found["peak_mib"] < 1024
