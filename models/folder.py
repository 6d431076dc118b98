"""Images from a folder: listing, checking, and shards for every rank."""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import os
import struct
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, default_collate
from torchvision import transforms
from torchvision.datasets.folder import (
    IMG_EXTENSIONS,
    DatasetFolder,
    default_loader,
    has_file_allowed_extension,
)

from ..bench.common.errors import UsageError
from ..bench.common.process import end_with
from .data import BatchSource, Share, make_seed
from .workload import Batch, format_error

MAX_CHECKED = 1000

PREFETCH_FACTOR = 2
"""Batches that each loader process has in hand, torch's default."""

MAX_PAUSE_S = 2.0
"""Longest wait for loader processes to finish their images: one that was killed never does."""

_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_DECODE_ERRORS = (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError)


@dataclass(frozen=True)
class Unreadable:
    """Stands for an image that cannot be decoded, so that workers hand the news on instead of a traceback."""

    message: str


Sample = tuple[Tensor, int] | Unreadable


class Images(DatasetFolder):  # type: ignore[misc]  # torchvision has no types
    """Augmented, normalised images (3, image_size, image_size) and class indices.

    Found as torchvision's ImageFolder does: a class per subfolder, in alphabetical order. Subfolders without
    an image are no classes; where none has any, all images of the folder are one class. Raises UsageError for
    a missing folder, for one without images, and for a link to a folder above it.
    """

    samples: list[tuple[str, int]]
    classes: list[str]
    gate: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    """Gate that each image passes as it is loaded."""

    def __init__(self, folder: Path, image_size: int) -> None:
        if not folder.is_dir():
            raise UsageError(
                f"no folder {str(folder)!r}; data is `device`, `host` or an existing folder of images"
            )
        steps = [
            transforms.RandomResizedCrop(image_size),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(_IMAGENET_MEAN, _IMAGENET_STD),
        ]
        _refuse_cycles(folder)
        how = {"transform": transforms.Compose(steps), "extensions": IMG_EXTENSIONS, "allow_empty": True}
        super().__init__(str(folder), default_loader, **how)
        if not self.samples:
            raise UsageError(
                f"folder {str(folder)!r} has no images; put {' '.join(IMG_EXTENSIONS)} files into it"
            )
        self.samples = [(os.path.normpath(path), target) for path, target in self.samples]

    def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
        folders = [entry for entry in Path(directory).iterdir() if entry.is_dir() and _has_image(entry)]
        names = sorted(entry.name for entry in folders) or ["."]
        return names, {name: index for index, name in enumerate(names)}

    def __getitem__(self, index: int) -> Sample:
        try:
            with self.gate:
                found: Sample = super().__getitem__(index)
        except _DECODE_ERRORS as exc:
            return Unreadable(_describe_unreadable(self.samples[index][0], exc))
        return found


