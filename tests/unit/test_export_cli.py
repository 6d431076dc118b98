"""`bench.export` as a command: what it writes, where to, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from commands import ROOT, python
from report_runs import Row, case, paper_like, run

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.export import main as command
from ddp_bench.bench.export.formats import nccl_tests
from ddp_bench.bench.predict.source import read_network
from ddp_bench.bench.results.store import load_run
from ddp_bench.bench.scaling.cost import measured_curve
from ddp_bench.bench.scaling.nccl_log import parse_nccl_log
from ddp_bench.bench.scaling.scenario import MeasuredNetwork

SAMPLE = ROOT / "results" / "samples" / "cpu-lab-1gbit-2hosts"
CALIBRATED = ROOT / "results" / "samples" / "predictions" / "resnet18-2hosts" / "1gbit"


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert command.main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


@pytest.mark.parametrize("name", command.FORMATS)
def test_a_file_holds_what_the_terminal_shows(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([str(CALIBRATED), "--format", name]) == 0
    shown = capsys.readouterr().out
    assert shown.endswith("\n")
    target = tmp_path / "exported"
    target.write_text("of before")
    assert command.main([str(CALIBRATED), "--format", name, "--out", str(target)]) == 0
    assert capsys.readouterr().out == ""
    assert target.read_text() == shown
    assert [path.name for path in tmp_path.iterdir()] == ["exported"]


def test_the_command_runs_by_itself() -> None:
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
        (["--format", "bencher", "--out", "/nowhere/x"], "--out /nowhere/x cannot be written"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused([str(SAMPLE), *arguments], capsys)


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not a results folder" in refused([str(tmp_path), "--format", "bencher"], capsys)


def test_a_results_file_is_never_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    shutil.copytree(SAMPLE, folder)
    before = (folder / "manifest.json").read_bytes()
    refused([str(folder), "--format", "pytorch", "--out", str(folder / "manifest.json")], capsys)
    assert (folder / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("path", [CALIBRATED, CALIBRATED.parents[1] / "resnet34-2hosts-slow" / "1gbit"])
def test_predict_reads_the_all_reduces_back(path: Path, tmp_path: Path) -> None:
    """To nine digits, over as many ranks, by the same backend, which decides how other ranks are assumed."""
    log = tmp_path / "log.txt"
    assert command.main([str(path), "--format", "nccl-tests", "--out", str(log)]) == 0
    table = load_run(path).allreduce
    own = measured_curve(
        (int(size), (ms,)) for size, ms in zip(table["bytes"], table["time_ms"], strict=True)
    )
    found = read_network(str(log))
    assert isinstance(found, MeasuredNetwork)
    (times,) = found.allreduce
    assert (times.num_ranks, times.backend) == (2, "gloo")
    read = measured_curve(times.points)
    assert [size for size, _ in read.points] == [size for size, _ in own.points]
    assert [ms for _, ms in read.points] == pytest.approx([ms for _, ms in own.points], rel=1e-9)


def test_a_log_is_of_one_number_of_devices() -> None:
    found = paper_like()
    with pytest.raises(
        UsageError, match="all-reduces over 2, 4 devices; a log is of one number, give --gpus 2"
    ):
        nccl_tests(found)
    with pytest.raises(UsageError, match="no all-reduce over 8 devices, but over 2, 4"):
        nccl_tests(found, gpus=8)


def test_columns_are_those_of_nccl_tests() -> None:
    """In place: bytes, count, type, redop, root, then us, GB/s, bus GB/s, and what was not checked."""
    sizes: list[Row] = [
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
    log = parse_nccl_log(text)
    assert (log.num_ranks, log.backend) == (4, "nccl")
    assert dict(log.curve.points) == pytest.approx({4096: 0.1, 2**20: 0.5})
    assert "standing in for a GPU" not in text
