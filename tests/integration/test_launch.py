"""The launcher leaves the process that called it as it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import ROOT, bench_run

from ddp_bench.bench.cluster.process import rank_variables
from ddp_bench.bench.errors import ExitCode
from ddp_bench.bench.run.agent import INTERFACE
from ddp_bench.bench.run.fork_server import fork_server
from ddp_bench.bench.run.launch import launch

SHOW = """
import os, sys
rank, started, threads = (os.environ[name] for name in ("RANK", "BENCH_STARTED_S", "OMP_NUM_THREADS"))
gpus, interface = os.environ["CUDA_VISIBLE_DEVICES"], os.environ["GLOO_SOCKET_IFNAME"]
forked = "decimal" in sys.modules
told = f"began {started}, {threads} thread, GPUs {gpus!r}, {interface}, forked {forked}"
print(f"rank {rank}: {told}\\n", end="")
"""


@pytest.mark.parametrize("server", ["none", "forks", "of another device"])
def test_what_the_ranks_inherit_is_not_left_behind(
    server: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shows_environment.py").write_text(SHOW)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")  # on one machine it would only open ports
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    before = dict(os.environ)
    variables = rank_variables(os.environ, "cpu" if server == "forks" else "cuda")
    with nullcontext() if server == "none" else fork_server(["decimal"], variables) as forks:
        code = launch(
            [],
            folder=tmp_path,
            num_ranks=2,
            device_type="cpu",
            began_s=7.5,
            program=("-m", "shows_environment"),
            forks=forks,
        )
    assert code == ExitCode.NOT_MEASURED  # no journal tells of a run that ended
    shown = sorted(capfd.readouterr().out.splitlines())
    forked = server == "forks"
    assert shown == [
        f"rank {rank}: began 7.5, 1 thread, GPUs '', {INTERFACE}, forked {forked}" for rank in range(2)
    ]
    assert dict(os.environ) == before
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("handler", ["_interrupt", "_terminate_process_handler"])
def test_a_signal_while_torch_takes_the_time_is_an_interruption(
    handler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the ranks start and after; torch's `prof` makes an UnboundLocalError of it."""
    (tmp_path / "waits.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    sent = []

    def taken() -> float:
        begins = sys._getframe(1).f_code.co_name == "wrapper"
        if begins and not sent and getattr(signal.getsignal(signal.SIGTERM), "__name__", "") == handler:
            sent.append(handler)
            os.kill(os.getpid(), signal.SIGTERM)
        return time.time()

    monkeypatch.setattr("torch.distributed.elastic.metrics.api.time", SimpleNamespace(time=taken))
    code = launch([], folder=tmp_path, num_ranks=1, device_type="cpu", began_s=0.0, program=("-m", "waits"))
    assert (code, sent) == (ExitCode.INTERRUPTED, [handler])


QUITS = """
import os, sys, torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3 * 8 * 8, 10)
    def forward(self, images):
        if self.training:
            {deed}
        return self.inner(images.flatten(1))
def model():
    return Model()
"""


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("deed", "said"),
    [("sys.exit(0)", "SystemExit: 0"), ("os._exit(0)", "the ranks ended before the run did")],
)
def test_a_model_that_leaves_with_success_is_no_success(deed: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "quits.py").write_text(QUITS.format(deed=deed))
    done = bench_run(
        *("--workload", "quits:model", "--image-size", "8", "--batch-size", "4", "--device", "cpu"),
        *("--modes", "ddp", "--gpus", "1", "--rounds", "2", "--bucket-cap-mb", "default"),
        *("--quiet", "--out", str(tmp_path / "run")),
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == ExitCode.NOT_MEASURED
    cases = (tmp_path / "run" / "cases.csv").read_text()
    assert said in done.stderr + cases
    assert (tmp_path / "run" / "report.html").exists()


MEET = """
import json, os, pathlib, sys
from ddp_bench.bench.cluster.ranks import Cluster
from ddp_bench.bench.cluster.process import leave
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
