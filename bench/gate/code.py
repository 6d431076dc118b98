"""The code of the two sides of a gate: whose it is, which commits, and whether it is the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import structs

from ..common.errors import UsageError
from ..machine.manifest import Manifest, WorkloadCode


@dataclass(frozen=True)
class Code:
    """Code of both sides by their manifests: the user's by repository, commit and content, and ours.

    `interleaved` where both sides took turns.
    """

    baseline: Manifest
    candidate: Manifest
    interleaved: bool
    environments: tuple[Mapping[str, str], ...] = ()
    """Variables that the gate set for baseline and candidate alone."""
    paths: tuple[Path, ...] = (Path(), Path())
    """Results folders, which tell two watched trainings apart."""

    @property
    def is_identical(self) -> bool | None:
        """Return whether both imported files of the same content; None where a manifest does not tell.

        None of watched trainings, whose scripts nobody looks into.
        Built-in models are code of ddp-bench: a commit of it without changes.
        """
        if self.baseline.watched or self.candidate.watched:
            return None
        if not any(side.workload for side in (self.baseline, self.candidate)):
            ours, theirs = self.baseline.git, self.candidate.git
            known = all(state.commit and state.dirty is False for state in (ours, theirs))
            return ours.commit == theirs.commit if known else None
        hashes = [_get_content_hash(side) for side in (self.baseline, self.candidate)]
        return None if None in hashes else hashes[0] == hashes[1]

    def name_sides(self) -> str:
        """Name both sides: `baseline mynet 1a2b3c4, torch 2.13.0 → candidate mynet 5d6e7f8, torch 2.14.1`."""
        sides = {"baseline": self.baseline, "candidate": self.candidate}
        variables = self.environments or ({}, {})
        named = [
            ", ".join((f"{name} {_name_code(side, path)}", *(f"{key}={value}" for key, value in own.items())))
            for (name, side), own, path in zip(sides.items(), variables, self.paths, strict=True)
        ]
        return " → ".join(named)

    def describe_same_code(self) -> str:
        """Say that both sides imported the same code of the workload, where they did; empty otherwise."""
        sides = (self.baseline, self.candidate)
        if not self.is_identical or not any(side.workload for side in sides):
            return ""
        if not self.interleaved:
            return "both runs imported identical code of the workload"
        told = [(side.versions, side.environment.env) for side in sides]
        is_same = told[0] == told[1] and not any(self.environments)
        what = "this is an A/A comparison" if is_same else "what differs is the environment"
        return f"both sides import identical code: {what}"

    def to_record(self) -> dict[str, Any]:
        """Return the same for a program; what a manifest does not tell is left out."""

        def select_facts(side: Manifest) -> dict[str, Any]:
            workload = structs.replace(side.workload or WorkloadCode(), files={})
            return {"workload": workload, "ddp_bench": side.ddp_bench, "git": side.git}

        both = {"baseline": select_facts(self.baseline), "candidate": select_facts(self.candidate)}
        return {"identical": self.is_identical, **both}


def check_one_code(launches: Sequence[Manifest]) -> None:
    """Raise UsageError where the launches of a side measured different code: it was edited meanwhile."""
    if len({_get_content_hash(manifest) for manifest in launches}) > 1:
        raise UsageError(
            "the workload's code was changed while it was measured; leave its files alone and measure again"
        )


def _get_content_hash(manifest: Manifest) -> str | None:
    """Return the hash of the user's code that a run imported; None where there is none or it is unknown."""
    return manifest.workload.code_sha256 if manifest.workload else None


def _name_code(side: Manifest, path: Path) -> str:
    """Name what a run trained with, the user's code or ddp-bench's own models, the commit and torch."""
    code, state = side.workload, side.workload or side.git
    name = "ddp-bench" if code is None else code.repository if code.commit else code.file or code.spec
    changes = " with uncommitted changes" if state.dirty else ""
    torch = f", torch {side.versions['torch']}" if side.versions.get("torch") else ""
    if side.watched:
        return f"{side.watched.script or 'the training'} in {path}{torch}"
    return (f"{name} {state.commit[:7]}{changes}" if state.commit else f"{name}") + torch
