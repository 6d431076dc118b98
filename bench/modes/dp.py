"""DataParallel: PyTorch's own on GPUs, a stand-in with the same stages on CPU cores.

Without CUDA `nn.DataParallel` silently passes through to the module. The stand-in carries out its
documented stages on host memory instead: scatter, replicate, parallel apply, gather, and in the backward
one thread per replica (autograd has one thread per device) and the sum of gradients on device 0. It cannot
give gradients with respect to inputs, nor gather what is no tensor: such models are skipped.

Either way replicas run in threads, and torch keeps autocast by thread: each enters the caller's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...models.nested import (
    add_row_dimension,
    describe,
    join,
    list_leaves,
    list_objects,
    list_tensors,
    map_tensors,
    replace_tensors,
    split_tensors,
)
from ..plan.case import Case
from .base import Mode, Place, Unsupported, collect_tensors, list_devices, pin_thread


class DataParallelMode(Mode):
    """DP over the first `case.num_devices` devices of rank 0's machine."""

    wrapped: CudaDataParallel | DataParallelStandIn

    def __init__(self, case: Case, module: nn.Module, place: Place) -> None:
        super().__init__(module)
        if place.device.type == "cuda":
            self.wrapped = CudaDataParallel(module, device_ids=list_devices(case, place))
        else:
            cores = [place.cores[i % len(place.cores)] for i in range(case.num_devices)]
            self.wrapped = DataParallelStandIn(module, cores)

    @contextlib.contextmanager
    def seed_parts(self, begin: Callable[..., None]) -> Iterator[None]:
        self.wrapped.begin = begin
        try:
            yield
        finally:
            self.wrapped.begin = None

    def close(self) -> None:
        if isinstance(self.wrapped, DataParallelStandIn):
            self.wrapped.close()


class CudaDataParallel(nn.DataParallel[nn.Module]):
    """`nn.DataParallel` whose replicas compute in the caller's autocast type, as in the other modes.

    Its own threads enter autocast without a type, and so in float16, whatever the caller's is.
    """

    autocast_device = "cuda"

    begin: Callable[..., None] | None = None
    """Called before each replica and after all where it is given; replicas then run one after another."""

    def scatter(self, inputs: tuple[Any, ...], kwargs: Any, device_ids: Sequence[Any]) -> Any:
        _check_scattered(inputs, kwargs)
        return super().scatter(inputs, kwargs, device_ids)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        check_gathered(outputs)
        return super().gather(outputs, output_device)

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        if self.begin is not None:
            outputs = []
            for number, replica in enumerate(replicas):
                with torch.cuda.device(self.device_ids[number]):
                    self.begin(number)
                    outputs.append(replica(*inputs[number], **kwargs[number]))
            self.begin(len(replicas))
            return outputs
        autocast = _make_autocast(self.autocast_device)
        return super().parallel_apply([autocast()(replica) for replica in replicas], inputs, kwargs)


class DataParallelStandIn(nn.DataParallel[nn.Module]):
    """`nn.DataParallel` over CPU cores: `cores[i]` runs replica i, 0 with the master's tensors."""

    begin: Callable[..., None] | None = None
    """Called as in `CudaDataParallel`."""

    def __init__(self, module: nn.Module, cores: Sequence[int]) -> None:
        # Past DataParallel's own constructor, which would take whatever GPUs it finds.
        super(nn.DataParallel, self).__init__()
        self.module = module
        self.device_ids = list(range(len(cores)))
        self.output_device = self.dim = 0
        self.src_device_obj = torch.device("cpu")
        self._copies: list[dict[str, Tensor]] = [{} for _ in cores[1:]]
        """Parameters and buffers of the other replicas: their memory is kept, for page faults take time."""
        self._leaves: list[dict[str, Tensor]] = []
        self._threads = [ThreadPoolExecutor(1, initializer=pin_thread, initargs=(core,)) for core in cores]

    # The documented stages of DataParallel, which its own forward goes through.

    def scatter(self, inputs: tuple[Any, ...], kwargs: Any, device_ids: Sequence[Any]) -> Any:
        """Split dimension 0 over the devices, a copy each, as a transfer would make."""
        _check_scattered(inputs, kwargs)
        first, *others = split_tensors((inputs, kwargs), len(device_ids))
        return zip(first, *(map_tensors(Tensor.clone, one) for one in others), strict=True)

    def replicate(self, module: nn.Module, device_ids: Sequence[Any]) -> list[nn.Module]:
        """Make the replicas, each with a copy of the master's parameters and buffers; the first has those."""
        sources = collect_tensors(module)
        first = {
            name: _make_leaf(one) if isinstance(one, nn.Parameter) else one for name, one in sources.items()
        }
        with torch.no_grad():
            for copies in self._copies:
                for name, source in sources.items():
                    if name not in copies or copies[name].shape != source.shape:
                        copies[name] = _make_leaf(source.clone(memory_format=torch.preserve_format))
                    else:
                        # A loss may call the model twice: to autograd, what the first call used stays.
                        copies[name].data.copy_(source)
                    copies[name].requires_grad_(source.requires_grad)
        self._leaves = [first, *self._copies]
        return [copy_replica(module, leaves) for leaves in self._leaves[: len(device_ids)]]

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        grad = torch.is_grad_enabled()
        autocast = _make_autocast("cpu")

        def run(number: int, replica: nn.Module, own: Sequence[Any], named: Any) -> Any:
            if self.begin is not None:
                self.begin(number)
            with torch.set_grad_enabled(grad), autocast():
                return replica(*own, **named)

        outputs = self._run_in_threads(run, range(len(replicas)), replicas, inputs, kwargs)
        if self.begin is not None:
            self.begin(len(replicas))
        return outputs

    def gather(self, outputs: Any, output_device: Any) -> Any:  # noqa: ARG002 - it is host memory
        """Join the outputs; the backward runs through `_Gather` into the replicas' threads.

        Raises TypeError for outputs that hold anything but tensors and None, as `nn.DataParallel` does.
        """
        for leaf in list_leaves(outputs[0]):
            if not isinstance(leaf, Tensor | None):
                raise TypeError(
                    f"DataParallel gathers tensors, and the module's outputs hold {describe(leaf)}"
                )
        check_gathered(outputs)
        if torch.is_grad_enabled():
            masters = [one for one in self.module.parameters() if one.requires_grad]
            joined = _Gather.apply(self, self._leaves, [list_tensors(output) for output in outputs], *masters)
            return replace_tensors(outputs[0], joined)
        return join(outputs)

    def run_replica_backwards(
        self, outputs: Sequence[Sequence[Tensor]], gradients: Sequence[Tensor | None]
    ) -> None:
        """Backward of every replica in its own thread, from its shares of the gradients of the outputs."""
        by_replica: list[list[tuple[Tensor, Tensor]]] = [[] for _ in outputs]
        for column, gradient in zip(zip(*outputs, strict=True), gradients, strict=True):
            if gradient is None:  # the loss does not use this output
                continue
            shares = gradient.split([len(add_row_dimension(output)) for output in column], dim=self.dim)
            for own, output, share in zip(by_replica, column, shares, strict=True):
                if output.requires_grad:
                    own.append((output, share.reshape(output.shape)))
        self._run_in_threads(_run_backward, by_replica)

    def reduce_gradients(self, leaves: Sequence[dict[str, Tensor]]) -> list[Tensor | None]:
        """Sum each trainable parameter's gradients over the replicas; they have none any more."""
        found: list[Tensor | None] = []
        for name, master in self.module.named_parameters():
            if not master.requires_grad:
                continue
            total: Tensor | None = None
            for own in leaves:
                gradient, own[name].grad = own[name].grad, None
                if gradient is not None:
                    total = gradient if total is None else total.add_(gradient)
            found.append(total)
        return found

    def _run_in_threads(self, work: Callable[..., Any], *arguments: Sequence[Any]) -> list[Any]:
        calls = list(zip(*arguments, strict=True))
        if self.begin is not None:  # threads share the generators
            pairs = zip(self._threads, calls, strict=False)
            return [thread.submit(work, *call).result() for thread, call in pairs]
        futures = [thread.submit(work, *call) for thread, call in zip(self._threads, calls, strict=False)]
        return [future.result() for future in futures]

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()


