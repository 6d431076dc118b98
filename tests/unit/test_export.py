"""Exports, each read by the tool it is for or held against its schema."""

import json
import sys

import numpy as np
import pytest
from commands import ROOT, finished
from pytest_benchmark.stats import Stats
from report_runs import case, measured, run, timed, usual_cases
from sample_runs import EVERY_SAMPLE, sample

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.export import main as command
from ddp_bench.bench.export.formats import pytest_benchmark, pytorch
from ddp_bench.bench.findings.wording import CPU_STAND_IN

CALIBRATED = ROOT / "results" / "samples" / "predictions" / "resnet18-2hosts" / "1gbit"
EXPORTS = (pytorch, pytest_benchmark)

OF_TRACKERS = ("ops", "stddev", "mean", "rounds", "median", "iqr")
"""Statistics that github-action-benchmark's tool `pytest` reads, and Bencher's adapter `python_pytest`."""

MAP = {"String": "String"}
DATABASE = {
    "benchmark": {"name": "String", "mode": "String", "dtype": "String", "extra_info": MAP},
    "model": {
        "name": "String", "type": "String", "backend": "String", "origins": ["String"], "extra_info": MAP,
    },
    "metric": {
        "name": "String", "benchmark_values": ["Float32"], "target_value": "Float32", "extra_info": MAP,
    },
    "runners": [{
        "name": "String", "type": "String", "cpu_info": "String", "cpu_count": "UInt32", "mem_info": "String",
        "avail_mem_in_gb": "UInt32", "gpu_info": "String", "gpu_count": "UInt32", "gpu_mem_info": "String",
        "avail_gpu_mem_in_gb": "UInt32", "extra_info": MAP,
    }],
    "dependencies": {"String": {
        "repo": "String", "branch": "String", "sha": "String", "version": "String", "extra_info": MAP,
    }},
}  # fmt: skip
"""Columns of benchmark.oss_ci_benchmark_v3 that a benchmark fills; CI's upload fills those of the change."""


def fits(value, kind):
    """Whether ClickHouse would read a JSON value into a column of this kind."""
    if isinstance(kind, list):
        return isinstance(value, list) and all(fits(item, kind[0]) for item in value)
    if isinstance(kind, dict):
        inner = kind.get("String")
        if not isinstance(value, dict) or not (inner or value.keys() <= kind.keys()):
            return False
        return all(fits(item, inner or kind[name]) for name, item in value.items())
    if kind == "String":
        return isinstance(value, str)
    if kind == "UInt32":
        return type(value) is int and 0 <= value < 2**32
    return type(value) in (int, float) and abs(value) < 3.4e38


HOST = "secret-host.example.org"
GPU = {"name": "Test GPU", "memory_mib": 81920}
MANIFEST = {
    "run_id": "abc123",
    "created_utc": "2026-01-02T03:04:05+00:00",
    "versions": {"torch": "2.15.0", "python": "3.11.7"},
    "git": {"commit": "f" * 40, "dirty": False},
    "environment": {"host": HOST, "os": "Linux-6.1-x86_64", "cpu_model": "A CPU", "num_cores": 64},
    "hosts": {
        HOST: {"cpu_model": "A CPU", "num_cores": 64, "memory_gib": 503.7, "gpus": [GPU] * 2},
        f"2.{HOST}": {"cpu_model": "A CPU", "num_cores": 64, "gpus": []},
    },
}


def made():
    """Two ranks that take turns at being the slowest; `single` for the speed-up; one case that failed."""
    single = case("single", 1, 100.0, peak_mem_mib=2000.0, **measured(step_ms=100.0))
    more = measured(step_ms=120.0, exposed_comm_ms=20.0)
    ddp = case("ddp", 2, 160.0, peak_mem_mib=2500.5, data="/home/someone/images", **more)
    failed = case("ddp", 4, None, status="failed", reason="rank 3 died")
    blocks = [
        *(timed(single, r, ms, ms) for r, ms in ((1, 100.0), (2, 80.0), (3, 125.0))),
        *(timed(ddp, r, ms, ms, rank=0) for r, ms in ((1, 120.0), (2, 90.0), (3, 125.0))),
        *(timed(ddp, r, ms, ms, rank=1) for r, ms in ((1, 110.0), (2, 100.0), (3, 120.0))),
        *(timed(ddp, r, ms, phase="no_sync") for r, ms in ((1, 100.0), (3, 115.0))),
    ]
    return run([single, ddp, failed], MANIFEST, timed_blocks=blocks)


def records(found):
    return list(json.loads(pytorch(found)))


@pytest.mark.parametrize("path", EVERY_SAMPLE)
def test_every_recorded_run_can_be_exported(path):
    """Older ones too, which have no step time."""
    found = sample(path)
    for record in records(found):
        assert record.keys() <= DATABASE.keys()
        for column, value in record.items():
            assert fits(value, DATABASE[column]), (column, value)
        assert record["metric"]["benchmark_values"]
    on_cpu = (found.cases["device_type"] == "cpu").all()
    for export in EXPORTS:
        assert (CPU_STAND_IN in export(found)) == on_cpu
    for benchmark in json.loads(pytest_benchmark(found))["benchmarks"]:
        assert benchmark["fullname"]
        assert all(0 <= benchmark["stats"][name] < 1e9 for name in OF_TRACKERS)


