"""Parts of runs, made of the few fields that a test is about."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
from msgspec import structs

from ddp_bench.bench.machine.launch import Launch
from ddp_bench.bench.machine.manifest import SCHEMA_VERSION, Manifest, Model, parse_manifest
from ddp_bench.bench.plan.case import Case
from ddp_bench.bench.plan.resolve import fill_device_defaults
from ddp_bench.bench.plan.settings import Settings
from ddp_bench.bench.plan.sweep import Machine, expand_cases
from ddp_bench.bench.results.aggregate import make_case_rows
from ddp_bench.bench.results.blocks import Block
from ddp_bench.bench.results.case_result import read_case_results
from ddp_bench.bench.results.columns import BLOCKS, COMPARISONS, make_frame
from ddp_bench.bench.results.comparisons import Comparison, list_pairs
from ddp_bench.bench.results.comparisons import compare_pairs as compared_pairs
from ddp_bench.bench.results.round_times import RoundTimes, group_blocks
from ddp_bench.bench.results.run_folder import write_manifest, write_table
from ddp_bench.bench.results.tables import encode_csv, format_csv_value
from ddp_bench.bench.worker.facts import Inspected


def case_of(**settings: Any) -> Case:
    """DDP on two CPU cores, or what `settings` say."""
    usual = {"mode": "ddp", "num_devices": 2, "arch": "line", "image_size": None, "batch_per_device": 4}
    usual |= {"scaling": "weak", "precision": "fp32", "data": "device", "device_type": "cpu"}
    return Case(**usual | settings)


def torchrun(num_ranks: int) -> Launch:
    """What torchrun says on one machine to the first rank."""
    return Launch(0, num_ranks, 0, num_ranks, 29500)


def inspected(**fields: Any) -> Inspected:
    """Return what a worker tells of a model that is like the built-in ones."""
    usual = {"model": Model(arch="net"), "image_size": None, "unit": "images", "units_per_sample": 1}
    return Inspected(**usual | {"has_fused_optimizer": True, "takes_images": True} | fields)


def made_manifest(**fields: Any) -> Manifest:
    """A manifest of these fields, as JSON holds them."""
    return parse_manifest({"schema_version": SCHEMA_VERSION, **fields}, "made")


def resolved(*, device="cpu", devices=2, **stored):
    """Settings as they are stored, with the defaults of a machine of so many devices."""
    asked = Settings.from_stored(stored)
    return fill_device_defaults(asked, device_type=device, num_local_devices=devices)


def planned(settings, *, device="cpu", devices=2, arch="resnet18", image_size=64, **more):
    """The plan of these settings on that machine."""
    machine = Machine(device_type=device, devices_per_node=devices)
    return expand_cases(settings, machine, arch=arch, image_size=image_size, **more)


def block(case_id, round_index, step_ms, *, phase="timed", rank=0, steps=1, **more):
    """A block of equal steps, as a row of blocks.csv."""
    row = {"case_id": case_id, "phase": phase, "round": round_index, "position": 0, "rank": rank}
    row |= {"num_steps": steps, "block_ms": steps * step_ms}
    return row | {"steps_ms": " ".join([f"{step_ms:.7g}"] * steps), **more}


def cap_of(case: Case) -> str:
    """The bucket cap of a DDP case, as it is typed; empty of another mode."""
    return case.bucket_cap_mb if case.mode == "ddp" else ""


def compared(cases: pd.DataFrame, times: RoundTimes, margin: float = 0.05) -> list[Comparison]:
    """The comparisons of these cases by these blocks."""
    ok = [case for case in read_case_results(cases) if case.is_ok]
    units = {case.case_id: case.units_per_step for case in ok}
    return compared_pairs(list_pairs(ok), times.fit_steps(), units=units, margin=margin)


def new_run(folder: Path, **fields: Any) -> Path:
    """A new folder of a run, with a manifest of these fields."""
    folder.mkdir(parents=True)
    write_manifest(folder, made_manifest(**fields))
    return folder


def write_blocks(folder: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write a blocks.csv row by row."""
    lines = ([format_csv_value(row.get(column.name)) for column in BLOCKS] for row in rows)
    (folder / "blocks.csv").write_bytes(encode_csv([[column.name for column in BLOCKS], *lines]))


def block_of_rows(rows: Sequence[dict[str, Any]]) -> Block:
    """The block that these rows are."""
    (block,) = blocks_of(make_frame(rows, BLOCKS))
    return block


def blocks_of(frame: pd.DataFrame) -> Iterator[Block]:
    """The blocks of a blocks.csv, with what a loaded run leaves aside: hosts, single steps and details."""
    texts = frame[["host", "steps_ms", "detail"]].astype(object).where(frame.notna(), None)
    groups = texts.groupby([frame[name] for name in ("case_id", "phase", "round")])
    for block, (_, rows) in zip(group_blocks(frame), groups, strict=True):
        hosts, steps_ms, details = rows.to_numpy().T.tolist()
        yield structs.replace(block, hosts=hosts, steps_ms=steps_ms, details=details)


def times_of(frame: pd.DataFrame) -> RoundTimes:
    """The times of all blocks of a blocks.csv, with their details."""
    return RoundTimes(blocks_of(frame))


def write_tables(folder: Path, cases: Sequence[dict[str, Any]], blocks: Sequence[dict[str, Any]]) -> Path:
    """The tables of a run that has ended so; `cases` are rows without what follows from blocks."""
    times = times_of(make_frame(blocks, BLOCKS))
    comparisons = compared(make_case_rows(cases, times), times)
    write_blocks(folder, blocks)
    write_table(folder, "cases.csv", make_case_rows(cases, times, comparisons))
    write_table(folder, "comparisons.csv", make_frame([one.to_row() for one in comparisons], COMPARISONS))
    return folder


def recorded(blocks: Iterable[tuple[str, str, int]]) -> Any:
    """The record of a run in which nothing failed, of these blocks."""
    state = SimpleNamespace(settled={})
    return SimpleNamespace(list_measured=lambda: set(blocks), journal=SimpleNamespace(state=state))
