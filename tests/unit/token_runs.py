"""Runs of a language model made of numbers: their workload counts tokens, 512 in a row of the batch."""

import json

import torch
from gate_runs import MANIFEST, block_rows
from made import new_run, planned, resolved, write_tables
from torch import nn

from ddp_bench.bench.results.aggregate import describe_planned_case
from ddp_bench.models.workload import Workload

ROWS, LENGTH = 8, 512
"""Sequences per device, and tokens in each."""

ROUNDS = 12
STEP_MS = {"single": 100.0, "dp": 200.0, "ddp": 125.0}
WATTS = 50.0


def token_plan():
    """`single`, DP and DDP with two caps, on two CPU cores."""
    settings = resolved(gpus=(2,), bucket_cap_mb=("default", "25"), batch_size=ROWS)
    return planned(settings, arch="lm:model", image_size=None, unit="tokens", units_per_sample=LENGTH)


def blocks_of(planned, scale):
    """Rounds at two speeds, every phase that the page shows, and 20 blocks without a pause, 10% slower."""
    case, ms = planned.case, STEP_MS[planned.case.mode] * scale
    series = [ms * (1.0 if r % 2 else 1.2) for r in range(ROUNDS)]
    rows = block_rows(case.case_id, case.mode, series)
    gpus = {f"GPU-{rank}": {"power_w": WATTS, "sm_clock_mhz": 1500.0} for rank in range(case.num_devices)}
    for row in rows:
        own = gpus if case.mode != "ddp" else {f"GPU-{row['rank']}": gpus[f"GPU-{row['rank']}"]}
        row["detail"] = json.dumps({"gpus": own})
    anatomy = {"data_ms": 1.0, "forward_ms": 0.3 * ms, "backward_ms": 0.6 * ms, "optimizer_ms": 2.0}
    phases = {"anatomy": ms}
    if case.mode == "ddp":
        phases |= {"no_sync": 0.8 * ms, "comm": 0.3 * ms}
    for phase, phase_ms in phases.items():
        more = block_rows(case.case_id, case.mode, [phase_ms] * ROUNDS, phase)
        rows += [row | {"detail": json.dumps(anatomy)} if phase == "anatomy" else row for row in more]
    return rows


def token_run(folder, *, scale=1.0, **manifest):
    """A results folder as `bench.run` leaves it; DDP with a cap of 25 MiB fails."""
    model = {
        "arch": "lm:model",
        "num_params": 10**6,
        "gradient_bytes": 4 * 10**6,
        "forward_flops_per_image": 1e9,
    }
    told = MANIFEST | {"model": model}
    told |= {"settings": {"data": "device", "device": "cpu", "margin": 0.05, "precision_target": 0.001}}
    rows = []
    outcomes = []
    for one in token_plan():
        failed = one.case.bucket_cap_mb != "default"
        usual = {"device_name": "CPU core", "peak_mem_mib": 10.0}
        facts = {"status": "oom", "reason": "out of memory"} if failed else usual
        outcomes.append(describe_planned_case(one, **facts))
        rows += [] if failed else blocks_of(one, scale)
    return write_tables(new_run(folder, **told | manifest), outcomes, rows)


def language_model(**changes):
    def batch(batch_size, generator):
        made = torch.randn(batch_size, 4, generator=generator)
        return made, torch.zeros(batch_size, dtype=torch.long)

    return Workload(**{"name": "lm", "module": lambda: nn.Linear(4, 3), "batch": batch} | changes)
