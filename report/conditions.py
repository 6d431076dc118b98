"""Shows the conditions of a run, from its manifest; what is not known shows nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from ddp_bench.bench.axes import STEP_DEFAULTS
from ddp_bench.bench.conditions import Question, conditions_of, variables_of
from ddp_bench.bench.findings.cautions import load_shares
from ddp_bench.bench.findings.numbers import TIMES, count, duration, finite, mib, plain, quantity, singular
from ddp_bench.bench.findings.wording import Row, link_name, samples_noun, text, unit_of, units_per_sample
from ddp_bench.bench.manifest import Git, Gpu, Manifest, Model, WorkloadCode
from ddp_bench.bench.settings import IMAGES
from ddp_bench.report.model import Fact, Group, Table, TableColumn

_RANK_COLUMNS = ("rank", "host", "local_rank", "device", "device_name", "bound_cores", "link")
_OF_THE_WORK = (
    *("device", "workload", "arch", "batch_size", "image_size", "scaling", "data", "precision"),
    *STEP_DEFAULTS,
)
"""Settings that say what trains; the others say which cases, and how long."""

_DIFFERENCES_NOTE = (
    "What was not the same and can change how fast a step is. Names, dates, and what evaluates the results "
    "are left out."
)
_SHORT_COMMIT = 7
_YES_OR_NO = {"True": "yes", "False": "no"}


def link(manifest: Manifest, cases: pd.DataFrame) -> str:
    """Return the rate of the link between the hosts of a lab; empty on a real network."""
    known = dict.fromkeys((manifest.link or "", *(text(cell) for cell in cases["link"])))
    return ", ".join(link_name(rate) for rate in known if rate)


def hosts(manifest: Manifest) -> list[str]:
    """Return every host of the run once; the one that wrote the results comes first."""
    names = (manifest.environment.host, *(rank.host for rank in manifest.ranks))
    return [name for name in dict.fromkeys(names) if name]


def groups(manifest: Manifest, cases: pd.DataFrame) -> tuple[Group, ...]:
    """Return the conditions in groups, without empty facts and groups."""
    made = (
        Group("Run", _run(manifest)),
        Group("Settings", _facts(manifest.settings.stored().items())),
        Group("Model", _model(manifest.model, cases)),
        Group("Machine", _machine(manifest, link(manifest, cases))),
        Group("Versions", _facts(manifest.versions.items())),
        Group("Workload's code", _workload_code(manifest.workload or WorkloadCode())),
        Group("ddp-bench", _own_code(manifest.ddp_bench.version, manifest.git)),
        Group("Environment variables", _facts(variables_of(manifest.environment).items(), code=True)),
    )
    return tuple(group for group in made if group.facts)


def ranks(manifest: Manifest) -> Table | None:
    """Tabulate where every rank ran."""
    told = [{name: plain(getattr(rank, name)) for name in _RANK_COLUMNS} for rank in manifest.ranks]
    names = [name for name in _RANK_COLUMNS if any(rank[name] for rank in told)]
    columns = tuple(
        TableColumn(name.replace("_", " ").capitalize(), "number" if name in {"rank", "local_rank"} else "")
        for name in names
    )
    rows = tuple(
        tuple(link_name(rank[name]) if name == "link" else rank[name] for name in names) for rank in told
    )
    return Table("Ranks", "Where every rank ran.", columns, rows) if names else None


def topology(manifest: Manifest) -> str:
    """Return the topology as the machine printed it; empty when unknown."""
    return (manifest.environment.topology or "").strip("\n")


def differences(titles: Sequence[str], manifests: Sequence[Manifest], links: Sequence[str]) -> Table | None:
    """Tabulate the conditions that differ between runs and matter; None where none does.

    They are the settings of the work, what the gate needs to be equal, and what it mentions, in this order.
    """
    by_run = [_that_matter(*pair) for pair in zip(manifests, links, strict=True)]
    names = dict.fromkeys(name for values in by_run for name in values)
    rows = tuple(
        (name, *shown) for name in names if len(set(shown := [values.get(name, "") for values in by_run])) > 1
    )
    columns = (TableColumn("Condition"), *(TableColumn(title) for title in titles))
    return Table("What differs between the runs", _DIFFERENCES_NOTE, columns, rows) if rows else None


def _that_matter(manifest: Manifest, link: str) -> dict[str, str]:
    """Return by name the conditions of a run that a difference in speed may come from."""
    settings = manifest.settings.stored()
    work = {name.replace("_", " "): plain(settings[name]) for name in _OF_THE_WORK}
    known = conditions_of(manifest)
    needed = [c for c in known if Question.GATE in c.needed]
    mentioned = [c for c in known if Question.GATE in c.mentioned]
    compared = {c.name: _YES_OR_NO.get(c.value, c.value) for c in (*needed, *mentioned)}
    code = manifest.workload or WorkloadCode()
    edited = " with uncommitted changes" if code.dirty else ""
    commit = f"{(code.commit or '')[:_SHORT_COMMIT]}{edited}"
    return {**work, "workload's commit": commit, "link between hosts": link, **compared}


def _run(manifest: Manifest) -> tuple[Fact, ...]:
    timing, command = manifest.timing, manifest.command or " ".join(manifest.argv)
    return (
        *_facts(
            (
                ("name", manifest.name),
                ("started (UTC)", manifest.created_utc),
                ("total time", duration(timing.total_s)),
                ("start-up", duration(timing.startup_s)),
                ("share of time measured", quantity(timing.timed_share_pct, "%")),
                ("cores used by others", _load(manifest)),
                ("rounds", timing.rounds),
                ("stopped because", timing.stopped_because),
                ("seed", manifest.seed),
            )
        ),
        *_facts((("plan", manifest.plan_hash), ("command", command)), code=True),
    )


def _load(manifest: Manifest) -> str:
    """Say how much of the ranks' cores others used during the rounds, of the machine with the most."""
    shares = load_shares(manifest)
    return f"{100 * shares.busy:.0f}%, other guests {100 * shares.steal:.0f}%" if shares else ""


