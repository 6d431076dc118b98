"""The export, read by the tool that it is for."""

import json
import sys

import numpy as np
import pytest
from commands import ROOT, finished
from pytest_benchmark.stats import Stats
from report_runs import case, run, timed, usual_cases
from sample_runs import EVERY_SAMPLE, sample

from ddp_bench.bench.common.errors import UsageError
from ddp_bench.bench.export import main as command
from ddp_bench.bench.export.pytest_benchmark import write_pytest_benchmark
from ddp_bench.bench.findings.wording import CPU_STAND_IN

CALIBRATED = ROOT / "results" / "samples" / "predictions" / "resnet18-2hosts" / "1gbit"

OF_TRACKERS = ("ops", "stddev", "mean", "rounds", "median", "iqr")
"""Statistics that github-action-benchmark's tool `pytest` reads, and Bencher's adapter `python_pytest`."""

HOST = "secret-host.example.org"
MANIFEST = {
    "created_utc": "2026-01-02T03:04:05+00:00",
    "versions": {"torch": "2.15.0", "python": "3.11.7"},
    "git": {"commit": "f" * 40, "dirty": False},
    "environment": {"host": HOST, "os": "Linux-6.1-x86_64", "cpu_model": "A CPU", "num_cores": 64},
    "hosts": {HOST: {}, f"2.{HOST}": {}},
}


def made():
    """Two ranks that take turns at being the slowest, and `single`; one case that failed."""
    single = case("single", 1, 100.0)
    ddp = case("ddp", 2, 160.0, data="/home/someone/images")
    failed = case("ddp", 4, None, status="failed", reason="rank 3 died")
    blocks = [
        *(timed(single, r, ms, ms) for r, ms in ((1, 100.0), (2, 80.0), (3, 125.0))),
        *(timed(ddp, r, ms, ms, rank=0) for r, ms in ((1, 120.0), (2, 90.0), (3, 125.0))),
        *(timed(ddp, r, ms, ms, rank=1) for r, ms in ((1, 110.0), (2, 100.0), (3, 120.0))),
        *(timed(ddp, r, ms, phase="no_sync") for r, ms in ((1, 100.0), (3, 115.0))),
    ]
    return run([single, ddp, failed], MANIFEST, timed_blocks=blocks)


def exported(found):
    return json.loads(write_pytest_benchmark(found))


@pytest.mark.parametrize("path", EVERY_SAMPLE)
def test_every_recorded_run_can_be_exported(path):
    """Older ones too, which have no step time."""
    found = sample(path)
    on_cpu = (found.cases["device_type"] == "cpu").all()
    benchmarks = exported(found)["benchmarks"]
    assert len(benchmarks) == (found.cases["status"] == "ok").sum()
    for benchmark in benchmarks:
        assert benchmark["fullname"]
        assert (benchmark["extra_info"].get("note") == CPU_STAND_IN) == on_cpu
        assert all(0 <= benchmark["stats"][name] < 1e9 for name in OF_TRACKERS)


def test_a_case_has_every_round_of_the_slowest_rank_and_its_throughput():
    found = exported(made())
    single, ddp = found["benchmarks"]
    assert ddp["stats"]["data"] == [0.12, 0.1, 0.125]
    assert single["stats"]["data"] == [0.1, 0.08, 0.125]
    assert (ddp["extra_info"]["images_per_s"], ddp["extra_info"]["num_devices"]) == ("160", "2")
    assert ddp["name"] == "resnet50 ddp-n2-x-1, 2 GPUs"
    assert found["commit_info"]["id"] == "f" * 40
    assert found["machine_info"]["cpu"] == {"brand_raw": "A CPU", "count": 64}


def test_no_machine_or_folder_of_the_user_is_named():
    text = write_pytest_benchmark(made())
    assert HOST not in text
    assert "someone" not in text
    assert exported(made())["benchmarks"][1]["extra_info"]["data"] == "folder"


def test_a_case_that_was_not_measured_stays_out():
    assert "ddp-n4" not in write_pytest_benchmark(made())
    with pytest.raises(UsageError, match="no measured case"):
        write_pytest_benchmark(run([case("ddp", 2, None, status="failed")]))


def test_manifests_may_lack_anything():
    for manifest in ({}, {"hosts": {"h": {}}}, {"environment": {"gpus": [{}]}}, {"created_utc": "then"}):
        assert "ddp-n2" in write_pytest_benchmark(run(usual_cases(), manifest))


@pytest.mark.parametrize("num_rounds", [1, 2, 3, 4, 5, 6, 7, 8, 41])
def test_statistics_are_pytest_benchmarks(num_rounds):
    row, oracle = case("ddp", 2, 160.0), Stats()
    steps_ms = np.random.default_rng(num_rounds).lognormal(4, 0.5, num_rounds).tolist()
    found = run([row], timed_blocks=[timed(row, r, ms, ms) for r, ms in enumerate(steps_ms, start=1)])
    for ms in steps_ms:
        oracle.update(ms / 1000)
    (benchmark,) = exported(found)["benchmarks"]
    stats = benchmark["stats"]
    assert stats.pop("data") == pytest.approx(oracle.data)
    assert stats.pop("iterations") == 2
    assert stats.pop("outliers") == oracle.outliers
    expected = oracle.as_dict()
    del expected["outliers"]
    assert stats == pytest.approx(expected)


@pytest.mark.campaign
def test_pytest_benchmark_draws_and_compares_runs(tmp_path):
    def at(*arguments):
        done = finished([sys.executable, *arguments], tmp_path, timeout_s=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    for name in ("before.json", "after.json"):
        (tmp_path / name).write_text(write_pytest_benchmark(made()))
    drawn = at("-m", "pytest_benchmark", "compare", "before.json", "after.json", "--columns=median,rounds")
    assert "time in ms" in drawn
    rows = [line.split() for line in drawn.splitlines() if line.startswith("resnet50 ddp-n2-x-1, 2 GPUs")]
    assert [row[-3:] for row in rows] == [["120.0000", "(1.20)", "3"]] * 2
    (tmp_path / "test_own.py").write_text("def test_own(benchmark):\n    benchmark(int)\n")
    said = at("-m", "pytest", "-q", "-p", "no:xdist", "--benchmark-compare=before.json", "test_own.py")
    assert "Comparing against benchmarks from: " in said
    assert "before.json" in said


def test_a_file_holds_what_the_terminal_shows(tmp_path, capsys):
    assert command.main([str(CALIBRATED), "--format", "pytest-benchmark"]) == 0
    shown = capsys.readouterr().out
    assert shown.endswith("\n")
    target = tmp_path / "exported"
    target.write_text("of before")
    assert command.main([str(CALIBRATED), "--format", "pytest-benchmark", "--out", str(target)]) == 0
    assert capsys.readouterr().out == ""
    assert target.read_text() == shown
    assert [path.name for path in tmp_path.iterdir()] == ["exported"]
