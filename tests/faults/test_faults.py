"""Every kind of fault at several moments of a run: what is resumed is as a run that nothing befell."""

import contextlib
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import psutil
import pytest
from commands import ROOT, finished
from fault_campaign import SAME, SWEEP, TWO_DEVICES, Campaign, Deed, deed

from ddp_bench.bench.common.process import get_host_name

pytestmark = pytest.mark.campaign

MOMENTS = ("before_first_block", "in_timed_block", "between_rounds")
IN_BLOCKS = ("before_first_block", "in_timed_block", "in_no_sync_block")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    campaign = Campaign(tmp_path_factory.mktemp("undisturbed"))
    ended = campaign.start()
    assert ended.code == 0, ended.error
    assert ended.cases["status"].eq("ok").all()
    assert [i for i, n in enumerate(ended.cases["num_devices"]) if n == 2] == list(TWO_DEVICES)
    return ended.cases[SAME]


@pytest.fixture
def campaign(tmp_path):
    return Campaign(tmp_path)


def ends(campaign, undisturbed, faults, **how):
    """Each fault and its end, where one start does all and a resume comes to what an undisturbed run has."""
    campaign.start(*faults, **how)
    campaign.start()
    for fault in faults:
        ended = campaign.check(fault.name, undisturbed)
        assert ended.code == 0, ended.error
        yield fault, ended


# Ranks that end.


def test_a_killed_rank_costs_its_case_alone(campaign, undisturbed):
    """The launcher starts all ranks again, and between two rounds nothing is lost at all."""
    of_two = {"ranks": [1], "cases": TWO_DEVICES}
    faults = [deed("rank1_killed", moment, "signal", signal.SIGKILL, **of_two) for moment in MOMENTS[:2]]
    faults.append(deed("rank1_killed", "between_rounds", "signal", signal.SIGKILL, ranks=[1]))
    faults += [deed("rank0_killed", moment, "signal", signal.SIGKILL) for moment in MOMENTS[:2]]
    faults.append(deed("rank0_killed", "between_rounds", "signal", signal.SIGKILL, after=faults[2].name))
    for fault, ended in ends(campaign, undisturbed, faults):
        assert ended.manifest.restarts == len(faults)
        if "between" not in fault.name:
            status, reason = campaign.outcome(fault.name)
            assert status == "failed", fault.name
            assert f"rank {fault.ranks[0]} was killed by signal 9 (SIGKILL) in " in reason
        marker = next(campaign.markers.glob(f"{fault.name}.*.json"))
        assert fault.what in json.loads(marker.read_text())["now"].get("what", fault.what)


TIMEOUT_S = 30
"""Enough for a preparation on a busy machine; the ranks sit idle through most of it."""


def test_a_stopped_rank_is_ended(campaign, undisturbed):
    stopped = [
        deed("rank_stopped", moment, "signal", signal.SIGSTOP, ranks=[rank], cases=TWO_DEVICES)
        for moment, rank in zip(IN_BLOCKS, (1, 1, 0), strict=True)
    ]
    for fault, _ in ends(campaign, undisturbed, stopped, more=("--case-timeout", f"{TIMEOUT_S}s")):
        status, reason = campaign.outcome(fault.name)
        assert status == "timeout", reason
        (rank,) = fault.ranks
        silent = f"within {TIMEOUT_S} s: rank {rank} on {get_host_name()} gave no answer"
        assert silent in reason
        assert "Thread" in "".join(path.read_text() for path in (campaign.out / "failures").iterdir())


def test_an_exception_on_one_rank(campaign, undisturbed):
    alone = [
        deed("exception_on_one_rank", moment, "raise", ranks=[1], cases=TWO_DEVICES, nth=1)
        for moment in IN_BLOCKS
    ]
    for fault, _ in ends(campaign, undisturbed, alone, more=("--case-timeout", "120s")):
        status, reason = campaign.outcome(fault.name)
        # In a block without communication the other rank comes to its end and hears of it there.
        of_one = "" if "no_sync" in fault.name else "; rank 1"
        assert status == "failed", reason
        where = r"tests/deeds\.py:\d+, in raise_error"
        assert re.search(rf"ValueError: no such sample \({where}{of_one}\)", reason), reason


DEEP_SWEEP = (
    *("--workload", "faulty_workload:deep", *SWEEP[2:]),
    *("--gpus", "2", "--bucket-cap-mb", "0.01", "--rounds", "2", "--passes", "none"),
)
SINGLE, APART, TOGETHER, ALONE, NONE = range(5)
"""Indices of the cases of DEEP_SWEEP, the last four of two ranks, by who fails in them."""

TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    *("--max-restarts", "3", "--no-python"),
)


def raises(name, *, layer, ranks, case, act="raise"):
    """Raise when the gradient of `layer` is there: those of the layers above it are in their buckets."""
    where = f"backward {layer}"
    return Deed(name=name, act=act, ranks=ranks, where=where, what="(timed)", cases=[case])


