"""bench.run over a shaped link: the link's physics is the oracle."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_lab import LINK_MS, buckets_at_1_gbit

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.lab import namespaces


@pytest.mark.lab
@pytest.mark.campaign
def test_one_gigabit_link_shows_what_buckets_hide(tmp_path: Path) -> None:
    try:
        namespaces.require_support()
    except UsageError as missing:
        pytest.skip(str(missing))
    run = buckets_at_1_gbit(tmp_path / "run")
    cases = run.cases[run.cases["mode"] == "ddp"].set_index("bucket_cap_mb")
    assert (cases["status"] == "ok").all()
    assert cases["link"].tolist() == ["1gbit", "1gbit"]
    assert cases["num_nodes"].tolist() == [2, 2]
    assert {rank.host for rank in run.manifest.ranks} == {"host0", "host1"}
    assert (cases["comm_ms"] > LINK_MS).all(), "not faster than the link carries the payload"
    whole, split = cases.loc["100"], cases.loc["1"]
    assert whole["exposed_comm_ms"] > split["exposed_comm_ms"], "small buckets hide some"
    assert whole["overlap_trace_pct"] < split["overlap_trace_pct"], "one bucket has nothing to overlap with"
    assert whole["step_ms_p50"] > split["step_ms_p50"], "and that shows in the step"
    buckets = run.buckets[run.buckets["case_id"] == split["case_id"]]
    assert set(buckets["rank"]) == {0, 1}
    assert (buckets["ready_ms"] <= buckets["launch_ms"]).all()
    assert (buckets["start_ms"] < buckets["done_ms"]).all()
