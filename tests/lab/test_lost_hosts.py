"""A host's link is cut for a while, and a host is gone for good, in the middle of a timed block."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from commands import ROOT
from fault_campaign import SWEEP, Campaign, Deed, deed
from real_lab import eventually

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.lab import namespaces

pytestmark = [pytest.mark.lab, pytest.mark.campaign]

LAB = (sys.executable, "-m", "bench.lab", "--hosts", "3", "--rate", "1gbit", "--quiet", "--")
CUT_S = 20.0
WAITING = deed("held", "in_timed_block", "wait", cases=(3, 4))
THREE = (*("1,3" if part == "1,2" else part for part in SWEEP[:-4]), "--sync-buffers", "on,off")


@contextmanager
def held_run(campaign: Campaign, fault: Deed) -> Iterator[subprocess.Popen[str]]:
    """A run in a lab of three hosts, while its first rank waits inside a block."""
    command = [*LAB, *campaign.command()]
    environment = campaign.environment(fault)
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as run:
        assert eventually(lambda: any(campaign.markers.glob("held-*.csv")) or run.poll() is not None)
        assert run.poll() is None, run.communicate()[1]
        yield run


def set_link(lab: subprocess.Popen[str], host: int, state: str) -> None:
    """Switch the port of a host `up` or `down`, in the network namespace of the lab's switch."""
    own_user = () if os.geteuid() == 0 else ("--user", "--preserve-credentials")
    inside = ("nsenter", f"--target={lab.pid}", "--net", *own_user)
    subprocess.run([*inside, "ip", "link", "set", f"host{host}", state], check=True)


@pytest.fixture
def campaign(tmp_path: Path) -> Campaign:
    try:
        namespaces.require_support()
    except UsageError as missing:
        pytest.skip(str(missing))
    return Campaign(tmp_path, THREE)


def test_a_link_that_is_cut_for_a_while_delays_the_run(campaign: Campaign) -> None:
    with held_run(campaign, WAITING) as run:
        set_link(run, 1, "down")
        (campaign.markers / f"{WAITING.name}.go").touch()
        time.sleep(CUT_S)
        assert run.poll() is None
        set_link(run, 1, "up")
        _, error = run.communicate(timeout=180)
    ended = campaign.look(run.returncode, error)
    assert ended.code == 0, error
    assert ended.cases["status"].tolist() == ["ok"] * 5, campaign.out
    assert ended.cases["num_rounds"].tolist() == [3] * 5
    block_ms = [float(row.split(",")[8]) for row in ended.rows if ",block_ms," not in row]
    assert max(block_ms) >= 1000 * CUT_S, "the cut was felt, and shows"


def test_a_host_that_is_gone_ends_the_run_with_its_tables_written(campaign: Campaign) -> None:
    with held_run(campaign, WAITING) as run:
        before = campaign.look(0, "").rows
        hosts = sorted(psutil.Process(run.pid).children(), key=lambda process: process.pid)
        assert len(hosts) == 3
        hosts[2].kill()
        (campaign.markers / f"{WAITING.name}.go").touch()
        _, error = run.communicate(timeout=120)
    campaign.await_end()
    ended = campaign.look(run.returncode, error)
    assert ended.code != 0
    assert "Traceback" not in error
    assert "lab: host2 was killed by signal 9" in error
    assert f"python -m bench.run {shlex.join(campaign.resume)}" in error
    assert before <= ended.rows
    assert len(ended.cases) == 5
    assert ended.cases["case_id"].is_unique
    assert ended.manifest.timing.stopped_because == "a rank was lost"
    again = campaign.start(within=LAB)
    assert again.code == 0, again.error
    assert before <= again.rows
    assert again.cases["status"].tolist() == ["ok"] * 5
    assert again.cases["num_rounds"].tolist() == [3] * 5
