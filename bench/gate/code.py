"""The code of the two sides of a gate: whose it is, which commits, and whether it is the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import structs

from ..common.errors import UsageError
from ..machine.manifest import Manifest, WorkloadCode
from .runs import GateRun


def is_same_code(baseline: Manifest, candidate: Manifest) -> bool | None:
    """Return whether both imported files of the same content; None where a manifest does not tell.

    None of watched trainings, whose scripts nobody looks into. Built-in models are code of ddp-bench: a
    commit of it without changes.
    """
    if baseline.watched or candidate.watched:
        return None
    if not (baseline.workload or candidate.workload):
        ours, theirs = baseline.git, candidate.git
        known = all(state.commit and state.dirty is False for state in (ours, theirs))
        return ours.commit == theirs.commit if known else None
    hashes = [_get_content_hash(side) for side in (baseline, candidate)]
    return None if None in hashes else hashes[0] == hashes[1]


def name_sides(baseline: GateRun, candidate: GateRun) -> str:
    """Name both sides: `baseline mynet 1a2b3c4, torch 2.13.0 → candidate mynet 5d6e7f8, torch 2.14.1`."""
    sides = {"baseline": baseline, "candidate": candidate}
    return " → ".join(f"{name} {_name_code(side)}" for name, side in sides.items())


def describe_same_code(baseline: GateRun, candidate: GateRun, *, interleaved: bool) -> str:
    """Say that both sides imported the same code of the workload, where they did; empty otherwise."""
    sides = baseline.manifest, candidate.manifest
    if not is_same_code(*sides) or not any(side.workload for side in sides):
        return ""
    if not interleaved:
        return "both runs imported identical code of the workload"
    told = [(side.versions, side.environment.env) for side in sides]
    is_same = told[0] == told[1] and not (baseline.variables or candidate.variables)
    what = "this is an A/A comparison" if is_same else "what differs is the environment"
    return f"both sides import identical code: {what}"


def make_code_record(baseline: Manifest, candidate: Manifest) -> dict[str, Any]:
    """Make a record of both sides' code for a program; what a manifest does not tell is left out."""

    def select_facts(side: Manifest) -> dict[str, Any]:
        workload = structs.replace(side.workload or WorkloadCode(), files={})
        return {"workload": workload, "ddp_bench": side.ddp_bench, "git": side.git}

    both = {"baseline": select_facts(baseline), "candidate": select_facts(candidate)}
    return {"identical": is_same_code(baseline, candidate), **both}


def check_one_code(launches: Sequence[GateRun]) -> None:
    """Raise UsageError where the launches of a side measured different code: it was edited meanwhile."""
    if len({_get_content_hash(run.manifest) for run in launches}) > 1:
        raise UsageError(
            "the workload's code was changed while it was measured; leave its files alone and measure again"
        )


def _get_content_hash(manifest: Manifest) -> str | None:
    """Return the hash of the user's code that a run imported; None where there is none or it is unknown."""
    return manifest.workload.code_sha256 if manifest.workload else None


def _name_code(run: GateRun) -> str:
    """Name the user's code or ddp-bench's own models, the commit, torch and variables of a side."""
    side, code = run.manifest, run.manifest.workload
    state = code or side.git
    name = "ddp-bench" if code is None else code.repository if code.commit else code.file or code.spec
    if side.watched:
        name = f"{side.watched.script or 'the training'} in {run.path}"
    elif state.commit:
        name = f"{name} {state.commit[:7]}{' with uncommitted changes' if state.dirty else ''}"
    torch = [f"torch {side.versions['torch']}"] if side.versions.get("torch") else []
    return ", ".join((f"{name}", *torch, *(f"{key}={value}" for key, value in run.variables.items())))
