"""The columns of cases.csv, and by file those of all results files.

Those of a planned case come from the plan, those of a prepared one are its facts (`bench/run/case_facts.py`).
"""

from __future__ import annotations

from dataclasses import Field
from typing import Any

from ..common.numbers import make_singular
from ..plan.case_settings import MODE_SETTINGS, STEP_SETTINGS
from ..plan.modes import MODES
from ..plan.settings import IMAGES, MAX_DEVICES, MAX_UNITS, PARAMETER_PRECISIONS, PRECISIONS
from .columns import (
    MAX_NUMBER,
    OTHER_FILES,
    REASON_CODES,
    STATUSES,
    UNIT,
    Column,
    Metric,
    declare_count_column,
    declare_number_column,
    declare_text_column,
)
from .details import DETAILS
from .metrics import SPEED


def _declare_setting(setting: Field[Any]) -> Column:
    """Declare the value of a setting of `case_settings.py`."""
    kind = {bool: "bool", int: "int"}.get(type(setting.default), "text")
    above = 0 if kind == "int" else -MAX_NUMBER
    return Column(setting.name, kind, setting.metadata["column"], above=above)


IDENTITY: tuple[Column, ...] = (
    declare_text_column(
        "case_id",
        "readable name of the case plus a hash of every setting that defines it",
        required=True,
        shown="Id = the case in cases.csv",
    ),
    declare_text_column(
        "status", "`ok`, `skipped`, `oom`, `failed` or `timeout`", required=True, choices=STATUSES
    ),
    Column("reason", "text", "why the status is not `ok`; empty otherwise"),
    declare_text_column(
        "reason_code",
        "kind of reason: `plan` (known beforehand), `equal_layout` (as another case), `not_reached`, or "
        "`unused_parameters` (DDP waits for their gradients); empty for any other",
        choices=REASON_CODES,
    ),
    declare_text_column(
        "mode",
        "`single`, `dp` (nn.DataParallel), `ddp`, `replicate`, `fsdp` (FSDP2), `partition` or `pipeline`",
        required=True,
        choices=MODES,
    ),
    declare_text_column("impl", "`torch`, or `cpu_standin` where DP's stages ran on CPU cores"),
    declare_text_column(
        "device_type", "`cuda` or `cpu`; on `cpu` a device is one core", choices=("cuda", "cpu")
    ),
    declare_text_column("device_name", "GPU or CPU model of rank 0"),
    declare_text_column(
        "backend",
        "process-group backend: `nccl`, `nccl2` or, also of pipelines, `nccl-lazy` (torch ≥ 2.14), `gloo`; "
        "empty without one",
    ),
    declare_count_column(
        "num_devices",
        "devices the case trains on (DDP: world size)",
        required=True,
        most=MAX_DEVICES,
    ),
    declare_count_column("num_nodes", "machines those devices are on", most=MAX_DEVICES),
    declare_text_column("link", "rate of the link between the hosts of a lab; empty on a real network"),
    Column("oversubscribed", "bool", "more devices than physical ones on a machine: shared cores or GPUs"),
    declare_text_column("arch", "model architecture, or the user's workload"),
    declare_count_column("image_size", "height and width of an image, in pixels"),
    declare_count_column(
        "batch_per_device", "samples, which are rows of the batch, per device and micro-batch"
    ),
    declare_count_column("global_batch", "samples per optimizer step over all devices", required=True),
    UNIT,
    declare_count_column(
        "units_per_sample", "how many of `unit` a sample holds", required=True, most=MAX_UNITS
    ),
    declare_text_column(
        "scaling", "`weak` fixes the batch per device, `strong` the global batch", choices=("weak", "strong")
    ),
    declare_text_column(
        "precision",
        "`fp32`, `tf32`, `bf16` or `fp16` (the last two under autocast); without autocast, of parameters in "
        "another type that one: `fp64`, `pure bf16` or `pure fp16`",
        choices=(*PRECISIONS, *PARAMETER_PRECISIONS.values()),
    ),
    *(_declare_setting(setting) for setting in STEP_SETTINGS),
    Column("data", "text", "`device`, `host`, or the folder the images come from"),
    *(_declare_setting(setting) for setting in MODE_SETTINGS),
)
"""Columns of a case: known before it is measured, equal when it is measured again."""

