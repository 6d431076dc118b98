"""Exports, each read by the tool it is for or held against its schema; what the command refuses."""

import csv
import io
import json
import math
import shutil
import subprocess
import sys
from typing import get_type_hints

import jsonschema
import numpy as np
import pandas as pd
import pytest
import schemas
from commands import ROOT, python
from gate_runs import MANIFEST as OF_A_GATE
from gate_runs import STEADY, write_run
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus_text
from pytest_benchmark.stats import Stats
from report_runs import case, measured, paper_like, run, timed, usual_cases
from sample_runs import EVERY_SAMPLE, sample

from ddp_bench import compare, load_run
from ddp_bench.bench import manifest as manifests
from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.export import main as command
from ddp_bench.bench.export.formats import (
    bencher,
    github_action,
    nccl_tests,
    prometheus,
    pytest_benchmark,
    pytorch,
)
from ddp_bench.bench.findings.wording import CPU_STAND_IN
from ddp_bench.bench.manifest import Record, public_fields
from ddp_bench.bench.plan import equal_layout_reason
from ddp_bench.bench.results.archive import unpacked
from ddp_bench.bench.results.public import LEFT_OUT
from ddp_bench.bench.results.recorder import NOT_REACHED
from ddp_bench.bench.results.schema import EXPORTED, FILES
from ddp_bench.bench.settings import Settings

SAMPLE = ROOT / "results" / "samples" / "cpu-lab-1gbit-2hosts"
CALIBRATED = ROOT / "results" / "samples" / "predictions" / "resnet18-2hosts" / "1gbit"
EXPORTS = (pytorch, bencher, github_action, pytest_benchmark, prometheus)

BMF = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "patternProperties": {
        ".+": {
            "type": "object",
            "patternProperties": {
                ".+": {
                    "type": "object",
                    "properties": {
                        "value": {"type": "number"},
                        "lower_value": {"type": "number"},
                        "upper_value": {"type": "number"},
                    },
                    "required": ["value"],
                }
            },
        }
    },
}
"""What https://bencher.dev/bmf.json asks for."""

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


def no_sync(row, round_index, ms, rank=0):
    return timed(row, round_index, ms, rank=rank) | {"phase": "no_sync"}