BACKWARDS = (
    raises("first_of_two", layer=3, ranks=[0], case=APART),
    raises("second_of_two", layer=1, ranks=[1], case=APART),
    raises("both", layer=2, ranks=[0, 1], case=TOGETHER),
    raises("only_one", layer=2, ranks=[1], case=ALONE),
    raises("device_assert", layer=2, ranks=[0], case=SINGLE, act="device assert"),
)


@pytest.mark.parametrize("within", [(), TORCHRUN], ids=["own ranks", "torchrun"])
def test_failing_between_two_buckets_of_a_backward_costs_the_case_alone(within, tmp_path):
    """All start again where they fell out of step or the device is lost; torchrun by its `--max-restarts`."""
    campaign = Campaign(tmp_path, DEEP_SWEEP)
    ended = campaign.start(*BACKWARDS, within=within)
    assert ended.code == 0, ended.error
    for fault in BACKWARDS:
        assert [*campaign.markers.glob(f"{fault.name}.*.json")], f"{fault.name} never happened"
    assert ended.cases["status"].tolist() == ["failed"] * 4 + ["ok"], ended.error
    reasons = ended.cases["reason"].fillna("").str.removesuffix("; its finished rounds are kept").tolist()
    where = r"ValueError: no such sample \(tests/deeds.py:\d+, in raise_error"
    assert re.fullmatch(rf"{where}\)", reasons[APART])
    assert reasons[TOGETHER] == reasons[APART]
    assert re.fullmatch(rf"{where}; rank 1\)", reasons[ALONE])
    assert ended.cases["num_rounds"].iloc[NONE] == 2
    lost = "AcceleratorError: CUDA error: device-side assert triggered"
    assert reasons[SINGLE].startswith(f"{lost} (tests/deeds.py:")
    assert ended.manifest.restarts == 3, "who failed at the same bucket need not start again"


# The whole run ends; each resume is ended again.


def test_a_run_that_is_asked_to_end(campaign, undisturbed):
    """Ctrl-C takes the same path as SIGTERM: one moment is enough."""
    asked = [deed("sigterm", moment, "signal parent", signal.SIGTERM) for moment in MOMENTS]
    asked.append(deed("sigint", "in_timed_block", "signal parent", signal.SIGINT))
    for fault in asked:
        campaign.start(fault)
    campaign.start()
    for fault in asked:
        ended = campaign.check(fault.name, undisturbed)
        assert ended.code == 130
        assert ended.manifest.timing.stopped_because == "interrupted"
        assert ended.error.splitlines()[-1].endswith(f"python -m bench.run {shlex.join(campaign.resume)}")
        assert "Traceback" not in ended.error


# Its storage is lost: one line says how to go on.


