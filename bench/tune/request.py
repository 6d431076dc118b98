"""Resolves what `bench.tune` was asked for into the settings of its two stages, ordinary runs."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_bench.bench.axes import DDP_AXES
from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.layout import BucketCaps
from ddp_bench.bench.plan import Planned
from ddp_bench.bench.resolve import resolve
from ddp_bench.bench.settings import Settings
from ddp_bench.bench.tune.candidates import Axes, Candidate
from ddp_bench.bench.worker.messages import Prepared

STAGES = CALIBRATION, PROOF = "calibration", "proof"
"""Results folders of the two stages, within the tuning's own."""

TUNED = ("bucket_cap_mb", *(axis.name for axis in dataclasses.fields(Axes)))
FIXED = ("compile", *(axis for axis in DDP_AXES if axis not in TUNED))
"""Axes of bench.run that take one value here: tuning does not compare them."""

DEFAULT_MAX_TIME_S = 150.0
"""Leaves a whole tuning, start-up and two reports included, below three minutes."""

CPU_PROOF_STEPS = 1
"""One step per block on a CPU: more rounds tell more than longer blocks of as many steps in all.

Two steps in a row are disturbed alike: on shared cores their times correlate by 0.3 to 0.6."""

CALIBRATION_SHARE = 0.3
"""Share of the time limit for the first stage: the proof compares cases and needs more rounds."""

LEAST_PROOF_SHARE = 0.25
"""The proof gets at least this share of the time limit, however long calibration took."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A tuning; `options` are settings of bench.run as text."""

    options: Mapping[str, str]
    num_devices: int
    axes: Axes
    max_time_s: float
    out: Path | None = None
    reuse: Path | None = None
    """A folder whose calibration is taken instead of measuring one."""
    proof_steps: int | None = None
    """Steps per block of the second stage, where the user has not said; None as in bench.run."""
    accept: bool = False
    """Take it though it is of another machine, torch or workload."""

    def calibration_options(self, out: Path) -> dict[str, str]:
        """The first stage: the default, with the calibration pass."""
        return self._options(
            out / CALIBRATION,
            self.max_time_s * CALIBRATION_SHARE,
            bucket_cap_mb="default",
            calibrate="on",
            passes="no_sync,comm",
            name=CALIBRATION,
        )

    def proof_s(self, spent_s: float) -> float:
        """Seconds for the second stage after `spent_s`; infinite where the rounds are given."""
        if "rounds" in self.options:
            return math.inf
        return max(self.max_time_s - spent_s, self.max_time_s * LEAST_PROOF_SHARE)

    def proof_options(self, out: Path, candidates: Sequence[Candidate], spent_s: float) -> dict[str, str]:
        """The second stage: every candidate in turns, after `spent_s` seconds."""
        options = self._options(
            out / PROOF,
            self.proof_s(spent_s),
            bucket_cap_mb=_joined(str(c.bucket_cap_mb) for c in candidates),
            gradient_as_bucket_view=_joined("on" if c.gradient_as_bucket_view else "off" for c in candidates),
            comm_hook=_joined(c.comm_hook for c in candidates),
            accumulate=_joined(str(c.accumulate) for c in candidates),
            passes="none",
            name=PROOF,
        )
        options.setdefault("precision_target", "0.5%")
        if self.proof_steps is not None:
            options["steps"] = str(self.proof_steps)
        return options

    def _options(self, out: Path, max_time_s: float, **more: str) -> dict[str, str]:
        base = {
            "gradient_as_bucket_view": "on" if self.axes.gradient_as_bucket_view[0] else "off",
            "comm_hook": self.axes.comm_hook[0],
            "accumulate": str(self.axes.accumulate[0]),
        }
        found = {**self.options, "modes": "ddp", "gpus": str(self.num_devices), **base, **more}
        if "rounds" not in found:
            found["max_time"] = f"{max(max_time_s, 1):.0f}s"
        return {**found, "out": str(out)}


def make_request(
    options: Mapping[str, str],
    prepare: Callable[[Settings], Prepared],
    *,
    reuse: Path | None = None,
    accept: bool = False,
) -> tuple[Request, Prepared]:
    """Make the request from settings as text, and check its first stage against this machine.

    `prepare` plans a run. Raises UsageError for what cannot be tuned here.
    """
    settings = resolve(options)
    axes = _axes(settings)
    if settings.gpus is not None and len(settings.gpus) > 1:
        raise UsageError("--gpus takes one device count here: a layout is best for one; tune each by itself")
    num_devices = settings.gpus[0] if settings.gpus else _all_devices(settings, prepare)
    if num_devices < 2:
        raise UsageError("one device exchanges gradients with nobody; give --gpus 2 or more")
    request = Request(
        options={k: v for k, v in options.items() if k not in ("out", "name", "max_time")},
        num_devices=num_devices,
        axes=axes,
        max_time_s=settings.max_time or DEFAULT_MAX_TIME_S,
        out=Path(settings.out) if settings.out else None,
        reuse=reuse,
        accept=accept,
    )
    # Where its folder lies is checked by itself.
    job = prepare(resolve({k: v for k, v in request.calibration_options(Path()).items() if k != "out"}))
    skipped = next((p.skip_reason for p in job.plan if p.case.mode == "ddp" and p.skip_reason), None)
    if skipped is not None:
        raise UsageError(f"{num_devices} devices cannot be tuned for here: {skipped}")
    on_cpu = job.machine.device_type == "cpu"
    proof_steps = CPU_PROOF_STEPS if on_cpu and "steps" not in options else None
    return dataclasses.replace(request, proof_steps=proof_steps), job


def stage_arguments(options: Mapping[str, str]) -> list[str]:
    """Write a stage's options as the command line of a run."""
    return [part for k, v in options.items() for part in (f"--{k.replace('_', '-')}", v)]


def point_of(planned: Planned) -> tuple[BucketCaps, bool, str, int]:
    """Name a planned case as `Candidate.point` does."""
    case = planned.case
    return case.bucket_cap_mb, case.gradient_as_bucket_view, case.comm_hook, case.accumulate


def _axes(settings: Settings) -> Axes:
    several = next((name for name in FIXED if len(getattr(settings, name) or ()) > 1), None)
    if several is not None:
        raise UsageError(f"--{several.replace('_', '-')} is not tuned: give one value")
    return Axes(
        gradient_as_bucket_view=settings.gradient_as_bucket_view,
        comm_hook=settings.comm_hook,
        accumulate=settings.accumulate,
    )


def _all_devices(settings: Settings, prepare: Callable[[Settings], Prepared]) -> int:
    """Count the ranks that a launcher has started, else the devices here."""
    machine = prepare(dataclasses.replace(settings, out=None)).machine
    if machine.ranks_per_node is not None:
        return int(os.environ["WORLD_SIZE"])
    return machine.devices_per_node


def _joined(values: Iterable[str]) -> str:
    return ",".join(dict.fromkeys(values))
