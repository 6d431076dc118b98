"""A results folder as the gate may use it: read, and refused where its files do not hold together.

Figures come from blocks.csv; cases.csv says what the cases are, how they ended and their peak memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from ddp_bench.bench.axes import DDP_AXES, DDP_DEFAULTS, PIPELINE_AXES, STEP_DEFAULTS
from ddp_bench.bench.conditions import UNKNOWN, Difference, Question, differences
from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.findings.numbers import count, finite, mib, rounded
from ddp_bench.bench.manifest import Manifest
from ddp_bench.bench.results.aggregate import (
    fits_of_cases,
    images_per_s_by_round,
    step_ms_by_round,
    typical_of,
    units_per_step,
)
from ddp_bench.bench.results.archive import opened
from ddp_bench.bench.results.comparisons import compile_mode
from ddp_bench.bench.results.round_times import ByRound, RoundTimes
from ddp_bench.bench.results.schema import IDENTITY, records
from ddp_bench.bench.results.store import RunData, load_run
from ddp_bench.bench.results.tables import readable
from ddp_bench.bench.settings import IMAGES, RANK_PER_DEVICE
from ddp_bench.bench.stats import Interval

SWEPT = ("mode", "num_devices", "compile", *DDP_AXES, *PIPELINE_AXES)
"""Columns that may differ between the cases of one run; together they name a case within it."""

DEFAULTS = STEP_DEFAULTS | DDP_DEFAULTS

PLANNED = tuple(
    column.name
    for column in IDENTITY
    if column.name not in {*SWEPT, "case_id", "status", "reason", "global_batch", "device_name", "link"}
)
"""Settings and places of a case, known of unmeasured ones too; global_batch follows from them."""

SEEN = ("device_name", "link")
"""Known only of cases that were measured."""

FITTED = ("images_per_s", "speedup", "efficiency", "exposed_comm_ms")
"""Columns that a run fits over all its rounds, with intervals."""

NEEDED = {
    "cases.csv": (
        *("case_id", "status", "mode", "num_devices", "batch_per_device", "global_batch", "accumulate"),
        *("images_per_s", "peak_mem_mib", "num_rounds", "num_blocks"),
    ),
    "blocks.csv": ("case_id", "phase", "round", "rank", "num_steps", "block_ms", "steps_ms"),
}
"""Columns without which there is nothing to compare; an archive has not all the others."""

_MOST_HEADER_BYTES = 2**16

OF_THE_MODEL = ("arch", "model parameters", "gradient bytes")
"""Conditions that a change of the model changes."""

RESTORE = "restore the folder or measure again"
"""The tail of an error message about a folder's files."""


@dataclass(frozen=True, kw_only=True)
class GateCase:
    """One row of cases.csv with its rounds in blocks.csv."""

    case_id: str
    row: Mapping[str, str]
    """Identity columns as text, the empty ones left out."""
    images_per_s: ByRound
    speedup: ByRound
    """Within-round ratio to `single`; empty for `single` itself."""
    exposed_comm_ms: ByRound
    peak_mem_mib: float | None
    fitted: Mapping[str, Interval] = field(default_factory=dict)
    """The repeated metrics as `cases.csv` has them, of one fit over all rounds, by column."""

    @property
    def ok(self) -> bool:
        """Whether the case was measured."""
        return self.row["status"] == "ok"

    @property
    def unit(self) -> str:
        return self.row.get("unit", IMAGES)

    @property
    def key(self) -> tuple[str, ...]:
        """What names the case within its run; a setting that its ddp-bench lacked had PyTorch's default."""
        return tuple(self.row.get(name, str(DEFAULTS.get(name, ""))) for name in SWEPT)


@dataclass(frozen=True)
class GateRun:
    """A run that passed every check."""

    path: Path
    manifest: Manifest
    cases: tuple[GateCase, ...]


def read_run(path: Path) -> GateRun:
    """Load and check a results folder or an archive. Raises UsageError that names what is wrong with it."""
    with opened(path) as folder:
        run = load_run(folder)
        for name, columns in NEEDED.items():
            _check_text(folder / name, columns)
        return checked(replace(run, path=path))