def _model(model: Model, cases: pd.DataFrame) -> tuple[Fact, ...]:
    flops = model.forward_flops_per_image
    row: Row = cases.iloc[0] if len(cases) else {}
    unit, each = unit_of(row), units_per_sample(row)
    counted = "" if unit == IMAGES else unit if each == 1 else f"{unit}, {each:,d} per sample"
    return _facts(
        (
            ("model", model.arch),
            ("parameters", count(model.num_params)),
            ("gradients per step", mib(model.gradient_bytes)),
            (
                "forward pass",
                quantity(None if flops is None else flops / 1e9, f"GFLOP/{singular(samples_noun(row))}"),
            ),
            ("throughput counts", counted),
        )
    )


def _workload_code(code: WorkloadCode) -> tuple[Fact, ...]:
    names = {
        "spec": "workload",
        "file": "file",
        "repository": "repository",
        "origin": "origin",
        "commit": "commit",
        "dirty": "uncommitted changes",
    }
    hashes = {"sha256": "SHA-256 of the file", "code_sha256": "SHA-256 of all imported files"}
    return (
        *_facts((label, getattr(code, key)) for key, label in names.items()),
        *_facts(((label, getattr(code, key)) for key, label in hashes.items()), code=True),
    )


def _own_code(version: str | None, git: Git) -> tuple[Fact, ...]:
    return _facts((("version", version), ("commit", git.commit), ("uncommitted changes", git.dirty)))


def _machine(manifest: Manifest, link: str) -> tuple[Fact, ...]:
    machine, cgroup = manifest.environment, manifest.environment.cgroup
    return _facts(
        (
            ("host", machine.host),
            ("system", machine.os),
            ("CPU", machine.cpu_model),
            ("CPU cores", count(machine.num_cores)),
            ("memory", quantity(machine.memory_gib, "GiB")),
            ("CPU governor", machine.governors),
            ("transparent huge pages", machine.huge_pages),
            ("container's CPU quota", quantity(finite(cgroup.cpu_quota_cores), "cores")),
            ("container's memory limit", quantity(finite(cgroup.memory_limit_gib), "GiB")),
            ("container's cores", cgroup.cpuset),
            ("GPUs", _gpus(machine.gpus or ())),
            ("link between hosts", link),
        )
    )


def _gpus(gpus: Iterable[Gpu]) -> str:
    """Return `2 x NVIDIA H200, 143,771 MiB`, equal GPUs counted together."""
    names = (", ".join(filter(None, (gpu.name, quantity(gpu.memory_mib, "MiB")))) for gpu in gpus)
    return "; ".join(f"{how_many} {TIMES} {name}" for name, how_many in Counter(names).items() if name)


def _facts(pairs: Iterable[tuple[Any, Any]], *, code: bool = False) -> tuple[Fact, ...]:
    shown = ((str(name).replace("_", " ") if not code else str(name), plain(value)) for name, value in pairs)
    return tuple(Fact(name, value, code) for name, value in shown if value)
