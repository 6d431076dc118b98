"""Splits a model over devices, layer by layer, so that the slowest device has as little work as it can."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from statistics import median

import torch
from torch import Tensor, nn

from ...models.workload import is_pair_of_tensors, list_layers
from ..measure.clock import make_clock
from ..measure.groups import set_default_group
from ..measure.timed import make_autocast
from ..modes import Stages, Unsupported
from ..plan.case import Case
from .making import Maker
from .peers import ProofGroup

REPETITIONS = 3
"""Times that each layer is measured after one untimed: the median leaves one disturbance out."""


@dataclass
class Splitter:
    """Splits one workload; all cases over as many devices are split alike."""

    maker: Maker
    _known: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def split(self, case: Case) -> tuple[int, ...]:
        """Measure the layers and return how many each device of a case gets.

        Raises Unsupported for a model that cannot be split.
        """
        maker, workload, n = self.maker, self.maker.workload, case.num_devices
        if n in self._known:
            return self._known[n]
        if workload.batch_loss is not None:
            raise Unsupported(
                "the workload has batch_loss, which calls the whole model; a split one needs loss"
            )
        batch = maker.make_batch(max(case.global_batch // case.num_micro_batches, 1))
        if not is_pair_of_tensors(batch):
            raise Unsupported(
                "stages pass one tensor on, and the workload's inputs and targets are more than that"
            )
        module = maker.make_module()
        layers = list_layers(workload, module)
        check_layers(module, layers, n)
        inputs, targets = (one.to(maker.device) for one in batch)
        costs = measure_layer_costs_ms(
            layers, inputs, lambda outputs: workload.loss(outputs, targets), within=make_autocast(case)
        )
        self._known[n] = partition_layers(costs, n)
        return self._known[n]

    def make_stages(
        self, case: Case, peers: ProofGroup, by_device: tuple[int, ...] | None = None
    ) -> Stages | None:
        """Return the stages of a case, split as the first rank finds best where `by_device` is not known.

        Every rank of the case calls it together. None for a mode that splits nothing.
        """
        if not case.spec.is_staged:
            return None
        if by_device is None:
            found = torch.zeros(case.num_devices, dtype=torch.int64)
            with peers.join_ranks(), set_default_group(self.maker.alone):
                if not peers.rank:
                    found = torch.tensor(self.split(case))
            by_device = tuple(peers.broadcast(found).tolist())
        return Stages(layers=functools.partial(list_layers, self.maker.workload), by_device=by_device)


def check_layers(module: nn.Module, layers: list[nn.Module], num_devices: int) -> None:
    """Raise Unsupported unless the layers hold each parameter once and are enough for the devices."""
    if not layers:
        raise Unsupported("the model is no nn.Sequential; Workload(layers=...) names its layers in order")
    if len(layers) < num_devices:
        raise Unsupported(f"the model has {len(layers)} layers for {num_devices} devices")
    held = [id(p) for layer in layers for p in layer.parameters()]
    wanted = {id(p): name for name, p in module.named_parameters()}
    if left_out := [name for key, name in wanted.items() if key not in held]:
        raise Unsupported(f"the workload's layers leave out parameter {left_out[0]}")
    if len(held) > len(wanted):
        raise Unsupported("the workload's layers share a parameter, or hold one that is not the module's")


def measure_layer_costs_ms(
    layers: Sequence[nn.Module],
    inputs: Tensor,
    loss: Callable[[Tensor], Tensor],
    *,
    within: contextlib.AbstractContextManager[object],
) -> list[float]:
    """Milliseconds of the forward and backward of each layer by itself, the loss as part of the last.

    `within` is the context of the arithmetic, as `make_autocast` makes it.
    """
    clock = make_clock(inputs.device)
    costs = []
    with within:
        for index, layer in enumerate(layers):
            last = index == len(layers) - 1
            x = inputs.detach()
            x.requires_grad_(index > 0 and x.is_floating_point())
            samples = []
            for _ in range(1 + REPETITIONS):
                clock.begin()
                # A copy: a layer may write to its input.
                outputs = layer(x.clone())
                total = loss(outputs) if last else outputs.float().sum()
                if total.requires_grad:
                    total.backward()
                clock.mark()
                samples += clock.read_ms()
            costs.append(median(samples[1:]))
            inputs = outputs
    for layer in layers:
        layer.zero_grad()
    return costs


def partition_layers(costs: Sequence[float], num_parts: int) -> tuple[int, ...]:
    """Lengths of `num_parts` runs of `costs`, none empty, whose largest sum is least; the first such."""
    sums = [0.0, *itertools.accumulate(costs)]

    @functools.cache
    def find_best(count: int, parts: int) -> tuple[float, tuple[int, ...]]:
        """Find the largest sum and the lengths, for the first `count` costs."""
        if parts == 1:
            return sums[count], (count,)
        found = ((*find_best(start, parts - 1), start) for start in range(parts - 1, count))
        every = ((max(high, sums[count] - sums[at]), (*ends, count - at)) for high, ends, at in found)
        return min(every, key=itemgetter(0))

    return find_best(len(costs), num_parts)[1]
