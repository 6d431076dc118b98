"""Real workers of this machine: how they are started, what they have, and how they end."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from functools import partialmethod

import psutil
import pytest
from commands import ROOT, bench_run, eventually, has_ended
from made import resolved
from selection import in_campaign
from stand_ins import Patch

from ddp_bench.bench.common.errors import ExitCode, UsageError
from ddp_bench.bench.plan.settings import Settings
from ddp_bench.bench.run.failures import RestartError
from ddp_bench.bench.run.processes import INTERFACE, Processes, list_modules, make_worker_variables
from ddp_bench.bench.run.workers import Workers
from ddp_bench.bench.worker import messages as m

LIMIT_S = 60.0


def is_gone(pid):
    return eventually(lambda: not psutil.pid_exists(pid), LIMIT_S)


@pytest.fixture(scope="module", autouse=True)
def _has_thread(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modules")
    (folder / "has_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=[120], daemon=True).start()\n"
    )
    with Patch.context() as patched:
        patched.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT)]))
        patched.setenv("GLOO_SOCKET_IFNAME", "eth9")  # on one machine it would only open ports
        patched.delenv("OMP_NUM_THREADS", raising=False)
        yield


def pids_of(workers):
    """By rank."""
    return [one.pid for _, one in sorted(workers._processes._children.items())]


def test_others_start_when_one_was_killed_and_all_end_within_the_limit_whoever_is_stopped(monkeypatch):
    """A worker at first; later what they are forks of. In between a worker finds a mistake."""
    modules = list_modules(Settings(arch="resnet20"))
    with contextlib.closing(Workers(Processes(make_worker_variables("cpu"), modules))) as workers:
        workers.open()
        workers.grow(2)
        first, second = pids_of(workers)
        os.kill(first, signal.SIGSTOP)
        os.kill(second, signal.SIGKILL)
        with pytest.raises(RestartError, match=r"rank 1 was killed by signal 9 \(SIGKILL\) in its wait for"):
            workers.ask({1: m.Load()}, "the test", LIMIT_S)
        workers.end_at_once()
        assert is_gone(first)
        workers.open()
        workers.grow(2)
        new = pids_of(workers)
        assert not {first, second} & {*new}
        assert workers.ask({0: m.Load(), 1: m.Load()}, "the test", LIMIT_S)[1].fault is None
        with pytest.raises(UsageError, match=r"^json:loads "):
            workers.ask_worker(0, m.Inspect(settings=resolved(workload="json:loads")), "the test", LIMIT_S)
        if sys.platform == "linux":
            monkeypatch.setattr(Processes, "ask_server", partialmethod(Processes.ask_server, within_s=1.0))
            server = workers._processes.server.pid
            os.kill(server, signal.SIGSTOP)
            workers.end()
            assert workers.stuck == []
            assert all(has_ended(pid) for pid in (server, *new))
    assert all(map(has_ended, new))


CONDUCTOR = """
import json, os, signal, sys
from ddp_bench.bench.run.processes import Processes, list_modules, make_worker_variables
from ddp_bench.bench.run.workers import Workers
from ddp_bench.bench.plan.settings import Settings
before = dict(os.environ)
more = sys.argv[1:]
workers = Workers(Processes(make_worker_variables("cpu"), [*list_modules(Settings(arch="resnet20")), *more]))
workers.open()
workers.grow(2)
assert dict(os.environ) == before
print(json.dumps([one.pid for one in workers._processes._children.values()]), flush=True)
input()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("more", "forked"),
    [
        ([], sys.platform == "linux"),
        *in_campaign((["has_thread"], False), (["there_is_no_such_module"], False)),
    ],
    ids=["forks", "a thread", "an error"],
)
def test_workers_are_forks_where_they_can_be_and_do_not_outlive_a_killed_conductor(more, *, forked):
    with subprocess.Popen(
        [sys.executable, "-c", CONDUCTOR, *more],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as conductor:
        assert conductor.stdout is not None
        pids = json.loads(conductor.stdout.readline())
        parents = [psutil.Process(pid).ppid() for pid in pids]
        assert [parent != conductor.pid for parent in parents] == [forked] * 2
        assert [os.getsid(pid) for pid in pids] == pids, "Ctrl-C is not for them"
        accepts = [
            c for c in psutil.Process(conductor.pid).net_connections() if c.status == psutil.CONN_LISTEN
        ]
        assert accepts == [], "nobody else can come in their place"
        if not forked:
            environments = [psutil.Process(pid).environ() for pid in pids]
            assert [(one["RANK"], one["OMP_NUM_THREADS"]) for one in environments] == [("0", "1"), ("1", "1")]
            assert {one["GLOO_SOCKET_IFNAME"] for one in environments} == {INTERFACE}
        _, said = conductor.communicate("go on\n", timeout=LIMIT_S)
        assert conductor.returncode == -signal.SIGKILL
        assert said == ""
    assert all(is_gone(pid) for pid in pids)


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


LEAVES = [
    ("sys.exit(0)", "SystemExit: 0"),
    ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ("os._exit(0)", "exit code 0"),
]


@pytest.mark.campaign
@pytest.mark.parametrize(("deed", "said"), LEAVES)
def test_a_model_that_leaves_costs_its_cases(deed, said, tmp_path):
    (tmp_path / "quits.py").write_text(QUITS.format(deed=deed))
    done = bench_run(
        *("--workload", "quits:model", "--image-size", "8", "--batch-size", "4", "--device", "cpu"),
        *("--modes", "ddp", "--gpus", "1", "--rounds", "2", "--bucket-cap-mb", "default"),
        *("--quiet", "--out", str(tmp_path / "run")),
        env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
    )
    assert done.returncode == ExitCode.NOT_MEASURED
    cases = (tmp_path / "run" / "cases.csv").read_text()
    assert said in done.stderr + cases
    assert (tmp_path / "run" / "report.html").exists()


FORKS = """
import os, signal, socket, sys, time
from ddp_bench.bench.worker import messages as m
from ddp_bench.bench.worker.main import Connection
Connection(socket.socket(fileno=int(sys.argv[1])), m.Hello(token="", rank=0, host="here"))
if (child := os.fork()) == 0:
    time.sleep(600)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_end_of_a_killed_rank_is_seen_though_a_fork_of_it_lives():
    """A user's pool of processes, made in the model or the loss, has all descriptors of its rank."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(LIMIT_S)
        ours.sendall(m.encode(m.AskStatus()))
        script = [sys.executable, "-c", FORKS, str(theirs.fileno())]
        with subprocess.Popen(script, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE) as rank:
            theirs.close()
            assert rank.stdout is not None
            child = int(rank.stdout.readline())
            try:
                while ours.recv(2**16):
                    pass
                assert psutil.pid_exists(child)
            finally:
                os.kill(child, signal.SIGKILL)
