"""Runs of which one thing is slow on purpose: what they name first is that thing."""

import pytest
from commands import bench_run
from real_lab import buckets_at_1_gbit
from slow_workloads import pictures

from ddp_bench.bench.findings.causes import ALL_REDUCE, BUFFERS, DATA, OWN_WORK, RANKS, causes, slow_ranks
from ddp_bench.bench.results.case_result import case_results
from ddp_bench.bench.results.store import load_run

pytestmark = pytest.mark.campaign


def named(run):
    cases = case_results(run.cases)
    return [*causes(cases, slow_ranks(run.manifest, cases, run.times))]


def measured(out, *options):
    given = (
        "--modes",
        "ddp",
        "--gpus",
        "1,2",
        "--bucket-cap-mb",
        "default",
        "--rounds",
        "20",
        "--steps",
        "4",
    )
    done = bench_run(*given, "--device", "cpu", *options, "--out", str(out), env={"PYTHONPATH": "tests"})
    assert done.returncode == 0, done.stderr[-4000:]
    return load_run(out)


@pytest.mark.parametrize(
    ("model", "cause"), [("Buffers", BUFFERS), ("LateRank", RANKS), ("ManyParameters", OWN_WORK)]
)
def test_a_workload_that_is_slow_in_one_way(tmp_path, model, cause):
    options = ("--workload", f"slow_workloads:{model}", "--image-size", "8", "--batch-size", "2")
    assert named(measured(tmp_path / "out", *options))[0] == cause


def test_slow_data(tmp_path):
    """Every batch of a small model is decoded by one process from large pictures."""
    options = ("--arch", "resnet20", "--image-size", "16", "--batch-size", "4", "--data-workers", "1")
    assert named(measured(tmp_path / "out", *options, "--data", str(pictures(tmp_path))))[0] == DATA


@pytest.mark.lab
def test_a_slow_link(tmp_path):
    assert named(buckets_at_1_gbit(tmp_path / "out"))[0] == ALL_REDUCE
