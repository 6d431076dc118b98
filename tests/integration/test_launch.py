"""The launcher leaves the process that called it as it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT

from bench.run.launch import launch

SHOW = """
import os
rank, started, threads = (os.environ[name] for name in ("RANK", "BENCH_STARTED_S", "OMP_NUM_THREADS"))
gpus = os.environ["CUDA_VISIBLE_DEVICES"]
print(f"rank {rank}: began {started}, {threads} thread, GPUs {gpus!r}\\n", end="")
"""


def test_what_the_ranks_inherit_is_not_left_behind(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shows_environment.py").write_text(SHOW)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = dict(os.environ)
    code = launch(
        [], folder=tmp_path, num_ranks=2, device_type="cpu", began_s=7.5, module="shows_environment"
    )
    assert code == 0
    shown = sorted(capfd.readouterr().out.splitlines())
    assert shown == [f"rank {rank}: began 7.5, 1 thread, GPUs ''" for rank in range(2)]
    assert dict(os.environ) == before


MEET = """
import json, os, pathlib, sys
from bench.cluster.ranks import Cluster
from bench.cluster.process import leave
cluster = Cluster("cpu")
found = [cluster.gather(cluster.rank), cluster.from_first("by rank 0" if cluster.is_first else None)]
pathlib.Path(sys.argv[1], f"{cluster.rank}.json").write_text(json.dumps(found))
cluster.close()
leave(0)
"""


def test_ranks_of_the_users_own_torchrun_meet(tmp_path: Path) -> None:
    (tmp_path / "meet.py").write_text(MEET)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run(
        [*launcher, str(tmp_path / "meet.py"), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        timeout=120,
        check=True,
    )
    said = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert said == [[[0, 1], "by rank 0"]] * 2
