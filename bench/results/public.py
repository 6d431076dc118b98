"""A run in one file to hand on: what of its manifest and tables is public, and nothing else."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from ..errors import UsageError
from ..machine import PACKAGES
from ..manifest import MANIFEST, Manifest, Record
from ..settings import Settings
from ..text import csv_cell, csv_text
from .archive import SUFFIX, opened, packed
from .case_columns import PUBLIC_REASONS
from .column_types import Column
from .disk import MOST_TABLE_BYTES, read_bytes
from .schema import FILES
from .store import RunData, write_output
from .tables import csv_bytes, readable

_HOST = "cpu_model num_cores memory_gib gpus gpu_pairs governors huge_pages cgroup"

KEEPS = {
    "Manifest": "run_id interleaved_id created_utc settings plan_hash versions ddp_bench git "
    "workload environment hosts model ranks link timing nccl load load_before restarts resumed",
    "OwnVersion": "version",
    "Git": "commit dirty",
    "WorkloadCode": "commit dirty code_sha256",
    "Host": _HOST,
    "FirstHost": f"{_HOST} host os env",
    "Gpu": "name uuid driver memory_mib power_limit_w",
    "GpuPair": "first second nvlink peer_access",
    "Cgroup": "cpu_quota_cores memory_limit_gib cpuset",
    "Model": "arch num_params gradient_bytes forward_flops_per_image",
    "RankPlace": "rank host local_rank device device_name link gpu bound_cores",
    "Timing": "startup_s measuring_s rounds stopped_because total_s timed_share_pct",
    "NcclChoices": "transports messages",
    "NcclMessage": "bytes algorithm protocol",
    "Load": "cores others steal seconds",
    "Resumed": "utc git",
}
"""What an archive keeps of a manifest, by record; of its settings those that are no free text, see below.

What is not named here stays private: a new field too, until somebody decides that it names neither a person
nor a machine. Names of hosts are kept as `host0`, `host1`, ….
"""

_SETTINGS = {"axes", "arch", "preset", "caps_given", "least_block_s"}
"""Settings that are kept though no parser of theirs says what they can hold."""

_TEXTS = (
    "case_id status reason_code mode impl device_type device_name backend link arch unit scaling precision "
    "compile bucket_cap_mb comm_hook mp_policy optimize_ddp pipeline_schedule bucket_bytes layers_by_device "
    "mem_by_device_mib throttle_reasons run_id started_at torch_version phase steps_ms detail reference_id "
    "metric answer not_proved proved_by"
)
"""Columns of text that are kept; numbers always are, `host`, `data` and `reason` in part."""

_VERSIONS = ("python", *PACKAGES, "cuda", "cudnn", "nccl", "nccl_backend")
_VARIABLES = (
    *("OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_WAIT_POLICY", "OMP_DYNAMIC", "MKL_NUM_THREADS", "MKL_DYNAMIC"),
    *("OPENBLAS_NUM_THREADS", "KMP_AFFINITY", "KMP_BLOCKTIME", "GLIBC_TUNABLES", "MALLOC_ARENA_MAX"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING"),
    *("CUDA_MODULE_LOADING", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "PYTORCH_ALLOC_CONF"),
    *("PYTORCH_CUDA_ALLOC_CONF", "TORCH_CPP_LOG_LEVEL", "TORCH_DIST_USE_NCCL2"),
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_AVOID_RECORD_STREAMS", "TORCH_NCCL_HIGH_PRIORITY"),
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_NTHREADS", "NCCL_BUFFSIZE", "NCCL_DEBUG", "NCCL_MIN_NCHANNELS"),
    *("NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"),
    *(
        "NCCL_MULTI_RANK_GPU_ENABLE",
        "NCCL_SHM_DISABLE",
        "NCCL_IB_DISABLE",
        "NCCL_NET_GDR_LEVEL",
        "NCCL_NVLS_ENABLE",
        "NCCL_CUMEM_ENABLE",
    ),
)
LEFT_OUT = "left out of the public file"
"""Stands for a reason: it may quote a traceback of the user's code."""


def write_zip(run: RunData, out: Path | None) -> Path:
    """Write the archive of a run to `out`, or beside the run by its id; return where it is.

    Raises UsageError where it cannot be written, or would take a place that the user did not name.
    """
    target = out or _beside(run)
    if target.suffix != SUFFIX:
        raise UsageError(
            f"--out {target} does not end with {SUFFIX}, by which an archive is known; name it so"
        )
    content = packed(public_members(run))
    write_output(target, lambda path: path.write_bytes(content), option="--out")
    return target


