"""Workloads of which one thing is slow on purpose: what their runs name first is that thing."""

import pytest
from commands import bench_run
from slow_workloads import causes_of, pictures

from ddp_bench.bench.findings.communication import BUFFERS, CONTENTION, DATA, OWN_WORK, RANKS
from ddp_bench.bench.results.store import load_run

OF_PICTURES = "--arch resnet20 --image-size 16 --batch-size 4 --data-workers 1 --data"
"""Every batch of a small model is decoded by one process from large pictures."""


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("slow", "cause"), [("Buffers", BUFFERS), ("LateRank", RANKS), ("ManyParameters", OWN_WORK), ("", DATA)]
)
def test_what_is_slow_is_named_first(tmp_path, slow, cause):
    of_model = f"--workload slow_workloads:{slow} --image-size 8 --batch-size 2"
    options = of_model if slow else f"{OF_PICTURES} {pictures(tmp_path)}"
    given = "--modes ddp --gpus 1,2 --bucket-cap-mb default --rounds 20 --steps 4 --device cpu"
    out = tmp_path / "out"
    done = bench_run(*f"{given} {options}".split(), "--out", str(out), env={"PYTHONPATH": "tests"})
    assert done.returncode == 0, done.stderr[-4000:]
    first, *others = causes_of(load_run(out))
    part = others[0] if first == CONTENTION and others else first
    assert cause in (first, part)
