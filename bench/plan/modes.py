"""Facts of each mode, in one place: whatever dispatches on modes reads them here.

Sentences about DP or DDP name these modes themselves: a flag would hide the question.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModeSpec:
    """Facts of a mode that decide which code runs."""

    label: str
    """Name in answers and tables."""
    rank_per_device: bool = False
    """True where each device has a process of its own; otherwise one process has them all."""
    splits_batch: bool = False
    """True where each rank loads a part of the batch; otherwise every rank loads the whole."""
    has_buckets: bool = False
    """True where ranks all-reduce gradients in DDP's buckets."""
    has_replicas: bool = False
    """True where one process has a replica of the module on each device."""
    is_composable: bool = False
    """True where parameters are DTensors of torch's composable API."""
    is_staged: bool = False
    """True where each device has some of the layers."""
    has_micro_batches: bool = False
    """True where parts of a batch pass the stages one after another."""
    holds_whole: bool = False
    """True where a rank holds every parameter as the plain module does."""
    is_comparator: bool = False
    """True of modes beside DP and DDP: DDP's successor, and those that a model's memory or size asks for."""


_COMPARATOR_FACTS = {"rank_per_device": True, "is_comparator": True}

SPECS: Mapping[str, ModeSpec] = {
    "single": ModeSpec(label="single", holds_whole=True),
    "dp": ModeSpec(label="DP", has_replicas=True, holds_whole=True),
    "ddp": ModeSpec(label="DDP", rank_per_device=True, splits_batch=True, has_buckets=True, holds_whole=True),
    "replicate": ModeSpec(label="replicate", splits_batch=True, is_composable=True, **_COMPARATOR_FACTS),
    "fsdp": ModeSpec(label="FSDP2", splits_batch=True, is_composable=True, **_COMPARATOR_FACTS),
    "partition": ModeSpec(label="partition", is_staged=True, **_COMPARATOR_FACTS),
    "pipeline": ModeSpec(label="pipeline", is_staged=True, has_micro_batches=True, **_COMPARATOR_FACTS),
}
"""Every mode, in the order of plans."""

MODES = tuple(SPECS)
RANK_PER_DEVICE = tuple(name for name, spec in SPECS.items() if spec.rank_per_device)
COMPOSABLE = tuple(name for name, spec in SPECS.items() if spec.is_composable)
STAGED = tuple(name for name, spec in SPECS.items() if spec.is_staged)
COMPARATORS = tuple(name for name, spec in SPECS.items() if spec.is_comparator)
