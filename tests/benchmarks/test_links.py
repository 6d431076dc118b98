"""How near the lab's links come to what they are set to, and what that shows of buckets: bounds that need a
quiet machine. Run with `python -m pytest tests/benchmarks/test_links.py --benchmark-only -s`.
"""

import pytest
from real_lab import LINK_MS, Lab, buckets_at_1_gbit

NUM_BYTES = 20_000_000


@pytest.mark.lab
@pytest.mark.parametrize(("rate", "bit_per_s", "repeats"), [("200mbit", 2e8, 2), ("1gbit", 1e9, 5)])
def test_a_transfer(benchmark, tmp_path, rate, bit_per_s, repeats):
    lab = Lab(tmp_path / "lab", rate, "transfer", str(NUM_BYTES), str(repeats))
    code, _, err = benchmark.pedantic(lab.end, rounds=1)
    assert code == 0, err
    ratio = lab.fastest_s() / (NUM_BYTES * 8 / bit_per_s)
    benchmark.extra_info["over_the_links_time"] = ratio
    print(f"{rate}: {ratio:.3f} of the link's own time")
    assert ratio <= 1.35


@pytest.mark.lab
def test_what_buckets_hide_at_1_gbit(benchmark, tmp_path):
    run = benchmark.pedantic(lambda: buckets_at_1_gbit(tmp_path / "run"), rounds=1)
    cases = run.cases[run.cases["mode"] == "ddp"].set_index("bucket_cap_mb")
    whole, split = cases.loc["100"], cases.loc["1"]
    # Headers cost 4.5%, busy cores some more.
    assert (cases["comm_ms"] < 1.3 * LINK_MS).all()
    assert whole["exposed_comm_ms"] > 0.8 * whole["comm_ms"], "one bucket leaves nothing to overlap with"
    assert split["exposed_comm_ms"] < 0.95 * whole["exposed_comm_ms"], "small buckets hide some"
    assert whole["overlap_trace_pct"] < 10 < split["overlap_trace_pct"]
