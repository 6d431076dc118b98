"""How long a piece of a run may take before it is given up, in seconds."""

from __future__ import annotations

import os

from bench.cluster.turns import TURNS_ENV
from bench.settings import ResolvedSettings

PREPARING_S = 600.0
LEAST_S = 60.0
PATIENCE = 20
"""A block may take this many times what its steps took in the warm-up."""

LEAST_STEPS = 4
"""A block counts as so many steps at least: some phases take several whatever `--steps` says."""

OTHERS_S = 900.0
"""Beside other runs a block waits for its turn."""


def preparing_s(settings: ResolvedSettings) -> float:
    """For a case's construction, proof and warm-up, or for one all-reduce curve."""
    return settings.case_timeout or PREPARING_S


def block_s(settings: ResolvedSettings, longest_step_s: float) -> float:
    """For a block of a case whose longest step of the warm-up took so long."""
    usual_s = longest_step_s * max(settings.steps, LEAST_STEPS)
    return settings.case_timeout or max(LEAST_S, PATIENCE * usual_s)


def waiting_s() -> float:
    """For the turns of other runs, where there are any."""
    return OTHERS_S if TURNS_ENV in os.environ else 0.0
