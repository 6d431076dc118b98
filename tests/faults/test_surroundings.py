"""Faults around a run: another run in its folder, a clock that jumps, a port that is taken, no memory."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from commands import ROOT
from fault_campaign import SWEEP, TWO_DEVICES, Campaign, Deed, deed

pytestmark = pytest.mark.campaign
MOMENTS = ("before_first_block", "in_timed_block", "between_rounds")
SECOND = [deed("second_run", moment, "wait") for moment in MOMENTS]
JUMPS_S = (3600, -3600, 7200)
JUMPED = [
    deed("clock_jump", moment, "turn clock", offset_s)
    for moment, offset_s in zip(MOMENTS, JUMPS_S, strict=True)
]
EATEN = [
    deed("kernel_out_of_memory", "before_first_block", "eat memory", ranks=[1], cases=TWO_DEVICES),
    deed("kernel_out_of_memory", "in_timed_block", "eat memory", ranks=[1], cases=TWO_DEVICES),
]
LIMIT_BYTES = 3 * 2**30


@pytest.fixture(scope="module")
def visited(tmp_path_factory: pytest.TempPathFactory) -> tuple[Campaign, dict[str, tuple[int, str]]]:
    """A run into whose folder another is started at each moment, while it waits in that very moment."""
    made, refused = Campaign(tmp_path_factory.mktemp("visited")), {}
    command = made.command()
    with subprocess.Popen(command, cwd=ROOT, env=made.environment(*SECOND), stderr=subprocess.PIPE) as run:
        for fault in SECOND:
            while not list(made.markers.glob(f"{fault.name}.*.csv")) and run.poll() is None:
                time.sleep(0.05)
            second = made.command() if fault is not SECOND[-1] else command
            done = subprocess.run(
                second, cwd=ROOT, env=made.environment(), capture_output=True, text=True, check=False
            )
            refused[fault.name] = done.returncode, done.stderr
            (made.markers / f"{fault.name}.go").touch()
        _, error = run.communicate(timeout=200)
    made.ended |= dict.fromkeys([*(f.name for f in SECOND), "end"], made.look(run.returncode, error.decode()))
    return made, refused


@pytest.mark.parametrize("fault", SECOND, ids=lambda fault: fault.name)
def test_a_second_run_is_refused_and_the_first_not_disturbed(
    visited: tuple[Campaign, dict[str, tuple[int, str]]], undisturbed: pd.DataFrame, fault: Deed
) -> None:
    campaign, refused = visited
    assert campaign.check(fault.name, undisturbed).error == ""
    code, error = refused[fault.name]
    assert code == 2
    said = "in use by another run (process " if fault is not SECOND[-1] else "already holds a run"
    assert said in error
    assert len(error.splitlines()) == 1


@pytest.fixture(scope="module")
def jumped(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    made = Campaign(tmp_path_factory.mktemp("jumped"))
    made.ended["end"] = made.start(*JUMPED)
    return made


@pytest.mark.parametrize("fault", JUMPED, ids=lambda fault: fault.name)
def test_a_clock_that_jumps_changes_no_duration(
    jumped: Campaign, undisturbed: pd.DataFrame, fault: Deed
) -> None:
    ended = jumped.check(fault.name, undisturbed)
    assert (ended.code, ended.error) == (0, "")
    timing = ended.manifest.timing
    assert 0 < timing.startup_s < timing.total_s < 3000
    started_s = [float(row.split(",")[6]) for row in ended.rows if ",started_s," not in row]
    assert 0 < min(started_s) <= max(started_s) < timing.measuring_s < 3000


@pytest.fixture(scope="module")
def memory_group() -> Iterator[Path]:
    """A control group whose processes may use LIMIT_BYTES together."""
    group = next((path for path in _memory_groups() if _limit(path)), None)
    if group is None:
        pytest.skip("needs the right to make a control group with a memory limit")
    yield group
    group.rmdir()


def _memory_groups() -> list[Path]:
    root = Path("/sys/fs/cgroup")
    return [base / f"ddp-bench-{os.getpid()}" for base in (root / "memory", root) if base.is_dir()]


def _limit(group: Path) -> bool:
    try:
        group.mkdir()
    except OSError:
        return False
    for name in ("memory.limit_in_bytes", "memory.max"):
        try:
            (group / name).write_text(str(LIMIT_BYTES))
        except OSError:
            continue
        return True
    group.rmdir()
    return False


@pytest.fixture(scope="module")
def starved(memory_group: Path, tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    made = Campaign(tmp_path_factory.mktemp("starved"))
    inside = ("sh", "-c", f'echo $$ > {memory_group}/cgroup.procs && exec "$@"', "sh")
    made.start(*EATEN, within=inside)
    made.start()
    return made


@pytest.mark.parametrize("fault", EATEN, ids=lambda fault: fault.name)
def test_the_kernel_ends_a_rank_for_want_of_memory(
    starved: Campaign, undisturbed: pd.DataFrame, fault: Deed
) -> None:
    ended = starved.check(fault.name, undisturbed)
    assert ended.code == 0, ended.error
    status, reason = starved.outcome(fault.name)
    assert status == "oom"
    assert f"rank {fault.ranks[0]} was killed by the kernel for want of host memory in " in reason


def test_port_in_use_before_first_block(undisturbed: pd.DataFrame, tmp_path: Path) -> None:
    """Ranks that srun or a user starts meet at a port that may be taken."""
    campaign = Campaign(tmp_path)
    command = [sys.executable, "-m", "bench.run", *SWEEP, "--quiet", "--out", str(campaign.out)]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "none"}
        sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        ranks = [
            campaign.environment() | meeting | sizes | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in (0, 1)
        ]
        refused = subprocess.run(
            command, cwd=ROOT, env=ranks[0], capture_output=True, text=True, timeout=120, check=False
        )
    assert refused.returncode == 2, refused.stderr
    where = f"127.0.0.1:{port} is already in use; choose another port with MASTER_PORT"
    assert refused.stderr == f"bench.run: error: {where}\n"
    assert not campaign.out.exists()
    second = subprocess.Popen(command, cwd=ROOT, env=ranks[1])
    first = subprocess.run(command, cwd=ROOT, env=ranks[0], timeout=120, check=False)
    assert (first.returncode, second.wait(60)) == (0, 0)
    pd.testing.assert_frame_equal(campaign.look(0, "").cases[list(undisturbed)], undisturbed)