HOST = "secret-host.example.org"
MANIFEST = {
    "run_id": "abc123",
    "created_utc": "2026-01-02T03:04:05+00:00",
    "versions": {"torch": "2.15.0", "python": "3.11.7"},
    "git": {"commit": "f" * 40, "dirty": False},
    "environment": {"host": HOST, "os": "Linux-6.1-x86_64", "cpu_model": "A CPU", "num_cores": 64},
    "hosts": {
        HOST: {
            "cpu_model": "A CPU",
            "num_cores": 64,
            "memory_gib": 503.7,
            "gpus": [{"name": "Test GPU", "memory_mib": 81920}] * 2,
        },
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
        *(no_sync(ddp, r, ms) for r, ms in ((1, 100.0), (3, 115.0))),
    ]
    return run([single, ddp, failed], MANIFEST, timed_blocks=blocks)


def records(found, **options):
    return list(json.loads(pytorch(found, **options)))


@pytest.mark.parametrize("path", EVERY_SAMPLE)
def test_every_recorded_run_can_be_exported(path):
    """Older ones too, which have no step time."""
    found = sample(path)
    for record in records(found):
        assert record.keys() <= DATABASE.keys()
        for column, value in record.items():
            assert fits(value, DATABASE[column]), (column, value)
        assert record["metric"]["benchmark_values"]
    jsonschema.validate(json.loads(bencher(found)), BMF)
    assert len(json.loads(github_action(found))) == (found.cases["status"] == "ok").sum()
    text = prometheus(found)
    assert [f.name for f in openmetrics(f"{text}\n")] == [f.name for f in prometheus_text(text)]
    assert CPU_STAND_IN in text
    assert json.loads(pytest_benchmark(found))["benchmarks"]


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
    assert found["ddp", "step_ms"]["extra_info"] == {
        "unit": "ms",
        "meaning": "one optimizer step of the slowest rank",
        "better": "lower",
        "estimate": "120",
        "low": "118.8",
        "high": "121.2",
    }
    assert all("target_value" not in metric for metric in found.values())


def test_the_database_gets_the_hosts_of_a_case():
    (runner,) = records(made())[0]["runners"]
    assert runner == {
        "name": "cuda",
        "type": "Test GPU",
        "cpu_info": "A CPU",
        "cpu_count": 64,
        "avail_mem_in_gb": 503,
        "gpu_info": "Test GPU",
        "gpu_count": 2,
        "avail_gpu_mem_in_gb": 160,
    }
    two = run([case("ddp", 2, 160.0, num_nodes=2)], MANIFEST)
    assert len(records(two)[0]["runners"]) == 2
    assert records(two, host_names=True)[0]["runners"][1]["extra_info"] == {"hostname": f"2.{HOST}"}


def test_no_format_names_a_machine_or_a_folder_of_the_user_unasked():
    for export in EXPORTS:
        text = export(made())
        assert HOST not in text
        assert "someone" not in text
    named = json.loads(pytest_benchmark(made(), host_names=True))
    assert named["machine_info"]["node"] == HOST


@pytest.mark.parametrize("export", EXPORTS)
def test_a_case_that_was_not_measured_stays_out(export):
    assert "ddp-n4" not in export(made())
    with pytest.raises(UsageError, match="no measured case"):
        export(run([case("ddp", 2, None, status="failed")]))


@pytest.mark.parametrize("export", EXPORTS)
def test_manifests_may_lack_anything(export):
    for manifest in ({}, {"hosts": {"h": {}}}, {"environment": {"gpus": [{}]}}, {"created_utc": "then"}):
        assert "ddp-n2" in export(run(usual_cases(), manifest))


def test_rates_count_what_the_workload_does():
    """A step of 2 x 10 sequences of 512 tokens; the column keeps its name, the unit stands beside it."""
    row = case("ddp", 2, 20 * 512 * 10.0, **measured(step_ms=100.0))
    found = run([row], timed_blocks=[timed(row, 1, 100.0), timed(row, 2, 50.0)])
    found.cases["unit"], found.cases["units_per_sample"] = "tokens", 512
    metric = records(found)[0]["metric"]
    assert (metric["name"], metric["extra_info"]["unit"]) == ("tokens_per_s", "tokens/s")
    assert metric["benchmark_values"] == pytest.approx([102_400, 204_800])
    assert json.loads(github_action(found))[0]["unit"] == "tokens/s"
    (gauge,) = next(iter(prometheus_text(prometheus(found)))).samples
    assert gauge.labels["unit"] == "tokens"


def test_bencher_gets_its_own_units_and_the_ends_of_intervals():
    found = json.loads(bencher(made()))
    jsonschema.validate(found, BMF)
    assert list(found) == ["resnet50 single-n1-x-1, 1 GPU", "resnet50 ddp-n2-x-1, 2 GPUs"]
    ddp = found["resnet50 ddp-n2-x-1, 2 GPUs"]
    assert ddp["latency"] == pytest.approx({"value": 120e6, "lower_value": 118.8e6, "upper_value": 121.2e6})
    assert ddp["throughput"]["value"] == 160.0
    assert ddp["exposed-communication-ns"]["value"] == 20e6
    assert ddp["peak-memory-bytes"] == {"value": 2500.5 * 2**20}


def test_names_tell_stand_ins_and_shared_devices():
    on_cores = {"device_type": "cpu", "device_name": "CPU core"}
    cases = [
        case("dp", 2, 50.0, impl="cpu_standin", **on_cores),
        case("ddp", 4, 60.0, oversubscribed=True, **on_cores),
    ]
    names = list(json.loads(bencher(run(cases))))
    assert names[0].endswith("2 CPU cores (CPU stand-in)")
    assert names[1].endswith("4 oversubscribed CPU cores")
    assert all(CPU_STAND_IN in record["benchmark"]["extra_info"]["note"] for record in records(run(cases)))


@pytest.mark.parametrize("metric", EXPORTED)
def test_github_action_gets_one_metric_in_the_documented_fields(metric):
    found = json.loads(github_action(made(), metric=metric))
    assert found
    for entry in found:
        assert entry.keys() <= {"name", "unit", "value", "range", "extra"}
        assert all(isinstance(entry[name], str) for name in entry.keys() - {"value"})
        assert type(entry["value"]) is float
    assert len({entry["name"] for entry in found}) == len(found)
    assert EXPORTED[metric].higher_is_better == (metric in ("images_per_s", "speedup"))
    if metric == "step_ms":
        assert (found[1]["unit"], found[1]["range"]) == ("ms", "95% interval 118.8 to 121.2")


def test_github_action_without_the_metric_is_refused():
    """The action itself stops at an empty list."""
    with pytest.raises(UsageError, match="no exposed_comm_ms of any case"):
        github_action(run(usual_cases()), metric="exposed_comm_ms")


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


def test_pytest_benchmark_draws_and_compares_runs(tmp_path):
    def at(*arguments):
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
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


def test_prometheus_gets_base_units_and_labels_as_they_are():
    odd = 'a "model"\\nof mine'
    found = made()
    found.cases.loc[1, "arch"] = odd
    found.cases.loc[1, "link"] = "\x1b[2J\n"
    text = prometheus(found)
    families = {family.name: family for family in openmetrics(f"{text}\n")}
    assert {family.name for family in prometheus_text(text)} == set(families)
    assert all(family.type == "gauge" for family in families.values())

    def ddp(name):
        (wanted,) = [one for one in families[f"ddp_bench_{name}"].samples if one.labels["mode"] == "ddp"]
        return wanted

    assert ddp("step_seconds").value == pytest.approx(0.12)
    assert ddp("step_low_seconds").value == pytest.approx(0.1188)
    assert ddp("step_high_seconds").value == pytest.approx(0.1212)
    assert ddp("peak_memory_bytes").value == pytest.approx(2500.5 * 2**20)
    assert "ddp_bench_peak_memory_low_bytes" not in families
    assert ddp("throughput_per_second").labels["arch"] == odd
    # What is shown on a terminal must not steer it.
    assert ddp("throughput_per_second").labels["link"] == r"\x1b[2J\x0a"
    assert "run_id" not in ddp("throughput_per_second").labels
    (about,) = families["ddp_bench_run_info"].samples
    assert about.labels == {"run_id": "abc123", "torch": "2.15.0", "commit": "f" * 40}
    (began,) = families["ddp_bench_run_start_time_seconds"].samples
    assert math.isclose(began.value, 1767323045)


def test_a_log_is_of_one_number_of_devices():
    found = paper_like()
    with pytest.raises(
        UsageError, match="all-reduces over 2, 4 devices; a log is of one number, give --gpus 2"
    ):
        nccl_tests(found)
    with pytest.raises(UsageError, match="no all-reduce over 8 devices, but over 2, 4"):
        nccl_tests(found, gpus=8)


def test_columns_are_those_of_nccl_tests():
    """In place: bytes, count, type, redop, root, then us, GB/s, bus GB/s, and what was not checked."""
    sizes = [
        {
            "num_devices": 4,
            "backend": "nccl",
            "bytes": size,
            "time_ms": ms,
            "busbw_gb_per_s": 1.5 * size / ms / 1e6,
        }
        for size, ms in ((4096, 0.1), (2**20, 0.5))
    ]
    text = nccl_tests(run([case("ddp", 4, 100.0)], allreduce=[*sizes, {**sizes[0], "num_devices": 1}]))
    rows = [line.split() for line in text.splitlines() if not line.startswith("#")]
    assert rows[0] == ["4096", "1024", "float", "sum", "-1", "100", "0.04096", "0.06144", "N/A"]
    assert rows[1][5:8] == ["500", "2.097152", "3.145728"]
    assert text.splitlines()[:2] == [
        "# Measured by ddp-bench, not by nccl-tests: all_reduce over 4 ranks",
        "# Backend nccl",
    ]
    assert text.splitlines()[-2:] == ["# Avg bus bandwidth    : 1.60358 ", "#"]
    assert CPU_STAND_IN not in text


def test_nccl_tests_columns_lose_nothing_of_a_run():
    """To nine digits."""
    table = load_run(CALIBRATED).allreduce
    lines = [line.split() for line in nccl_tests(load_run(CALIBRATED)).splitlines() if line[0] != "#"]
    assert [int(line[0]) for line in lines] == sorted(table["bytes"])
    by_size = {int(line[0]): float(line[5]) / 1000 for line in lines}
    assert by_size == pytest.approx(dict(zip(table["bytes"], table["time_ms"], strict=True)), rel=1e-9)
    assert CPU_STAND_IN in nccl_tests(load_run(CALIBRATED))


def refused(arguments, capsys):
    assert command.main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


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


def test_the_command_runs_by_itself():
    done = python("-m", "bench.export", str(SAMPLE), "--format", "github-action", "--metric", "step_ms")
    assert done.returncode == 0
    assert len(json.loads(done.stdout)) == 6
    assert done.stderr == "For github-action-benchmark's tool: customSmallerIsBetter\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--format is missing; known: pytorch, bencher"),
        (["--format", "benchr"], "did you mean 'bencher'?"),
        (
            ["--format", "bencher", "--metric", "step_ms"],
            "--metric is for --format github-action, not bencher",
        ),
        (
            ["--format", "prometheus", "--host-names"],
            "for --format pytorch or pytest-benchmark, not prometheus",
        ),
        (["--format", "github-action", "--metric", "step"], "did you mean 'step_ms'?"),
        (["--format", "nccl-tests", "--gpus", "0"], "--gpus: '0' is not a whole number"),
        (["--format", "nccl-tests"], "has no all-reduce measured by itself; measure a run with"),
        (["--format", "bencher", "--out", str(SAMPLE / "cases.csv")], "is a file of a run's results"),
        (["--format", "zip", "--host-names"], "for --format pytorch or pytest-benchmark, not zip"),
        (["--format", "zip", "--out", "a.tar"], "--out a.tar does not end with .zip"),
        (["--format", "zip", "--out", "/nowhere/a.zip"], "--out /nowhere/a.zip cannot be written"),
        (["--format", "bencher", "--out", "/nowhere/x"], "--out /nowhere/x cannot be written"),
    ],
)
def test_mistakes(arguments, message, capsys):
    assert message in refused([str(SAMPLE), *arguments], capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: RUN"),
        (["--schema", "casess"], "did you mean 'cases'? known: cases, blocks"),
        (["--schema", "cases", str(SAMPLE)], "--schema describes every run; leave out RUN"),
        (["--schema", "cases", "--out", "x"], "--schema describes every run; leave out RUN"),
    ],
)
def test_mistakes_without_a_run(arguments, message, capsys):
    assert message in refused(arguments, capsys)


