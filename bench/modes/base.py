"""The interface that every mode shares, and the plainest of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...models.workload import Batch, Loss
from ..plan.buckets import BucketLayout
from ..plan.case import Case


class Unsupported(RuntimeError):  # noqa: N818 - a reason to skip, not an error
    """The installed torch or this machine cannot run the case; the text is the reason."""


class UnusedParametersError(RuntimeError):
    """DDP waits for gradients of parameters that a step did not use; the text names them and what helps."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Rank and device of a process. `cores` are the CPU cores of its machine that it may use, in order."""

    rank: int
    device: torch.device
    cores: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The split of a model over devices: its layers in order, and how many each device has."""

    layers: Callable[[nn.Module], Sequence[nn.Module]]
    by_device: tuple[int, ...]


def list_devices(case: Case, place: Place) -> list[torch.device]:
    """List the devices that a rank trains on: its own, and for DP on GPUs one for each replica."""
    if case.spec.has_replicas and place.device.type == "cuda":
        num_gpus = torch.cuda.device_count() or case.num_devices
        return [torch.device("cuda", index % num_gpus) for index in range(case.num_devices)]
    return [place.device]


def list_gpus(case: Case, place: Place) -> list[int]:
    """CUDA indices of the GPUs that a rank trains on, each once; none on CPU cores."""
    return sorted({device.index for device in list_devices(case, place) if device.type == "cuda"})


def pin_thread(core: int) -> None:
    """Keep this thread on one core, with one intra-op thread: a device that is a CPU core."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})


def collect_tensors(module: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


class Mode:
    """A module made ready to train in one of the modes; by itself, on one device: the reference of ratios."""

    wrapped: nn.Module
    """Module that the training step calls."""

    module: nn.Module
    """The plain module inside."""

    train: Callable[[Batch, Loss], Tensor | None] | None = None
    """Does forwards and backwards where the mode mixes them; returns the loss, on the ranks that know it."""

    broadcast_buffers: Callable[[], None] | None = None
    """Does what a step sends before its gradients; None where it sends nothing more."""

    sparse: frozenset[int] = frozenset()
    """Places, among the trained parameters, of those with sparse gradients, where a step sends these."""

    def __init__(self, module: nn.Module) -> None:
        self.wrapped = self.module = module

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Within it, a backward leaves gradients local to the rank; of DDP alone.

        DP always sums. FSDP and pipelines can hold nothing back: a forward needs what other ranks send.
        """
        return contextlib.nullcontext()

    def skip_communication(self) -> contextlib.AbstractContextManager[None]:
        """Within it, a whole step does no communication at all; after it, steps are as before."""
        return self.no_sync()

    def make_optimizer(self, make: Callable[[Iterable[nn.Parameter]], Optimizer]) -> Optimizer:
        """Make the optimizer that `make` makes, as the mode steps it."""
        # A list, for an author may go through the parameters twice.
        return make(list(self.module.parameters()))

    def read_bucket_layout(self) -> BucketLayout | None:
        """Read the gradient buckets in use; None where the mode has none."""
        return None

    def enter_steps(self) -> contextlib.AbstractContextManager[None]:
        """Within it are whole blocks of steps: what they compile is compiled as the case asks.

        An error that the mode knows is raised as what it means, and what helps.
        """
        return contextlib.nullcontext()

    def stop_sampling(self) -> None:
        """Stop whatever PyTorch itself samples; called once after warm-up."""

    def gather_weights(self) -> dict[str, Tensor]:
        """Gather the plain module's parameters, by name; every rank of the case calls it.

        Where ranks hold parts, they are those that train.
        """
        return dict(self.module.named_parameters())

    def collect_buffers(self) -> dict[str, Tensor]:
        """Collect the plain module's buffers that this rank has, by name."""
        return dict(self.module.named_buffers())

    def seed_parts(self, begin: Callable[..., None]) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002
        """Within it, what draws random numbers beside other parts of the model calls `begin` first.

        Its arguments number the replica or, of a pipeline, chunk and stage. Replicas run one after another.
        """
        return contextlib.nullcontext()

    def gather_state_dict(self) -> dict[str, Tensor]:
        """Weights that load into the plain module: no wrapper's prefix; every rank of the case calls it."""
        return self.gather_full(self.module.state_dict())

    def gather_full(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gather the whole of tensors of which each rank of the case may have a part."""
        return own

    def close(self) -> None:
        """Release threads and hooks."""
