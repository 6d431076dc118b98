"""What a worker finds: of its machine, of the workload, of a case. Records of data alone, without torch."""

from __future__ import annotations

from ..buckets import BucketLayout
from ..manifest import FirstHost, Gpu, Model, RankPlace, Record, WorkloadCode
from ..resolve import GpuKind
from ..results.block_times import BlockTimes, Compilation, DeviceMemory


class SeenGpus(Record, frozen=True):
    """The GPUs that a rank sees, by CUDA's index: their UUIDs, and what NVML says of them."""

    host: str
    local_rank: int
    uuids: tuple[str, ...]
    facts: tuple[Gpu, ...]

    @property
    def own(self) -> str:
        """The UUID of the one that the rank trains on, as `gpu_of` chooses it."""
        return self.uuids[self.local_rank % len(self.uuids)]


class Devices(Record, frozen=True):
    """What a rank's process can train on."""

    num_cores: int
    gpus: SeenGpus | None = None
    """None without GPUs, or where none is asked for."""
    kind: GpuKind | None = None
    """The least of them."""
    nccl: tuple[int, ...] = ()
    """NCCL's version."""
    has_lazy_nccl: bool = False
    """Whether torch has the backend `nccl-lazy`."""


class Inspected(Record, frozen=True):
    """What is trained."""

    model: Model
    image_size: int | None
    unit: str
    units_per_sample: int
    has_fused_optimizer: bool
    takes_images: bool
    """Where channels_last is in question."""
    num_images: int | None = None
    """Of the folder, where the data is one."""
    versions: dict[str, str] = {}
    workload: WorkloadCode | None = None
    parameters: tuple[tuple[str, int, str], ...] = ()
    """Name, bytes and kind of the trainable ones, where the run calibrates."""


class Begun(Record, frozen=True):
    """A rank that is ready."""

    place: RankPlace
    machine: FirstHost | None = None
    """Of its host, from the first rank there."""
    conditions: dict[str, str] = {}
    """What has to be the same of hosts that train together, by name."""
    oom_kills: int | None = None


class NotProved(Record, frozen=True):
    """Why a case is neither proved nor wrong, and what would prove it; it is timed all the same."""

    reason: str
    remedy: str


class Shown(Record, frozen=True):
    """What a proof has shown of a case."""

    error: float | None = None
    """Relative, of gradients or of what the first steps add to parameters; None where nothing is told."""
    not_proved: NotProved | None = None
    why_silent: str = ""
    """Why the first steps tell nothing, though the case is not in doubt."""
    split_effect: float | None = None
    """Of the loss, as the first proof finds it: see `SplitEffect`."""


class Warmed(Record, frozen=True):
    """A case that is ready to be measured, as one rank has it."""

    times: BlockTimes
    memory: tuple[DeviceMemory, ...] = ()
    """Of each device that it trains on; empty where it cannot be told."""
    compilation: Compilation | None = None
    """None for an eager case."""
    layout: BucketLayout | None = None
