"""Commands over shaped links, whose physics is the oracle; hosts that are lost."""

import os
import shlex
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
import pytest
from commands import ROOT, SMALL, eventually, python
from fault_campaign import SWEEP, Campaign, deed
from real_lab import least_s
from slow_workloads import causes_of

from ddp_bench.bench.findings.communication import ALL_REDUCE
from ddp_bench.bench.predict import main as predict
from ddp_bench.bench.results.store import load_run

pytestmark = [pytest.mark.lab, pytest.mark.campaign]


RESNET18_BYTES = 46_758_048
LINK_MS = RESNET18_BYTES * 8 / 1e9 * 1000
"""Two ranks send every gradient byte once each way, at 1 Gbit/s."""


def test_one_gigabit_link_is_named_as_slow_and_shows_what_buckets_hide(tmp_path):
    lab = ["-m", "bench.lab", "--hosts", "2", "--rate", "1gbit", "--", "python", "-m", "bench.run"]
    sweep = ["--modes", "ddp", "--gpus", "2", "--bucket-cap-mb", "1,100", "--rounds", "5", "--device", "cpu"]
    done = python(*lab, *sweep, "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr[-4000:]
    run = load_run(tmp_path / "run")
    assert causes_of(run)[0] == ALL_REDUCE
    cases = run.cases[run.cases["mode"] == "ddp"].set_index("bucket_cap_mb")
    assert (cases["status"] == "ok").all()
    assert cases["link"].tolist() == ["1gbit", "1gbit"]
    assert cases["num_nodes"].tolist() == [2, 2]
    assert {rank.host for rank in run.manifest.ranks} == {"host0", "host1"}
    assert (cases["comm_ms"] > LINK_MS).all(), "not faster than the link carries the payload"
    whole, split = cases.loc["100"], cases.loc["1"]
    assert whole["exposed_comm_ms"] > split["exposed_comm_ms"], "small buckets hide some"
    assert whole["overlap_trace_pct"] < split["overlap_trace_pct"], "one bucket has nothing to overlap with"
    assert whole["step_ms_p50"] > split["step_ms_p50"], "and that shows in the step"
    buckets = run.buckets[run.buckets["case_id"] == split["case_id"]]
    assert set(buckets["rank"]) == {0, 1}
    assert (buckets["ready_ms"] <= buckets["launch_ms"]).all()
    assert (buckets["start_ms"] < buckets["done_ms"]).all()


RATES = {"20mbit": 2e7, "1gbit": 1e9}
GRADIENT_BYTES = 1_080_424


def test_every_rate_meets_its_own_link_and_predicts_the_other(tmp_path, capsys):
    sweep = ["--bucket-cap-mb", "default,100", "--calibrate", "--passes", "no_sync,comm"]
    sweep += ["--modes", "ddp", "--gpus", "2", "--rounds", "3", "--steps", "1"]
    for rate, bits_per_s in RATES.items():
        lab = ["-m", "bench.lab", "--hosts", "2", "--rate", rate, "--", "python", "-m", "bench.run"]
        done = python(*lab, *SMALL, *sweep, "--out", str(tmp_path / rate))
        assert done.returncode == 0, done.stderr[-4000:]
        assert f"lab: 2 hosts of 1 rank each, link {rate} each way" in done.stderr
        run = load_run(tmp_path / rate)
        assert set(run.cases["link"].dropna()) == {rate}
        slowest = run.cases[run.cases["bucket_cap_mb"] == "100"].iloc[0]
        assert slowest["step_ms_p50"] >= 1000 * least_s(GRADIENT_BYTES, bits_per_s)
    slow, fast = (tmp_path / rate for rate in RATES)
    assert predict.main([str(slow), "--validate", str(slow), str(fast)]) == 0
    held_out = [line.split() for line in capsys.readouterr().out.splitlines() if " ddp-n2-cap" in line]
    found = {(cells[0], cells[1].split("-")[2]) for cells in held_out if cells[0] in RATES}
    assert found == {("20mbit", "cap100"), ("1gbit", "cap100"), ("1gbit", "capdefault")}


THREE_HOSTS = (sys.executable, "-m", "bench.lab", "--hosts", "3", "--rate", "1gbit", "--quiet", "--")
CUT_S = 20.0
WAITING = deed("held", "in_timed_block", "wait", cases=(3, 4))
SWEEP_OF_THREE = (*("1,3" if part == "1,2" else part for part in SWEEP[:-4]), "--sync-buffers", "on,off")


@contextmanager
def held_run(campaign, fault):
    """A run in a lab of three hosts, while its first rank waits inside a block."""
    command = [*THREE_HOSTS, *campaign.command()]
    environment = campaign.environment(fault)
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as run:
        assert eventually(lambda: any(campaign.markers.glob("held-*.csv")) or run.poll() is not None)
        assert run.poll() is None, run.communicate()[1]
        yield run


def set_link(lab, host, state):
    """Switch the port of a host `up` or `down`, in the network namespace of the lab's switch."""
    own_user = () if os.geteuid() == 0 else ("--user", "--preserve-credentials")
    inside = ("nsenter", f"--target={lab.pid}", "--net", *own_user)
    subprocess.run([*inside, "ip", "link", "set", f"host{host}", state], check=True)


@pytest.fixture
def campaign(tmp_path):
    return Campaign(tmp_path, SWEEP_OF_THREE)


def test_a_link_that_is_cut_for_a_while_delays_the_run(campaign):
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
    assert ended.blocks["block_ms"].astype(float).max() >= 1000 * CUT_S, "the cut was felt, and shows"


def test_a_host_that_is_gone_ends_the_run_with_its_tables_written(campaign):
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
    again = campaign.start(within=THREE_HOSTS)
    assert again.code == 0, again.error
    assert before <= again.rows
    assert again.cases["status"].tolist() == ["ok"] * 5
    assert again.cases["num_rounds"].tolist() == [3] * 5
