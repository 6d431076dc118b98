"""manifest.json: what a run was measured under and how it ended, as typed records.

A field may be missing: then nobody knows it. Keys that no field names are ignored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from ..common.errors import UsageError
from ..common.text import to_json
from ..plan.settings import MARGINS, Settings
from .records import Amount, Count, Limit, Record
from .watched import Watched

MANIFEST = "manifest.json"

SCHEMA_VERSION: Final = 3
"""Version of a results folder as a whole; a folder of another one is refused."""


class Gpu(Record, frozen=True):
    """A GPU, as NVML tells it; the memory of one that MIG splits is not what its slices have."""

    name: str | None = None
    uuid: str | None = None
    driver: str | None = None
    memory_mib: Amount | None = None
    power_limit_w: Amount | None = None


class GpuPair(Record, frozen=True):
    """The path between two GPUs of a host, by their places in its `gpus`."""

    first: Count
    second: Count
    nvlink: bool | None = None
    peer_access: bool | None = None


class Cgroup(Record, frozen=True):
    """Cores and memory that a container may use."""

    cpu_quota_cores: Limit | None = None
    memory_limit_gib: Limit | None = None
    cpuset: str | None = None
    """Such as 0-3,8."""


class Host(Record, frozen=True):
    """A machine that ranks ran on."""

    cpu_model: str | None = None
    num_cores: Count | None = None
    memory_gib: Amount | None = None
    gpus: tuple[Gpu, ...] | None = None
    gpu_pairs: tuple[GpuPair, ...] = ()
    governors: tuple[str, ...] | None = None
    huge_pages: str | None = None
    """Transparent huge pages: always, madvise or never."""
    cgroup: Cgroup = Cgroup()


class FirstHost(Host, frozen=True):
    """The first rank's machine."""

    host: str | None = None
    os: str | None = None
    env: dict[str, str] = {}
    """Variables that change how fast a step is; credentials are hidden."""


class Git(Record, frozen=True):
    """A checkout."""

    commit: str | None = None
    dirty: bool | None = None
    """True where tracked files had uncommitted changes."""


class WorkloadCode(Git, frozen=True):
    """The user's code."""

    spec: str | None = None
    file: str | None = None
    """Below the top of its repository, or where it is imported from."""
    code_sha256: str | None = None
    """SHA-256 over all files that were imported from there."""
    files: dict[str, str | None] = {}
    """The SHA-256 of each by absolute path, and of what other checkouts of the repository gave."""
    repository: str | None = None


class OwnVersion(Record, frozen=True):
    """ddp-bench."""

    version: str | None = None


class Model(Record, frozen=True):
    """The model that was trained."""

    arch: str | None = None
    """Architecture, or the user's workload."""
    num_params: Count | None = None
    gradient_bytes: Count | None = None
    dtype: str | None = None
    """Type of its parameters: fp32, fp64, bf16 or fp16."""
    forward_flops_per_image: Amount | None = None
    """Arithmetic of a forward, FLOP."""
    in_evaluation: bool | None = None
    """Made in evaluation mode, and measured so."""


class RankPlace(Record, frozen=True):
    """Host and device of a rank."""

    rank: Count
    host: str = ""
    local_rank: Count = 0
    device: str = ""
    """cuda:0, or the core."""
    device_name: str = ""
    link: str | None = None
    gpu: str | None = None
    bound_cores: str = ""
    """The cores that it was kept on, such as 0-15,64."""


class Timing(Record, frozen=True):
    """Durations of a run."""

    startup_s: Amount | None = None
    """All but the rounds: imports, proofs of the cases, compilers, warm-up."""
    measuring_s: Amount | None = None
    """Seconds of rounds, which the time limit counts."""
    rounds: Count | None = None
    stopped_because: str | None = None
    total_s: Amount | None = None
    """From the command to its page."""
    timed_share_pct: Amount | None = None
    """Share of the time after start-up in timed steps."""


