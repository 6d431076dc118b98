"""How the report bears a large run: time, memory and size of the page. Run with
`python -m pytest tests/benchmarks/test_report_scale.py --benchmark-only -s`.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT

from ddp_bench.bench.axes import DDP_DEFAULTS
from ddp_bench.bench.results.schema import CASES, typed_frame
from ddp_bench.bench.results.store import RunWriter

NUM_ROUNDS, NUM_RANKS, NUM_STEPS = 30, 8, 4
STEP_MS = 100.0


def case(index: int) -> dict[str, Any]:
    """The first case is `single`; the others are DDP on eight devices with a bucket cap each."""
    mode, n = ("single", 1) if index == 0 else ("ddp", NUM_RANKS)
    row: dict[str, Any] = {
        "case_id": f"{mode}-n{n}-cap{index}-{index:06x}",
        "status": "ok",
        "mode": mode,
        "impl": "torch",
        "device_type": "cuda",
        "device_name": "NVIDIA H200",
        "backend": "nccl",
        "num_devices": n,
        "num_nodes": 1,
        "oversubscribed": False,
        "arch": "resnet50",
        "image_size": 224,
        "batch_per_device": 64,
        "global_batch": 64 * n,
        "unit": "images",
        "units_per_sample": 1,
        "scaling": "weak",
        "precision": "fp32",
        "data": "device",
        "num_rounds": NUM_ROUNDS,
        "num_buckets": 4,
        "bucket_bytes": "8196000/27260928/27260928/39508992",
        **({**DDP_DEFAULTS, "bucket_cap_mb": str(index)} if mode == "ddp" else {}),
    }
    for column in CASES:
        if column.kind == "float" and not column.name.startswith("dp_"):
            row[column.name] = 0.9 + (index % 97) / 700 + len(column.name) / 1000
    return row


def write(folder: Path, num_cases: int) -> Path:
    folder.mkdir()
    (folder / "manifest.json").write_text(
        json.dumps({"schema_version": 3, "name": "large"}), encoding="utf-8"
    )
    writer = RunWriter(folder)
    cases = [case(i) for i in range(num_cases)]
    writer.replace("cases.csv", typed_frame(cases, CASES))
    for round_index in range(1, NUM_ROUNDS + 1):
        writer.append(
            "blocks.csv",
            [
                {
                    "case_id": row["case_id"],
                    "phase": "timed",
                    "round": round_index,
                    "position": i,
                    "rank": rank,
                    "host": "node-0",
                    "started_s": 10.0 * round_index,
                    "num_steps": NUM_STEPS,
                    "block_ms": NUM_STEPS * STEP_MS + i % 11 + rank / 10,
                    "steps_ms": " ".join(f"{STEP_MS + (i + step) % 7:.3f}" for step in range(NUM_STEPS)),
                }
                for i, row in enumerate(cases)
                for rank in range(row["num_devices"])
            ],
        )
    return folder


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_cases", [100, 1000, 10_000])
def test_page_of_a_large_run(benchmark: Any, tmp_path: Path, num_cases: int) -> None:
    folder = write(tmp_path / "run", num_cases)
    command = [sys.executable, "-m", "report", str(folder)]
    benchmark.pedantic(lambda: subprocess.run(command, cwd=ROOT, check=True, capture_output=True), rounds=1)
    page_mb = (folder / "report.html").stat().st_size / 1e6
    # The largest child so far, so sizes must grow from test to test.
    peak_mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    benchmark.extra_info |= {"page_mb": page_mb, "peak_mib": peak_mib}
    print(f"{num_cases} cases: {benchmark.stats.stats.mean:.1f} s, {peak_mib:.0f} MiB, page {page_mb:.2f} MB")
    if num_cases == 1000:
        assert page_mb < 5
        assert peak_mib < 1024
