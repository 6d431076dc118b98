"""The command as a user types it: both stages, their folders, the answer, and what it refuses."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from commands import SMALL, python

from ddp_bench.bench.layout import BucketCaps
from ddp_bench.bench.predict import main as predict
from ddp_bench.bench.predict.buckets import assign_cap, bucket_bytes
from ddp_bench.bench.predict.calibration import load_calibration
from ddp_bench.bench.results.store import load_run
from ddp_bench.bench.tune import main as tune
from ddp_bench.models.registry import resnet_workload


def bench_tune(*arguments: str) -> subprocess.CompletedProcess[str]:
    given = (*SMALL, "--gpus", "2", *arguments)
    return python("-m", "bench.tune", *given, env={"OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("tune") / "out"
    axes = ("--gradient-as-bucket-view", "off,on")
    done = bench_tune("--rounds", "3", "--steps", "2", *axes, "--json", "--out", str(out))
    assert done.returncode == 0, done.stderr[-4000:]
    return out, json.loads(done.stdout)


@pytest.mark.campaign
@pytest.mark.smoke
def test_the_answer_is_on_stdout_and_in_the_folder(tuned: Any) -> None:
    out, said = tuned
    stored = json.loads((out / "tune.json").read_text())
    assert {k: stored[k] for k in said if k != "results"} == {k: v for k, v in said.items() if k != "results"}
    assert stored["answer"]
    caps = [c["bucket_cap_mb"] for c in stored["candidates"]]
    assert caps[0] == "default"
    assert len(caps) >= 3
    assert [c["gradient_as_bucket_view"] for c in stored["candidates"]].count(True) == 1
    assert all(c["predicted_ms"] >= c["bound_ms"] > 0 for c in stored["candidates"])
    assert stored["chosen"]["bucket_cap_mb"] in caps


@pytest.mark.campaign
@pytest.mark.smoke
def test_both_stages_are_ordinary_results_with_reports(tuned: Any) -> None:
    out, said = tuned
    for stage in ("calibration", "proof"):
        run = load_run(out / stage)
        assert (run.cases["status"] == "ok").all(), run.cases["reason"].tolist()
        assert (run.cases["num_rounds"] == 3).all()
        assert (out / stage / "report.html").stat().st_size > 10_000
    measured = run.cases[run.cases["mode"] == "ddp"]
    key = ["bucket_cap_mb", "gradient_as_bucket_view"]
    buckets = {tuple(c[k] for k in key): c["num_buckets"] for c in said["candidates"]}
    assert {(c, v): n for c, v, n in measured[[*key, "num_buckets"]].itertuples(index=False)} == buckets


@pytest.mark.campaign
@pytest.mark.smoke
def test_the_calibration_speaks_of_the_model_as_ddp_has_it(tuned: Any) -> None:
    out, _ = tuned
    found = load_calibration(out / "calibration")
    module = resnet_workload("resnet20", 32).module()
    assert {p.name for p in found.parameters} == {name for name, _ in module.named_parameters()}
    sizes = [p.num_bytes for p in found.parameters]
    cases = load_run(out / "calibration").cases
    layout = assign_cap(sizes, BucketCaps())
    default = cases.loc[cases["mode"] == "ddp", "bucket_bytes"].item()
    assert "/".join(map(str, bucket_bytes(sizes, layout))) == default, "the reducer's order"
    ready = [p.ready_ms for p in found.parameters]
    assert 0 < ready[0] < ready[-1] <= max(found.backward_ms)
    assert min(*found.compute_slowdown, *found.comm_slowdown) >= 1
    assert found.allreduce[0].points[0][0] == 4096
    assert len(found.residual_ms) == 3
    assert found.single_step_ms


@pytest.mark.campaign
def test_the_slowest_are_dropped(tmp_path: Path) -> None:
    """Blocks of a dropped case end with the round it was dropped in; its row and the default stay."""
    out = tmp_path / "out"
    axes = ("--gradient-as-bucket-view", "off,on", "--accumulate", "1,2")
    done = bench_tune("--rounds", "8", "--steps", "1", *axes, "--json", "--out", str(out))
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout)
    rounds = [c["num_rounds"] for c in said["candidates"]]
    assert len(rounds) >= 4
    assert rounds[0] == 8
    assert sorted(rounds)[-3:] == [8, 8, 8], "the default and two finalists"
    assert all(4 <= n < 8 for n in sorted(rounds)[:-3])
    run = load_run(out / "proof")
    assert (run.cases["status"] == "ok").all()
    assert not (run.cases["mode"] == "single").any(), "no time is spent on it"
    last = run.blocks[run.blocks["phase"] == "timed"].groupby("case_id")["round"].agg(["max", "nunique"])
    assert (last["max"] == last["nunique"]).all(), "nobody comes back"


@pytest.mark.campaign
@pytest.mark.smoke
def test_predict_starts_from_the_calibration(tuned: Any, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = tuned
    code = predict.main([str(out / "calibration"), "--gpus", "1,2,8"])
    said = capsys.readouterr()
    if code == 0:
        assert "measured by the calibration pass" in said.out
    else:  # nothing of a noisy calibration is known to half its value
        assert code == 2
        assert "not predicted: the interval would be" in said.err


@pytest.mark.campaign
def test_a_calibration_of_something_else_is_refused_with_the_difference(
    tuned: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, _ = tuned
    given = ("--batch-size", "4", "--calibration", str(out / "calibration"), "--out", str(tmp_path / "new"))
    assert tune.main([*SMALL, "--gpus", "2", *given]) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert "batch_per_device 8 is not 4" in error
    assert "--accept" in error
    assert not (tmp_path / "new").exists()


@pytest.mark.campaign
@pytest.mark.parametrize("more", [(), ("--batch-size", "4", "--accept")])
def test_a_calibration_is_used_again(tuned: Any, tmp_path: Path, more: tuple[str, ...]) -> None:
    calibrated, first = tuned
    out = tmp_path / "out"
    how = ("--rounds", "3", "--steps", "2", "--json", "--out", str(out))
    done = bench_tune("--calibration", str(calibrated / "calibration"), *more, *how)
    assert done.returncode == 0, done.stderr[-4000:]
    assert not (out / "calibration").exists(), "nothing is calibrated again"
    cases = load_run(out / "proof").cases
    assert (cases["status"] == "ok").all()
    assert set(cases["batch_per_device"]) == {4 if more else 8}
    again = json.loads(done.stdout)
    assert again["candidates"][0]["bucket_cap_mb"] == "default"
    predicted = {c["bucket_cap_mb"]: c["predicted_ms"] for c in first["candidates"] if c["predicted_ms"]}
    shared = [c for c in again["candidates"] if c["bucket_cap_mb"] in predicted]
    assert shared
    assert all(c["predicted_ms"] == pytest.approx(predicted[c["bucket_cap_mb"]]) for c in shared)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpus", "1"), "exchanges gradients with nobody"),
        (("--gpus", "1,2"), "one device count"),
        (("--comm-hook", "none,powersgd"), "powersgd"),
        (("--static-graph", "on,off"), "--static-graph is not tuned"),
        (("--arch", "resnet-18"), "resnet18"),
        (("--workload", "nowhere.at:all"), "no module 'nowhere'"),
        (("--max-time", "soon"), "--max-time"),
    ],
)
def test_mistakes_are_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune.main(["--device", "cpu", "--gpus", "2", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("bench.tune: error: ")
    assert message in error


def test_a_dry_run_measures_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert tune.main([*SMALL, "--gpus", "2", "--max-time", "90s", "--dry-run", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "Stage 1, calibration" in said
    assert "Stage 2, proof" in said
    assert "at most 1m 30s of measuring" in said
    assert not out.exists()