def checked(run: RunData) -> GateRun:
    """The cases of a loaded run. Raises UsageError where cases.csv or blocks.csv is damaged or cut off."""
    cases, blocks = run.cases, run.blocks
    where = str(run.path)
    _check_cases(where, cases)
    used = blocks[blocks["phase"].isin(["timed", "no_sync"])]
    _check_blocks(where, cases, blocks, used)
    if not run.longest_only:
        _check_ranks(where, cases, used)
    units = units_per_step(cases)
    throughput = images_per_s_by_round(used, units)
    timed, no_sync = step_ms_by_round(used, "timed"), step_ms_by_round(used, "no_sync")
    rows = records(cases)
    singles = {compile_mode(row): str(row["case_id"]) for row in rows if row["mode"] == "single"}
    with readable(run.path / "blocks.csv"):
        fits = fits_of_cases(rows, typical_of(RoundTimes.of(blocks.assign(detail=None))), units)
    visits = blocks.drop_duplicates(["case_id", "phase", "round"])["case_id"].value_counts()
    made = []
    for row in rows:
        case_id = str(row["case_id"])
        rates = throughput.get(case_id, {})
        single = throughput.get(singles.get(compile_mode(row), ""), {})
        local = no_sync.get(case_id, {})
        case = GateCase(
            case_id=case_id,
            row={c.name: str(row[c.name]) for c in IDENTITY if not pd.isna(row[c.name])},
            images_per_s=rates,
            speedup={}
            if row["mode"] == "single"
            else {r: rates[r] / single[r] for r in rates if r in single},
            exposed_comm_ms={r: ms - local[r] for r, ms in timed.get(case_id, {}).items() if r in local},
            peak_mem_mib=finite(row["peak_mem_mib"]),
            fitted={name: found for name in FITTED if (found := fits.get(case_id, {}).get(name)) is not None},
        )
        if case.ok:
            _check_rounds(where, case, row, int(visits.get(case_id, 0)))
        made.append(case)
    return GateRun(run.path, run.manifest, tuple(made))


