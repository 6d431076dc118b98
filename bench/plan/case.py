"""A case: one point of the sweep, its id and what follows from its settings."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass, fields
from typing import Any

from .case_settings import (
    MODE_SETTINGS,
    SETTINGS_OF,
    DdpSettings,
    FsdpSettings,
    PipelineSettings,
    StepSettings,
)
from .modes import SPECS, ModeSpec
from .settings import IMAGES

STAND_IN = "cpu_standin"
"""`impl` of what carries out DataParallel's stages on CPU cores."""

GRAPH_MODES = ("reduce-overhead", "max-autotune")
"""Modes of torch.compile that replay CUDA graphs, by torch._inductor.list_mode_options."""

HALF_HOOKS = ("fp16", "bf16")
"""Communication hooks that send two bytes for every gradient element of four."""


def get_wire_share(comm_hook: str) -> float:
    """Tell the share of fp32 gradients' bytes that a hook sends."""
    return 0.5 if comm_hook in HALF_HOOKS else 1.0


@dataclass(frozen=True, kw_only=True)
class Case(DdpSettings, FsdpSettings, PipelineSettings, StepSettings):
    """One point of the sweep: every setting that defines what is measured."""

    mode: str
    num_devices: int
    arch: str
    image_size: int | None
    batch_per_device: int
    scaling: str
    precision: str
    data: str
    device_type: str
    backend: str = ""
    unit: str = IMAGES
    """Unit that throughput counts; a name for people, so no part of `case_id`."""
    units_per_sample: int = 1

    @property
    def spec(self) -> ModeSpec:
        return SPECS[self.mode]

    @property
    def batch(self) -> int:
        """Samples per device, or in all under strong scaling: what `--batch-size` fixes."""
        return self.batch_per_device * (self.num_devices if self.scaling == "strong" else 1)

    @property
    def global_batch(self) -> int:
        """Samples, which are rows of the batch, per optimizer step over all devices."""
        return self.batch_per_device * self.num_devices * self.accumulate

    @property
    def units_per_step(self) -> int:
        """Units that an optimizer step trains over all devices, counted in `unit`."""
        return self.global_batch * self.units_per_sample

    @property
    def num_ranks(self) -> int:
        """Processes that it takes: one for every device, or one for all."""
        return self.num_devices if self.spec.rank_per_device else 1

    @property
    def num_batches(self) -> int:
        """Parts of the batch that ranks load, one each; stages of a pipeline all load the whole."""
        return self.num_devices if self.spec.splits_batch else 1

    def get_part(self, rank: int) -> int:
        """Return the number of the part that a rank loads."""
        return rank if self.num_batches > 1 else 0

    @property
    def num_micro_batches(self) -> int:
        """Parts that pass the stages one after another: of `partition` the whole batch is one."""
        return self.micro_batches if self.spec.has_micro_batches else 1

    @property
    def communicates(self) -> bool:
        """True where ranks all-reduce gradients in buckets."""
        return self.spec.has_buckets and self.num_devices > 1

    @property
    def unmeasured(self) -> set[str]:
        """Passes that would be wrong of it, by its settings.

        PowerSGD's messages are not the buckets.
        """
        found = {"comm"} if self.comm_hook == "powersgd" else set()
        on = [setting for setting in MODE_SETTINGS if getattr(self, setting.name) != setting.default]
        return found.union(*(setting.metadata["unmeasured"] for setting in on))

    @property
    def apart_from_cap(self) -> tuple[object, ...]:
        """Equal for cases that differ in nothing but the bucket cap."""
        return tuple(item for item in self.to_row().items() if item[0] != "bucket_cap_mb")

    @property
    def impl(self) -> str:
        """`cpu_standin` where DataParallel's stages run on CPU cores, else `torch`."""
        return STAND_IN if self.spec.has_replicas and self.device_type == "cpu" else "torch"

    @functools.cached_property
    def case_id(self) -> str:
        """Readable name plus a hash of `stored`: the same settings give the same id everywhere."""
        settings = {name: value for name, value in self.to_row().items() if name != "unit"}
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:6]
        parts = [self.mode, f"n{self.num_devices}"]
        for setting in SETTINGS_OF.get(self.mode, ()):
            value, short = getattr(self, setting.name), setting.metadata["short"]
            if value != setting.default or setting.name == "bucket_cap_mb":
                parts.append(short if isinstance(value, bool) else f"{short}{value}".replace("/", "_"))
        return "-".join([*parts, digest])

    def to_row(self) -> dict[str, Any]:
        """Every setting as tables hold it."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class BatchSplit:
    """The way a case splits the batch of a step: the samples that each forward of the model sees."""

    num_sources: int
    """Ranks that fetch batches of their own."""
    batch_size: int
    """Rows that one of them fetches for a micro-batch."""
    num_chunks: int = 1
    """Equal chunks of these, each with a forward, and so with batch-norm statistics, of its own."""
    accumulate: int = 1
    joined: bool = False
    """True where one forward sees the micro-batch of all ranks, as SyncBatchNorm does."""
    gathered: bool = False
    """True where one loss sees the outputs of all chunks, as DataParallel gathers them."""

    @property
    def num_rows(self) -> int:
        """Rows of a step, over all ranks."""
        return self.batch_size * self.num_sources * self.accumulate

    @property
    def num_forwards(self) -> int:
        """Forwards of the model in a micro-batch, over all ranks."""
        return 1 if self.joined else self.num_sources * self.num_chunks

    @property
    def num_losses(self) -> int:
        """Losses of what one source fetches for a micro-batch; their mean is trained on."""
        return 1 if self.gathered else self.num_chunks


def explain_too_few(folder: str, num_images: int, batch_size: int, num_sources: int) -> str:
    """Say why the images of a folder do not fill a batch of all ranks; empty where they do."""
    if num_images >= batch_size * num_sources:
        return ""
    return (
        f"folder {folder!r} has {num_images} images, one global batch needs {batch_size * num_sources}"
        f" ({batch_size} x {num_sources} ranks); use a smaller batch size, fewer devices or more images"
    )


def split_batch(case: Case) -> BatchSplit:
    """Return how `case` splits its batch."""
    if case.num_batches > 1:
        return BatchSplit(
            case.num_devices, case.batch_per_device, accumulate=case.accumulate, joined=case.sync_batchnorm
        )
    whole = case.batch_per_device * case.num_devices
    if case.spec.has_replicas:
        return BatchSplit(1, whole, num_chunks=case.num_devices, accumulate=case.accumulate, gathered=True)
    return BatchSplit(1, whole, num_chunks=case.num_micro_batches, accumulate=case.accumulate)
