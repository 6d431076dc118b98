"""Gradients in the order of a backward, with the arithmetic behind each, to guess ready times from."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from models.workload import Workload, make_batch


@dataclass(frozen=True)
class Gradient:
    """One trainable parameter: bytes of its gradient, FLOPs of its module's forward for one image."""

    name: str
    num_bytes: int
    forward_flops: float


def gradients_in_backward_order(workload: Workload) -> list[Gradient]:
    """The workload's trainable parameters, last registered first, as a backward reaches them to close.

    A module's FLOPs stand at its first parameter in this order. Counted on the meta device; a workload whose
    module does not run there raises what it raises.
    """
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
        inputs, _ = make_batch(workload, batch_size=2, generator=torch.Generator().manual_seed(0))
        with torch.device("meta"):
            module = workload.module().eval()
            counter = FlopCounterMode(module, display=False)
            with torch.no_grad(), counter:
                module(inputs.to("meta"))
    # Names of modules in the counter begin with the model's class.
    flops = {name.partition(".")[2]: sum(ops.values()) / 2 for name, ops in counter.get_flop_counts().items()}
    found, counted = [], set()
    for name, parameter in reversed([(n, p) for n, p in module.named_parameters() if p.requires_grad]):
        owner = name.rpartition(".")[0]
        share = 0.0 if owner in counted else flops.get(owner, 0.0)
        counted.add(owner)
        found.append(Gradient(name, parameter.numel() * parameter.element_size(), share))
    return found
