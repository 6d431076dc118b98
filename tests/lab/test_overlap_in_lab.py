"""bench.run over a shaped link: the link's physics is the oracle."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT

from bench.errors import UsageError
from bench.records.store import load_run
from bench.virtual_hosts import netns

GRADIENT_BYTES = 46_758_048
LINK_MS = GRADIENT_BYTES * 8 / 1e9 * 1000
"""Two ranks send every gradient byte once each way, at 1 Gbit/s."""


@pytest.mark.lab
def test_one_gigabit_link_shows_what_buckets_hide(tmp_path: Path) -> None:
    try:
        netns.require_support()
    except UsageError as missing:
        pytest.skip(str(missing))
    out = tmp_path / "run"
    lab = ["-m", "bench.lab", "--hosts", "2", "--rate", "1gbit", "--", "python", "-m", "bench.run"]
    sweep = ["--modes", "ddp", "--gpus", "2", "--bucket-cap-mb", "1,100", "--rounds", "5", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, *lab, *sweep, "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    run = load_run(out)
    cases = run.cases[run.cases["mode"] == "ddp"].set_index("bucket_cap_mb")
    assert (cases["status"] == "ok").all()
    assert cases["link"].tolist() == ["1gbit", "1gbit"]
    assert cases["num_nodes"].tolist() == [2, 2]
    assert {rank["host"] for rank in run.manifest["ranks"]} == {"host0", "host1"}
    # Not faster than the link carries the payload; headers cost 4.5%, busy cores some more.
    assert (cases["comm_ms"] > LINK_MS).all()
    assert (cases["comm_ms"] < 1.3 * LINK_MS).all()
    whole, split = cases.loc["100"], cases.loc["1"]
    assert whole["exposed_comm_ms"] > 0.8 * whole["comm_ms"], "one bucket leaves nothing to overlap with"
    assert split["exposed_comm_ms"] < 0.95 * whole["exposed_comm_ms"], "small buckets hide some"
    assert whole["overlap_trace_pct"] < 10 < split["overlap_trace_pct"]
    buckets = run.buckets[run.buckets["case_id"] == split["case_id"]]
    assert set(buckets["rank"]) == {0, 1}
    assert (buckets["ready_ms"] <= buckets["launch_ms"]).all()
    assert (buckets["start_ms"] < buckets["done_ms"]).all()
