"""Judges predictions by measured cases that nothing was fitted to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import pandas as pd
from msgspec import Meta

from ..buckets import bucket_caps
from ..case import HALF_HOOKS
from ..results.case_result import CaseResult, text
from ..results.store import RunData
from ..stats.interval import Interval
from .calibration import Calibration
from .networks import NetworkModel
from .prediction import predict
from .scenario import Scenario
from .tables import ddp_cases


@dataclass(frozen=True)
class HeldOut:
    """One measured case and its prediction."""

    case_id: str
    num_devices: int
    measured_ms: Annotated[float, Meta(gt=0, le=1e15)]
    """A step: global batch over throughput."""
    predicted_ms: Interval
    network: str = ""
    """Rate of the link that joined a lab's hosts; empty on a real network."""

    @property
    def error_pct(self) -> float:
        """Predicted over measured, less 1, percent."""
        return 100 * (self.predicted_ms.estimate / self.measured_ms - 1)


def held_out(
    calibration: Calibration, run: RunData, *, fitted: str, network: NetworkModel | None = None
) -> list[HeldOut]:
    """Predict every measured DDP case of `run` but `fitted` that a scenario can describe.

    `network` joins the nodes of `run` where it is another than the calibration's.
    """
    found = []
    for row in ddp_cases(run):
        described = row["comm_hook"] in ("none", *HALF_HOOKS) and not row["sync_batchnorm"]
        if row["case_id"] == fitted or not described or pd.isna(row["images_per_s"]):
            continue
        scenario = Scenario(
            num_devices=int(row["num_devices"]),
            network=network,
            bucket_cap_mb=bucket_caps(str(row["bucket_cap_mb"])),
            batch_size=int(row["batch_per_device"]),
            comm_hook=str(row["comm_hook"]),
            accumulate=int(row["accumulate"]),
        )
        each = CaseResult.of(row).units_per_sample
        found.append(
            HeldOut(
                str(row["case_id"]),
                scenario.num_devices,
                float(row["global_batch"]) * each * 1000 / float(row["images_per_s"]),
                predict(calibration, scenario).step_ms,
                text(row["link"]),
            )
        )
    return found


def error_sizes(cases: Sequence[HeldOut]) -> list[float]:
    """The errors of the cases, percent, without signs; the largest widens intervals."""
    return [abs(case.error_pct) for case in cases]
