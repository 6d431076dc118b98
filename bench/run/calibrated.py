"""Writes a run's `calibration.json` once its blocks are on disk."""

from __future__ import annotations

from pathlib import Path

from bench.errors import UsageError
from bench.measure.calibration import trainable
from bench.predict.source import save_calibration
from bench.results.store import load_run
from bench.scaling.from_pass import calibration_of
from models.workload import Workload


def write_calibration(folder: Path, workload: Workload) -> str | None:
    """Put `calibration.json` beside a run's tables; why not, where its pass was not measured."""
    try:
        save_calibration(folder, calibration_of(load_run(folder), trainable(workload)))
    except UsageError as missing:
        return f"no calibration: {missing}"
    return None
