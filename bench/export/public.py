"""A run in one file to hand on: what of its manifest and tables is public, and nothing else."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping
from enum import Enum, auto
from pathlib import Path
from typing import Any

from ddp_bench.bench.axes import DDP_AXES, PIPELINE_AXES, STEP_DEFAULTS
from ddp_bench.bench.conditions import part
from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.export.figures import data_kind
from ddp_bench.bench.machine import PACKAGES
from ddp_bench.bench.plan import equal_layout, equal_layout_reason
from ddp_bench.bench.results.archive import SUFFIX, opened, packed
from ddp_bench.bench.results.disk import MOST_TABLE_BYTES, read_bytes
from ddp_bench.bench.results.recorder import NOT_REACHED
from ddp_bench.bench.results.schema import FILES, Column
from ddp_bench.bench.results.store import MANIFEST, RunData, write_output
from ddp_bench.bench.results.tables import readable
from ddp_bench.bench.text import csv_cell, csv_text


class As(Enum):
    """How a public field is handed on."""

    IT_IS = auto()
    """A number, a text or a list of them, unchanged."""
    HOST = auto()
    """The name of a host: `host0` for the first, `host1`, …"""
    DATA = auto()
    """Where batches come from: `folder` for the path of one."""
    WORKLOAD = auto()
    """That there is one, not where it lies."""


def _fields(*names: str) -> dict[str, Any]:
    """Fields that are handed on as they are."""
    return dict.fromkeys(names, As.IT_IS)


_SETTINGS = (
    *("modes", "gpus", "arch", "batch_size", "image_size", "data_workers", "prefetch", "scaling"),
    *("precision", "device", "backend", "numa_bind", "rounds", "precision_target", "margin", "max_time"),
    *("sustain", "case_timeout", "steps", "trace", "telemetry", "allreduce_curve", "calibrate", "passes"),
    *("sweep", "seed", "preset", "caps_given", "least_block_s", *STEP_DEFAULTS, *DDP_AXES, *PIPELINE_AXES),
)
_VARIABLES = (
    *("OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_WAIT_POLICY", "OMP_DYNAMIC", "MKL_NUM_THREADS", "MKL_DYNAMIC"),
    *("OPENBLAS_NUM_THREADS", "KMP_AFFINITY", "KMP_BLOCKTIME", "GLIBC_TUNABLES", "MALLOC_ARENA_MAX"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING"),
    *("CUDA_MODULE_LOADING", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "PYTORCH_ALLOC_CONF"),
    *("PYTORCH_CUDA_ALLOC_CONF", "TORCH_CPP_LOG_LEVEL", "TORCH_DIST_USE_NCCL2"),
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_AVOID_RECORD_STREAMS", "TORCH_NCCL_HIGH_PRIORITY"),
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_NTHREADS", "NCCL_BUFFSIZE", "NCCL_DEBUG", "NCCL_MIN_NCHANNELS"),
    *("NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"),
    *("NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_NET_GDR_LEVEL", "NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE"),
)
_HOST = {
    **_fields("cpu_model", "num_cores", "memory_gib", "governors", "huge_pages"),
    "gpus": [_fields("uuid", "name", "driver", "memory_mib", "power_limit_w", "max_sm_clock_mhz")],
    "gpu_pairs": [_fields("first", "second", "nvlink", "peer_access", "path")],
    "cgroup": _fields("cpu_quota_cores", "memory_limit_gib", "cpuset"),
}
_RANK = _fields("local_rank", "device", "device_name", "link", "gpu", "bound_cores")
_TIMING = _fields(
    *("startup_s", "measuring_s", "timed_steps_s", "rounds", "stopped_because", "total_s", "timed_share_pct")
)
_GIT = _fields("commit", "dirty")
_RATES = [f"matrix_tflop_per_s{end}" for end in ("", "_low", "_high")]

PUBLIC: dict[str, Any] = {
    **_fields("schema_version", "run_id", "interleaved_id", "preset", "created_utc", "seed", "plan_hash"),
    **_fields("link", "restarts"),
    "settings": {**_fields(*_SETTINGS), "data": As.DATA, "workload": As.WORKLOAD},
    "versions": _fields("python", *PACKAGES, "cuda", "cudnn", "nccl", "nccl_backend"),
    "ddp_bench": _fields("version"),
    "git": _GIT,
    "workload": _fields("commit", "dirty", "sha256", "code_sha256"),
    "environment": {**_HOST, "host": As.HOST, "os": As.IT_IS, "env": _fields(*_VARIABLES)},
    "hosts": {As.HOST: _HOST},
    "model": _fields("arch", "num_params", "gradient_bytes", "forward_flops_per_image"),
    "ranks": [{"rank": As.IT_IS, "host": As.HOST, **_RANK}],
    "timing": _TIMING,
    "load": [_fields("cores", "others", "steal", "seconds")],
    "roofline": [_fields("num_devices", "rank", *_RATES)],
    "resumed": [{**_fields("utc"), "git": _GIT}],
}
"""The public fields of a manifest, the only ones that are handed on; a list holds the fields of its items."""

TEXTS = (
    *("case_id", "status", "mode", "impl", "device_type", "device_name", "backend", "link", "arch", "unit"),
    *("scaling", "precision", *STEP_DEFAULTS, *DDP_AXES, *PIPELINE_AXES, "bucket_bytes", "layers_by_device"),
    *("mem_by_device_mib", "throttle_reasons", "run_id", "started_at", "torch_version"),
    *("phase", "steps_ms", "detail", "reference_id", "metric", "answer"),
)
"""The public columns of text; numbers are public, `host`, `data` and `reason` in part, and no other text."""

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
    content = packed(_members(run))
    write_output(target, lambda path: path.write_bytes(content), option="--out")
    return target


def _beside(run: RunData) -> Path:
    """Not by the folder's name, which has that of the host."""
    run_id = str(run.manifest.get("run_id"))
    if not re.fullmatch(r"[0-9a-f]{12}", run_id):
        raise UsageError(f"{run.path} has no run_id to name the archive by; name it with --out FILE{SUFFIX}")
    target = run.path.absolute().parent / f"{run_id}{SUFFIX}"
    if target.exists():
        raise UsageError(f"{target} is there already; remove it, or name another file with --out")
    return target


