"""The process of one side of a trial: trains blocks on request, slowed by a known share.

Takes the architecture, the batch size and the steps per block. Reads a share per line on standard input
(0 or 0.05) and answers each with the block's milliseconds.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import torch

from ddp_bench.bench.case import Case
from ddp_bench.bench.measure.clock import float32_precision, make_clock
from ddp_bench.bench.measure.timed import Trainer, run_block
from ddp_bench.bench.modes import Place, build_mode
from ddp_bench.bench.plan import Machine, expand
from ddp_bench.bench.resolve import with_device_defaults
from ddp_bench.bench.settings import Settings
from ddp_bench.models.data import open_source
from ddp_bench.models.registry import default_image_size, resnet_workload
from ddp_bench.models.step import as_set, placed
from ddp_bench.models.workload import Workload, make_module

WARM_UP_STEPS = 8
CPU_CORE = "one CPU core standing in for a GPU"


def case_of(arch: str, batch_size: int, device_type: str) -> tuple[Workload, Case]:
    """The suite's own case `single`, and what it trains."""
    torch.manual_seed(0)
    workload = resnet_workload(arch, default_image_size(arch, device_type))
    asked = Settings(modes=("single",), gpus=(1,), batch_size=batch_size)
    settings = with_device_defaults(asked, device_type=device_type, num_local_devices=1)
    machine = Machine(device_type=device_type, devices_per_node=1)
    case = expand(settings, machine, arch=workload.name, image_size=workload.image_size)[0].case
    return as_set(workload, case), case


def make_trainer(workload: Workload, case: Case, place: Place) -> Trainer:
    """The suite's own trainer of that case."""
    mode = build_mode(case, placed(make_module(workload), case, place.device), place, None)
    source = open_source(
        workload,
        data="device",
        batch_size=case.batch_per_device,
        rank=0,
        world_size=1,
        device=place.device,
        seed=0,
    )
    return Trainer(case, mode, workload, source)


def slowed(step: Callable[[], None], share: float, device: torch.device) -> Callable[[], None]:
    """`step`, then a wait of `share` of the time it took: what slows the one slows the other."""

    def run() -> None:
        begun_ns = time.perf_counter_ns()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        until_ns = begun_ns + (time.perf_counter_ns() - begun_ns) * (1 + share)
        while time.perf_counter_ns() < until_ns:
            pass

    return run


def main() -> None:
    """Serve blocks until standard input ends."""
    arch, batch_size, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    workload, case = case_of(arch, batch_size, device.type)
    with float32_precision(case.precision, device):
        _serve(workload, case, device, steps)


def _serve(workload: Workload, case: Case, device: torch.device, steps: int) -> None:
    if device.type == "cpu":
        torch.set_num_threads(1)
        if hasattr(os, "sched_setaffinity"):
            # Both sides on one core, like rank 0 of two runs that take turns; they start on another.
            cores = os.sched_getaffinity(0)
            os.sched_setaffinity(0, {max(cores)})
    trainer = make_trainer(workload, case, Place(rank=0, local_rank=0, device=device, cores=(0,)))
    clock = make_clock(device)
    print("ready", flush=True)
    sys.stdin.readline()
    if device.type == "cpu" and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(cores)})
    run_block(trainer.step, WARM_UP_STEPS, clock)
    print(torch.cuda.get_device_name() if device.type == "cuda" else CPU_CORE, flush=True)
    for line in sys.stdin:
        block = run_block(slowed(trainer.step, float(line), device), steps, clock)
        print(f"{block.block_ms:.5f}", flush=True)
    trainer.close()


if __name__ == "__main__":
    main()