def check_folder(folder: Path) -> int:
    """Count the images of a folder and decode them: all, or 1000 spread evenly where there are more.

    Raises UsageError for a missing folder, for one without images, and for a corrupt image, naming the file.
    """
    samples = Images(folder, image_size=1).samples
    num_checked = min(len(samples), MAX_CHECKED)
    for index in range(num_checked):
        path, _ = samples[index * len(samples) // num_checked]
        try:
            with Image.open(path) as image:
                image.draft("RGB", (64, 64))  # a JPEG is then decoded small but still read to its end
                image.load()
        except _DECODE_ERRORS as exc:
            raise UsageError(_describe_unreadable(path, exc)) from None
    return len(samples)


class _Gate(contextlib.AbstractContextManager[None]):
    """A gate that loader processes pass for each image; none is at work while it is closed.

    Otherwise those of one case fill their queue while another case is timed, on the same cores, and the next
    block of their case finds batches that took no time.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._door = multiprocessing.Lock()
        self._at_work = multiprocessing.Semaphore(num_workers)
        self._is_closed = False

    def __enter__(self) -> None:
        while not self._door.acquire(timeout=MAX_PAUSE_S):  # a rank that was killed opens it no more
            parent = multiprocessing.parent_process()
            if parent is not None and not parent.is_alive():
                os._exit(1)
        self._at_work.acquire()
        self._door.release()

    def __exit__(self, *_: object) -> None:
        self._at_work.release()

    def close(self) -> None:
        """Let no image begin, and wait for those that have begun."""
        if self._is_closed:
            return
        self._is_closed = self._door.acquire(timeout=MAX_PAUSE_S)
        deadline_s = time.monotonic() + MAX_PAUSE_S
        at_rest = [
            self._at_work.acquire(timeout=max(deadline_s - time.monotonic(), 0.0))
            for _ in range(self._num_workers)
        ]
        for _ in range(sum(at_rest)):
            self._at_work.release()

    def open(self) -> None:
        if self._is_closed:
            self._is_closed = False
            self._door.release()


class FolderSource(BatchSource):
    """Batches of a rank's shard, epoch after epoch, each in a new order."""

    def __init__(self, images: Images, share: Share, *, channels_last: bool) -> None:
        num_workers, device = share.num_workers, share.device
        sampler: DistributedSampler[Sample] = DistributedSampler(
            images, share.world_size, share.rank, shuffle=True, seed=share.seed, drop_last=True
        )
        self._gate = _Gate(num_workers) if num_workers else None
        if self._gate is not None:
            images.gate = self._gate
        self.num_ahead = PREFETCH_FACTOR * num_workers
        loader: DataLoader[Sample] = DataLoader(
            images,
            batch_size=share.batch_size,
            sampler=sampler,
            num_workers=num_workers,
            prefetch_factor=PREFETCH_FACTOR if num_workers else None,
            # Not the workload: a process that is no fork gets it pickled, and functions of users may not be.
            collate_fn=functools.partial(_collate, channels_last=channels_last),
            pin_memory=device.type == "cuda",
            drop_last=True,
            persistent_workers=num_workers > 0,
            worker_init_fn=_make_worker_start() if num_workers else None,
            generator=torch.Generator().manual_seed(make_seed(share.seed, share.rank)),
        )
        self._device = device
        self._batches = _yield_epochs(loader, sampler)

    def get_batch(self) -> Batch:
        """Give the next batch on the device; raises UsageError for an image that cannot be decoded."""
        batch = next(self._batches)
        if isinstance(batch, Unreadable):
            raise UsageError(batch.message)
        images, targets = batch
        return images.to(self._device, non_blocking=True), targets.to(self._device, non_blocking=True)

    def pause(self) -> None:
        if self._gate is not None:
            self._gate.close()

    def resume(self) -> None:
        if self._gate is not None:
            self._gate.open()

    def close(self) -> None:
        """Stop the workers: they live as long as the loader, which only the generator holds."""
        self.resume()  # who waits at the gate sees no end
        self._batches.close()


def _make_worker_start() -> Callable[[int], None] | None:
    """Return a worker's first call; None where workers are not forks of this process.

    A fork holds this process's GPU and the memory on it. By itself it looks after its parent only every five
    seconds, and ranks that were started again meanwhile would find no memory.
    """
    parent = os.getpid()
    return (lambda _worker: end_with(parent)) if multiprocessing.get_start_method() == "fork" else None


def _yield_epochs(
    loader: DataLoader[Sample],
    sampler: DistributedSampler[Sample],
) -> Generator[Batch | Unreadable, None, None]:
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


def _collate(samples: list[Sample], *, channels_last: bool) -> Batch | Unreadable:
    unreadable = next((sample for sample in samples if isinstance(sample, Unreadable)), None)
    if unreadable is not None:
        return unreadable
    images, classes = default_collate(samples)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return images.contiguous(memory_format=layout), classes


def _refuse_cycles(folder: Path, above: frozenset[tuple[int, int]] = frozenset()) -> None:
    """Raise UsageError for a link to a folder above it: what is below would be listed again and again."""
    with contextlib.suppress(PermissionError):
        found = folder.stat()
        here = found.st_dev, found.st_ino
        if here in above:
            raise UsageError(
                f"{str(folder)!r} is a link to a folder above it; remove it, or name another folder"
            )
        with os.scandir(folder) as entries:
            below = [Path(entry.path) for entry in entries if entry.is_dir()]
        for one in below:
            _refuse_cycles(one, above | {here})


def _has_image(folder: Path) -> bool:
    return any(
        has_file_allowed_extension(name, IMG_EXTENSIONS) for _, _, names in os.walk(folder) for name in names
    )


def _describe_unreadable(path: str, exc: Exception) -> str:
    return f"cannot read image {path!r} ({format_error(exc)}); delete it or put an intact one in its place"
