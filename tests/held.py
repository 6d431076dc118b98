"""Parts of a case as a rank has them, made of the few things that a test is about."""

from __future__ import annotations

from typing import Any

import torch

from ddp_bench.bench.measure.clock import make_clock
from ddp_bench.bench.measure.timed import Trainer
from ddp_bench.bench.modes import Place, build_mode
from ddp_bench.bench.plan.case import Case, split_batch
from ddp_bench.bench.worker.held_case import PreparedCase, Shared
from ddp_bench.models.data import Share, open_source
from ddp_bench.models.workload import Workload, make_module

CPU = torch.device("cpu")


def place_of(rank: int = 0, device: str | torch.device = CPU) -> Place:
    """A rank on a device, with one core."""
    return Place(rank=rank, device=torch.device(device), cores=(0,))


def trainer_of(case: Case, workload: Workload, place: Place, group: Any = None, **mode: Any) -> Trainer:
    """Make what trains a case on this rank, on a batch that stays on the device."""
    rows, part = split_batch(case).batch_size, case.get_part(place.rank)
    share = Share(batch_size=rows, rank=part, device=place.device)
    built = build_mode(case, make_module(workload), place, group, **mode)
    return Trainer(case, built, workload, open_source(workload, "device", share))


def held(case: Case, trainer: Any, place: Place, group: Any = None, **more: Any) -> PreparedCase:
    """A case that is ready to be measured, by a trainer that may be made up."""
    parts = {"settings": None, "clock": make_clock(place.device), "prover": None} | more
    return PreparedCase(case, group, Shared(place=place, **parts), trainer, None)
