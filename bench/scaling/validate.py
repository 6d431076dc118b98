"""Predictions against what was measured, on cases that nothing was fitted to. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import pandas as pd

from bench.plan import HALF_HOOKS
from bench.results.aggregate import step_ms_by_round
from bench.results.store import RunData
from bench.scaling.calibration import Calibration
from bench.scaling.from_run import ddp_cases, single_steps
from bench.scaling.naive import naive_ms
from bench.scaling.networks import Network
from bench.scaling.predict import predict
from bench.scaling.scenario import Scenario
from bench.stats import Interval, ratio_of_medians


@dataclass(frozen=True)
class HeldOut:
    """One measured case and its prediction."""

    case_id: str
    num_devices: int
    bucket_cap_mb: str
    measured_ms: float
    """Global batch over images per second."""
    predicted_ms: Interval
    naive_ms: Mapping[str, float] = field(default_factory=dict)
    """What rules of thumb say, by name (bench/scaling/naive.py)."""
    paced_ms: float | None = None
    """Predicted for compute as fast as the case's own steps without communication.

    None where there are none, or where they differ from the calibration's by no more than noise: to follow
    noise would only add it. What remains of the error is the simulation's: a shared or throttled machine
    changes its speed between a calibration and its check.
    """
    network: str = ""
    """Rate of the link that joined a lab's hosts; empty on a real network."""

    @property
    def error_pct(self) -> float:
        """Predicted over measured, less 1, percent."""
        return 100 * (self.predicted_ms.estimate / self.measured_ms - 1)

    @property
    def paced_error_pct(self) -> float | None:
        """The same of `paced_ms`."""
        return None if self.paced_ms is None else 100 * (self.paced_ms / self.measured_ms - 1)

    def naive_error_pct(self, rule: str) -> float:
        """The same of a rule of thumb."""
        return 100 * (self.naive_ms[rule] / self.measured_ms - 1)


def held_out(
    calibration: Calibration, run: RunData, *, fitted: str | None, network: Network | None = None
) -> list[HeldOut]:
    """Every measured DDP case of `run` but `fitted` that a scenario can describe, predicted.

    `network` joins the nodes of `run` where it is another than the calibration's.
    """
    found = []
    calibrated = predict(calibration, Scenario(num_devices=calibration.num_ranks), resamples=0)
    local_ms = step_ms_by_round(run.blocks, "no_sync")
    for row in ddp_cases(run):
        if row["case_id"] == fitted or row["comm_hook"] not in ("none", *HALF_HOOKS) or row["sync_batchnorm"]:
            continue
        scenario = Scenario(
            num_devices=int(row["num_devices"]),
            network=network,
            bucket_cap_mb=str(row["bucket_cap_mb"]),
            batch_per_device=int(row["batch_per_device"]),
            comm_hook=str(row["comm_hook"]),
            accumulate=int(row["accumulate"]),
        )
        if pd.isna(row["images_per_s"]):
            continue
        found.append(
            HeldOut(
                str(row["case_id"]),
                scenario.num_devices,
                scenario.bucket_cap_mb,
                float(row["global_batch"]) * 1000 / float(row["images_per_s"]),
                predict(calibration, scenario).step_ms,
                naive_ms(calibration, scenario, calibrated_ms=calibrated.step_ms.estimate),
                _paced_ms(calibration, scenario, local_ms.get(str(row["case_id"]), {})),
                "" if pd.isna(row["link"]) else str(row["link"]),
            )
        )
    return found


def _paced_ms(calibration: Calibration, scenario: Scenario, local_ms: Mapping[int, float]) -> float | None:
    if (
        not local_ms
        or scenario.num_devices == 1  # predicted from one device alone
        or scenario.accumulate != 1
        or scenario.batch_per_device != calibration.identity.batch_per_device
    ):
        return None
    # Blocks are as long as their longest rank's.
    slowest = calibration.spread.factor(scenario.num_devices)
    calibrated_ms = [slowest * ms for ms in calibration.local_by_round]
    if not ratio_of_medians(list(local_ms.values()), calibrated_ms).excludes(1.0):
        return None
    paced = calibration.paced(median(local_ms.values()) / (slowest * calibration.local_ms))
    return predict(paced, scenario, resamples=0).step_ms.estimate


def model_error_pct(cases: Sequence[HeldOut]) -> float:
    """The largest error of any held-out case, percent: what a prediction may be off by."""
    return max(abs(case.error_pct) for case in cases)


def median_error_pct(cases: Sequence[HeldOut]) -> float:
    """The median of the errors' sizes, percent."""
    return float(median(abs(case.error_pct) for case in cases))


def drift(calibration: Calibration, run: RunData) -> Interval | None:
    """How many times as long one device alone took in `run` as when calibrated; None where not measured.

    What a shared or throttled machine changed in between is no error of the simulation, but part of one.
    """
    now = single_steps(run, calibration.identity.batch_per_device)
    if not now or not calibration.single_step_ms:
        return None
    return ratio_of_medians(now, calibration.single_step_ms)


def beside(cases: Sequence[HeldOut]) -> str:
    """What rules of thumb err on the same cases, and the simulation at their pace; empty where not known."""
    errors = {rule: [abs(c.naive_error_pct(rule)) for c in cases] for rule in cases[0].naive_ms}
    said = [f"{rule} {median(sizes):.0f}% and {max(sizes):.0f}%" for rule, sizes in errors.items()]
    lines = [f"Rules of thumb on the same cases, median and largest: {', '.join(said)}."] if said else []
    paced = [(abs(c.paced_error_pct), abs(c.error_pct)) for c in cases if c.paced_error_pct is not None]
    if paced:
        at_pace, as_calibrated = zip(*paced, strict=True)
        lines.append(
            f"Beside {len(paced)} of these {len(cases)} cases compute, in steps without communication, was "
            f"not as fast as when calibrated: at its speed there the simulation is off by "
            f"{median(at_pace):.1f}% and {max(at_pace):.1f}% in them, instead of "
            f"{median(as_calibrated):.1f}% and {max(as_calibrated):.1f}%."
        )
    return " ".join(lines)
