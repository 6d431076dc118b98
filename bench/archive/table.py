"""The table of all published runs: `results/baselines/README.md`, written anew from the files beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from bench.conditions import gpus_of, part
from bench.errors import UsageError
from bench.findings.numbers import count, plain
from bench.findings.wording import link_name, own_devices, ranged, unit_of_cases, workload_parts
from bench.results.archive import SUFFIX
from bench.results.store import MANIFEST, RunData, load_run, write_output
from bench.text import markdown
from report.answer import heading

README = "README.md"

DOCTOR = "doctor"
"""Key of an archive's manifest: what `bench.doctor` said before the run, or null."""

INTRODUCTION = f"""# Published runs

Written by `python -m bench.archive --table`: do not edit. How to add one, and what a run must fulfil:
[docs/baselines.md](../../docs/baselines.md).

- A file `*{SUFFIX}` is an archive: a published run, to look at and to compare with. `python -m report
  FILE{SUFFIX}` makes its page, `load_run` of `bench` loads it, `python -m bench.gate FILE{SUFFIX} RUN`
  compares with it.
- A folder is the baseline that `python -m bench.gate auto` finds on its kind of machine.

A rate has its 95% interval. Rates of different machines do not compare; speed-ups do so better.
"""

COLUMNS = ("run", "what", "on", "single", "DDP, default", "speed-up", "rounds", "measured", "code", "doctor")


def write(root: Path) -> Path:
    """Write the table into `root` and return its path. Raises UsageError where a run there cannot be read."""
    if not root.is_dir():
        raise UsageError(f"{root} is no folder; call this where results/baselines is")
    content = page(root)
    write_output(root / README, lambda path: path.write_text(content, encoding="utf-8"), option="--table")
    return root / README


def page(root: Path) -> str:
    """The table of all archives and folders in `root`, by name, as Markdown."""
    archives = sorted(root.glob(f"*{SUFFIX}"))
    folders = sorted(path.parent for path in root.glob(f"*/{MANIFEST}"))
    parts = [INTRODUCTION]
    for title, paths in (("Archives", archives), ("Baselines of `bench.gate auto`", folders)):
        rows = [_row(load_run(path)) for path in paths]
        parts.append(f"## {title}\n\n{_table(rows)}" if rows else f"## {title}\n\nNone yet.\n")
    return "\n".join(parts)


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _row(run: RunData) -> list[str]:
    ok = own_devices(run.cases[run.cases["status"] == "ok"])
    ddp = ok[ok["mode"] == "ddp"]
    ddp = ddp[ddp["num_devices"] == ddp["num_devices"].max()]
    default = ddp[ddp["bucket_cap_mb"] == "default"]
    rate = f"{unit_of_cases(run.cases)}/s"
    name = run.path.name
    cells = (
        _what(run.cases),
        _on(run),
        *_rated(ok[ok["mode"] == "single"], rate),
        *_rated(default, rate, on=True),
        ranged(default.iloc[0], "speedup") if len(default) else "",
        count(float(run.cases["num_rounds"].fillna(0).max())),
        plain(run.manifest.get("created_utc"))[:10],
        _code(run),
        _doctor(run),
    )
    return [f"[{markdown(name)}]({name})", *(markdown(cell) for cell in cells)]


def _what(cases: pd.DataFrame) -> str:
    row = cases.iloc[0].to_dict()
    return ", ".join((heading(cases), *(part for part in workload_parts(row, _batch(row))[1:] if part)))


def _batch(row: dict[Any, Any]) -> float | None:
    return None if pd.isna(row["batch_per_device"]) else float(row["batch_per_device"])


def _on(run: RunData) -> str:
    environment = part(run.manifest, "environment")
    gpus = [plain(gpu.get("name")) for gpu in gpus_of(environment) or () if isinstance(gpu, dict)]
    on_cpu = bool((run.cases["device_type"] == "cpu").any())
    parts = (
        ", ".join(dict.fromkeys(gpus)) if gpus and not on_cpu else plain(environment.get("cpu_model")),
        f"link {link_name(plain(run.manifest.get('link')))}" if run.manifest.get("link") else "",
        f"torch {plain(part(run.manifest, 'versions').get('torch'))}",
        "CPU cores stand in for GPUs" if on_cpu else "",
    )
    return ", ".join(part for part in parts if part)


def _rated(found: pd.DataFrame, rate: str, *, on: bool = False) -> list[str]:
    """The rate of the first of these cases, as a list of one cell; `on` how many devices."""
    if found.empty:
        return [""]
    row = found.iloc[0]
    return [ranged(row, "images_per_s", rate) + (f" on {int(row['num_devices'])}" if on else "")]


def _code(run: RunData) -> str:
    git = part(run.manifest, "git")
    version = plain(part(run.manifest, "ddp_bench").get("version"))
    code = plain(git.get("commit"))[:8] or version or "unknown"
    return f"{code}, with uncommitted changes" if git.get("dirty") is True else code


def _doctor(run: RunData) -> str:
    found = part(run.manifest, DOCTOR)
    if not found:
        return "not asked"
    cautions = found.get("cautions")
    return plain(found.get("status")) + (f": {plain(cautions)}" if cautions else "")
