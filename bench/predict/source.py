"""Reads what a prediction needs: a calibration, and a network by name, from a log or from a run."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_bench.bench.cli import speaker
from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.manifest import MANIFEST
from ddp_bench.bench.results.disk import MOST_CALIBRATION_BYTES, MOST_JSON_BYTES, read_text, replace_file
from ddp_bench.bench.results.store import CALIBRATION, load_run
from ddp_bench.bench.scaling.calibration import AllReduceTimes, Calibration, check_same
from ddp_bench.bench.scaling.from_pass import Trainable, calibration_of, residual_case
from ddp_bench.bench.scaling.measured import allreduce_of_run, most_like
from ddp_bench.bench.scaling.nccl_log import parse_nccl_log
from ddp_bench.bench.scaling.networks import NetworkModel, network
from ddp_bench.bench.scaling.scenario import MeasuredNetwork

MOST_LOG_BYTES = MOST_JSON_BYTES
"""Of an nccl-tests log; with the time of every iteration (`-I 1 -J`) it takes some MiB."""


@dataclass(frozen=True)
class Source:
    """A calibration, and the case that its residual was fitted to, if any."""

    calibration: Calibration
    fitted: str | None = None


def read_source(folder: Path, *, accept: bool = False) -> Source:
    """Read the calibration of a results folder.

    Raises UsageError where there is none, or where it is of another machine, torch or workload than the
    folder's run, unless `accept`.
    """
    if not os.path.lexists(folder / CALIBRATION):
        raise UsageError(f"{folder} has no {CALIBRATION}; measure a run with {speaker('run')} --calibrate")
    calibration = load_calibration(folder)
    if not (folder / MANIFEST).exists():
        return Source(calibration)
    run = load_run(folder)
    if found := most_like(run, calibration.identity):
        check_same(calibration.identity, found, accept=accept)
    fitted = residual_case(run, calibration.num_ranks)
    return Source(calibration, str(fitted["case_id"]) if fitted else None)


def load_calibration(folder: Path) -> Calibration:
    """Read `calibration.json` of a results folder. Raises UsageError where it cannot be read."""
    path = folder / CALIBRATION
    return Calibration.from_json(read_text(path, most_bytes=MOST_CALIBRATION_BYTES), source=str(path))


def save_calibration(folder: Path, calibration: Calibration) -> None:
    """Put `calibration.json` into a results folder."""
    text = calibration.to_json()
    replace_file(folder / CALIBRATION, lambda file: file.write_text(text, encoding="utf-8"))


def write_calibration(folder: Path, trainable: Sequence[Trainable]) -> str | None:
    """Put `calibration.json` beside a run's tables, or return why its pass does not allow it.

    `trainable` are the model's parameters as registered.
    """
    try:
        save_calibration(folder, calibration_of(load_run(folder), trainable))
    except UsageError as missing:
        return f"no calibration: {missing}"
    return None


def read_network(name: str) -> NetworkModel | MeasuredNetwork:
    """Find a network: by name, in the file of an nccl-tests log in JSON, or in the folder of a run.

    Raises UsageError for an unknown name, a file that is no such log and a run without all-reduces.
    """
    path = Path(name)
    try:
        kind = path.stat().st_mode if name else 0
    except (OSError, ValueError):
        kind = 0
    if stat.S_ISDIR(kind):
        calibrated = os.path.lexists(path / CALIBRATION)
        known = load_calibration(path).allreduce if calibrated else (allreduce_of_run(load_run(path)),)
        allreduce = tuple(times for times in known if times.num_ranks > 1)
        if not allreduce:
            raise UsageError(f"--network {path} has no all-reduce of 2 ranks or more; name another run")
        return MeasuredNetwork(f"run {path.resolve().name}", f"the all-reduces of {path}", allreduce)
    if kind:
        text = read_text(path, most_bytes=MOST_LOG_BYTES, follow=True)
        log = parse_nccl_log(text, source=str(path))
        points = tuple((round(size), (ms,)) for size, ms in log.curve.points)
        times = AllReduceTimes(num_ranks=log.num_ranks, backend="nccl", points=points)
        return MeasuredNetwork(f"nccl-tests log of {log.num_ranks} ranks", str(path), (times,))
    return network(name)
