"""One job at several rates: only one of them computes at any moment, and each meets its own link."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from commands import ROOT, SMALL
from real_lab import eventually, namespaces_in_use

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.lab import namespaces
from ddp_bench.bench.predict import main as predict
from ddp_bench.bench.results.store import load_run

pytestmark = [pytest.mark.lab, pytest.mark.campaign]

RATES = {"20mbit": 2e7, "1gbit": 1e9}
GRADIENT_BYTES = 1_080_424


def start(rates: Sequence[str], *arguments: str) -> subprocess.Popen[str]:
    try:
        namespaces.require_support()
    except UsageError as missing:
        pytest.skip(str(missing))
    lab = [sys.executable, "-m", "bench.lab", "--hosts", "2", "--rate", ",".join(rates)]
    return subprocess.Popen(
        [*lab, "--", "python", "-m", "bench.run", *SMALL, "--modes", "ddp", "--gpus", "2", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def measuring_s(folder: Path, *, phase: str) -> float:
    """Seconds that rank 0 spent in blocks of a phase, but for those of the last round."""
    blocks = load_run(folder).blocks
    blocks = blocks[(blocks["rank"] == 0) & (blocks["phase"] == phase)]
    return float(blocks[blocks["round"] < blocks["round"].max()]["block_ms"].sum() / 1000)


def test_every_rate_meets_its_own_link_and_predicts_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = (
        "--bucket-cap-mb",
        "default,100",
        "--calibrate",
        "--passes",
        "no_sync,comm",
        "--rounds",
        "3",
        "--steps",
        "1",
    )
    out, err = (job := start(list(RATES), *sweep, "--out", str(tmp_path / "{rate}"))).communicate(timeout=240)
    assert job.returncode == 0, err
    for rate, bits_per_s in RATES.items():
        assert f"{rate}: lab: 2 hosts of 1 rank each, link {rate} each way" in err
        assert f"{rate}: Report: {tmp_path / rate}" in out
        run = load_run(tmp_path / rate)
        assert set(run.cases["link"].dropna()) == {rate}
        slowest = run.cases[run.cases["bucket_cap_mb"] == "100"].iloc[0]
        floor_ms = 1000 * 8 * (GRADIENT_BYTES - 2 * max(70_000, bits_per_s * 0.002 / 8)) / bits_per_s
        assert slowest["step_ms_p50"] >= floor_ms
    slow, fast = (tmp_path / rate for rate in RATES)
    last_began_s = load_run(fast).blocks["started_s"].max()
    assert last_began_s >= measuring_s(slow, phase="timed"), "the fast one did not wait for the slow one"
    assert measuring_s(slow, phase="timed") > 2 * measuring_s(fast, phase="timed"), "no reason to wait"
    assert predict.main([str(slow), "--validate", str(slow), str(fast)]) == 0
    held_out = [line.split() for line in capsys.readouterr().out.splitlines() if " ddp-n2-cap" in line]
    found = {(cells[0], cells[1].split("-")[2]) for cells in held_out if cells[0] in RATES}
    assert found == {("20mbit", "cap100"), ("1gbit", "cap100"), ("1gbit", "capdefault")}


def test_a_rate_that_fails_leaves_the_others_theirs(tmp_path: Path) -> None:
    taken = tmp_path / "20mbit"
    taken.mkdir()
    (taken / "manifest.json").write_text("{}")
    job = start(list(RATES), "--rounds", "2", "--steps", "1", "--out", str(tmp_path / "{rate}"))
    _, err = job.communicate(timeout=240)
    assert job.returncode == 2, err
    assert [
        line for line in err.splitlines() if line.startswith("20mbit: ") and "already holds a run" in line
    ], err
    assert (tmp_path / "1gbit" / "report.html").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_labs_that_are_stopped(number: signal.Signals, tmp_path: Path) -> None:
    before = namespaces_in_use()
    job = start(list(RATES), "--rounds", "1000", "--out", str(tmp_path / "{rate}"))
    assert eventually(lambda: all((tmp_path / rate / "manifest.json").exists() for rate in RATES))
    assert namespaces_in_use() > before
    job.send_signal(number)
    _, err = job.communicate(timeout=120)
    assert job.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL), err
    assert eventually(lambda: namespaces_in_use() <= before)