def _members(run: RunData) -> dict[str, bytes]:
    hosts = _aliases(run)
    manifest = json.dumps(_public(run.manifest, PUBLIC, hosts), indent=2) + "\n"
    members = {MANIFEST: manifest.encode("utf-8")}
    with opened(run.path) as folder:
        for name, columns in FILES.items():
            path = folder / name
            if path.is_file():
                with readable(path):
                    members[name] = _table(read_bytes(path, most_bytes=MOST_TABLE_BYTES), columns, hosts)
    return members


def _aliases(run: RunData) -> dict[str, str]:
    """What stands for each host that a run names, the first rank's first."""
    ranks = run.manifest.get("ranks")
    found = [
        part(run.manifest, "environment").get("host"),
        *(rank.get("host") for rank in (ranks if isinstance(ranks, list) else ()) if isinstance(rank, dict)),
        *part(run.manifest, "hosts"),
        *run.blocks["host"].dropna().unique(),
    ]
    names = dict.fromkeys(name for name in found if isinstance(name, str) and name)
    return {name: f"host{place}" for place, name in enumerate(names)}


def _public(value: Any, allowed: Any, hosts: Mapping[str, str]) -> Any:
    """What is public of a value in the place of a manifest that `allowed` describes."""
    if isinstance(allowed, list):
        items = value if isinstance(value, list) else []
        return [_public(item, allowed[0], hosts) for item in items if isinstance(item, dict)]
    if not isinstance(allowed, dict):
        return _public_field(value, allowed, hosts)
    known = value if isinstance(value, dict) else {}
    if As.HOST in allowed:
        inner = allowed[As.HOST]
        return {hosts[name]: _public(facts, inner, hosts) for name, facts in known.items() if name in hosts}
    return {name: _public(known[name], inner, hosts) for name, inner in allowed.items() if name in known}


def _public_field(value: Any, allowed: As, hosts: Mapping[str, str]) -> Any:
    """None where it is nothing of what was allowed."""
    if allowed is As.IT_IS:
        items = value if isinstance(value, list) else [value]
        return value if all(item is None or isinstance(item, str | int | float) for item in items) else None
    if not isinstance(value, str):
        return None
    return {As.HOST: hosts.get(value), As.DATA: data_kind(value), As.WORKLOAD: "WORKLOAD"}[allowed]


def _table(content: bytes, columns: tuple[Column, ...], hosts: Mapping[str, str]) -> bytes:
    """A table's file with its public columns."""
    in_part = {"host": lambda text: hosts.get(text, ""), "data": data_kind, "reason": _reason}
    whole = content[: content.rfind(b"\n") + 1].decode("utf-8")  # a run may still write its last line
    reader = csv.DictReader(io.StringIO(whole, newline=""), strict=True)
    names = [
        column.name
        for column in columns
        if column.name in (reader.fieldnames or ())
        and (column.kind != "text" or column.name in TEXTS or column.name in in_part)
    ]
    made = io.StringIO(newline="")
    writer = csv.writer(made, lineterminator="\n")
    writer.writerow(names)
    for row in reader:
        writer.writerow(
            csv_cell(in_part[name](csv_text(row[name]))) if name in in_part else row[name] for name in names
        )
    return made.getvalue().encode("utf-8")


def _reason(text: str) -> str:
    """A reason of a case as far as it is public: which case has its layout, or that its turn never came."""
    if (measured := equal_layout(text)) is not None:
        return equal_layout_reason(measured)
    return text if text in ("", NOT_REACHED) else LEFT_OUT