@pytest.fixture
def disk(tmp_path):
    """A small disk where one can be mounted, else a folder."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if os.geteuid() == 0:
        subprocess.run(mount, capture_output=True, check=False)
    yield folder
    if folder.is_mount():
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(campaign, disk, undisturbed):
    full = [
        deed("disk_full", moment, "fill disk")
        for moment in ("before_first_block", "in_timed_block", "while_writing")
    ]
    campaign.out = disk / "run"
    for fault in full:
        campaign.start(fault)
        (disk / "filler").unlink(missing_ok=not disk.is_mount())
    campaign.start()
    for fault in full:
        ended = campaign.check(fault.name, undisturbed)
        assert ended.code == 2
        said = f"{campaign.out} cannot be written: "
        assert sum(said in line for line in ended.error.splitlines()) == 1, ended.error
        assert f"python -m bench.run {shlex.join(campaign.resume)}" in ended.error
        assert "Traceback" not in ended.error


def moved(campaign):
    return (
        f"bench.run: error: {campaign.out} has been removed or renamed during the run; if renamed, python -m "
        "bench.run --resume with its new name goes on\n"
    )


@pytest.mark.parametrize("moment", ["before_first_block", "between_rounds"])
def test_a_removed_folder_ends_the_run_in_one_line(campaign, moment):
    fault = deed("folder_removed", moment, "remove folder")
    assert campaign.run(fault) == (2, moved(campaign))
    assert list(campaign.markers.glob(f"{fault.name}.*.log")), "it happened"
    assert not campaign.out.exists(), "nothing is written there again"


def test_a_renamed_folder_goes_on_under_its_new_name(campaign, undisturbed):
    fault = deed("folder_renamed", "in_timed_block", "rename folder", "elsewhere")
    assert campaign.run(fault) == (2, moved(campaign))
    assert not campaign.out.exists()
    campaign.out = campaign.out.with_name("run-elsewhere")
    campaign.ended[fault.name] = campaign.look(2, "")
    campaign.start()
    campaign.check(fault.name, undisturbed)


# Around the run.


def test_a_second_run_is_refused_and_the_first_not_disturbed(campaign, undisturbed):
    """Another is started into its folder at each moment, while it waits in that very moment."""
    waits, refused = [deed("second_run", moment, "wait") for moment in MOMENTS], []
    anew = campaign.command()
    with subprocess.Popen(anew, cwd=ROOT, env=campaign.environment(*waits), stderr=subprocess.PIPE) as run:
        for fault in waits:
            while not list(campaign.markers.glob(f"{fault.name}.*.log")) and run.poll() is None:
                time.sleep(0.05)
            second = campaign.command() if fault is not waits[-1] else anew
            done = finished(second, env=campaign.environment())
            refused.append((done.returncode, done.stderr))
            (campaign.markers / f"{fault.name}.go").touch()
        _, error = run.communicate(timeout=200)
    ended = campaign.look(run.returncode, error.decode())
    campaign.ended |= dict.fromkeys([*(fault.name for fault in waits), "end"], ended)
    for fault in waits:
        assert campaign.check(fault.name, undisturbed).error == ""
    in_use = "in use by another run (process "
    for (code, said), why in zip(refused, (in_use, in_use, "already holds a run"), strict=True):
        assert code == 2
        assert why in said
        assert len(said.splitlines()) == 1


def test_a_clock_that_jumps_changes_no_duration(campaign, undisturbed):
    jumps = [
        deed("clock_jump", moment, "turn clock", offset_s)
        for moment, offset_s in zip(MOMENTS, (3600, -3600, 7200), strict=True)
    ]
    campaign.ended["end"] = campaign.start(*jumps)
    for fault in jumps:
        ended = campaign.check(fault.name, undisturbed)
    assert (ended.code, ended.error) == (0, "")
    timing = ended.manifest.timing
    assert 0 < timing.startup_s < timing.total_s < 3000
    started_s = ended.blocks["started_s"].astype(float)
    assert 0 < started_s.min() <= started_s.max() < timing.measuring_s < 3000


LIMIT_BYTES = 3 * 2**30


@pytest.fixture
def memory_group():
    """A control group whose processes may use LIMIT_BYTES together."""
    root = Path("/sys/fs/cgroup")
    for base, limit in ((root / "memory", "memory.limit_in_bytes"), (root, "memory.max")):
        group = base / f"ddp-bench-{os.getpid()}"
        with contextlib.suppress(OSError):
            group.mkdir()
            (group / limit).write_text(str(LIMIT_BYTES))
            yield group
            group.rmdir()
            return
    pytest.skip("needs the right to make a control group with a memory limit")


def test_the_kernel_ends_a_rank_for_want_of_memory(campaign, memory_group, undisturbed):
    eaten = [
        deed("kernel_out_of_memory", moment, "eat memory", ranks=[1], cases=TWO_DEVICES)
        for moment in MOMENTS[:2]
    ]
    inside = ("sh", "-c", f'echo $$ > {memory_group}/cgroup.procs && exec "$@"', "sh")
    for fault, _ in ends(campaign, undisturbed, eaten, within=inside):
        status, reason = campaign.outcome(fault.name)
        assert status == "oom"
        assert f"rank {fault.ranks[0]} was killed by the kernel for want of host memory in " in reason


def test_a_port_in_use_is_told_in_one_line(campaign, undisturbed):
    """Ranks that srun or a user starts meet at a port that may be taken."""
    command = [sys.executable, "-m", "bench.run", *SWEEP, "--quiet", "--out", str(campaign.out)]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "none"}
        sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        ranks = [
            campaign.environment() | meeting | sizes | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in (0, 1)
        ]
        refused = finished(command, env=ranks[0], timeout_s=120)
    assert refused.returncode == 2, refused.stderr
    where = f"127.0.0.1:{port} is already in use; choose another port with MASTER_PORT"
    assert refused.stderr == f"bench.run: error: {where}\n"
    assert not campaign.out.exists()
    second = subprocess.Popen(command, cwd=ROOT, env=ranks[1])
    first = finished(command, env=ranks[0], timeout_s=120)
    assert (first.returncode, second.wait(60)) == (0, 0)
    pd.testing.assert_frame_equal(campaign.look(0, "").cases[list(undisturbed)], undisturbed)


RANDOM_SWEEP = (*SWEEP[:-4], "--passes", "no_sync", "--max-time", "20s", "--rounds", "6")
LONGEST_S = 20.0


@pytest.mark.parametrize("seed", range(20))
def test_any_process_killed_at_any_moment(seed, tmp_path):
    draw = random.Random(seed)
    campaign = Campaign(tmp_path, RANDOM_SWEEP)
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
    again = ended.blocks.duplicated(["case_id", "phase", "round", "rank"])
    assert not again.any(), "nothing is measured twice"
    assert not list(campaign.out.glob(".*-*")), "no half-written file is left"
