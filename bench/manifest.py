"""manifest.json: what a run was measured under and how it ended, as typed records.

A field may be missing: then nobody knows it. Keys that no field names are ignored.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta

from . import cli
from .errors import UsageError
from .settings import MARGINS, Settings, is_public

MANIFEST = "manifest.json"

SCHEMA_VERSION: Final = 3
"""Of a results folder as a whole; a folder of another one is refused."""

Count: TypeAlias = Annotated[int, Meta(ge=0, le=10**15)]
Amount: TypeAlias = Annotated[float, Meta(ge=0, le=1e15)]
Limit: TypeAlias = Amount | Literal["unlimited"]


def said(text: str | None = None, unit: str | None = None, **more: Any) -> Meta:
    """What a field means, for the printed JSON Schema; with `unit` where it has one."""
    return Meta(description=text, extra_json_schema={"x-unit": unit} if unit else None, **more)


def public(text: str | None = None, unit: str | None = None) -> Meta:
    """The same of a field that may be handed on: it names neither a person nor a machine."""
    return said(text, unit, extra={"public": True})


@functools.cache
def public_fields(kind: type) -> tuple[str, ...]:
    """The fields of a record, or of the settings, that may be handed on; the marks stand at the fields."""
    if dataclasses.is_dataclass(kind):
        return tuple(one.name for one in dataclasses.fields(kind) if is_public(one))
    hints = get_type_hints(kind, include_extras=True)
    return tuple(
        name
        for name, hint in hints.items()
        if any(isinstance(one, Meta) and (one.extra or {}).get("public") for one in get_args(hint)[1:])
    )


class Record(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """An object of a JSON file of ours."""


class Gpu(Record, frozen=True):
    """A GPU, as NVML tells it; the memory of one that MIG splits is not what its slices have."""

    name: Annotated[str | None, public()] = None
    uuid: Annotated[str | None, public()] = None
    driver: Annotated[str | None, public()] = None
    memory_mib: Annotated[Amount | None, public("memory", unit="MiB")] = None
    power_limit_w: Annotated[Amount | None, public("power limit", unit="W")] = None
    max_sm_clock_mhz: Annotated[Amount | None, public("highest SM clock", unit="MHz")] = None


class GpuPair(Record, frozen=True):
    """How two GPUs of a host reach each other, by their places in its `gpus`."""

    first: Annotated[Count, public()]
    second: Annotated[Count, public()]
    nvlink: Annotated[bool | None, public()] = None
    peer_access: Annotated[bool | None, public()] = None
    path: Annotated[str | None, public("in the words of `nvidia-smi topo -m`")] = None


class Cgroup(Record, frozen=True):
    """What a container may use."""

    cpu_quota_cores: Annotated[Limit | None, public("CPU time", unit="cores")] = None
    memory_limit_gib: Annotated[Limit | None, public("memory", unit="GiB")] = None
    cpuset: Annotated[str | None, public("cores, such as 0-3,8")] = None


class Host(Record, frozen=True):
    """A machine that ranks ran on."""

    cpu_model: Annotated[str | None, public("name of the processor")] = None
    num_cores: Annotated[Count | None, public("logical cores")] = None
    memory_gib: Annotated[Amount | None, public("memory", unit="GiB")] = None
    gpus: Annotated[tuple[Gpu, ...] | None, public("the GPUs that its ranks see, as NVML tells them")] = None
    gpu_pairs: Annotated[tuple[GpuPair, ...], public()] = ()
    topology: Annotated[str | None, said("what `nvidia-smi topo -m` printed")] = None
    governors: Annotated[tuple[str, ...] | None, public("frequency governors of the cores")] = None
    huge_pages: Annotated[str | None, public("transparent huge pages: always, madvise or never")] = None
    cgroup: Annotated[Cgroup, public()] = Cgroup()


class FirstHost(Host, frozen=True):
    """The first rank's machine."""

    host: Annotated[str | None, public("its name")] = None
    os: Annotated[str | None, public("operating system")] = None
    env: Annotated[
        dict[str, str], public("variables that change how fast a step is; credentials are hidden")
    ] = {}


class Git(Record, frozen=True):
    """A checkout."""

    commit: Annotated[str | None, public()] = None
    dirty: Annotated[bool | None, public("whether tracked files had uncommitted changes")] = None


class WorkloadCode(Git, frozen=True):
    """The user's code."""

    spec: Annotated[str | None, said("--workload")] = None
    file: Annotated[str | None, said("below the top of its repository, or where it is imported from")] = None
    sha256: Annotated[str | None, public("of that file")] = None
    code_sha256: Annotated[str | None, public("of all files that were imported from there")] = None
    repository: Annotated[str | None, said("its name")] = None
    origin: Annotated[str | None, said("where it was cloned from")] = None


class OwnVersion(Record, frozen=True):
    """ddp-bench."""

    version: Annotated[str | None, public("of ddp-bench")] = None


class Model(Record, frozen=True):
    """What was trained."""

    arch: Annotated[str | None, public("architecture, or the user's workload")] = None
    num_params: Annotated[Count | None, public()] = None
    gradient_bytes: Annotated[Count | None, public("gradients of a step", unit="bytes")] = None
    forward_flops_per_image: Annotated[Amount | None, public("arithmetic of a forward", unit="FLOP")] = None


class RankPlace(Record, frozen=True):
    """Where a rank ran."""

    rank: Annotated[Count, public()]
    host: Annotated[str, public()] = ""
    local_rank: Annotated[Count, public()] = 0
    device: Annotated[str, public("cuda:0, or the core")] = ""
    device_name: Annotated[str, public()] = ""
    link: Annotated[str | None, public()] = None
    pid: Count = 0
    gpu: Annotated[str | None, public("UUID of its GPU")] = None
    bound_cores: Annotated[str, public("the cores that it was kept on, such as 0-15,64")] = ""


