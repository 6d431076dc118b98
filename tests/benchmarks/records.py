"""A run of recorded blocks without a device: planned, stored round by round, resumed and summarised.

    python tests/benchmarks/records.py NUM_CAPS NUM_ROUNDS NUM_RANKS FOLDER

prints the number of blocks, the processor time of every part and the peak memory as one line of JSON. Step
times come from a fixed pattern. `os.fsync` is left out: its time is the disk's.
"""

import json
import os
import resource
import sys
import time
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import made

from ddp_bench.bench.findings.findings import conclude
from ddp_bench.bench.manifest import Manifest
from ddp_bench.bench.plan import Machine, expand, round_order
from ddp_bench.bench.resolve import with_device_defaults
from ddp_bench.bench.results.aggregate import Outcome, case_rows
from ddp_bench.bench.results.case_result import CaseResult, case_results
from ddp_bench.bench.results.comparisons import compared, pairs_of
from ddp_bench.bench.results.round_times import RoundTimes
from ddp_bench.bench.results.tables import read_blocks
from ddp_bench.bench.settings import Settings

NUM_STEPS = 3


def plan(num_caps, num_ranks):
    settings = Settings(
        modes=("ddp",),
        gpus=(num_ranks,),
        axes={
            "bucket_cap_mb": tuple(map(str, range(1, num_caps + 1))),
            "gradient_as_bucket_view": (False, True),
            "static_graph": (False, True),
            "comm_hook": ("none", "fp16", "bf16"),
            "accumulate": (1, 2, 4, 8),
        },
    )
    machine = Machine(device_type="cuda", devices_per_node=8, num_nodes=num_ranks // 8, ranks_per_node=8)
    resolved = with_device_defaults(settings, device_type="cuda", num_local_devices=8)
    return expand(resolved, machine, arch="resnet50", image_size=224)


def block(case_id, index, round_index, num_ranks):
    rows = []
    for rank in range(num_ranks):
        steps = [100 + (7 * index + 3 * round_index + rank + step) % 11 / 10 for step in range(NUM_STEPS)]
        times = {"block_ms": round(sum(steps), 4), "steps_ms": tuple(steps), "detail": {}}
        at = {"position": index, "host": f"node-{rank // 8}", "started_s": 10.0 * round_index}
        rows.append(made.block(case_id, round_index, 0.0, rank=rank, steps=NUM_STEPS) | at | times)
    return rows


def main(num_caps, num_rounds, num_ranks, folder):
    os.fsync = lambda _descriptor: None
    cpu_s = {}

    @contextmanager
    def timed(part):
        begun = time.process_time()
        yield
        cpu_s[part] = cpu_s.get(part, 0.0) + time.process_time() - begun

    with timed("plan"):
        planned = plan(num_caps, num_ranks)
        ids = [p.case.case_id for p in planned]
    ranks = [p.case.num_devices for p in planned]
    outcomes = [Outcome(p, "ok", "", {"num_buckets": 4, "device_name": "NVIDIA H200"}) for p in planned]
    writer, times = made.new_run(folder), RoundTimes()
    writer.write_manifest(Manifest())
    for round_index in range(1, num_rounds + 1):
        for index in round_order(len(planned), seed=0, round_index=round_index):
            rows = block(ids[index], index, round_index, ranks[index])
            with timed("store"):
                writer.append(rows)
                times.add(rows)
        with timed("summarise"):
            writer.replace("cases.csv", case_rows(outcomes, times))
    del times
    with timed("resume"):
        times = RoundTimes(read_blocks(folder / "blocks.csv"))
        batches = {p.case.case_id: p.case.global_batch for p in planned}
        rows = [
            {**p.case.stored(), "case_id": p.case.case_id, "oversubscribed": p.oversubscribed}
            for p in planned
        ]
        typical = times.fitted()
        pairs = pairs_of(map(CaseResult.of, rows))
        comparisons = compared(pairs, typical, units=batches, margin=0.05)
        cases = case_rows(outcomes, times, comparisons, typical=typical)
    with timed("findings"):
        assert conclude(folder, Manifest(), case_results(cases), times, comparisons).lines
    assert len(cases) == len(planned)
    return {
        "cases": len(planned),
        "blocks": sum(ranks) * num_rounds,
        "cpu_s": cpu_s,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


if __name__ == "__main__":
    print(json.dumps(main(*map(int, sys.argv[1:4]), folder=Path(sys.argv[4]))))
