"""Sources of a rank's batches: the device itself, host memory, or a folder of images."""

from __future__ import annotations

import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from ..bench.common.errors import UsageError
from ..bench.plan.case import explain_too_few
from .nested import list_tensors, map_tensors
from .profile import count_outputs
from .workload import Batch, Workload, is_pair_of_tensors, make_batch

if TYPE_CHECKING:
    from .folder import Images

CPU = torch.device("cpu")

_POOL_SIZE = 4  # host batches in turn: enough that the copied bytes are not already in the CPU's cache


Drawn: TypeAlias = dict[tuple[int, int], list[Batch]]
"""Synthetic batches by their rows and the rank that trains on them, where it takes them from."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """The part of all batches that one rank trains on.

    Synthetic batches depend on `seed` and `rank`, not on `world_size`; of a folder, shares are disjoint.
    """

    batch_size: int
    """Rows of the rank's own batch."""
    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU
    """Device that batches are given on."""
    seed: int = 0
    num_workers: int = 0
    """Processes that read images of a folder; 0: this one."""


class BatchSource(ABC):
    """An endless supply of batches for one rank."""

    held: Sequence[Tensor] = ()
    """Tensors that stay on the device between steps."""

    num_ahead = 0
    """Batches that processes of its own may have ready when a block begins."""

    @abstractmethod
    def get_batch(self) -> Batch:
        """Give the next batch, on the device, ready to train on."""

    def pause(self) -> None:
        """Load nothing until `resume`; return once no process of its own is at work."""

    def resume(self) -> None:
        """Go on loading ahead."""

    def close(self) -> None:
        """Let go of workers and memory."""


class DeviceSource(BatchSource):
    """One batch that stays on the device: fetching it costs nothing, unless the loss changes its tensors."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self.held = list_tensors(batch)
        self._lent: list[Tensor] | None = None
        self._is_changed = False

    def get_batch(self) -> Batch:
        """Return the batch in containers of its own; first a copy, to see whether it is changed in place."""
        if self._lent:
            self._is_changed, self._lent = any(one._version for one in self._lent), []
        if self._lent is None or self._is_changed:
            lent = map_tensors(Tensor.clone, self._batch)
            self._lent = list_tensors(lent) if self._lent is None else self._lent
            return lent
        return map_tensors(Tensor.detach, self._batch)


class HostSource(BatchSource):
    """Host batches in turn, each copied to the device when asked for."""

    def __init__(self, batches: list[Batch], device: torch.device) -> None:
        self._batches = itertools.cycle(batches)
        self._device = device

    def get_batch(self) -> Batch:
        """Copy the next batch; on CUDA the copy is queued on the current stream."""
        # copy=True: on a CPU the copy within host memory stands in for the one to the device
        return map_tensors(
            lambda tensor: tensor.to(self._device, non_blocking=True, copy=True), next(self._batches)
        )


def open_source(
    workload: Workload, data: str, share: Share, *, drawn: Drawn | None = None, outputs: int | None = None
) -> BatchSource:
    """Open the batches of a share.

    `data` is `device` (one synthetic batch), `host` (synthetic batches copied every step) or a folder of
    images, shuffled anew every epoch. Synthetic ones that are in `drawn`, of the same `data` and device, are
    not drawn again, and others are put there: eight GPUs' cases would hold gigabytes of equal batches.
    `outputs` are those of the model, 0 where none are known; None has this process look, which no process
    that trains does.

    Raises UsageError for a folder that is missing, empty, smaller than one global batch, or of more classes
    than the model has outputs, and for a workload whose batches are not images of a known size and their
    classes.
    """
    if data in ("device", "host"):
        drawn = {} if drawn is None else drawn
        key = share.batch_size, share.rank
        if key not in drawn:
            generator = torch.Generator().manual_seed(make_seed(share.seed, share.rank))
            made = (
                make_batch(workload, batch_size=share.batch_size, generator=generator)
                for _ in range(1 if data == "device" else _POOL_SIZE)
            )
            drawn[key] = [_move_batch(batch, data, share.device) for batch in made]
        return DeviceSource(drawn[key][0]) if data == "device" else HostSource(drawn[key], share.device)
    outputs = (count_outputs(workload) or 0) if outputs is None else outputs
    images = find_images(workload, data, outputs)
    if too_few := explain_too_few(data, len(images), share.batch_size, share.world_size):
        raise UsageError(too_few)
    # torchvision takes seconds to import: only a folder of images needs it.
    from .folder import FolderSource

    return FolderSource(images, share, channels_last=workload.channels_last)


def find_images(workload: Workload, data: str, outputs: int) -> Images:
    """Find the images of a folder, for a workload of so many outputs (0: unknown) that can train on them.

    Raises UsageError for a workload that cannot, and for a folder without images or of too many classes.
    """
    if workload.image_size is None:
        raise UsageError(
            f"workload {workload.name} sets no image_size; set it, or use `device` or `host` data"
        )
    if not is_pair_of_tensors(make_batch(workload)):
        raise UsageError(
            f"a folder gives (images, classes), two tensors, and `batch` of workload {workload.name} another "
            "shape; use `device` or `host` data"
        )
    from .folder import Images

    images = Images(Path(data), workload.image_size)
    if outputs and len(images.classes) > outputs:
        raise UsageError(
            f"folder {data!r} has {len(images.classes)} classes, {workload.name} has {outputs} outputs; use a"
            " model with more outputs or a folder with fewer classes"
        )
    return images


def _move_batch(batch: Batch, data: str, device: torch.device) -> Batch:
    if data == "device":
        return map_tensors(lambda tensor: tensor.to(device), batch)
    return map_tensors(_pin_tensor, batch) if device.type == "cuda" else batch


def _pin_tensor(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if tensor.layout == torch.strided and not tensor.is_nested else tensor


def make_seed(*numbers: int) -> int:
    """One 64-bit seed of some. The sum of two would give rank 1 of seed 0 the data of rank 0 of seed 1."""
    return int.from_bytes(hashlib.blake2b(" ".join(map(str, numbers)).encode(), digest_size=8).digest())
