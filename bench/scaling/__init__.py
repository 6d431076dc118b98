"""What a step would take elsewhere: an event simulation fed by a calibration. Pure, no torch, no I/O.

Units: milliseconds, bytes, caps in MiB (2^20 bytes). Parameters are always in the reducer's order: the order
in which gradients become ready, which is close to reversed registration order but not identical.

`Calibration` holds what was measured (`calibration.py`); `cost.py` and `networks.py` give the time of an
all-reduce by size; `buckets.py` assigns parameters to buckets as DDP does; `timeline.simulate` plays one
step; `search.py` finds the best layout; `predict.predict` puts them together, with intervals.
"""

from bench.scaling.buckets import Layout, assign, assign_cap, cap_limits, caps_for
from bench.scaling.calibration import AllReduceTimes, Calibration, Identity, Parameter, differences
from bench.scaling.cost import CostBand, CostCurve, measured_curve
from bench.scaling.networks import Network, network
from bench.scaling.predict import Prediction, predict
from bench.scaling.scenario import Scenario
from bench.scaling.search import Found, best_layout, best_uniform_cap, lower_bound_ms
from bench.scaling.timeline import Compute, Slowdown, Step, StepBucket, Work, simulate

__all__ = [
    "AllReduceTimes",
    "Calibration",
    "Compute",
    "CostBand",
    "CostCurve",
    "Found",
    "Identity",
    "Layout",
    "Network",
    "Parameter",
    "Prediction",
    "Scenario",
    "Slowdown",
    "Step",
    "StepBucket",
    "Work",
    "assign",
    "assign_cap",
    "best_layout",
    "best_uniform_cap",
    "cap_limits",
    "caps_for",
    "differences",
    "lower_bound_ms",
    "measured_curve",
    "network",
    "predict",
    "simulate",
]
