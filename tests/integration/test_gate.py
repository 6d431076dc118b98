"""The gate on folders that a real run made."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import pytest
from commands import ROOT

from ddp_bench.bench.gate.main import main

if TYPE_CHECKING:
    from conftest import RealRun

COPIES = 40
SCATTER = 0.1
"""A real run of three rounds, repeated, is a long one. On a busy machine those three differ by a factor of
two, and no number of copies decides a change of 20%: so a long run has a tenth of their scatter."""


Gate = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def gate(capsys: pytest.CaptureFixture[str]) -> Gate:
    """The command in this process; a process of its own takes two seconds to import pandas."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = main(arguments)
        said = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, said.out, said.err)

    return run


def gate_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench.gate", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def copy(run: Path, folder: Path, *, num_copies: int = 1, slower: float = 1.0) -> str:
    """The run under another name, or a long one made of it; a slower one is of another commit."""
    shutil.copytree(run, folder)
    if slower > 1:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        manifest["git"] = {"commit": "0123456789abcdef", "dirty": False}
        (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    blocks = pd.read_csv(folder / "blocks.csv", dtype="string", keep_default_na=False)
    block_ms = blocks["block_ms"].astype(float)
    if num_copies > 1:
        typical = block_ms.groupby([blocks["case_id"], blocks["phase"], blocks["rank"]]).transform("median")
        block_ms = typical * (block_ms / typical) ** SCATTER
    blocks["block_ms"] = (block_ms * slower).map("{:.10g}".format)
    rounds = blocks["round"].astype(int)
    parts = [blocks.assign(round=rounds + k * rounds.max()) for k in range(num_copies)]
    pd.concat(parts).to_csv(folder / "blocks.csv", index=False, lineterminator="\n")
    cases = pd.read_csv(folder / "cases.csv", dtype="string", keep_default_na=False)
    ok = cases["status"] == "ok"
    for name in ("num_rounds", "num_blocks"):
        cases.loc[ok, name] = (cases.loc[ok, name].astype(int) * num_copies).astype("string")
    cases.to_csv(folder / "cases.csv", index=False, lineterminator="\n")
    return str(folder)


def test_a_run_against_its_copy_passes(real_run: RealRun, tmp_path: Path) -> None:
    run = real_run.data
    long = copy(run.path, tmp_path / "long", num_copies=COPIES)
    done = gate_process(long, copy(run.path, tmp_path / "again", num_copies=COPIES))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1].startswith("pass: ")
    assert "regressed" not in done.stdout
    assert "differs" not in done.stdout


def test_a_copy_that_is_20_percent_slower_regresses(gate: Gate, real_run: RealRun, tmp_path: Path) -> None:
    run = real_run.data
    long = copy(run.path, tmp_path / "long", num_copies=COPIES)
    done = gate(long, copy(run.path, tmp_path / "slow", num_copies=COPIES, slower=1.2))
    assert done.returncode == 1, done.stdout + done.stderr
    rates = [line for line in done.stdout.splitlines() if " images/s  " in line and "0.833x [" in line]
    assert len(rates) == int((run.cases["status"] == "ok").sum())
    assert all(line.startswith(" regressed") for line in rates)
    assert not [
        line for line in done.stdout.splitlines() if line.startswith(" regressed") and "speed-up" in line
    ]


@pytest.mark.parametrize("slower", [1.0, 1.2])
def test_three_rounds_alone_never_pass_as_regressed_or_hide_behind_one(
    gate: Gate, real_run: RealRun, tmp_path: Path, slower: float
) -> None:
    run = real_run.data
    done = gate(str(run.path), copy(run.path, tmp_path / "again", slower=slower))
    if slower == 1.0:
        assert done.returncode in (0, 3)
        assert "regressed" not in done.stdout
    else:
        assert done.returncode in (1, 3), "20% slower is caught, or said to be undecided; never a pass"


def test_the_run_itself_is_not_its_own_baseline(gate: Gate, real_run: RealRun) -> None:
    run = real_run.data
    done = gate(str(run.path), str(run.path))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
