"""Who can connect to a run: nobody from outside, as long as all its ranks are on this machine."""

from __future__ import annotations

import ipaddress
import subprocess
import sys
from pathlib import Path

import psutil
from commands import ROOT, SMALL


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    """Addresses on which a process and its children accept connections."""
    found = set()
    for one in (process, *process.children(recursive=True)):
        try:
            connections = one.net_connections(kind="inet")
        except psutil.Error:
            continue  # it has just ended
        found |= {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}
    return found


def test_a_run_on_this_machine_listens_on_the_loopback_alone(tmp_path: Path) -> None:
    sweep = ("--modes", "ddp", "--gpus", "2", "--bucket-cap-mb", "default", "--rounds", "2", "--steps", "2")
    command = [sys.executable, "-m", "bench.run", *SMALL, *sweep, "--quiet", "--out", str(tmp_path / "run")]
    seen: set[tuple[str, int]] = set()
    with subprocess.Popen(command, cwd=ROOT) as run:
        process = psutil.Process(run.pid)
        while run.poll() is None:
            seen |= listening(process)
            try:
                run.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
        assert run.returncode == 0
    assert len(seen) >= 3, f"the launcher's store and a listener of every rank's gloo, not {seen}"
    assert all(ipaddress.ip_address(host).is_loopback for host, _ in seen), seen