def test_the_database_gets_every_round_of_the_slowest_rank():
    found = {(r["model"]["backend"].split("-")[0], r["metric"]["name"]): r["metric"] for r in records(made())}
    rounds = {name: metric["benchmark_values"] for name, metric in found.items()}
    assert rounds["ddp", "step_ms"] == [120.0, 100.0, 125.0]
    assert rounds["ddp", "images_per_s"] == pytest.approx([20 * 1000 / ms for ms in (120, 100, 125)])
    # Only in rounds that have both.
    assert rounds["ddp", "exposed_comm_ms"] == [20.0, 10.0]
    single = [10 * 1000 / ms for ms in (100, 80, 125)]
    assert rounds["single", "images_per_s"] == pytest.approx(single)
    ratios = [own / one for own, one in zip(rounds["ddp", "images_per_s"], single, strict=True)]
    assert rounds["ddp", "speedup"] == pytest.approx(ratios)
    assert rounds["single", "peak_mem_mib"] == [2000.0]
    assert ("single", "exposed_comm_ms") not in rounds
    about = {"unit": "ms", "meaning": "one optimizer step of the slowest rank", "better": "lower"}
    about |= {"estimate": "120", "low": "118.8", "high": "121.2"}
    assert found["ddp", "step_ms"]["extra_info"] == about
    assert all("target_value" not in metric for metric in found.values())


def test_the_database_gets_the_hosts_of_a_case():
    (runner,) = records(made())[0]["runners"]
    machine = {"name": "cuda", "type": "Test GPU", "cpu_info": "A CPU", "cpu_count": 64}
    machine |= {"gpu_info": "Test GPU", "gpu_count": 2, "avail_gpu_mem_in_gb": 160}
    assert runner == machine | {"avail_mem_in_gb": 503}
    two = run([case("ddp", 2, 160.0, num_nodes=2)], MANIFEST)
    assert len(records(two)[0]["runners"]) == 2


def test_no_format_names_a_machine_or_a_folder_of_the_user():
    for export in EXPORTS:
        text = export(made())
        assert HOST not in text
        assert "someone" not in text


@pytest.mark.parametrize("export", EXPORTS)
def test_a_case_that_was_not_measured_stays_out(export):
    assert "ddp-n4" not in export(made())
    with pytest.raises(UsageError, match="no measured case"):
        export(run([case("ddp", 2, None, status="failed")]))


@pytest.mark.parametrize("export", EXPORTS)
def test_manifests_may_lack_anything(export):
    for manifest in ({}, {"hosts": {"h": {}}}, {"environment": {"gpus": [{}]}}, {"created_utc": "then"}):
        assert "ddp-n2" in export(run(usual_cases(), manifest))


@pytest.mark.parametrize("num_rounds", [1, 2, 3, 4, 5, 6, 7, 8, 41])
def test_statistics_are_pytest_benchmarks(num_rounds):
    row, oracle = case("ddp", 2, 160.0), Stats()
    steps_ms = np.random.default_rng(num_rounds).lognormal(4, 0.5, num_rounds).tolist()
    found = run([row], timed_blocks=[timed(row, r, ms, ms) for r, ms in enumerate(steps_ms, start=1)])
    for ms in steps_ms:
        oracle.update(ms / 1000)
    (benchmark,) = json.loads(pytest_benchmark(found))["benchmarks"]
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
        (tmp_path / name).write_text(pytest_benchmark(made()))
    drawn = at("-m", "pytest_benchmark", "compare", "before.json", "after.json", "--columns=median,rounds")
    assert "time in ms" in drawn
    rows = [line.split() for line in drawn.splitlines() if line.startswith("resnet50 ddp-n2-x-1, 2 GPUs")]
    assert [row[-3:] for row in rows] == [["120.0000", "(1.20)", "3"]] * 2
    (tmp_path / "test_own.py").write_text("def test_own(benchmark):\n    benchmark(int)\n")
    said = at("-m", "pytest", "-q", "-p", "no:xdist", "--benchmark-compare=before.json", "test_own.py")
    assert "Comparing against benchmarks from: " in said
    assert "before.json" in said


@pytest.mark.parametrize("name", sorted({*command.FORMATS} - {command.ZIP}))
def test_a_file_holds_what_the_terminal_shows(name, tmp_path, capsys):
    assert command.main([str(CALIBRATED), "--format", name]) == 0
    shown = capsys.readouterr().out
    assert shown.endswith("\n")
    target = tmp_path / "exported"
    target.write_text("of before")
    assert command.main([str(CALIBRATED), "--format", name, "--out", str(target)]) == 0
    assert capsys.readouterr().out == ""
    assert target.read_text() == shown
    assert [path.name for path in tmp_path.iterdir()] == ["exported"]
