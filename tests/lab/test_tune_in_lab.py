"""bench.tune over a slow link, where the default's two buckets hide next to nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import SMALL, python

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.lab import namespaces
from ddp_bench.bench.predict.calibration import load_calibration

RATE_BITS_PER_S = 200e6
GRADIENT_BYTES = 1_080_424


@pytest.mark.lab
@pytest.mark.campaign
def test_a_slow_link_is_calibrated_and_a_finer_layout_proven(tmp_path: Path) -> None:
    try:
        namespaces.require_support()
    except UsageError as missing:
        pytest.skip(str(missing))
    out = tmp_path / "out"
    lab = ["-m", "bench.lab", "--hosts", "2", "--rate", "200mbit", "--", "python", "-m", "bench.tune"]
    how = ["--gpus", "2", "--rounds", "24", "--steps", "2", "--out", str(out)]
    done = python(*lab, *SMALL, *how)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Paste:\nmodel = DistributedDataParallel(model, bucket_cap_mb" in done.stdout
    answer = json.loads((out / "tune.json").read_text())
    default, chosen = answer["candidates"][0], answer["chosen"]
    assert answer["change"]
    assert chosen["num_buckets"] > default["num_buckets"], "small buckets start while the backward runs"
    assert chosen["step_ms"]["estimate"] < default["step_ms"]["estimate"]
    # Not faster than the link carries the payload: two ranks send every byte once each way.
    times = dict(load_calibration(out / "calibration").allreduce[0].points)
    link_ms = {size: size * 8 / RATE_BITS_PER_S * 1000 for size in times}
    assert times[2**20][0] > 0.9 * link_ms[2**20]
    assert chosen["bound_ms"] > link_ms[2**20]