class Load(Record, frozen=True):
    """Mean use of the cores on which the ranks of one machine may run, by what is no rank."""

    cores: Count
    others: Amount = 0.0
    """Cores' worth of time in other programs."""
    steal: Amount = 0.0
    """The same that the hypervisor gave to other guests."""
    seconds: Amount = 0.0
    """Seconds of all rounds, those of earlier attempts included."""


class NcclMessage(Record, frozen=True):
    """NCCL's way to send an all-reduce of so many bytes, in its own words."""

    bytes: Count
    algorithm: str
    protocol: str


class NcclChoices(Record, frozen=True):
    """NCCL's way to send the gradient buckets of a run, as a short job of its own has shown."""

    transports: tuple[str, ...] = ()
    """Such as P2P/CUMEM or NET/IB/GDRDMA."""
    messages: tuple[NcclMessage, ...] = ()
    """One for each size, in their order."""


class Resumed(Record, frozen=True):
    """A `--resume`."""

    utc: str | None = None
    command: str | None = None
    git: Git = Git()


class Manifest(Record, frozen=True):
    """A run: what was asked for, what it was measured under, how it ended."""

    schema_version: Literal[3] = SCHEMA_VERSION
    name: str | None = None
    run_id: str | None = None
    """Names the run, whatever becomes of its folder."""
    interleaved_id: str | None = None
    """Alike in the runs that a gate measured in turns."""
    created_utc: str | None = None
    command: str | None = None
    settings: Settings = Settings()
    plan_hash: str | None = None
    """Equal for runs of the same cases."""
    versions: dict[str, str] = {}
    """Versions of Python, packages, CUDA, cuDNN and NCCL."""
    ddp_bench: OwnVersion = OwnVersion()
    git: Git = Git()
    workload: WorkloadCode | None = None
    environment: FirstHost = FirstHost()
    hosts: dict[str, Host] = {}
    model: Model = Model()
    ranks: tuple[RankPlace, ...] = ()
    link: str | None = None
    """Rate of the link between the hosts of a lab, such as 1gbit."""
    timing: Timing = Timing()
    nccl: NcclChoices | None = None
    watched: Watched | None = None
    load: tuple[Load, ...] = ()
    load_before: Amount | None = None
    """Load average of the minute before the command, a share of the first machine's cores."""
    restarts: Count = 0
    resumed: tuple[Resumed, ...] = ()

    @property
    def margin(self) -> float:
        """Margin within which the run treats changes as equal, a fraction; by default its device kind's."""
        return self.settings.margin or MARGINS["cuda" if self.settings.device == "cuda" else "cpu"]

    def to_json(self) -> bytes:
        apart = {"schema_version": SCHEMA_VERSION, "settings": self.settings.stored()}
        return f"{to_json(msgspec.to_builtins(self) | apart, indent=1)}\n".encode()


def parse_manifest(found: Any, where: Path | str) -> Manifest:
    """Parse the manifest that a JSON value is. Raises UsageError."""
    if not isinstance(found, dict):
        raise UsageError(f"{where} does not hold a JSON object; restore it")
    version = found.get("schema_version")
    if version != SCHEMA_VERSION:
        raise UsageError(
            f"{where} is of schema {version!r}, this version reads {SCHEMA_VERSION}; use the ddp-bench that "
            "wrote it"
        )
    settings = found.pop("settings", {})
    try:
        manifest = msgspec.convert(found, Manifest)
    except (msgspec.ValidationError, ValueError, RecursionError) as error:  # a lone surrogate is no text
        raise UsageError(f"{where} is damaged: {error}; restore it, or leave the run out") from None
    if not isinstance(settings, dict):
        raise UsageError(f"{where} is damaged: its settings are no object; restore it")
    try:
        return msgspec.structs.replace(manifest, settings=Settings.from_stored(settings))
    except ValueError as error:  # a UsageError is one
        raise UsageError(f"{where}: settings: {error}") from None
