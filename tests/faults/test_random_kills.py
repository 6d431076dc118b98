"""Any process of a run, killed at any moment: what is resumed is whole, and nothing is left behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from commands import ROOT
from fault_campaign import SWEEP, Campaign

pytestmark = pytest.mark.campaign

SMALL_SWEEP = (*SWEEP[:-4], "--passes", "no_sync", "--max-time", "20s", "--rounds", "6")
LONGEST_S = 20.0


@pytest.mark.parametrize("seed", range(20))
def test_a_run_survives(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    campaign = Campaign(tmp_path, SMALL_SWEEP)
    with subprocess.Popen(
        campaign.command(), cwd=ROOT, env=campaign.environment(), stderr=subprocess.PIPE, text=True
    ) as run:
        moment_s = time.monotonic() + draw.uniform(0.5, LONGEST_S)
        while run.poll() is None and time.monotonic() < moment_s:
            time.sleep(0.05)
        if run.poll() is None:
            conductor = psutil.Process(run.pid)
            everyone = [conductor, *conductor.children(recursive=True)]
            os.kill(draw.choice(everyone).pid, signal.SIGKILL)
        _, error = run.communicate(timeout=120)
    campaign.await_end()
    assert run.returncode in (0, -signal.SIGKILL), error
    if not (campaign.out / "manifest.json").exists():
        return  # it had not begun
    code, error = campaign.run()
    ended = campaign.look(code, error)
    assert code == 0, error
    assert ended.cases["status"].eq("ok").all(), ended.cases["reason"].tolist()
    assert ended.cases["num_rounds"].eq(6).all()
    blocks = [(*row.split(",")[:3], row.split(",")[4]) for row in ended.rows]
    assert len(blocks) == len(set(blocks)), "nothing is measured twice"
    assert not list(campaign.out.glob(".*-*")), "no half-written file is left"
