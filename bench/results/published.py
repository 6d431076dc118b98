"""Efficiencies of DDP that others published, as `published.csv` holds them, and those of runs, to compare."""

from __future__ import annotations

import csv
import functools
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..stats.interval import Interval
from .case_result import CaseResult

if TYPE_CHECKING:
    from .store import RunData

ROWS = Path(__file__).with_name("published.csv")

GPUS_PER_NODE = 8
"""GPUs of a machine in rows of more than one."""

MAX_BATCH_RATIO = 2.0
"""Largest ratio of two batches that compare: a larger batch leaves more time to hide communication."""

_NOT_THE_MODEL = re.compile(
    r"\(.*\)|\b(NVIDIA|Tesla|GeForce|Generation|SXM\d*|HBM\w*|\d+GB)\b|-", re.IGNORECASE
)
"""Parts of a GPU's name beside its model: a remark, maker, brand, socket, memory."""


class Scaling(NamedTuple):
    """A case of DDP without settings that others measured, as far as they tell of it, or a run."""

    source: str
    """Name of who measured it, or of the file."""
    case: CaseResult
    efficiency: Interval
    """Fraction of the plain module's throughput on one GPU that each GPU reaches."""

    def can_compare(self, other: Scaling) -> bool:
        """Return whether all is alike but the kind of 16 bits, and the batches are near each other."""
        batches = [one.case.batch_per_device or math.nan for one in (self, other)]
        is_near = 1 / MAX_BATCH_RATIO <= batches[0] / batches[1] <= MAX_BATCH_RATIO
        return is_near and _list_conditions(self.case) == _list_conditions(other.case)


def _list_conditions(case: CaseResult) -> tuple[object, ...]:
    precision = "16 bits" if case.precision.endswith("16") else case.precision
    model = name_gpu_model(case.device_name).casefold()
    return case.arch, case.image_size, model, case.num_devices, case.num_nodes, precision


def name_gpu_model(name: str) -> str:
    """Reduce the name that the driver has for a GPU to its model; on PCIe it is another than on SXM."""
    return " ".join(_NOT_THE_MODEL.sub(" ", name).split())


@functools.cache
def read_published() -> tuple[Scaling, ...]:
    """Read the rows of `published.csv` with a rate of the plain module on one GPU."""
    with ROWS.open(encoding="utf-8", newline="") as file:
        return tuple(_parse_row(row) for row in csv.DictReader(file) if row["single"])


def _parse_row(row: dict[str, str]) -> Scaling:
    num_gpus = int(row["gpus"])
    efficiency = float(row["published"]) / num_gpus / float(row["single"])
    cells = {
        "arch": row["model"],
        "image_size": row["image_size"],
        "device_name": row["gpu"],
        "num_devices": num_gpus,
        "num_nodes": -(-num_gpus // int(row["node"] or GPUS_PER_NODE)),
        "precision": row["precision"],
        "batch_per_device": row["batch"],
    }
    source = f"{row['source']} with {row['left_out']}" if row["left_out"] else row["source"]
    return Scaling(source, CaseResult.from_row(cells), Interval(efficiency, efficiency, efficiency))


def list_scalings(run: RunData, source: str = "") -> list[Scaling]:
    """Return what eager DDP without settings reached under weak scaling, on GPUs that no ranks share.

    Empty for a user's own model: others have another of that name.
    """
    if run.manifest.settings.workload is not None or run.manifest.watched is not None:
        return []
    return [
        Scaling(source, case, case.efficiency)
        for case in run.results
        if (case.mode, case.device_type, case.compile, case.scaling) == ("ddp", "cuda", "off", "weak")
        and (case.is_ok and case.is_ranked and not case.list_changed())
        and (case.device_name and case.image_size and case.batch_per_device)
        # An interval of few rounds is NaN.
        and (case.efficiency and case.efficiency.low > 0)
    ]
