"""DDP's reducer, built anew with other bucket caps: private names of torch that a race of caps uses."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import distributed

from .private import Ddp, find_differing_names

CapConfig: Any = getattr(distributed, "_BucketCapacityConfig", None)
"""Class of DDP's bucket caps, from torch 2.14 on."""

RACE_FUNCTIONS = (
    (c10d, "_get_process_group_store", ("pg",)),
    (Ddp, "_remove_autograd_hooks", ("self",)),
    (Ddp, "_build_debug_param_to_name_mapping", ("self", "parameters")),
    (
        Ddp,
        "_ddp_init_helper",
        ("self", "parameters", "expect_sparse_gradient", "param_to_name_mapping", "static_graph"),
    ),
    (Ddp, "_get_ddp_logging_data", ("self",)),
    (getattr(dist, "Reducer", None), "_set_static_graph", ("self",)),
    (getattr(dist, "Logger", None), "_set_static_graph", ("self",)),
    *(
        [(CapConfig, "create", ("bucket_cap_mb", "bucket_cap_mb_list", "use_python_reducer"))]
        if CapConfig
        else []
    ),
)
"""Further functions that a race of bucket caps calls."""

CAPS = ("bucket_bytes_cap", "bucket_bytes_cap_list", "bucket_bytes_cap_default", "_bucket_config")
"""Attributes of a DDP instance that hold its bucket caps; the last one with CapConfig."""


def format_caps(ddp: Any) -> str:
    """Write the bucket caps of a DDP instance as `--bucket-cap-mb` takes them."""
    # With a list torch 2.14 takes the cap for its default.
    uniform = [] if getattr(ddp, "bucket_bytes_cap_default", True) else [ddp.bucket_bytes_cap]
    return "/".join(map(format_cap_mib, getattr(ddp, "bucket_bytes_cap_list", None) or uniform)) or "default"


def format_cap_mib(num_bytes: int) -> str:
    """Write a cap in MiB as the script names it: the shortest number of which DDP makes so many bytes."""
    mib = num_bytes / 2**20
    shorter = (float(f"{mib:.{digits}g}") for digits in range(1, 12))
    return f"{next((cap for cap in shorter if int(cap * 2**20) == num_bytes), mib):.12g}"


def get_caps(ddp: Any) -> dict[str, Any]:
    """Return the attributes of a DDP instance that hold its bucket caps."""
    return {name: getattr(ddp, name) for name in CAPS if hasattr(ddp, name)}


def make_cap_attributes(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what CAPS are after these arguments of DDP's constructor."""
    sizes = [int(cap * 2**20) for cap in given.get("bucket_cap_mb_list", ())]
    largest = max(sizes, default=int(given.get("bucket_cap_mb", 25) * 2**20))
    caps: dict[str, Any] = dict(zip(CAPS, (largest, sizes, not given), strict=False))
    if CapConfig:
        arguments = {name: given.get(name) for name in ("bucket_cap_mb", "bucket_cap_mb_list")}
        caps["_bucket_config"] = CapConfig.create(**arguments, use_python_reducer=False)
    return caps


def explain_no_race(ddp: Any) -> str | None:
    """Return why the reducer of this DDP instance must not be built anew, or None."""
    differing = find_differing_names(RACE_FUNCTIONS)
    read = Ddp._ddp_init_helper.__code__.co_names
    caps = CAPS[-1:] if CapConfig else CAPS[:-1]
    differing += [name for name in caps if name not in read or not hasattr(ddp, name)]
    if differing:
        return f"this torch differs in {', '.join(differing)}"
    counted = ddp._get_ddp_logging_data().get("num_parameter_tensors")
    reasons = {
        "the training is under join()": ddp._join_config.enable,
        "parameters were frozen or unfrozen after DDP was made": counted
        != sum(p.requires_grad for p in ddp._module_parameters),
        "torch.compile has split its graphs by the script's own cap": has_compiled(),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def has_compiled() -> bool:
    """Tell whether torch.compile has compiled anything in this process."""
    if "torch._dynamo" not in sys.modules:
        return False
    from torch._dynamo.utils import counters

    return bool(counters["frames"]["ok"])


def get_store(group: Any) -> Any:
    """Return the store by which the ranks of a process group have found each other."""
    return c10d._get_process_group_store(group)


def rebuild_reducer(ddp: Any, caps: Mapping[str, Any]) -> None:
    """Build DDP's reducer anew with these caps, as DDP does where it is unpickled; the old one goes first."""
    ddp._remove_autograd_hooks()
    del ddp.logger, ddp.reducer
    for name, value in caps.items():
        setattr(ddp, name, value)
    parameters, expect_sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, expect_sparse, names, ddp.static_graph)
    ddp._has_rebuilt_buckets = False
    if ddp.static_graph:
        ddp._static_graph_delay_allreduce_enqueued = False
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