def _beside(run: RunData) -> Path:
    """Not by the folder's name, which has that of the host."""
    run_id = run.manifest.run_id or ""
    if not re.fullmatch(r"[0-9a-f]{12}", run_id):
        raise UsageError(f"{run.path} has no run_id to name the archive by; name it with --out FILE{SUFFIX}")
    target = run.path.absolute().parent / f"{run_id}{SUFFIX}"
    if target.exists():
        raise UsageError(f"{target} is there already; remove it, or name another file with --out")
    return target


def public_members(run: RunData) -> dict[str, bytes]:
    """The files of a run's folder by name, its manifest first, with what of them is public."""
    hosts = _aliases(run)
    members = {MANIFEST: _manifest(run.manifest, hosts).as_json()}
    with opened(run.path) as folder:
        for name, columns in FILES.items():
            path = folder / name
            if path.is_file():
                with readable(path):
                    content = read_bytes(path, most_bytes=MOST_TABLE_BYTES)
                    members[name] = _table(content, columns, hosts)
    return members


def data_kind(data: str) -> str:
    """Where batches come from, without the path of a folder, which names a user or a machine."""
    return data if data in ("", "device", "host") else "folder"


def _aliases(run: RunData) -> dict[str, str]:
    """What stands for each host that a run names, the first rank's first."""
    found = [
        run.manifest.environment.host,
        *(rank.host for rank in run.manifest.ranks),
        *run.manifest.hosts,
        *run.blocks["host"].dropna().unique(),
    ]
    names = dict.fromkeys(name for name in found if name)
    return {name: f"host{place}" for place, name in enumerate(names)}


def _manifest(whole: Manifest, hosts: Mapping[str, str]) -> Manifest:
    found: Manifest = _public(whole)
    first, asked = found.environment, whole.settings
    kinds = replace(found.settings, data=data_kind(asked.data), workload=asked.workload and "WORKLOAD")
    return structs.replace(
        found,
        settings=kinds,
        versions={name: told for name, told in found.versions.items() if name in _VERSIONS},
        environment=structs.replace(
            first,
            host=hosts.get(first.host or ""),
            env={name: told for name, told in first.env.items() if name in _VARIABLES},
        ),
        hosts={hosts[name]: host for name, host in found.hosts.items() if name in hosts},
        ranks=tuple(structs.replace(rank, host=hosts.get(rank.host, "")) for rank in found.ranks),
    )


def _public(value: Any) -> Any:
    """A record with what is kept of it alone, and so within; anything else as it is."""
    if isinstance(value, Settings):
        kept = {f.name for f in fields(value) if f.metadata.get("parse", str) is not str} | _SETTINGS
        return Settings(**{name: getattr(value, name) for name in kept})
    if isinstance(value, Record):
        kind: Any = type(value)
        return kind(**{name: _public(getattr(value, name)) for name in KEEPS.get(kind.__name__, "").split()})
    if isinstance(value, tuple):
        return tuple(map(_public, value))
    if isinstance(value, dict):
        return {key: _public(item) for key, item in value.items()}
    return value


def _table(content: bytes, columns: tuple[Column, ...], hosts: Mapping[str, str]) -> bytes:
    """A table's file with its public columns."""
    in_part: dict[str, Callable[[Mapping[str, str]], str]] = {
        "host": lambda row: hosts.get(csv_text(row["host"]), ""),
        "data": lambda row: data_kind(csv_text(row["data"])),
        "reason": _public_reason,
    }
    whole = content[: content.rfind(b"\n") + 1].decode("utf-8")  # a run may still write its last line
    kept = _TEXTS.split()
    reader = csv.DictReader(io.StringIO(whole, newline=""), strict=True)
    names = [
        column.name
        for column in columns
        if column.name in (reader.fieldnames or ())
        and (column.kind != "text" or column.name in kept or column.name in in_part)
    ]
    rows = (
        [csv_cell(in_part[name](row)) if name in in_part else row[name] for name in names] for row in reader
    )
    return csv_bytes([names, *rows])


def _public_reason(row: Mapping[str, str]) -> str:
    reason = csv_text(row["reason"])
    return reason if not reason or row.get("reason_code") in PUBLIC_REASONS else LEFT_OUT
