"""Units of the columns of results files, by their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from ddp_bench.bench.results.schema import FILES
from ddp_bench.bench.settings import IMAGES

_ENDS = re.compile(r"_(low|high)$")
"""The ends of an interval have the unit of what they enclose."""

_BY_NAME: tuple[tuple[str, str], ...] = (
    (r"(.*_)?images_per_s(_.*)?", f"{IMAGES}/s"),
    (r"joules_per_image", "J/image"),
    (r".*_gb_per_s", "GB/s"),
    (r".*_ms(_p\d+)?", "ms"),
    (r".*_s", "s"),
    (r".*_mib", "MiB"),
    (r".*_pct", "%"),
    (r".*_mhz", "MHz"),
    (r".*_w", "W"),
    (r"temperature_c", "°C"),
    (r"(.*_)?bytes", "bytes"),
    (r"image_size", "pixels"),
    (r"batch_per_device|global_batch", "samples"),
    (r"accumulate|micro_batches", "micro-batches"),
    (r"num_params", "parameters"),
    (r"num_samples", "repetitions"),
    (r"num_(nodes|devices|buckets|rounds|blocks|steps|graphs)", r"\1"),
    (r"graph_breaks", "breaks"),
)
"""Units by patterns of whole names, the first that fits; a ratio, an index or a plain text has none."""


def unit_of(name: str) -> str:
    """The unit of the column `name`; empty for ratios, indices and plain text."""
    plain = _ENDS.sub("", name)
    for pattern, unit in _BY_NAME:
        if (found := re.fullmatch(pattern, plain)) is not None:
            return found.expand(unit)
    return ""


def units_of(unit: str = IMAGES) -> Mapping[str, str]:
    """The unit of every column of every file; rates count `unit`, such as `tokens`."""
    names = (column.name for columns in FILES.values() for column in columns)
    return MappingProxyType({name: _counting(unit_of(name), unit) for name in names})


def _counting(unit: str, counted: str) -> str:
    if unit == f"{IMAGES}/s":
        return f"{counted}/s"
    return f"J/{counted.removesuffix('s')}" if unit == "J/image" else unit
