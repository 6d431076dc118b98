"""How a large run is borne: time, memory and size of its page; time and memory to plan, store, resume and
summarise its records; time of a simulated step. The full size:
`python -m pytest tests/benchmarks/test_scale.py --benchmark-only -s`.
"""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT

PLAY = Path(__file__).with_name("records.py")


def play(folder, num_caps, num_rounds, num_ranks):
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
    return json.loads(done.stdout)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_caps", [2, 21, 208])
def test_page_of_a_large_run(benchmark, tmp_path, num_caps):
    """Of 48 cases a cap, on eight ranks."""
    folder = tmp_path / "run"
    num_cases = play(folder, num_caps, 30, 8)["cases"]
    command = [sys.executable, "-m", "report", str(folder)]
    benchmark.pedantic(lambda: subprocess.run(command, cwd=ROOT, check=True, capture_output=True), rounds=1)
    page_mb = (folder / "report.html").stat().st_size / 1e6
    # The largest child so far, so sizes must grow from test to test, and these tests come first.
    peak_mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    benchmark.extra_info |= {"page_mb": page_mb, "peak_mib": peak_mib}
    print(f"{num_cases} cases: {benchmark.stats.stats.mean:.1f} s, {peak_mib:.0f} MiB, page {page_mb:.2f} MB")
    if num_caps == 21:
        assert page_mb < 5
        assert peak_mib < 1024


@pytest.mark.campaign
def test_memory_and_work_grow_with_the_blocks_and_no_faster(tmp_path):
    small, large = play(tmp_path / "small", 1, 8, 64), play(tmp_path / "large", 4, 8, 64)
    factor = large["blocks"] / small["blocks"]
    assert factor == pytest.approx(4, rel=0.05)
    # Rows kept as dictionaries would take above 500 bytes each: 18 MiB here, 5 GiB at full size.
    grown_bytes = (large["peak_mib"] - small["peak_mib"]) * 2**20
    assert grown_bytes / (large["blocks"] - small["blocks"]) < 250
    # With the square it would grow 16-fold. Processor time, so a busy machine does not matter.
    assert sum(large["cpu_s"].values()) / sum(small["cpu_s"].values()) < 2 * factor


@pytest.mark.timeout(1200)
def test_5000_cases_of_64_ranks_in_30_rounds(benchmark, tmp_path):
    found = benchmark.pedantic(lambda: play(tmp_path / "run", 104, 30, 64), rounds=1)
    parts = ", ".join(f"{part} {cpu_s:.0f} s" for part, cpu_s in found["cpu_s"].items())
    print(f"{found['cases']} cases, {found['blocks']:,} blocks: {parts}; {found['peak_mib']:.0f} MiB")
    benchmark.extra_info |= found
    assert found["blocks"] > 9_500_000
    assert found["peak_mib"] < 1024