def test_what_is_no_run_is_refused(tmp_path, capsys):
    assert "is not a results folder" in refused([str(tmp_path), "--format", "bencher"], capsys)


def test_a_results_file_is_never_written_over(tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(SAMPLE, folder)
    before = (folder / "manifest.json").read_bytes()
    refused([str(folder), "--format", "pytorch", "--out", str(folder / "manifest.json")], capsys)
    assert (folder / "manifest.json").read_bytes() == before


TELLING = (
    "gpu-node-17",
    "other-node",
    "alice",
    "home",
    "hunter",
    "10.1.2.3",
    "fe80",
    "tmp",
    "wlan7",
    "net.py",
)
"""Parts of the names of hosts, a user, folders, addresses, an interface and a workload's file."""
NODE, OTHER = "gpu-node-17.cluster.example", "other-node"
TOLD = (
    f"Traceback: /home/alice/net.py on {NODE} (10.1.2.3, fe80::1) by alice: see /tmp/alice/x, wlan7, hunter"
)
TEN = {key: [*series, *(1.001 * ms for ms in series[:4])] for key, series in STEADY.items()}
SECRETIVE = {
    "name": TOLD,
    "run_id": "0123456789ab",
    "argv": ["--out", "/home/alice/run"],
    "command": "python -m bench.run --out /home/alice/run",
    "settings": {
        **OF_A_GATE["settings"],
        "out": "/home/alice/run",
        "data": "/home/alice/my images",
        "workload": "/home/alice/net.py:model",
        "name": "gpu-node-17",
    },
    "git": {"commit": "a" * 40, "dirty": False, "origin": TOLD},
    "environment": {
        **OF_A_GATE["environment"],
        "host": NODE,
        "topology": TOLD,
        "env": {
            "LD_PRELOAD": "/usr/lib/x.so:/home/alice/y.so",
            "NCCL_COMM_ID": "10.1.2.3:29500",
            "NCCL_HOSTID": NODE,
            "NCCL_SOCKET_IFNAME": "wlan7",
            "TORCHINDUCTOR_CACHE_DIR": TOLD,
            "OMP_NUM_THREADS": "1",
        },
    },
    "hosts": {name: {"num_cores": 2, "topology": TOLD} for name in (NODE, OTHER)},
    "ranks": [
        {"rank": 0, "host": NODE, "device": "core 0", "pid": 4711},
        {"rank": 1, "host": OTHER, "device": "core 1", "pid": 4712},
    ],
    "timing": {"rounds": 10, "stopped_because": "all rounds done"},
    "resumed": [{"utc": "2026-01-02T03:04:05+00:00", "host": NODE, "command": TOLD}],
    "workload": {"spec": TOLD, "file": "net.py", "commit": "b" * 40, "dirty": False, "origin": "hunter"},
    "of later": {"host": TOLD},
}


@pytest.fixture
def secretive(tmp_path):
    """A run that names hosts, a user, folders and addresses wherever a run can."""
    folder = tmp_path / f"20260102T030405Z-{NODE}-run"
    write_run(folder, TEN, **SECRETIVE)
    changes = {
        "cases.csv": {"reason": TOLD, "data": "/home/alice/my images", "of_later": TOLD},
        "blocks.csv": {"host": [NODE, OTHER], "of_later": TOLD},
    }
    for name, changed in changes.items():
        table = pd.read_csv(folder / name, dtype="string", keep_default_na=False)
        for column, value in changed.items():
            table[column] = value * (len(table) // 2) if isinstance(value, list) else value
        table.to_csv(folder / name, index=False)
    for name in ("journal.jsonl", "tune.json", "calibration.json", "report.html"):
        (folder / name).write_text(TOLD)
    return folder


def zipped(folder, out):
    assert command.main([str(folder), "--format", "zip", "--out", str(out)]) == 0
    return out


def test_no_member_of_the_zip_tells_of_people_and_places(secretive, tmp_path):
    path = zipped(secretive, tmp_path / "a.zip")
    members = unpacked(path)
    assert set(members) == {"manifest.json", "cases.csv", "blocks.csv", "allreduce.csv", "comparisons.csv"}
    for name, content in members.items():
        assert not [word for word in TELLING if word in content.decode().lower()], name
    manifest = json.loads(members["manifest.json"])
    assert manifest["environment"]["host"] == "host0"
    assert manifest["environment"]["env"] == {"OMP_NUM_THREADS": "1"}
    assert list(manifest["hosts"]) == [rank["host"] for rank in manifest["ranks"]] == ["host0", "host1"]
    assert (manifest["settings"]["data"], manifest["settings"]["workload"]) == ("folder", "WORKLOAD")
    assert manifest["workload"] == {"commit": "b" * 40, "dirty": False}
    found = load_run(path)
    assert set(found.cases["reason"]) == {LEFT_OUT}
    assert set(found.blocks["host"]) == {"host0", "host1"}
    assert schemas.problems("manifest", manifest) == []


def test_commands_read_the_zip_as_they_read_the_run(secretive, tmp_path):
    before, after = load_run(secretive), load_run(zipped(secretive, tmp_path / "a.zip"))
    for frame, private in (("cases", ["reason", "data"]), ("blocks", ["host"])):
        tables = [getattr(found, frame).drop(columns=private) for found in (before, after)]
        pd.testing.assert_frame_equal(*tables)
    assert set(compare(secretive, after, ratios_only=True)["verdict"]) == {"unchanged"}
    assert json.loads(bencher(after)) == json.loads(bencher(before))
    whole = load_run(zipped(SAMPLE, tmp_path / "sample.zip"))
    assert not compare(SAMPLE, whole)["verdict"].isin(["not comparable", "missing"]).any()
    assert schemas.problems("manifest", json.loads(whole.manifest.as_json())) == []


def test_a_reason_is_public_where_it_names_a_case_or_the_end_of_the_run(tmp_path):
    folder = write_run(tmp_path / "run", TEN)
    table = pd.read_csv(folder / "cases.csv", dtype="string", keep_default_na=False)
    reasons = ["", equal_layout_reason(table["case_id"].iloc[0]), NOT_REACHED]
    table["reason"] = [*reasons, *[TOLD] * (len(table) - 3)][: len(table)]
    table.to_csv(folder / "cases.csv", index=False)
    content = unpacked(zipped(folder, tmp_path / "a.zip"))["cases.csv"].decode()
    found = [row["reason"] for row in csv.DictReader(io.StringIO(content))]
    assert found[:3] == reasons
    assert set(found[3:]) <= {LEFT_OUT}


def test_what_is_not_public_is_known():
    """Whoever adds a setting or a column of text decides here whether it may name people and places."""
    kinds = [kind for kind in vars(manifests).values() if isinstance(kind, type) and issubclass(kind, Record)]
    private = {
        kind.__name__: left
        for kind in (*kinds, Settings)
        if (left := set(get_type_hints(kind)) - set(public_fields(kind)))
    }
    assert private == {
        "Manifest": {"schema_version", "name", "argv", "command"},
        "WorkloadCode": {"spec", "file", "repository", "origin"},
        "Host": {"topology"},
        "FirstHost": {"topology"},
        "RankPlace": {"pid"},
        "Resumed": {"command", "workload", "host"},
        "Settings": {"out", "name", "data", "workload"},
    }
    columns = [column for of_file in FILES.values() for column in of_file]
    assert {one.name for one in columns if one.kind == "text" and not one.public} == {
        "host",
        "data",
        "reason",
    }


def test_equal_runs_make_equal_bytes(tmp_path, monkeypatch):
    one = zipped(write_run(tmp_path / "one"), tmp_path / "1.zip").read_bytes()
    monkeypatch.setattr("time.time", lambda: 2e9)
    assert zipped(write_run(tmp_path / "two"), tmp_path / "2.zip").read_bytes() == one


def test_the_zip_lies_beside_the_run_by_its_id_and_replaces_nothing_unasked(secretive, tmp_path, capsys):
    target = tmp_path / "0123456789ab.zip"
    assert command.main([str(secretive), "--format", "zip"]) == 0
    assert capsys.readouterr().out.strip() == str(target)
    target.write_text("of another")
    assert "is there already" in refused([str(secretive), "--format", "zip"], capsys)
    assert target.read_text() == "of another"
    assert load_run(zipped(secretive, target)).manifest.run_id == "0123456789ab"
    capsys.readouterr()
    nameless = write_run(tmp_path / "nameless", run_id="../x")
    assert "has no run_id to name" in refused([str(nameless), "--format", "zip"], capsys)
