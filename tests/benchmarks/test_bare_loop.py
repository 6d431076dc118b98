"""What a run knows after its time, against a bare loop over the same cases for the same time.

They alternate, so that both meet the same neighbours; one estimator makes the intervals of both, with what
another launch adds: the loop is one, a run has several. Run with
`python -m pytest tests/benchmarks/test_bare_loop.py --benchmark-only -n 0 -s`.

This file is the loop, too: one step a visit, in random order, and nothing else.

    torchrun --nproc-per-node 2 tests/benchmarks/test_bare_loop.py RUN DEADLINE OUT

It builds those cases of RUN that own their devices and takes steps until DEADLINE, in seconds since 1970. OUT
gets the step times in ms of the slowest rank, by case and round. What a run does beside timed steps (proof,
passes, tables, messages) is what it has over this.
"""

import json
import os
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean, median

import pandas as pd
import pytest
from commands import python
from real_ranks import Cluster

from ddp_bench.bench.cluster.process import rank_variables
from ddp_bench.bench.findings.wording import own_devices
from ddp_bench.bench.measure.timed import Trainer
from ddp_bench.bench.modes import build_mode
from ddp_bench.bench.results.aggregate import rate_half_widths
from ddp_bench.bench.results.comparisons import compared
from ddp_bench.bench.results.journal import read
from ddp_bench.bench.results.store import load_run
from ddp_bench.bench.results.typical import Typical
from ddp_bench.models.data import open_source
from ddp_bench.models.registry import resnet_workload
from ddp_bench.models.step import placed
from ddp_bench.models.workload import make_module

COMMAND = ("--modes", "dp,ddp", "--gpus", "1,2,4")
PAIRS = int(os.environ.get("BARE_LOOP_PAIRS", "2"))
MOST = 1.3
WARMUP_STEPS = 3


def loop(run, deadline_s, out):
    """Step through the cases until the deadline; rank 0 writes what was measured."""
    cluster = Cluster()
    trainers = {}
    for case in cases_of(run):
        group = cluster.group(case.num_devices, case.backend) if case.mode == "ddp" else None
        takes_part = cluster.rank < (case.num_devices if case.mode == "ddp" else 1)
        trainers[case.case_id] = trainer_of(case, cluster, group) if takes_part else None
        cluster.barrier()
    rounds = []
    order = random.Random(0)
    while cluster.from_first(time.time() < deadline_s):
        own = {}
        for case_id in order.sample(sorted(trainers), len(trainers)):
            trainer = trainers[case_id]
            cluster.barrier()
            if trainer is not None:
                start = time.perf_counter_ns()
                trainer.step()
                own[case_id] = (time.perf_counter_ns() - start) / 1e6
        rounds.append(own)
    by_rank = cluster.gather(rounds)
    if cluster.is_first:
        slowest = {
            case_id: {
                str(r): max(found[r][case_id] for found in by_rank if case_id in found[r])
                for r in range(len(rounds))
            }
            for case_id in trainers
        }
        out.write_text(json.dumps(slowest))
    cluster.barrier()
    cluster.close()


def cases_of(run):
    """The cases that a run measured on devices of their own."""
    found = load_run(run).cases
    own = set(own_devices(found[found["status"] == "ok"])["case_id"])
    return [planned.case for planned in read(run).plan if planned.case.case_id in own]


def trainer_of(case, cluster, group):
    """A case ready to step: built and warmed up."""
    workload = replace(resnet_workload(case.arch, case.image_size), channels_last=case.channels_last)
    mode = build_mode(case, placed(make_module(workload), case, cluster.place.device), cluster.place, group)
    in_ddp = case.mode == "ddp"
    source = open_source(
        workload,
        data=case.data,
        batch_size=case.batch_per_device * (1 if in_ddp else case.num_devices),
        rank=cluster.rank,
        world_size=case.num_devices if in_ddp else 1,
        device=cluster.place.device,
        seed=0,
    )
    trainer = Trainer(case, mode, workload, source)
    for _ in range(WARMUP_STEPS):
        trainer.step()
    mode.settle()
    return trainer


def of_run(run):
    """Half-widths of a run: the median over the cases that own their devices, and of every comparison."""
    widths = rate_half_widths(own_devices(run.cases), with_single=True)
    comparisons = [c for c in run.compared if {c.case_id, c.reference_id} <= widths.keys()]
    return {"images/s": median(widths.values()), **by_pair(comparisons)}


def of_loop(step_ms, run):
    """The same half-widths from a loop's step times."""
    by_round = {c: {int(r): ms for r, ms in found.items()} for c, found in step_ms.items()}
    typical = Typical.of({"timed": by_round})
    batches = dict(zip(run.cases["case_id"], run.cases["global_batch"], strict=True))
    named = run.comparisons[["case_id", "reference_id"]].itertuples(index=False, name=None)
    pairs = [pair for pair in named if set(pair) <= by_round.keys()]
    rounds = {c: len(r) for c, r in by_round.items()}
    comparisons = compared(pairs, typical, units=batches, num_rounds=rounds, margin=0.05)
    widths = [typical.step_ms(c).half_width for c in by_round]
    return {"images/s": median(widths), **by_pair(comparisons)}


def by_pair(comparisons):
    return {f"{one.case_id} / {one.reference_id}": one.ratio.half_width for one in comparisons}


def run_and_loop(folder):
    """One run, then one loop for as long: their half-widths and rounds."""
    folder.mkdir()
    start = time.time()
    ran = python("-m", "bench.run", *COMMAND, "--out", str(folder / "run"), "--quiet", timeout_s=900)
    took_s = time.time() - start
    assert ran.returncode == 0, ran.stderr
    run, out = load_run(folder / "run"), folder / "loop.json"
    looped = python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__),
        *(str(folder / "run"), str(time.time() + took_s), str(out)),
        env=rank_variables({}, "cpu") | {"PYTHONPATH": os.pathsep.join(sys.path)},
        timeout_s=900,
    )
    assert looped.returncode == 0, looped.stderr
    step_ms = json.loads(out.read_text())
    table = pd.DataFrame({"suite": of_run(run), "loop": of_loop(step_ms, run)})
    table["suite / loop"] = table["suite"] / table["loop"]
    rounds = int(run.cases["num_rounds"].max()), max(map(len, step_ms.values()))
    print(f"{took_s:.0f} s each; rounds: suite {rounds[0]}, loop {rounds[1]}")
    print(table.to_string(float_format="{:.3f}".format))
    return table


@pytest.mark.timeout(3600)
def test_a_run_knows_nearly_as_much_as_a_bare_loop(benchmark, tmp_path):
    tables = benchmark.pedantic(lambda: [run_and_loop(tmp_path / str(i)) for i in range(PAIRS)], rounds=1)
    ratio = geometric_mean(value for table in tables for value in table["suite / loop"])
    benchmark.extra_info["half-widths, suite / loop"] = f"{ratio:.2f}"
    assert ratio <= MOST


if __name__ == "__main__":
    loop(Path(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3]))
