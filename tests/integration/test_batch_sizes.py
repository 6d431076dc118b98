"""The command as a user types it: two batch sizes on two ranks."""

import json

import pytest
from commands import TINY, bench_run

from ddp_bench.bench.results.store import load_run


def test_two_sizes_on_two_ranks_have_a_single_each_and_an_answer(tmp_path):
    what = ("--modes", "ddp", "--gpus", "2", "--bucket-cap-mb", "default", "--passes", "no_sync")
    how = ("--rounds", "6", "--json", "--out", str(tmp_path / "out"))
    done = bench_run(*TINY, "--batch-size", "8,2", *what, *how)
    assert done.returncode == 0, done.stderr[-4000:]
    cases = load_run(tmp_path / "out").cases
    assert (cases["status"] == "ok").all(), cases["reason"].tolist()
    assert [*zip(cases["mode"], cases["batch_per_device"], cases["global_batch"], strict=True)] == [
        ("single", 2, 2),
        ("ddp", 2, 4),
        ("single", 8, 8),
        ("ddp", 8, 16),
    ]
    rate, speedup = cases["images_per_s"], cases["speedup"]
    for single, ddp in ((0, 1), (2, 3)):
        assert rate[ddp] / rate[single] == pytest.approx(speedup[ddp], rel=1e-9)
    answers = json.loads(done.stdout)["answers"]
    assert "batch size" in [one["question"] for one in answers]
    assert (tmp_path / "out/report.html").read_text().count("Throughput over batch size") >= 1
