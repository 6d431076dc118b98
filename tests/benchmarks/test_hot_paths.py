"""The suite's own work: none of it may come near the time of what it measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddp_bench.bench.buckets import BucketCaps
from ddp_bench.bench.manifest import Manifest
from ddp_bench.bench.plan import Machine, Planned, expand
from ddp_bench.bench.resolve import with_device_defaults
from ddp_bench.bench.results.aggregate import Outcome, case_rows
from ddp_bench.bench.results.round_times import RoundTimes
from ddp_bench.bench.results.schema import BLOCKS, typed_frame
from ddp_bench.bench.results.store import RunWriter, claim
from ddp_bench.bench.settings import Settings
from ddp_bench.report.build import build

MACHINE = Machine(device_type="cpu", devices_per_node=8)


def plan(num_caps: int) -> list[Planned]:
    settings = Settings(
        gpus=(1, 2, 4, 8), bucket_cap_mb=tuple(BucketCaps((i + 1.0,)) for i in range(num_caps))
    )
    resolved = with_device_defaults(settings, device_type="cpu", num_local_devices=8)
    return expand(resolved, MACHINE, arch="resnet18", image_size=64)


def blocks(planned: list[Planned], num_rounds: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        {
            "case_id": p.case.case_id,
            "phase": "timed",
            "round": r + 1,
            "position": 0,
            "rank": 0,
            "host": "h",
            "started_s": 0.0,
            "num_steps": 3,
            "block_ms": ms,
            "steps_ms": f"{ms / 3:.4g} {ms / 3:.4g} {ms / 3:.4g}",
        }
        for p in planned
        for r, ms in enumerate(rng.lognormal(5, 0.05, num_rounds))
    ]


def test_plan_expansion(benchmark: Any) -> None:
    planned = benchmark(lambda: plan(1000))
    assert len(planned) > 3000


def test_store_append(benchmark: Any, tmp_path: Path) -> None:
    writer = RunWriter(claim(tmp_path / "run"))
    rows = blocks(plan(1)[:1], 8)
    benchmark(lambda: writer.append("blocks.csv", rows))


@pytest.mark.timeout(600)
def test_statistics_over_10_000_blocks(benchmark: Any) -> None:
    planned = plan(120)
    frame = typed_frame(blocks(planned, 30), BLOCKS)
    assert len(frame) >= 10_000
    outcomes = [Outcome(p, "ok") for p in planned]
    rows = benchmark.pedantic(lambda: case_rows(outcomes, RoundTimes.of(frame)), rounds=1)
    assert rows["images_per_s"].notna().all()


@pytest.mark.timeout(600)
def test_report_build(benchmark: Any, tmp_path: Path) -> None:
    planned = plan(10)
    writer = RunWriter(claim(tmp_path / "run"))
    rows = blocks(planned, 30)
    writer.append("blocks.csv", rows)
    frame = typed_frame(rows, BLOCKS)
    writer.replace("cases.csv", case_rows([Outcome(p, "ok") for p in planned], RoundTimes.of(frame)))
    writer.write_manifest(Manifest())
    page = benchmark.pedantic(lambda: build([tmp_path / "run"], tmp_path / "report.html"), rounds=2)
    assert page.stat().st_size > 0
