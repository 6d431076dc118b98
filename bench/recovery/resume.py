"""`--resume DIR`: the settings of a run that broke off, and whether here and now it would be the same run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from bench.conditions import Question, differences
from bench.errors import NotComparableError, UsageError
from bench.results.journal import State, read
from bench.results.store import MANIFEST
from bench.results.tables import read_json
from bench.settings import Settings

MAY_CHANGE = ("rounds", "max_time", "precision_target", "case_timeout")
"""How long to measure may be said anew; what is measured may not."""

DONE = ("all rounds done", "precision target reached", "time limit reached", "no case is left to measure")
"""Ends after which a run without a failed case has nothing left to do."""


def settings_of(folder: Path, changes: Mapping[str, Any]) -> Settings:
    """The settings in a run's manifest with `changes`, parsed values by name.

    Raises UsageError where there is no run to resume, or for a change of what is measured.
    """
    manifest = manifest_of(folder)
    refused = [f"--{name.replace('_', '-')}" for name in changes if name not in MAY_CHANGE]
    if refused:
        allowed = ", ".join(f"--{name.replace('_', '-')}" for name in MAY_CHANGE)
        raise UsageError(
            f"--resume takes its settings from {folder}: leave out {', '.join(refused)} (with it "
            f"go {allowed}, --quiet, --json)"
        )
    known = {f.name for f in fields(Settings)}
    stored = manifest.get("settings")
    if not isinstance(stored, dict) or not set(stored) <= known:
        raise NotComparableError(
            f"{folder} was made by another version of bench.run; resume it with that one"
        )
    values = {**stored, "max_time": changes.get("max_time")} if "rounds" in changes else stored
    return replace(Settings.of_stored(values), **changes, out=None)


def manifest_of(folder: Path) -> dict[str, Any]:
    """The manifest of a run that can be resumed. Raises UsageError where there is none."""
    if not (folder / MANIFEST).is_file():
        raise UsageError(f"--resume {folder}: it has no {MANIFEST}; name a run's folder")
    read(folder)
    manifest = read_json(folder / MANIFEST)
    if not isinstance(manifest, dict) or "plan_hash" not in manifest:
        raise UsageError(f"--resume {folder}: its {MANIFEST} tells of no plan; start the run anew")
    return manifest


def check_same(folder: Path, manifest: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise NotComparableError, with every difference, unless plan and environment are those of `manifest`.

    `now` has a manifest's `plan_hash`, `versions` and `environment`, and `ranks` where they are known.
    """
    then = {**manifest, "ranks": devices_of(manifest.get("ranks", []))}
    here = {**now, "ranks": devices_of(now["ranks"]) if "ranks" in now else then["ranks"]}
    found = [
        f"{d.name}: then {d.then}, now {d.now}"
        for d in differences(then, here, Question.RESUME)
        if d.blocking
    ]
    if found:
        raise NotComparableError(
            f"--resume {folder}: not the same run: {'; '.join(found)}; go where it began, or start anew"
        )


def devices_of(ranks: Sequence[Mapping[str, Any]]) -> str:
    """How many ranks there are, and on what they train."""
    return f"{len(ranks)} on {', '.join(sorted({str(rank.get('device_name')) for rank in ranks}))}"


def is_complete(state: State) -> bool:
    """Whether nothing is left to do: the run came to its end, and no case failed."""
    reached = all(
        p.skip_reason is not None or (i in state.settled and state.settled[i].status in ("ok", "skipped"))
        for i, p in enumerate(state.plan)
    )
    return state.ended in DONE and reached