CAP_MIB = Column("cap_mib", "float", "`bucket_cap_mb` as a number, to sort by; empty for `default` and lists")
"""Beside `bucket_cap_mb`, from which it follows: no part of what a case is."""

PREPARED: tuple[Column, ...] = (
    declare_number_column(
        "gradient_error",
        "of the proof: gradients against the plain module's of the same parts of a batch, relative",
        shown="Proof: gradients off by = how far, relatively, gradients and what two steps add to the "
        "parameters were off the plain module's, before the case was timed",
    ),
    declare_number_column(
        "split_effect",
        "of the proof: gradient of the parts into which the case splits a batch against that of the whole, "
        "relative; rounding alone where the loss is a mean over rows of equal weight; empty where random",
    ),
    declare_number_column(
        "update_error",
        "of the proof: parameters after 2 steps against eager training of the plain module, relative to the "
        "update; empty where rounding is too large to tell",
        shown="Proof: two steps off by",
    ),
    declare_text_column("not_proved", "of the proof: why the case is neither proved nor wrong; else empty"),
    declare_text_column("proved_by", "what would prove a case that `not_proved` speaks of; else empty"),
    declare_count_column(
        "num_buckets",
        "DDP buckets after the rebuild; with the Python reducer, compiled all-reduces",
    ),
    declare_text_column("bucket_bytes", "bytes of each bucket in all-reduce order, `/`-separated"),
    declare_text_column(
        "layers_by_device",
        "`partition`, `pipeline`: layers of each device, `/`-separated",
    ),
)
"""Columns of a case once it is prepared: how it was proved and laid out."""

LAST: tuple[Column, ...] = (
    declare_number_column(
        "compile_s",
        "seconds that torch.compile took on rank 0, backward included, with its caches as found; "
        "empty for eager cases",
        above=0,
        shown="Compiling",
    ),
    declare_count_column(
        "num_graphs", "graphs that torch.compile made; DDPOptimizer splits one at the buckets; empty if eager"
    ),
    declare_count_column(
        "graph_breaks", "places where dynamo could not go on in one graph; empty for eager cases", first=0
    ),
    declare_text_column("run_id", "names the run, whatever becomes of its folder"),
    declare_text_column("started_at", "when the run began, UTC"),
    declare_text_column("torch_version", "PyTorch that was measured"),
)
"""Columns of what compiling took, and of the run."""

_BEHIND_CAP = 1 + [column.name for column in IDENTITY].index("bucket_cap_mb")

CASES: tuple[Column, ...] = (
    *IDENTITY[:_BEHIND_CAP],
    CAP_MIB,
    *IDENTITY[_BEHIND_CAP:],
    *PREPARED,
    *SPEED,
    *DETAILS,
    *LAST,
)

FILES: dict[str, tuple[Column, ...]] = {"cases.csv": CASES, **OTHER_FILES}

METRICS: dict[str, Metric] = {column.name: column for column in CASES if isinstance(column, Metric)}
"""The columns of cases.csv in which one direction is better, by name."""

GATED_METRICS = {name: metric for name, metric in METRICS.items() if metric.gated}


def map_units(unit: str = IMAGES) -> dict[str, str]:
    """Return the unit of every column of every file; rates count `unit`, such as `tokens`."""
    return {column.name: name_unit(column, unit) for of_file in FILES.values() for column in of_file}


def name_unit(column: Column, unit: str) -> str:
    """Return the unit of a column of a run that counts `unit`."""
    counted = {f"{IMAGES}/s": f"{unit}/s", "J/image": f"J/{make_singular(unit)}"}
    return counted.get(column.unit, column.unit)
