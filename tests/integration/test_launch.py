"""The launcher leaves the process that called it as it was."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.ranks.launch import launch

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
