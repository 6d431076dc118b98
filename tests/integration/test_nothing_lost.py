"""Real runs and what befalls them: a rank killed, one that raises alone, an interruption; and resuming."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import psutil
import pytest
from commands import ROOT, SMALL, bench_run

from bench.records.schema import IDENTITY
from bench.records.store import load_run

SWEEP = (
    "--modes",
    "ddp",
    "--gpus",
    "1,2",
    "--bucket-cap-mb",
    "default,0.25",
    "--rounds",
    "3",
    "--steps",
    "1",
)
SAME = [column.name for column in IDENTITY] + ["num_buckets", "bucket_bytes", "num_rounds"]


def interfere(out: Path, moment: str, act: Callable[[psutil.Process, int], None]) -> tuple[int, str]:
    """Start a run and call `act(launcher, pid of rank 1)` once the journal's last note matches `moment`."""
    command = [sys.executable, "-m", "bench.run", *SMALL, *SWEEP, "--quiet", "--out", str(out)]
    acted = False
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as run:
        launcher = psutil.Process(run.pid)
        while run.poll() is None and not acted:
            journal = out / "journal.jsonl"
            notes = [n for n in journal.read_text().splitlines() if '"on"' in n] if journal.exists() else []
            if notes and re.search(moment, notes[-1]):
                ranks = {p.environ().get("RANK"): p.pid for p in launcher.children()}
                act(launcher, ranks["1"])
                acted = True
            time.sleep(0.01)
        _, error = run.communicate(timeout=120)
    assert acted, error
    return run.returncode, error


def resumed(out: Path) -> pd.DataFrame:
    done = bench_run("--resume", str(out), "--quiet")
    assert done.returncode == 0, done.stderr
    run = load_run(out)
    assert not run.blocks.duplicated(["case_id", "phase", "round", "rank"]).any()
    return run.cases[SAME]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    done = bench_run(*SMALL, *SWEEP, "--quiet", "--out", str(out))
    assert done.returncode == 0, done.stderr
    complete = bench_run("--resume", str(out))
    assert (complete.returncode, complete.stdout) == (0, "")
    assert "nothing is left to do" in complete.stderr
    return load_run(out).cases[SAME]


def test_a_killed_rank_costs_its_case_alone(undisturbed: pd.DataFrame, tmp_path: Path) -> None:
    out = tmp_path / "run"
    moment = r'"index":2,"what":"round 2'
    code, _ = interfere(out, moment, lambda _, rank: os.kill(rank, signal.SIGKILL))
    assert code == 0
    cases = load_run(out).cases
    assert cases["status"].tolist() == ["ok", "ok", "failed", "ok"]
    assert "rank 1 was killed by signal 9 (SIGKILL) in round 2" in cases["reason"][2]
    assert cases["num_rounds"].tolist()[0] == 3
    pd.testing.assert_frame_equal(resumed(out), undisturbed)


def test_an_interruption_keeps_what_is_finished(undisturbed: pd.DataFrame, tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, error = interfere(out, "round 2", lambda launcher, _: launcher.send_signal(signal.SIGTERM))
    assert code == 130
    assert error.splitlines()[-1].endswith(f"python -m bench.run --resume {out}")
    run = load_run(out)
    assert len(run.cases) == len(undisturbed)
    assert run.manifest["timing"]["stopped_because"] == "interrupted"
    assert (run.blocks["phase"] == "timed").any()
    assert (out / "report.html").exists()
    pd.testing.assert_frame_equal(resumed(out), undisturbed)


def test_an_error_on_one_rank_alone_fails_its_case(tmp_path: Path) -> None:
    (tmp_path / "uneven.py").write_text(
        "import os, torch\n"
        "class Model(torch.nn.Linear):\n"
        "    steps = 0\n"
        "    def forward(self, x):\n"
        "        self.steps += self.training and x.dtype == torch.float32\n"
        "        if self.steps == 5 and os.environ['RANK'] == '1': raise ValueError('not here')\n"
        "        return super().forward(x.flatten(1))\n"
        "def model(): return Model(3 * 8 * 8, 4)\n"
    )
    out = tmp_path / "run"
    sweep = ("--modes", "ddp", "--gpus", "1,2", "--bucket-cap-mb", "default", "--rounds", "2", "--steps", "2")
    done = bench_run(
        *("--workload", "uneven:model", "--image-size", "8", "--device", "cpu", "--batch-size", "4"),
        *(*sweep, "--quiet", "--out", str(out)),
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    cases = load_run(out).cases
    assert cases["status"].tolist() == ["ok", "ok", "failed"]
    assert "ValueError: not here" in cases["reason"][2]
    assert "Traceback" not in done.stderr
