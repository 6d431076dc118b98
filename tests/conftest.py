"""What several test folders need: real ranks, and one small real run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT, SMALL, bench_run

from bench.records.store import RunData, load_run

Ranks = Callable[[str, int], list[Any]]

PROLOGUE = """
import json, os, pathlib, sys, warnings
import torch, torch.distributed as dist
torch.set_num_threads(1)
def report(value):
    pathlib.Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(value))
"""

EPILOGUE = """
from bench.ranks.process import leave
leave(0)
"""


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    """Run a script as real ranks under PyTorch's launcher; what each rank passed to `report`."""

    def run(script: str, num_ranks: int) -> list[Any]:
        path = tmp_path / "script.py"
        path.write_text(PROLOGUE + textwrap.dedent(script) + EPILOGUE, encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        done = subprocess.run(
            [*command, str(num_ranks), str(path), str(tmp_path)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(num_ranks)]

    return run


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunData, subprocess.CompletedProcess[str]]:
    """A real run of every mode on one and two devices, with caps of which two give one layout."""
    out = tmp_path_factory.mktemp("small") / "run"
    sweep = ("--modes", "dp,ddp", "--gpus", "1,2", "--bucket-cap-mb", "default,0.25,50,100")
    done = bench_run(*SMALL, *sweep, "--rounds", "3", "--steps", "2", "--out", str(out))
    assert done.returncode == 0, done.stderr[-4000:]
    return load_run(out), done