def _check_text(path: Path, columns: Iterable[str]) -> None:
    try:
        with path.open("rb") as file:
            header = file.readline(_MOST_HEADER_BYTES).decode("utf-8-sig", "replace").strip().split(",")
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 1, 0))
            last = file.read(1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; {RESTORE}") from None
    if last != b"\n":
        raise UsageError(f"{path} is empty or cut off in the middle of a line; {RESTORE}")
    missing = [name for name in columns if name not in header]
    if missing:
        raise UsageError(f"{path} lacks the column {missing[0]}; {RESTORE}")


def _check_cases(where: str, cases: pd.DataFrame) -> None:
    def refuse(bad: pd.Series[bool], what: str) -> None:
        if bad.any():
            first = str(cases["case_id"][bad].iloc[0])
            raise UsageError(f"{where}: cases.csv: {what} (case {first!r}); {RESTORE}")

    if cases.empty:
        raise UsageError(f"{where}: cases.csv holds no case; {RESTORE}")
    refuse(~cases["case_id"].fillna("").map(lambda i: bool(re.fullmatch(r"[\w.-]+", i))), "invalid case_id")
    refuse(cases[list(SWEPT)].astype(object).fillna("").duplicated(), "the same settings stand twice")
    ok = cases["status"] == "ok"
    for name in ("num_devices", "accumulate", "batch_per_device", "global_batch"):
        refuse(~(cases[name].fillna(0) >= 1), f"{name} is not above 0")
    product = cases["batch_per_device"] * cases["num_devices"] * cases["accumulate"]
    refuse(product != cases["global_batch"], "global_batch is not batch x devices x accumulate")
    refuse(ok & cases["images_per_s"].isna(), "images_per_s is not a number above 0")


def _check_blocks(where: str, cases: pd.DataFrame, blocks: pd.DataFrame, used: pd.DataFrame) -> None:
    def refuse(bad: Any, what: str) -> None:
        if bool(bad.any()):
            raise UsageError(f"{where}: blocks.csv: {what}; {RESTORE}")

    refuse(~blocks["case_id"].isin(cases["case_id"]), "blocks of a case that cases.csv does not hold")
    refuse(used["steps_ms"].fillna("").str.split().map(len) != used["num_steps"], "steps_ms is incomplete")
    refuse(used.duplicated(["case_id", "phase", "round", "rank"]), "a block stands twice")


def _check_ranks(where: str, cases: pd.DataFrame, used: pd.DataFrame) -> None:
    ok = cases[cases["status"] == "ok"]
    ranks = ok["num_devices"].where(ok["mode"].isin(RANK_PER_DEVICE), 1)
    wanted = dict(zip(ok["case_id"], ranks, strict=True))
    for keys, found in used.groupby(["case_id", "phase", "round"])["rank"]:
        case_id, phase, round_index = keys if isinstance(keys, tuple) else (keys, "", "")
        if case_id in wanted and set(found) != set(range(int(wanted[case_id]))):
            raise UsageError(
                f"{where}: blocks.csv lacks ranks of {case_id} ({phase}, round {round_index}); {RESTORE}"
            )


def _check_rounds(where: str, case: GateCase, row: Mapping[Any, Any], num_blocks: int) -> None:
    """A file cut off between two lines has rounds that stop early."""
    for what, found in (("blocks", num_blocks), ("rounds", len(case.images_per_s))):
        told = row[f"num_{what}"]
        if pd.isna(told) or told != found:
            raise UsageError(
                f"{where}: blocks.csv has {found} {what} of {case.case_id}, cases.csv has num_{what} {told}; "
                f"{RESTORE}"
            )


def run_differences(
    baseline: GateRun,
    candidate: GateRun,
    pairs: Iterable[tuple[GateCase, GateCase]],
    *,
    allow_changed_model: bool = False,
) -> tuple[Difference, ...]:
    """Conditions and settings that differ, blocking ones first; a changed model blocks unless allowed."""
    found = _between_cases(list(pairs))
    found += differences(baseline.manifest, candidate.manifest, Question.GATE)
    if allow_changed_model:
        found = [_allowed(difference) for difference in found]
    return tuple(sorted(found, key=lambda difference: not difference.blocking))


def _allowed(difference: Difference) -> Difference:
    known = UNKNOWN not in (difference.then, difference.now)
    return replace(difference, blocking=False) if difference.name in OF_THE_MODEL and known else difference


def model_change(then: Manifest, now: Manifest) -> str:
    """Say how the model of two manifests differs: its name, parameters and gradient bytes; else empty."""
    models = then.model, now.model
    names = [model.arch for model in models]
    said = [f"{names[0]} \N{RIGHTWARDS ARROW} {names[1]}"] if all(names) and names[0] != names[1] else []
    if changed := _changed([model.num_params for model in models], rounded, count):
        said.append(f"{changed[0]} parameters ({changed[1]})")
    elif changed := _changed(
        [model.gradient_bytes for model in models], mib, lambda value: f"{count(value)} bytes"
    ):
        said.append(f"gradients of {changed[0]} ({changed[1]})")
    return f"model changed: {', '.join(said)}" if said else ""


def _changed(
    values: Sequence[float | None], short: Callable[[float], str], exact: Callable[[float], str]
) -> tuple[str, str] | None:
    """Two figures with an arrow, and the change in percent; None where they are equal or unknown."""
    before, after = values
    if before is None or after is None or before == after or before <= 0:
        return None
    change = after / before - 1
    percent = f"{100 * change:+.1f}%" if abs(change) >= 5e-4 else f"{after - before:+,.0f}"
    written = exact if short(before) == short(after) else short
    return f"{written(before)} \N{RIGHTWARDS ARROW} {written(after)}", percent


def _between_cases(pairs: list[tuple[GateCase, GateCase]]) -> list[Difference]:
    found = []
    for name in (*PLANNED, *SEEN):
        changed = [
            (a.row.get(name, "none"), b.row.get(name, "none"))
            for a, b in pairs
            if a.row.get(name) != b.row.get(name) and (name in PLANNED or (a.ok and b.ok))
        ]
        if changed:
            left, right = (", ".join(dict.fromkeys(side)) for side in zip(*changed, strict=True))
            found.append(Difference(name, left, right, blocking=True))
    return found
