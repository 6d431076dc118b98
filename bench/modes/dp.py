"""DataParallel: PyTorch's own on GPUs, a stand-in with the same stages on CPU cores.

Without CUDA `nn.DataParallel` silently passes through to the module. The stand-in carries out its
documented stages on host memory instead: scatter, replicate, parallel apply, gather, and in the backward
one thread per replica (autograd has one thread per device) and the sum of gradients on device 0.

Either way replicas run in threads, and torch keeps autocast by thread: each enters the caller's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...models.nested import (
    chunk,
    describe,
    join,
    leaves_of,
    map_tensors,
    rows,
    tensors_of,
    with_tensors,
)
from ..case import Case
from .base import Mode, Place, devices_of, pin

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a replica."""


class DataParallelMode(Mode):
    """DP over the first `case.num_devices` devices of rank 0's machine."""

    def __init__(self, case: Case, module: nn.Module, place: Place) -> None:
        self.module = module
        if place.device.type == "cuda":
            self.wrapped = CudaDataParallel(module, device_ids=devices_of(case, place))
        else:
            cores = [place.cores[i % len(place.cores)] for i in range(case.num_devices)]
            self.wrapped = DataParallelStandIn(module, cores)

    def close(self) -> None:
        if isinstance(self.wrapped, DataParallelStandIn):
            self.wrapped.close()


class CudaDataParallel(nn.DataParallel[nn.Module]):
    """`nn.DataParallel` whose replicas compute in the caller's autocast type, as in the other modes.

    Its own threads enter autocast without a type, and so in float16, whatever the caller's is.
    """

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        autocast = _callers_autocast("cuda")

        def entered(replica: nn.Module) -> Any:
            def run(*inputs: Any, **named: Any) -> Any:
                with autocast():
                    return replica(*inputs, **named)

            return run

        return super().parallel_apply([entered(replica) for replica in replicas], inputs, kwargs)


class DataParallelStandIn(nn.DataParallel[nn.Module]):
    """`nn.DataParallel` over CPU cores: `cores[i]` runs replica i, replica 0 is the master itself."""

    def __init__(self, module: nn.Module, cores: Sequence[int]) -> None:
        # Past DataParallel's own constructor, which would take whatever GPUs it finds.
        super(nn.DataParallel, self).__init__()
        self.module = module
        self.device_ids = []
        self.dim = 0
        self._copies = [copy.deepcopy(module) for _ in cores[1:]]
        self._threads = [ThreadPoolExecutor(1, initializer=pin, initargs=(core,)) for core in cores]
        self._anchor = torch.zeros((), requires_grad=True)
        self._awaits_backward = False

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Outputs of the whole batch, their tensors (N, …), as the module would give them."""
        chunks = self.scatter_batch(inputs, named)
        replicas = self.replicate_weights()
        outputs = self.apply_replicas(replicas[: len(chunks)], chunks)
        return self.gather_outputs(outputs)

    def scatter_batch(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> list[Arguments]:
        """Split dimension 0 over the devices, a copy each, as a transfer would make."""
        chunks = chunk((inputs, named), len(self._threads))
        return [chunks[0], *(map_tensors(Tensor.clone, one) for one in chunks[1:])]

    def replicate_weights(self) -> list[nn.Module]:
        """Copy the master's parameters and buffers into every other replica."""
        with torch.no_grad():
            for replica in self._copies:
                for target_part, source_part in zip(replica.modules(), self.module.modules(), strict=True):
                    target_part.training = source_part.training
                for target, source in zip(_tensors(replica), _tensors(self.module), strict=True):
                    # A loss that calls the model twice: to autograd, what the first call used is not changed.
                    (target.data if self._awaits_backward else target).copy_(source)
        return [self.module, *self._copies]

    def apply_replicas(self, replicas: Sequence[nn.Module], chunks: Sequence[Arguments]) -> list[Any]:
        grad = torch.is_grad_enabled()
        autocast = _callers_autocast("cpu")

        def run(replica: nn.Module, arguments: Arguments) -> Any:
            inputs, named = arguments
            with torch.set_grad_enabled(grad), autocast():
                return replica(*inputs, **named)

        return self._in_threads(run, replicas, chunks)

    def gather_outputs(self, outputs: Sequence[Any]) -> Any:
        """Join the outputs; the backward runs through `_Gather` into the replicas' threads.

        Raises TypeError for outputs that hold anything but tensors and None, as `nn.DataParallel` does.
        """
        for leaf in leaves_of(outputs[0]):
            if not isinstance(leaf, Tensor | None):
                raise TypeError(
                    f"DataParallel gathers tensors, and the module's outputs hold {describe(leaf)}"
                )
        if torch.is_grad_enabled():
            self._awaits_backward = True
            joined = _Gather.apply(self._anchor, self, [tensors_of(output) for output in outputs])
            return with_tensors(outputs[0], joined)
        return join(outputs)

    def backward_replicas(
        self, outputs: Sequence[Sequence[Tensor]], gradients: Sequence[Tensor | None]
    ) -> None:
        """Backward of every replica in its own thread, from its shares of the gradients of the outputs."""
        by_replica: list[list[tuple[Tensor, Tensor]]] = [[] for _ in outputs]
        for column, gradient in zip(zip(*outputs, strict=True), gradients, strict=True):
            if gradient is None:  # the loss does not use this output
                continue
            shares = gradient.split([len(rows(output)) for output in column], dim=self.dim)
            for own, output, share in zip(by_replica, column, shares, strict=True):
                if output.requires_grad:
                    own.append((output, share.reshape(output.shape)))
        self._in_threads(_backward, by_replica)

    def reduce_gradients(self) -> None:
        self._awaits_backward = False
        with torch.no_grad():
            for replica in self._copies:
                for master, copied in zip(self.module.parameters(), replica.parameters(), strict=True):
                    if copied.grad is not None:
                        master.grad = copied.grad if master.grad is None else master.grad.add_(copied.grad)
                        copied.grad = None

    def _in_threads(self, work: Callable[..., Any], *arguments: Sequence[Any]) -> list[Any]:
        calls = list(zip(*arguments, strict=True))
        futures = [thread.submit(work, *call) for thread, call in zip(self._threads, calls, strict=False)]
        return [future.result() for future in futures]

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()


class _Gather(torch.autograd.Function):
    """Joins detached outputs, tensors by replica; its backward goes on in the replicas' own graphs."""

    @staticmethod
    def forward(
        ctx: Any, _anchor: Tensor, owner: DataParallelStandIn, outputs: Sequence[Sequence[Tensor]]
    ) -> tuple[Tensor, ...]:
        ctx.owner, ctx.outputs = owner, outputs
        ctx.set_materialize_grads(False)
        columns = list(zip(*outputs, strict=True))
        joined = tuple(torch.cat([rows(one.detach()) for one in column]) for column in columns)
        trained = [any(one.requires_grad for one in column) for column in columns]
        ctx.mark_non_differentiable(
            *(one for one, is_trained in zip(joined, trained, strict=True) if not is_trained)
        )
        return joined

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.owner.backward_replicas(ctx.outputs, gradients)
        ctx.owner.reduce_gradients()
        return None, None, None


def _backward(outputs: Sequence[tuple[Tensor, Tensor]]) -> None:
    if outputs:
        torch.autograd.backward([output for output, _ in outputs], [gradient for _, gradient in outputs])


def _callers_autocast(device_type: str) -> Callable[[], torch.autocast]:
    """Makes contexts that give another thread the autocast state of this one."""
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    return partial(torch.autocast, device_type, dtype=dtype, enabled=enabled)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
