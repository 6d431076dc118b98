"""What a run must fulfil to be archived, and what is kept of the doctor: see `docs/baselines.md`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddp_bench.bench.cli import command, speaker
from ddp_bench.bench.conditions import gpus_of, part
from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.estimate import MIN_ROUNDS
from ddp_bench.bench.gate.runs import GateRun
from ddp_bench.bench.results.disk import MOST_JSON_BYTES, parse_json, read_bytes

LEAST_ROUNDS = 10
"""Rounds of the whole run: with fewer, an interval says little of the machine's slow changes."""


def check(run: GateRun) -> None:
    """Raise UsageError with the first rule that a run breaks."""
    where, manifest = run.path, run.manifest
    if "stopped_because" not in part(manifest, "timing"):
        raise UsageError(f"{where}: the run has not ended; finish it with {speaker('run')} --resume {where}")
    measured = [case for case in run.cases if case.ok]
    if not measured:
        raise UsageError(f"{where} has no case with status ok; there is nothing to archive")
    rounds = max(len(case.images_per_s) for case in measured)
    if rounds < LEAST_ROUNDS:
        raise UsageError(
            f"{where} has {rounds} rounds, an archive needs at least {LEAST_ROUNDS}; go on with "
            f"{speaker('run')} --resume {where} --rounds {LEAST_ROUNDS}"
        )
    for case in measured:
        # Cases that share devices are in few rounds, and say nothing about scaling.
        if case.row.get("oversubscribed") != "True" and len(case.images_per_s) < MIN_ROUNDS:
            raise UsageError(
                f"{where}: {case.case_id} has {len(case.images_per_s)} rounds, an interval needs at least "
                f"{MIN_ROUNDS}; go on with {speaker('run')} --resume {where} --rounds {LEAST_ROUNDS}"
            )
    for name, owner in (("git", "ddp-bench"), ("workload", "the workload")):
        if part(manifest, name).get("dirty") is True:
            raise UsageError(
                f"{where}: {owner} had uncommitted changes, so nobody else can measure the same; commit them "
                "and measure again"
            )
    if not part(manifest, "git").get("commit") and not part(manifest, "ddp_bench").get("version"):
        raise UsageError(f"{where}: neither commit nor version of ddp-bench is known; measure again")


def doctor_summary(path: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What an archive keeps of `bench.doctor --json`: its status, and the names of what was not ok.

    Raises UsageError for another file, for one of another machine, and where something was bad.
    """
    found = parse_json(read_bytes(path, most_bytes=MOST_JSON_BYTES, follow=True), path)
    if not isinstance(found, dict) or "status" not in found or not isinstance(found.get("findings"), list):
        raise UsageError(f"--doctor {path} holds no findings; write it with {command('doctor')} --json")
    _check_machine(path, part(found, "readings"), manifest)
    names: dict[str, list[str]] = {"bad": [], "caution": []}
    for finding in found["findings"]:
        if isinstance(finding, dict) and finding.get("status") in names:
            names[finding["status"]].append(str(finding.get("name")))
    if names["bad"] or found["status"] == "bad":
        bad = ", ".join(names["bad"])
        raise UsageError(f"--doctor {path} says bad: {bad}; mend that and measure again")
    return {"status": str(found["status"]), "cautions": names["caution"]}


def _check_machine(path: Path, readings: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    environment = part(manifest, "environment")
    told = {
        "CPU cores": (part(readings, "cpu").get("present"), environment.get("num_cores")),
        "torch": (
            _release(part(readings, "software").get("torch")),
            _release(part(manifest, "versions").get("torch")),
        ),
        "GPUs": (_named(readings.get("gpus")), _named(gpus_of(environment))),
    }
    for name, (there, here) in told.items():
        if there is not None and here is not None and there != here:
            raise UsageError(
                f"--doctor {path} is of another machine: {name} {there}, the run's {here}; run bench.doctor "
                "where the run was measured"
            )


def _release(version: Any) -> str | None:
    """A version without how it was built: the module tells of that, its metadata may not."""
    return version.partition("+")[0] if isinstance(version, str) else None


def _named(gpus: Any) -> str | None:
    """The models of GPUs, each once: a run may use some of them. None where there are none."""
    listed = gpus if isinstance(gpus, list) else []
    return ", ".join(sorted({str(gpu.get("name")) for gpu in listed if isinstance(gpu, dict)})) or None