class Timing(Record, frozen=True):
    """How long a run took."""

    startup_s: Annotated[Amount | None, public("from the command to the first case", unit="s")] = None
    measuring_s: Annotated[Amount | None, public("from there to the end", unit="s")] = None
    timed_steps_s: Annotated[Amount | None, public("in timed steps", unit="s")] = None
    rounds: Annotated[Count | None, public()] = None
    stopped_because: Annotated[str | None, public()] = None
    total_s: Annotated[Amount | None, public("from the command to its page", unit="s")] = None
    timed_share_pct: Annotated[
        Amount | None, public("share of the time after start-up in timed steps", unit="%")
    ] = None


class Load(Record, frozen=True):
    """Mean use of the cores on which the ranks of one machine may run, by what is no rank."""

    cores: Annotated[Count, public()]
    others: Annotated[Amount, public("cores' worth of time in other programs")] = 0.0
    steal: Annotated[Amount, public("the same that the hypervisor gave to other guests")] = 0.0
    seconds: Annotated[Amount, public("of all rounds, those of earlier attempts included")] = 0.0


class DeviceRates(Record, frozen=True):
    """What a device reaches by itself, beside others."""

    num_devices: Annotated[Count, public()]
    rank: Annotated[Count, public()]
    matrix_tflop_per_s: Annotated[Amount | None, public("matrix products, median", unit="TFLOP/s")] = None
    matrix_tflop_per_s_low: Annotated[Amount | None, public("the slowest", unit="TFLOP/s")] = None
    matrix_tflop_per_s_high: Annotated[Amount | None, public("the fastest", unit="TFLOP/s")] = None


class Resumed(Record, frozen=True):
    """A `--resume`."""

    utc: Annotated[str | None, public()] = None
    command: str | None = None
    git: Annotated[Git, public()] = Git()
    workload: WorkloadCode | None = None
    host: str | None = None


class Manifest(Record, frozen=True):
    """A run: what was asked for, what it was measured under, how it ended."""

    schema_version: Literal[3] = SCHEMA_VERSION
    name: Annotated[str | None, said("--name")] = None
    run_id: Annotated[str | None, public("names the run, whatever becomes of its folder")] = None
    interleaved_id: Annotated[str | None, public("alike in the runs that a gate measured in turns")] = None
    preset: Annotated[str | None, public()] = None
    created_utc: Annotated[str | None, public("when the run began")] = None
    argv: Annotated[tuple[str, ...], said("the command's arguments")] = ()
    command: Annotated[str | None, said("the command, to be pasted")] = None
    settings: Annotated[Settings, public("every setting, defaults included")] = Settings()
    seed: Annotated[int | None, public("of weights, batches and the order of cases")] = None
    plan_hash: Annotated[str | None, public("equal for runs of the same cases")] = None
    versions: Annotated[dict[str, str], public("of Python, packages, CUDA, cuDNN and NCCL")] = {}
    ddp_bench: Annotated[OwnVersion, public()] = OwnVersion()
    git: Annotated[Git, public("ddp-bench's own checkout")] = Git()
    workload: Annotated[WorkloadCode | None, public()] = None
    environment: Annotated[FirstHost, public()] = FirstHost()
    hosts: Annotated[dict[str, Host], public("every host, by name")] = {}
    model: Annotated[Model, public()] = Model()
    ranks: Annotated[tuple[RankPlace, ...], public()] = ()
    link: Annotated[str | None, public("rate of the link between the hosts of a lab, such as 1gbit")] = None
    timing: Annotated[Timing, public()] = Timing()
    roofline: Annotated[tuple[DeviceRates, ...], public()] = ()
    load: Annotated[tuple[Load, ...], public("use of the ranks' cores by others, per machine")] = ()
    restarts: Annotated[Count, public("how often the ranks were started again")] = 0
    resumed: Annotated[tuple[Resumed, ...], public()] = ()

    @property
    def margin(self) -> float:
        """What the run calls equal, a fraction; that of its kind of device where it does not say."""
        return self.settings.margin or MARGINS["cuda" if self.settings.device == "cuda" else "cpu"]

    def as_json(self) -> bytes:
        apart = {"schema_version": SCHEMA_VERSION, "settings": self.settings.stored()}
        return f"{cli.to_json(msgspec.to_builtins(self) | apart, indent=1)}\n".encode()


T = TypeVar("T")


def of_json(value: Any, kind: type[T], where: Path | str) -> T:
    """`value`, of a JSON file, as a record; raises UsageError, which names `where`, for what it cannot be."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise UsageError(f"{where} is damaged: {error}; restore it, or leave the run out") from None


def manifest_of(found: Any, where: Path | str) -> Manifest:
    """The manifest that a JSON value is. Raises UsageError."""
    if not isinstance(found, dict):
        raise UsageError(f"{where} does not hold a JSON object; restore it")
    version = found.get("schema_version")
    if version != SCHEMA_VERSION:
        raise UsageError(
            f"{where} is of schema {version!r}, this version reads {SCHEMA_VERSION}; use the ddp-bench that "
            "wrote it"
        )
    settings = found.pop("settings", {})
    manifest = of_json(found, Manifest, where)
    if not isinstance(settings, dict):
        raise UsageError(f"{where} is damaged: its settings are no object; restore it")
    try:
        return msgspec.structs.replace(manifest, settings=Settings.of_stored(settings))
    except ValueError as error:  # a UsageError is one
        raise UsageError(f"{where}: settings: {error}") from None
