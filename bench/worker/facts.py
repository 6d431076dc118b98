"""Facts that a worker finds, of its machine, the workload, a case: records and columns, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

from ..machine.manifest import FirstHost, Gpu, Model, RankPlace, WorkloadCode
from ..machine.records import Record
from ..plan.buckets import BucketLayout
from ..plan.case import Case
from ..plan.resolve import GpuKind
from ..results.block_times import BlockTimes, Compilation, DeviceMemory, ProofResult, make_memory_columns
from ..results.columns import MIN_NUMBER

Gpus: TypeAlias = dict[str, Gpu]
"""GPUs that processes see, in CUDA's order: what NVML says of each, by the UUID that torch tells."""


class Devices(Record, frozen=True):
    """Devices that a rank's process can train on."""

    cores: tuple[int, ...]
    """CPU cores, in the order in which ranks take them."""
    physical: tuple[int, ...] = ()
    """The first hardware thread of the physical core that each of `cores` is on."""
    local_rank: int = 0
    host: str = ""
    boot_id: str = ""
    """The kernel's name for this start of the host, which no other host has; empty where it gives none."""
    gpus: Gpus = {}
    """Empty without GPUs, or where none is asked for."""
    kind: GpuKind | None = None
    """The least of them."""
    is_exclusive: bool = False
    """True where one of the GPUs takes a single process (compute mode EXCLUSIVE_PROCESS)."""
    nccl: tuple[int | str, ...] = ()
    """NCCL's version, which may end in a word; empty where torch was built without it."""
    nccl_backends: tuple[str, ...] = ()
    """Those of `NCCL_BACKENDS` that torch has."""

    @property
    def own_gpu(self) -> str:
        """UUID of the GPU that the rank trains on, as `choose_gpu` chooses it."""
        return [*self.gpus][self.local_rank % len(self.gpus)]


class Inspected(Record, frozen=True):
    """The workload that is trained."""

    model: Model
    image_size: int | None
    unit: str
    units_per_sample: int
    has_fused_optimizer: bool
    takes_images: bool
    """True where some inputs are images; told where channels_last is in question."""
    num_outputs: int = 0
    """Classes of the model, where batches are made for them or a folder has some; 0 where none are known."""
    num_images: int | None = None
    """Images of the folder, where the data is one."""
    versions: dict[str, str] = {}
    workload: WorkloadCode | None = None
    parameters: tuple[tuple[str, int, str], ...] = ()
    """Name, bytes and kind of the trainable ones, where the run calibrates."""


class Begun(Record, frozen=True):
    """A rank that is ready."""

    place: RankPlace
    machine: FirstHost | None = None
    """Description of its host, from the first rank there."""
    conditions: dict[str, str] = {}
    """Conditions, by name, that have to be the same of hosts that train together."""
    oom_kills: int | None = None


class Prepared(Record, frozen=True):
    """A case that is ready to be measured, as one rank has it."""

    times: BlockTimes
    memory: tuple[DeviceMemory, ...] = ()
    """Memory of each device that it trains on; empty where it cannot be told."""
    compilation: Compilation | None = None
    """None for an eager case."""
    layout: BucketLayout | None = None
    by_device: tuple[int, ...] | None = None
    """Layers of each device, of a case that splits the model."""
    gradients: ProofResult | None = None
    """Proof of its gradients, and of its first steps; None where it was not asked for."""
    update: ProofResult | None = None


def make_proof_facts(shown: ProofResult, update: ProofResult) -> dict[str, Any]:
    """Return what both proofs of a case found, for its row in cases.csv."""
    doubt = shown.not_proved or update.not_proved
    errors = {
        "gradient_error": shown.error,
        "split_effect": shown.split_effect,
        "update_error": update.error,
    }
    return {
        # As a file holds it: what is next to nothing is 0.
        **{
            name: 0.0 if error is not None and error < MIN_NUMBER else error for name, error in errors.items()
        },
        "not_proved": doubt and doubt.reason,
        "proved_by": doubt and doubt.remedy,
    }


def make_case_facts(case: Case, ranks: Sequence[Prepared]) -> dict[str, Any]:
    """Return what the preparation of a case on every rank tells, for its row in cases.csv."""
    facts: dict[str, Any] = make_memory_columns([one.memory for one in ranks], case.mode)
    layout, compiled = ranks[0].layout, ranks[0].compilation
    if layout is not None:
        facts["num_buckets"] = len(layout.num_bytes)
        facts["bucket_bytes"] = str(layout)
    if compiled is not None:
        facts |= asdict(compiled)
    if ranks[0].by_device:
        facts["layers_by_device"] = "/".join(map(str, ranks[0].by_device))
    return facts
