"""Ranks that are forks look, to who started their proxies, like processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from ddp_bench.bench.run.fork_server import ForkServer, fork_server

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are made on Linux only")

RANK = """
import json, os, pathlib, signal, sys, time
deed, folder = sys.argv[1], pathlib.Path(sys.argv[2])
def is_open(descriptor):
    try:
        return bool(os.fstat(descriptor))
    except OSError:
        return False
told = {"pid": os.getpid(), "session": os.getsid(0), "forked": "decimal" in sys.modules,
        "descriptors": [number for number in range(100) if is_open(number)],
        "RANK": os.environ.get("RANK"), "main": __name__, "argv": sys.argv[1:]}
part = folder / f"part{os.environ.get('RANK', '')}"
part.write_text(json.dumps(told))
part.rename(part.with_name(part.name.replace("part", "told") + ".json"))
if deed == "wait":
    time.sleep(120)
elif deed == "signal":
    os.kill(os.getpid(), int(sys.argv[3]))
elif deed == "exit":
    sys.exit(int(sys.argv[3]))
"""

PROXIES: list[subprocess.Popen[str]] = []


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which ranks tell about themselves."""
    (tmp_path / "a_rank.py").write_text(RANK)
    (tmp_path / "has_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=[120], daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return tmp_path


@pytest.fixture
def server(ranks: Path) -> Iterator[ForkServer]:
    assert ranks.exists()
    with fork_server(["decimal"], {"CHOSEN": "yes"}) as made:
        assert made is not None
        yield made
        while PROXIES:  # a failed test leaves them running
            proxy = PROXIES.pop()
            proxy.kill()
            proxy.wait()


def start(server: ForkServer, folder: Path, *deed: str, rank: int = 0) -> subprocess.Popen[str]:
    command: Sequence[str] = server.proxy(["-m", "a_rank", deed[0], str(folder), *deed[1:]])
    proxy = subprocess.Popen([sys.executable, *command], env=os.environ | {"RANK": str(rank)}, text=True)
    PROXIES.append(proxy)
    return proxy


def told(folder: Path, rank: int = 0) -> dict[str, object]:
    file = folder / f"told{rank}.json"
    deadline_s = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    found: dict[str, object] = json.loads(file.read_text())
    return found


def is_gone(pid: object) -> bool:
    assert isinstance(pid, int)
    deadline_s = time.monotonic() + 30
    while psutil.pid_exists(pid) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return not psutil.pid_exists(pid)


def test_a_rank_is_what_python_m_would_have_started(server: ForkServer, ranks: Path) -> None:
    proxy = start(server, ranks, "tell", rank=3)
    assert proxy.wait(60) == 0
    found = told(ranks, 3)
    assert found["forked"]
    assert found["pid"] != proxy.pid
    assert found["session"] == found["pid"]
    assert (found["RANK"], found["main"], found["argv"]) == ("3", "__main__", ["tell", str(ranks)])
    assert found["descriptors"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("deed", "code"),
    [
        (("exit", "0"), 0),
        (("exit", "75"), 75),
        (("signal", str(int(signal.SIGKILL))), -signal.SIGKILL),
        (("signal", str(int(signal.SIGSEGV))), -signal.SIGSEGV),
        (("signal", str(int(signal.SIGTERM))), -signal.SIGTERM),
    ],
)
def test_a_proxy_ends_as_its_rank_does(
    deed: Sequence[str], code: int, server: ForkServer, ranks: Path
) -> None:
    assert start(server, ranks, *deed).wait(60) == code
    assert told(ranks)["forked"]


def test_a_rank_whose_proxy_is_killed_is_gone_before_others_start(server: ForkServer, ranks: Path) -> None:
    """A stopped one too; the other ranks' end is told as ever."""
    proxies = [start(server, ranks, "wait", rank=rank) for rank in range(2)]
    pids = [told(ranks, rank)["pid"] for rank in range(2)]
    assert isinstance(pids[0], int)
    os.kill(pids[0], signal.SIGSTOP)
    for proxy in proxies:
        proxy.kill()
        proxy.wait()
    server.end_ranks()
    assert not any(psutil.pid_exists(pid) for pid in pids if isinstance(pid, int))
    assert start(server, ranks, "exit", "4", rank=2).wait(60) == 4
    assert told(ranks, 2)["forked"]


def test_no_rank_outlives_a_killed_server_and_the_next_one_needs_none(
    server: ForkServer, ranks: Path
) -> None:
    proxy = start(server, ranks, "wait")
    rank = told(ranks)["pid"]
    assert isinstance(rank, int)
    parent = psutil.Process(rank).parent()
    assert parent is not None
    parent.kill()
    assert proxy.wait(60) == -signal.SIGKILL
    assert is_gone(rank)
    assert start(server, ranks, "exit", "4", rank=1).wait(60) == 4
    assert not told(ranks, 1)["forked"]


@pytest.mark.parametrize("module", ["has_thread", "there_is_no_such_module"])
def test_what_cannot_be_forked_starts_as_a_process_of_its_own(
    module: str, ranks: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with fork_server(["decimal", module], {}) as server:
        assert server is not None
        assert start(server, ranks, "exit", "4").wait(60) == 4
        assert not told(ranks)["forked"]
    assert capfd.readouterr().err == ""


LAUNCHER = """
import os, signal, subprocess, sys
from ddp_bench.bench.run.fork_server import ForkServer
server = ForkServer(["decimal"], {})
subprocess.Popen([sys.executable, *server.proxy(["-m", "a_rank", "wait", sys.argv[1]])])
print(server._process.pid, flush=True)
input()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_launchers_ranks_end_by_themselves_and_the_server_after_them(ranks: Path) -> None:
    """Rank 0 has still to bring the files up to date."""
    command = [sys.executable, "-c", LAUNCHER, str(ranks)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        server = int(launcher.stdout.readline())
        path = ranks / "told.json"
        while not path.exists():
            time.sleep(0.02)
        rank = json.loads(path.read_text())["pid"]
        assert launcher.stdin is not None
        print("end", file=launcher.stdin, flush=True)
        assert launcher.wait(60) == -signal.SIGKILL
    time.sleep(0.5)
    assert psutil.Process(rank).status() == psutil.STATUS_SLEEPING
    assert psutil.Process(server).status() == psutil.STATUS_SLEEPING
    os.kill(rank, signal.SIGKILL)
    assert is_gone(server)
