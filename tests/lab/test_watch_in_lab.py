"""Trainings that are watched on two hosts, each with its own torchrun, network and process numbers."""

import csv
import sys
from collections import Counter

import pytest
from commands import python

from ddp_bench.bench.findings.watched import conclude_watch
from ddp_bench.bench.results.store import load_run

pytestmark = pytest.mark.lab

STEPS = 60
SCRIPT = f"""
import os, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
model = DDP(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range({STEPS}):
    optimizer.zero_grad()
    if os.environ["BENCH_HOST"] == "host1":
        time.sleep(0.05)
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
time.sleep(0.2)  # torch aborts where a thread of gloo holds an all-reduce as Python ends
"""
LAB = ("-m", "bench.lab", "--hosts", "2", "--rate", "1gbit", "--")
TORCHRUN = f"{sys.executable} -m torch.distributed.run"
MEETING = (
    "--nnodes 2 --nproc-per-node 1 --node-rank $NODE_RANK --rdzv-id 80 --rdzv-backend c10d "
    "--rdzv-endpoint 10.77.0.1:29400 --rdzv-conf is_host=$((NODE_RANK == 0))"
)
WATCH = f"{sys.executable} -m bench.watch --steps {STEPS} --out"
ELSEWHERE = "the watch on rank 0's host writes the report"


@pytest.fixture
def watch_on_hosts(tmp_path):
    """Runs a shell's line on both hosts, with SCRIPT as `$0` and a new folder as `$1`; what is on stderr."""
    script, folder = tmp_path / "train.py", tmp_path / "watched"
    script.write_text(SCRIPT)

    def run(line):
        done = python(*LAB, "bash", "-c", line, str(script), str(folder))
        assert done.returncode == 0, done.stderr
        return folder, " ".join(done.stderr.split())

    return run


def check_both_hosts(folder, said):
    """Rows of both hosts are there, each in a file, and the late rank is named with its host."""
    assert len([*(folder / "ranks").iterdir()]) == 2
    rows = csv.DictReader((folder / "steps.csv").read_text().splitlines())
    assert Counter(row["rank"] for row in rows) == {"0": STEPS, "1": STEPS}
    run = load_run(folder)
    hosts = {one.rank: one.host for one in run.manifest.ranks}
    assert sorted(hosts.values()) == ["host0", "host1"]
    late = run.manifest.watched.late
    assert hosts[late.rank] == "host1"
    assert late.later_ms.estimate == pytest.approx(50, rel=0.3)
    [straggler] = [one.fact for one in conclude_watch(run).costs if one.title == "Straggler"]
    assert straggler.startswith(f"Rank {late.rank} on host1 is a straggler: ")
    assert f"Rank {late.rank} on host1 is a straggler: " in said
    (case,) = run.results
    assert (case.num_devices, case.num_nodes) == (2, 2)
    # Of the wait for the late host nothing is communication; a machine that does much else adds to both.
    assert case.exposed_comm_ms.estimate < 0.7 * late.later_ms.estimate
    assert f"{late.rank} on host1" in (folder / "report.html").read_text()


def test_a_watch_on_each_host_ends_in_one_report_that_names_the_late_host(watch_on_hosts):
    folder, said = watch_on_hosts(f'{WATCH} "$1" -- {TORCHRUN} {MEETING} "$0"')
    check_both_hosts(folder, said)
    assert said.count(ELSEWHERE) == 1
    assert said.count("report.html") == 1


@pytest.mark.campaign
def test_so_does_a_torchrun_on_each_host_whose_ranks_watch(watch_on_hosts):
    line = f'{TORCHRUN} {MEETING} -m ddp_bench watch --steps {STEPS} --out "$1" "$0"'
    check_both_hosts(*watch_on_hosts(line))


@pytest.mark.campaign
def test_rank_0_says_whose_rows_are_missing_where_hosts_share_no_folder(watch_on_hosts):
    folder, said = watch_on_hosts(f'{WATCH} "$1/$BENCH_HOST" -- {TORCHRUN} {MEETING} "$0"')
    (reported,) = folder.glob("*/report.html")
    start = "1 of 2 ranks left no steps here, rank 1 for one, so what communication adds is not"
    (note,) = [one for one in load_run(reported.parent).manifest.watched.notes if one.startswith(start)]
    assert note in said
    assert "Communication adds" not in said, "the wait for a host that nobody sees is no communication"
    assert "Only one process trained" not in said
    assert said.count(ELSEWHERE) == 1