class _Gather(torch.autograd.Function):
    """Joins detached outputs, tensors by replica; its backward goes on in the replicas' own graphs."""

    @staticmethod
    def forward(
        ctx: Any,
        owner: DataParallelStandIn,
        leaves: Sequence[dict[str, Tensor]],
        outputs: Sequence[Sequence[Tensor]],
        *_masters: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.owner, ctx.leaves, ctx.outputs = owner, leaves, outputs
        ctx.set_materialize_grads(False)
        columns = list(zip(*outputs, strict=True))
        joined = tuple(torch.cat([add_row_dimension(one.detach()) for one in column]) for column in columns)
        trained = [any(one.requires_grad for one in column) for column in columns]
        ctx.mark_non_differentiable(
            *(one for one, is_trained in zip(joined, trained, strict=True) if not is_trained)
        )
        return joined

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.owner.run_replica_backwards(ctx.outputs, gradients)
        return None, None, None, *ctx.owner.reduce_gradients(ctx.leaves)


def copy_replica(module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Copy the structure of a module, as `nn.DataParallel` does, to compute with other tensors by name.

    It shares all else with the module; what a forward sets on it is lost with it.
    """
    copies: dict[nn.Module, Any] = {part: part._replicate_for_data_parallel() for part in module.modules()}
    names = {id(one): name for name, one in collect_tensors(module).items()}
    for part in module.modules():
        copied = copies[part]
        copied._former_parameters = {}
        for name, child in part._modules.items():
            copied._modules[name] = None if child is None else copies[child]
        for name, value in (*part._parameters.items(), *part._buffers.items()):
            if value is None:
                (copied._parameters if name in part._parameters else copied._buffers)[name] = None
                continue
            own = tensors[names[id(value)]]
            setattr(copied, name, own)
            if name in part._parameters:
                copied._former_parameters[name] = own
    replica: nn.Module = copies[module]
    return replica


def _check_scattered(*inputs: Any) -> None:
    """Raise Unsupported for an object with tensors, which `nn.DataParallel` hands whole to each replica."""
    if whole := list_objects(inputs):
        raise Unsupported(
            f"nn.DataParallel scatters tensors in tuples, lists and dicts, and hands {describe(whole[0])}"
            " whole to each replica"
        )


def check_gathered(outputs: Sequence[Any]) -> None:
    """Raise Unsupported for outputs that differ in more than their rows."""
    for column in zip(*map(list_tensors, outputs), strict=False):
        if len({add_row_dimension(one).shape[1:] for one in column}) > 1:
            raise Unsupported(
                "replicas return tensors of different sizes, which nn.DataParallel cannot gather; where "
                "pad_packed_sequence makes them, give it total_length="
            )


def _run_backward(outputs: Sequence[tuple[Tensor, Tensor]]) -> None:
    if outputs:
        torch.autograd.backward([output for output, _ in outputs], [gradient for _, gradient in outputs])


def _make_autocast(device_type: str) -> Callable[[], torch.autocast]:
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    return partial(torch.autocast, device_type, dtype=dtype, enabled=enabled)


def _make_leaf(tensor: Tensor) -> Tensor:
    """Return the same numbers, apart from the graph that made them."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
