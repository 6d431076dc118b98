"""A bare loop over the cases of a run: one step a visit, in random order, and nothing else.

    torchrun --nproc-per-node 2 tests/benchmarks/bare_loop.py RUN DEADLINE OUT

It builds those cases of RUN that own their devices and takes steps until DEADLINE, in seconds since 1970. OUT
gets the step times in ms of the slowest rank, by case and round. What a run does beside timed steps (proof,
passes, tables, messages) is what it has over this.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

import torch.distributed as dist
from real_ranks import Cluster

from ddp_bench.bench.case import Case
from ddp_bench.bench.findings.wording import own_devices
from ddp_bench.bench.measure.timed import Trainer
from ddp_bench.bench.modes import build_mode
from ddp_bench.bench.results.journal import read
from ddp_bench.bench.results.store import load_run
from ddp_bench.models.data import open_source
from ddp_bench.models.registry import resnet_workload
from ddp_bench.models.step import as_set, placed
from ddp_bench.models.workload import make_module

WARMUP_STEPS = 3


def main(run: Path, deadline_s: float, out: Path) -> None:
    """Step through the cases until the deadline; rank 0 writes what was measured."""
    cluster = Cluster("cpu")
    trainers: dict[str, Trainer | None] = {}
    for case in cases_of(run):
        group = cluster.group(case.num_devices, case.backend) if case.mode == "ddp" else None
        takes_part = cluster.rank < (case.num_devices if case.mode == "ddp" else 1)
        trainers[case.case_id] = trainer_of(case, cluster, group) if takes_part else None
        cluster.barrier()
    rounds: list[dict[str, float]] = []
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


def cases_of(run: Path) -> list[Case]:
    """The cases that a run measured on devices of their own."""
    found = load_run(run).cases
    own = set(own_devices(found[found["status"] == "ok"])["case_id"])
    return [planned.case for planned in read(run).plan if planned.case.case_id in own]


def trainer_of(case: Case, cluster: Cluster, group: dist.ProcessGroup | None) -> Trainer:
    """A case ready to step: built and warmed up."""
    assert case.image_size is not None
    workload = as_set(resnet_workload(case.arch, case.image_size), case)
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


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3]))
