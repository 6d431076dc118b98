"""Runs both stages on the same workers: calibrate, choose, measure in turns, answer."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import msgspec

from ddp_bench.bench import conditions
from ddp_bench.bench.cli import command, to_json
from ddp_bench.bench.cluster.process import host_name
from ddp_bench.bench.console import Console
from ddp_bench.bench.errors import ExitCode, UsageError
from ddp_bench.bench.findings.numbers import short
from ddp_bench.bench.findings.wording import step_labels
from ddp_bench.bench.layout import BucketCaps
from ddp_bench.bench.predict.source import load_calibration
from ddp_bench.bench.resolve import resolve
from ddp_bench.bench.results.aggregate import images_per_s_by_round, units_per_step
from ddp_bench.bench.results.disk import replace_file
from ddp_bench.bench.results.round_times import ByRound
from ddp_bench.bench.results.schema import records
from ddp_bench.bench.results.store import CALIBRATION as CALIBRATION_FILE
from ddp_bench.bench.results.store import TUNE, default_folder, load_run
from ddp_bench.bench.run.conductor import START_LIMIT_S, Conductor, How, prepare
from ddp_bench.bench.run.workers import Workers
from ddp_bench.bench.scaling.calibration import Calibration, Identity, check_same
from ddp_bench.bench.tune.answer import Answer, decide
from ddp_bench.bench.tune.candidates import Candidate, choose
from ddp_bench.bench.tune.elimination import Elimination, affordable
from ddp_bench.bench.tune.output import as_json
from ddp_bench.bench.tune.request import CALIBRATION, PROOF, Request, point_of, stage_arguments
from ddp_bench.bench.worker.messages import Prepared, Profile, Profiled

TUNE_VERSION = 1


class StageFailedError(UsageError):
    """A stage could not be measured; its own messages tell why."""

    exit_code = ExitCode.NOT_MEASURED


class Tuning:
    """A tuning on `workers`: calibrates, chooses, measures in turns, decides and writes."""

    def __init__(self, request: Request, job: Prepared, workers: Workers, *, quiet: bool) -> None:
        self._request = request
        self._job = job
        self._workers = workers
        self._quiet = quiet
        self._began_s = time.monotonic()
        self._console = Console(silent=quiet)
        self.out = request.out or default_folder(host=host_name(), name="tune")

    def run(self) -> Answer | int:
        """Tune; the answer, or the exit code of a stage that was ended. Raises UsageError."""
        if self._request.reuse is None and not (self._calibration / CALIBRATION_FILE).is_file():
            self._console.note("Stage 1 of 2: calibration")
            if code := self._measure(self._request.calibration_options(self.out), ()):
                return code
        candidates, spent_s = self._affordable()
        folder = self.out / CALIBRATION
        if len(candidates) > 1 or self._request.reuse is not None:
            folder = self.out / PROOF
            self._console.note(f"Stage 2 of 2: {len(candidates)} candidates in turns")
            options = self._request.proof_options(self.out, candidates, spent_s)
            if code := self._measure(options, candidates):
                return code
        answer = answer_of(folder, candidates)
        self._write(answer, folder)
        return answer

    @property
    def _calibration(self) -> Path:
        """The folder that holds it."""
        return self._request.reuse or self.out / CALIBRATION

    def _measure(self, options: Mapping[str, str], candidates: Sequence[Candidate]) -> int:
        """Measure a stage, of the `candidates` alone if any; the exit code. Raises StageFailedError."""
        settings = resolve(options)
        prepared = prepare(self._workers, settings)
        points = {c.point for c in candidates}
        if points:
            kept = (p for p in prepared.plan if p.case.mode == "ddp" and point_of(p) in points)
            prepared = msgspec.structs.replace(prepared, plan=tuple(kept))
        how = How(
            arguments=stage_arguments(options),
            quiet=self._quiet,
            is_part=True,
            to_drop=_elimination(prepared, candidates).dropped if candidates else None,
        )
        conductor = Conductor(settings, how, self._workers, began_s=time.monotonic(), prepared=prepared)
        code = conductor.run()
        if code == ExitCode.NOT_MEASURED:
            raise StageFailedError(f"a stage could not be measured; see {options['out']}")
        return code

    def _affordable(self) -> tuple[list[Candidate], float]:
        """Choose from the calibration what to measure; also the seconds spent so far."""
        calibration = load_calibration(self._calibration)
        if self._request.reuse is not None:
            self._check(calibration)
        self._console.note(_described(calibration))
        found = choose(calibration, num_ranks=self._request.num_devices, axes=self._request.axes)
        spent_s = self._spent_s()
        seconds = self._request.proof_s(spent_s)
        kept = affordable(found, seconds=seconds)
        if len(kept) < len(found):
            self._console.note(
                f"{seconds:.0f} s are enough for {len(kept)} of {len(found)} candidates, those that promise "
                "most; --max-time for more"
            )
        return kept, spent_s

    def _check(self, found: Calibration) -> None:
        """Raise UsageError where a calibration is of something else than what is tuned."""
        case = next(p.case for p in self._job.plan if p.case.mode == "ddp")
        profile = Profile(settings=self._job.settings)
        here = self._workers.value(0, profile, Profiled, "start-up", START_LIMIT_S)
        identity = Identity(
            arch=case.arch,
            image_size=case.image_size,
            batch_per_device=case.batch_per_device,
            precision=case.precision,
            device_type=case.device_type,
            device_name=here.device_name,
            torch=here.versions.get("torch", ""),
            host=conditions.machine_name(here.machine),
            link=os.environ.get("BENCH_LINK"),
            step=", ".join(step_labels(asdict(case))[1:]),
            unit=case.unit,
            units_per_sample=case.units_per_sample,
        )
        check_same(found.identity, identity, accept=self._request.accept)
        if found.num_ranks != case.num_devices and not self._request.accept:
            raise UsageError(
                f"the calibration is of {found.num_ranks} devices, not {case.num_devices}; calibrate again, "
                "or --accept to carry its all-reduces over by the ring law"
            )

    def _spent_s(self) -> float:
        return time.monotonic() - self._began_s

    def _write(self, answer: Answer, folder: Path) -> None:
        whole = {
            "schema_version": TUNE_VERSION,
            "created_utc": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": command("tune", *sys.argv[1:]),
            "calibration": str(self._calibration),
            "measured_in": str(folder),
            "seconds": round(self._spent_s(), 1),
            **as_json(answer),
        }
        text = to_json(whole) + "\n"
        self.out.mkdir(parents=True, exist_ok=True)
        replace_file(self.out / TUNE, lambda path: path.write_text(text, encoding="utf-8"))


def _elimination(job: Prepared, candidates: Sequence[Candidate]) -> Elimination:
    ids = {point_of(p): p.case.case_id for p in job.plan}
    default, *challengers = (ids[c.point] for c in candidates if c.point in ids)
    return Elimination(default, tuple(challengers))


def answer_of(folder: Path, candidates: Sequence[Candidate]) -> Answer:
    """Decide from a results folder. Raises UsageError where the default was not measured there."""
    run = load_run(folder)
    cases = run.cases[(run.cases["mode"] == "ddp") & (run.cases["status"] == "ok")]
    per_step = units_per_step(cases)
    throughput = images_per_s_by_round(run.blocks, per_step)
    by_point = {
        (
            BucketCaps.parse(str(row["bucket_cap_mb"])),
            bool(row["gradient_as_bucket_view"]),
            str(row["comm_hook"]),
            int(row["accumulate"]),
        ): str(row["case_id"])
        for row in records(cases)
    }
    rates: dict[Candidate, ByRound] = {}
    units: dict[Candidate, int] = {}
    for candidate in candidates:
        case_id = by_point.get(candidate.point)
        if case_id in throughput:
            rates[candidate], units[candidate] = throughput[case_id], per_step[case_id]
    if candidates[0] not in rates:
        raise UsageError(f"the default was not measured in {folder}: there is nothing to compare with")
    return decide(candidates, rates, units)


def _described(calibration: Calibration) -> str:
    error = calibration.model_error_pct
    known = "" if error is None else f"; the model is off by {error:.1f}% on a step that it was not fitted to"
    return (
        f"Calibrated: backward {short(median(calibration.backward_ms))} ms; beside communication compute "
        f"takes {median(calibration.compute_slowdown):.2f} times as long, communication "
        f"{median(calibration.comm_slowdown):.2f} times{known}"
    )
