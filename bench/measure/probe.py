"""One step of a case on one device: enough to say what a plan will cost."""

from __future__ import annotations

import torch

from bench.measure.clock import make_clock
from bench.measure.timed import Trainer, run_block
from bench.modes.single import SingleMode
from bench.plan import Case
from models.data import open_source
from models.workload import Workload, make_module


def step_seconds(workload: Workload, case: Case, device: torch.device) -> float:
    """Seconds of the third of three steps of `case`, a `single` one."""
    if device.type == "cpu":
        torch.set_num_threads(1)
    module = make_module(workload).to(device)
    source = open_source(
        workload, data="device", batch_size=case.global_batch, rank=0, world_size=1, device=device, seed=0
    )
    trainer = Trainer(case, SingleMode(module), workload, source)
    steps_ms = run_block(trainer.step, 3, make_clock(device)).steps_ms
    trainer.close()
    return steps_ms[-1] / 1000
