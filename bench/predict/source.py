"""What a prediction reads: a calibration or an ordinary run, a network by name or from a log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.errors import UsageError
from bench.results.store import load_run, replace_file
from bench.scaling.approximate import Shape
from bench.scaling.calibration import AllReduceTimes, Calibration, check_same
from bench.scaling.from_pass import residual_case
from bench.scaling.from_run import calibrate, calibration_case, ddp_cases, identity
from bench.scaling.nccl_log import parse_nccl_log
from bench.scaling.networks import Network, network
from bench.scaling.scenario import MeasuredNetwork
from models.gradients import gradients_in_backward_order
from models.registry import ARCHS, resnet_workload

CALIBRATION = "calibration.json"


@dataclass(frozen=True)
class Source:
    """A calibration, and the case of its folder that it was fitted to, if any."""

    calibration: Calibration
    fitted: str | None = None


def read_source(folder: Path, *, cap: str | None = None, accept: bool = False) -> Source:
    """The calibration of a results folder: its `calibration.json`, else fitted on one of its DDP cases.

    Raises UsageError where there is neither, or where the calibration is of another machine, torch or
    workload than the folder's run, unless `accept`.
    """
    if cap is None and (folder / CALIBRATION).exists():
        calibration = load_calibration(folder)
        fitted: dict[str, Any] | None = None
        if (folder / "manifest.json").exists():
            run = load_run(folder)
            cases: Sequence[dict[str, Any]] = ddp_cases(run)
            if cases:
                check_same(calibration.identity, identity(run, cases[0]), accept=accept)
            fitted = residual_case(run, calibration.num_ranks)
        return Source(calibration, str(fitted["case_id"]) if fitted else None)
    run = load_run(folder)
    case = calibration_case(run, cap=cap)
    return Source(
        calibrate(run, case, shapes=model_shapes(str(case["arch"]), case["image_size"])), str(case["case_id"])
    )


def load_calibration(folder: Path) -> Calibration:
    """Read `calibration.json` of a results folder. Raises UsageError where it cannot be read."""
    path = folder / CALIBRATION
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read ({error}); calibrate again") from None
    return Calibration.from_json(text, source=str(path))


def save_calibration(folder: Path, calibration: Calibration) -> Path:
    """Put `calibration.json` into a results folder; the path."""
    path = folder / CALIBRATION
    replace_file(path, lambda file: file.write_text(calibration.to_json(), encoding="utf-8"))
    return path


def model_shapes(arch: str, image_size: Any) -> list[Shape] | None:
    """Parameters of a built-in architecture in backward order; None for a user's own workload."""
    if arch not in ARCHS:
        return None
    found = gradients_in_backward_order(resnet_workload(arch, int(image_size)))
    return [(g.name, g.num_bytes, g.forward_flops) for g in found]


def read_network(name: str) -> Network | MeasuredNetwork:
    """A network by name, from the log of nccl-tests in a file of that name, or from a run in a folder.

    Raises UsageError for an unknown name, a file that is no such log and a run without all-reduces.
    """
    path = Path(name)
    if name and path.is_dir():
        allreduce = tuple(t for t in read_source(path, accept=True).calibration.allreduce if t.num_ranks > 1)
        if not allreduce:
            raise UsageError(f"--network {path} has no all-reduce of 2 ranks or more; name another run")
        return MeasuredNetwork(f"run {path.resolve().name}", f"the all-reduces of {path}", allreduce)
    if path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--network {path} cannot be read as text ({error}); give a log file") from None
        log = parse_nccl_log(text, source=str(path))
        points = tuple((round(size), (ms,)) for size, ms in log.curve.points)
        times = AllReduceTimes(num_ranks=log.num_ranks, backend="nccl", points=points)
        return MeasuredNetwork(f"nccl-tests log of {log.num_ranks} ranks", str(path), (times,))
    return network(name)
