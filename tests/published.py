"""A calibration from a model's arithmetic and one published throughput, to judge predictions by."""

import warnings
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.utils.flop_counter import FlopCounterMode

from ddp_bench.bench.predict.calibration import Calibration, Parameter
from ddp_bench.models.workload import make_batch

FORWARD_SHARE = 1 / 3
"""A backward does twice the arithmetic of its forward: gradients of inputs and of weights."""

OVERLAPPED_SLOWDOWN = 1.189
"""Compute beside communication, on average over published measurements (40% at most)."""


@dataclass(frozen=True)
class Gradient:
    """One trainable parameter: bytes of its gradient, FLOPs of its module's forward for one image."""

    name: str
    num_bytes: int
    forward_flops: float


def gradients_in_backward_order(workload):
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


def from_throughput(identity, gradients, *, images_per_s):
    """The calibration that a single device's published throughput allows.

    Assumes that a third of the step is forward, the rest backward, the optimizer counting to the backward's
    end as nothing; that gradients become ready as the share of FLOPs behind them grows; no spread between
    ranks. No figure of several devices enters.
    """
    step_ms = identity.batch_per_device * 1000 / images_per_s
    backward_ms = step_ms * (1 - FORWARD_SHARE)
    done = [*accumulate(gradient.forward_flops for gradient in gradients)]
    return Calibration(
        identity=identity,
        num_ranks=1,
        num_nodes=1,
        parameters=tuple(
            Parameter(name=one.name, num_bytes=one.num_bytes, ready_ms=flops / done[-1] * backward_ms)
            for one, flops in zip(gradients, done, strict=True)
        ),
        forward_ms=(step_ms * FORWARD_SHARE,),
        backward_ms=(backward_ms,),
        optimizer_ms=(0.0,),
        compute_slowdown=(OVERLAPPED_SLOWDOWN,),
        single_step_ms=(step_ms,),
        notes=("ready times from the model's FLOPs, not measured",),
    )
