"""Facts of how the user has set a training up: plain ones, from which the reader concludes what is costly."""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from dataclasses import dataclass, field
from time import perf_counter as now
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DistributedSampler

from . import private

if TYPE_CHECKING:
    from .steps import Watch

MAKERS = {
    **{name: name for name in ("accelerate", "transformers", "lightning")},
    **dict.fromkeys(("pytorch_lightning", "lightning_fabric"), "lightning"),
}
"""Packages that wrap models or make loaders for their users."""

STANDARD_LIBRARY = os.path.dirname(os.__file__)  # noqa: PTH120

MAX_PASSES = 4
"""Passes over a loader that are looked at: whether its epoch is set shows in the second one."""


def find_caller() -> dict[str, str]:
    """Find who calls: `line` is FILE:LINE of the user's code, `made_by` a package of MAKERS; else empty."""
    frame: Any = sys._getframe(1)
    made_by = ""
    while frame is not None:
        package, file = str(frame.f_globals.get("__name__")).partition(".")[0], frame.f_code.co_filename
        made_by = MAKERS.get(package, made_by)  # the outermost one is what the user calls
        is_users = package not in ("torch", __package__, *MAKERS) and "-packages" not in file
        if is_users and not file.startswith(STANDARD_LIBRARY) and os.path.isfile(file):  # noqa: PTH113
            # A folder's name may be that of a person.
            return {"line": f"{os.path.basename(file)}:{frame.f_lineno}", "made_by": made_by}  # noqa: PTH119
        frame = frame.f_back
    return {"line": "", "made_by": made_by}


def describe_process() -> dict[str, Any]:
    """Describe what a process may use, and the debug level of torch.distributed."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = sorted(os.sched_getaffinity(0)) if has_affinity else [*range(os.cpu_count() or 1)]
    debug = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF").upper()
    return {"threads": torch.get_num_threads(), "cores": cores, "debug": debug}


@dataclass
class Loader:
    """A loader whose batches may be trained on."""

    facts: dict[str, Any]
    passes: int = 0
    """Passes whose batches were trained on."""
    epoch: int | None = None
    """Epoch of its shuffling DistributedSampler in the latest pass, trained on or not."""
    epochs: set[int] = field(default_factory=set)
    """Epochs of a shuffling DistributedSampler in its passes."""
    begins: bool = False


class Setup:
    """Facts of one process's training beside its steps."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.callers: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()
        """Lines and packages that made each DDP model, or the sampler of a loader."""
        self.loaders: weakref.WeakKeyDictionary[Any, Loader] = weakref.WeakKeyDictionary()
        """Loaders by their sampler."""
        self.num_loaders = 0
        self.latest: Loader | None = None
        """Loader of the latest batch."""
        self.search_s, self.sent, self.accumulated = 0.0, 0, 0
        self.loading_s, self.loading_since_s = 0.0, 0.0

    def take_row(self) -> dict[str, Any]:
        """Return what the row of a step says, and begin the next one."""
        sent = 0 if self.watch.num_models else private.count_collectives()
        seconds = {"search_s": round(self.search_s, 7), "loading_s": round(self.loading_s, 7)}
        counts = {"accumulated": self.accumulated, "collectives": max(sent - self.sent, 0)}
        self.search_s, self.loading_s, self.sent, self.accumulated = 0.0, 0.0, sent, 0
        return seconds | counts

    def keep_made(self, made: Any) -> Any:
        """Pass on what is about to be made."""
        return made

    def note_model(self, ddp: Any) -> None:
        """Note who has wrapped a model in DDP."""
        self.callers.setdefault(ddp, find_caller())

    def note_replicas(self, model: Any) -> None:
        """Note a DataParallel on several devices."""
        if len(getattr(model, "device_ids", ())) > 1:
            row = {"how": "DataParallel", "devices": len(model.device_ids), **find_caller()}
            self.watch.rows.write(kind="parallel", **row)

    def note_loader(self, loader: Any) -> None:
        """Note who has made a loader."""
        sampler = getattr(loader, "batch_sampler", None)
        if sampler is None:
            sampler = getattr(loader, "sampler", None)
        with contextlib.suppress(TypeError):  # a list may be a sampler, too
            self.callers[sampler] = find_caller()

    def note_batch(self, iterator: Any) -> None:
        """Note whose batch comes next."""
        sampler, begins, facts = private.describe_loading(iterator)
        with contextlib.suppress(TypeError):
            if sampler not in self.loaders:
                self.num_loaders += 1
                facts |= {"loader": self.num_loaders, **self.callers.get(sampler, {})}
                self.loaders[sampler] = Loader(facts)
            self.latest = loader = self.loaders[sampler]
            if begins and loader.passes < MAX_PASSES:
                loader.begins = True
                inner = getattr(sampler, "sampler", sampler)
                shuffles = isinstance(inner, DistributedSampler) and inner.shuffle
                loader.epoch = inner.epoch if shuffles else None

    def note_backward(self) -> None:
        """Note that the latest batch is trained on."""
        loader = self.latest
        if loader is not None and loader.begins:
            loader.begins = False
            loader.passes += 1
            if loader.epoch is not None:
                loader.epochs.add(loader.epoch)
            row = {"passes": loader.passes, "epochs": len(loader.epochs), **loader.facts}
            self.watch.rows.write(kind="loader", **row)

    def note_optimizer(self, optimizer: Any) -> None:
        """Note, once for each optimizer, that its parameters are distributed tensors."""
        tensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
        if any(isinstance(one, tensor) for group in optimizer.param_groups for one in group["params"]):
            self.watch.rows.write(kind="parallel", how="DTensor")

    def begin_search(self, ddp: Any) -> float | None:
        """Begin the search for unused parameters, where DDP is told to search."""
        is_asked = private.is_searching(ddp) and torch.is_grad_enabled() and self.watch.is_ours()
        return now() if is_asked else None

    def end_search(self, begin: float) -> None:
        """End the search."""
        self.search_s += now() - begin
