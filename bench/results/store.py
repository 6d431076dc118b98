"""A run as its folder or archive holds it, loaded with types, and earlier runs beside it."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd

from ..common.errors import UsageError
from ..common.scratch import make_scratch_folder
from ..machine.conditions import describe_machine_kind
from ..machine.manifest import MANIFEST, Manifest, parse_manifest
from ..plan.modes import RANK_PER_DEVICE
from ..plan.sweep import hash_plan
from ..stats.fit import FittedSteps
from .aggregate import LogTables
from .archive import open_run_folder
from .case_columns import FILES
from .case_result import CaseResult, read_case_results
from .columns import make_frame
from .comparisons import Comparison, read_comparisons
from .disk import read_json
from .journal import JOURNAL, State, has_ended, read, read_blocks
from .published import Scaling, read_published
from .round_times import RoundTimes, group_blocks
from .run_folder import write_manifest
from .tables import load_blocks, read_table, report_read_errors


@dataclass(frozen=True)
class RunData:
    """A loaded run; frames hold exactly the columns of `case_columns.py`, missing values as NA."""

    path: Path
    manifest: Manifest
    cases: pd.DataFrame
    blocks: pd.DataFrame
    buckets: pd.DataFrame
    allreduce: pd.DataFrame
    comparisons: pd.DataFrame = field(default_factory=lambda: make_frame([], FILES["comparisons.csv"]))
    resumable: bool = True
    """True where its log is there; baselines and archives have none."""
    from_log: bool = False
    """True where its tables are made of its log, for it has not ended."""
    published: tuple[Scaling, ...] = field(default_factory=read_published, repr=False)
    """Efficiencies of others, to hold those of this run against."""

    @cached_property
    def times(self) -> RoundTimes:
        """Its blocks as numbers, without the single steps and what else they tell in detail."""
        return RoundTimes(group_blocks(self.blocks))

    @cached_property
    def typical(self) -> FittedSteps:
        """The fit of its blocks."""
        return self.times.fit_steps()

    @cached_property
    def results(self) -> list[CaseResult]:
        """Its cases, as typed records."""
        return read_case_results(self.cases)

    @cached_property
    def compared(self) -> list[Comparison]:
        """Comparisons of the run, as typed records."""
        return read_comparisons(self.comparisons)

    @cached_property
    def earlier(self) -> list[tuple[list[CaseResult], list[Comparison]]]:
        """Cases and comparisons of earlier runs that lie beside it: see `load_earlier_runs`."""
        return load_earlier_runs(self.path, self.manifest)


MAX_EARLIER = 20
"""Runs of the same plan that are looked at, the latest ones."""


def load_earlier_runs(path: Path, manifest: Manifest) -> list[tuple[list[CaseResult], list[Comparison]]]:
    """Cases and comparisons of what the same kind of machine measured of the same plan, in folders beside it.

    Those of the same owner that began before this run and have their tables, oldest first; what cannot be
    read is passed over. Runs in turns and archives have none.
    """
    if manifest.interleaved_id or manifest.plan_hash is None or not path.is_dir():
        return []
    kind, found = (manifest.plan_hash, describe_machine_kind(manifest)), []
    for folder in list_neighbours(path):
        with suppress_errors():
            other = read_manifest(folder)
            is_alike = (other.plan_hash, describe_machine_kind(other)) == kind
            if is_alike and (begun := other.created_utc or "") < (manifest.created_utc or ""):
                cases, compared = (read_table(folder / n, FILES[n]) for n in ("cases.csv", "comparisons.csv"))
                if not cases.empty:  # it was killed
                    found.append((begun, (read_case_results(cases), read_comparisons(compared))))
    return [run for _, run in sorted(found, key=lambda one: one[0])[-MAX_EARLIER:]]


def list_neighbours(path: Path) -> list[Path]:
    """List the folders beside a run's that have the same owner; none where that cannot be told."""
    with suppress_errors():
        owner = path.stat().st_uid
        beside = sorted(path.absolute().parent.iterdir())
        return [one for one in beside if is_folder_of(one, owner) and not one.samefile(path)]
    return []


def is_folder_of(path: Path, owner: int) -> bool:
    """Tell whether `path` is a folder, not a link to one, of the user with the number `owner`."""
    with suppress_errors():
        found = path.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == owner
    return False


def suppress_errors() -> contextlib.AbstractContextManager[None]:
    """Suppress whatever a folder raises that this run only looks at: it may hold anything, of anyone."""
    return contextlib.suppress(Exception)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a run's folder. Raises UsageError if missing, damaged or of another schema."""
    path = folder / MANIFEST
    if not os.path.isfile(path):  # noqa: PTH113 - Path's raises where a name is too long
        why = f"it does not exist, or has no {MANIFEST}"
        raise UsageError(f"{folder} is not a results folder: {why}; name a run's folder")
    return parse_manifest(read_json(path), path)


def load_run(path: Path) -> RunData:
    """Read a results folder or an archive. Raises UsageError where it is neither, or of another schema.

    The tables of a run that has not ended are made of its log, which is ahead of those in its folder.
    """
    with open_run_folder(path) as folder:
        manifest = read_manifest(folder)
        if (folder / JOURNAL).is_file() and not has_ended(folder):
            state = read(folder, with_times=True)
            # Cases of another version have other names: only that version makes its tables.
            if hash_plan(state.plan) == manifest.plan_hash:
                return replace(_load_from_log(folder, manifest, state), path=path)
        return replace(load_tables(folder), path=path)


def _load_from_log(folder: Path, manifest: Manifest, state: State) -> RunData:
    """Load the tables that are made of the log in `folder`, in a folder of their own."""
    log = folder / JOURNAL
    with report_read_errors(log), make_scratch_folder() as made:
        write_manifest(made, manifest)
        # A run that measures goes on writing its log.
        LogTables(manifest, state).write(made, islice(read_blocks(folder), state.num_blocks))
        try:
            return replace(load_tables(made), resumable=True, from_log=True)
        except UsageError as error:
            error.args = (str(error).replace(f"{made}/", f"{log}: "),)
            raise


def load_tables(path: Path) -> RunData:
    """Read a results folder whose tables are whole. Raises UsageError as `load_run`."""
    manifest = read_manifest(path)
    if not os.path.lexists(path / "cases.csv"):
        raise UsageError(
            f"{path / 'cases.csv'} is missing; restore the file, or finish the run with --resume"
        )
    tables: dict[str, Any] = {
        Path(n).stem: read_table(path / n, FILES[n]) for n in FILES if n != "blocks.csv"
    }
    cases = tables["cases"]
    if cases.empty:
        raise UsageError(f"{path / 'cases.csv'} holds no case; restore the file, or measure again")
    twice = cases["case_id"].duplicated()
    if twice.any():
        name = cases["case_id"][twice].iloc[0]
        raise UsageError(f"{path / 'cases.csv'}: a case_id stands twice ({name}); restore the file")
    world_size = cases["num_devices"].where(cases["mode"].isin(RANK_PER_DEVICE), 1).fillna(1)
    blocks = load_blocks(path / "blocks.csv", dict(zip(cases["case_id"], world_size, strict=True)))
    return RunData(path, manifest, blocks=blocks, resumable=(path / JOURNAL).is_file(), **tables)
