"""bench.tune over a slow link, where the default's two buckets hide next to nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import SMALL, python

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.lab import namespaces
from ddp_bench.bench.predict.bound import bound_ms
from ddp_bench.bench.predict.calibration import load_calibration

RATE_BITS_PER_S = 200e6


@pytest.mark.lab
@pytest.mark.campaign
def test_over_a_slow_link_a_finer_layout_wins(tmp_path: Path) -> None:
    try:
        namespaces.require_support()
    except UsageError as missing:
        pytest.skip(str(missing))
    out = tmp_path / "out"
    lab = ["-m", "bench.lab", "--hosts", "2", "--rate", "200mbit", "--", "python", "-m", "bench.tune"]
    caps = ["--bucket-cap-mb", "default,0.1,0.25,0.5,5", "--calibrate", "--passes", "no_sync,comm"]
    how = ["--gpus", "2", "--rounds", "24", "--steps", "2", "--out", str(out)]
    done = python(*lab, *SMALL, *caps, *how)
    assert done.returncode == 0, done.stderr[-4000:]
    said = next(line for line in done.stdout.splitlines() if line.startswith("bucket_cap_mb="))
    assert said.partition(":")[0] in {f"bucket_cap_mb={cap}" for cap in ("0.1", "0.25", "0.5")}
    assert "the rate of the default" in said
    assert "Bound: by simulation no bucket layout has a step below" in done.stdout
    # Not faster than the link carries the payload: two ranks send every byte once each way.
    found = load_calibration(out)
    times = dict(found.allreduce[0].points)
    link_ms = {size: size * 8 / RATE_BITS_PER_S * 1000 for size in times}
    assert times[2**20][0] > 0.9 * link_ms[2**20]
    assert bound_ms(found) > link_ms[2**20]
