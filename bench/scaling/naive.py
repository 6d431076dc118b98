"""The rules of thumb that a simulation has to beat, on the same case. Pure."""

from __future__ import annotations

import statistics

from bench.scaling.calibration import Calibration
from bench.scaling.scenario import Scenario, cost_band, own_curves

PERFECT = "perfect scaling"
"""No communication: a step takes what it takes on one device alone."""

CONSTANT = "constant efficiency"
"""What one configuration reached, every other reaches: the calibrated step, on any network and layout."""

LONGER = "max(compute, communication)"
"""Everything overlaps: the longer of a rank's compute and one all-reduce of all gradients."""


def naive_ms(calibration: Calibration, scenario: Scenario, *, calibrated_ms: float) -> dict[str, float]:
    """Step times by the three rules, ms.

    Args:
        calibration: as for `predict`.
        scenario: weak scaling; what is asked for.
        calibrated_ms: the step of the calibrated configuration, per micro-batch of its batch size.
    """
    size = (scenario.batch_per_device or calibration.identity.batch_per_device) * scenario.accumulate
    size_share = size / calibration.identity.batch_per_device
    computed = statistics.median(calibration.forward_ms) + statistics.median(calibration.backward_ms)
    compute_ms = computed * size_share + statistics.median(calibration.optimizer_ms)
    alone = calibration.single_step_ms
    alone_ms = statistics.median(alone) * size_share if alone else compute_ms
    cost = cost_band(calibration, scenario, own_curves(calibration.allreduce)).at(0.0)
    num_bytes = sum(p.num_bytes for p in calibration.parameters) * scenario.wire_share
    return {
        PERFECT: alone_ms,
        CONSTANT: calibrated_ms * size_share,
        LONGER: max(compute_ms, cost(num_bytes)),
    }
