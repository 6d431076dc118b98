"""Baselines kept for the gate: one results folder per kind of machine, found by the machine's fingerprint."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

from ..cli import command
from ..conditions import machine_kind
from ..errors import NotComparableError, UsageError
from ..manifest import MANIFEST, Manifest
from ..results.archive import public_members
from ..results.disk import writable
from ..results.store import check_claimable, load_run
from .compare import require_rounds
from .runs import checked, read_run


def fingerprint(manifest: Manifest) -> str:
    """A machine's name for its baseline: what trains and how many, torch, and a hash of all that counts.

    GPUs by name and number, else the CPU; both CPU model and cores are in the hash, and torch's major.minor.
    Equal for equal machines, whatever their host name, driver or operating system, which the gate compares.
    """
    facts = machine_kind(manifest)
    if facts["device"] == "cuda" and facts["gpus"]:
        name = "-".join(f"{count}x-{gpu}" for gpu, count in facts["gpus"])
    else:
        name = f"{facts['num_cores']}-cores-{facts['cpu_model']}"
    readable = re.sub(r"[^a-z0-9]+", "-", name.lower())[:40].strip("-")
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]
    return f"{readable}-torch{facts['torch'] or '-unknown'}-{digest}"


def find(candidate: Path, root: Path) -> Path:
    """The baseline of the machine that measured `candidate`.

    Raises NotComparableError with the command that makes one where there is none.
    """
    name = fingerprint(read_run(candidate).manifest)
    if not (root / name / MANIFEST).is_file():
        raise NotComparableError(
            f"{root.absolute()} has no baseline for this machine ({name}); make one of a run that "
            "is known to be good: " + command("gate", "--save-baseline", "RUN", "--baselines", str(root))
        )
    return root / name


def save(run: Path, root: Path) -> Path:
    """Keep a run as its machine's baseline: what an archive would hold of it, so nobody's name or folder.

    Raises UsageError where the run cannot serve as one or the machine has a baseline already.
    """
    whole = load_run(run)
    found = checked(whole)
    measured = [case for case in found.cases if case.result.is_ok]
    if not measured:
        raise UsageError(f"{run} has no case with status ok; it cannot be a baseline")
    require_rounds(found, measured)
    folder = root / fingerprint(found.manifest)
    if folder.exists():
        raise UsageError(f"{folder} is this machine's baseline already; remove it first to replace it")
    check_claimable(folder, option="--baselines")
    with writable(f"--baselines {folder}"):
        try:
            folder.mkdir(parents=True)
            # The manifest last, so that a folder that was broken off is no baseline.
            for name, content in reversed([*public_members(whole).items()]):
                (folder / name).write_bytes(content)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return folder
