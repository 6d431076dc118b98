"""Shows the conditions of a run, from its manifest; a missing key shows nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from bench.conditions import Manifest, gpus_of, part
from bench.findings.wording import TIMES, count, duration, finite, link_name, mib, plain, quantity, text
from bench.results.schema import READS
from report.model import Fact, Group, Table, TableColumn

_RANK_COLUMNS = ("rank", "host", "local_rank", "device", "device_name", "bound_cores", "link")
_DIFFER_FIRST = {
    title: place
    for place, title in enumerate(
        ("Settings", "Model", "Machine", "Versions", "Source", "Environment variables")
    )
}
_TRIVIAL = {
    ("Run", "name"),
    ("Run", "started (UTC)"),
    ("Run", "command"),
    ("Settings", "name"),
    ("Settings", "out"),
}
"""Conditions that tell runs apart and say nothing about their numbers."""
_DIFFERENCES_NOTE = (
    "Conditions that are not the same in every run; read the numbers below with these in mind."
)


def link(manifest: Manifest, cases: pd.DataFrame) -> str:
    """Return the rate of the link between the hosts of a lab; empty on a real network."""
    known = dict.fromkeys((plain(manifest.get("link")), *(text(cell) for cell in cases["link"])))
    return ", ".join(link_name(rate) for rate in known if rate)


def hosts(manifest: Manifest) -> list[str]:
    """Return every host of the run once; the one that wrote the results comes first."""
    entries = manifest.get("ranks")
    ranks = entries if isinstance(entries, list) else []
    own = plain(part(manifest, "environment").get("host"))
    others = (plain(entry.get("host")) for entry in ranks if isinstance(entry, dict))
    return [name for name in dict.fromkeys((own, *others)) if name]


def groups(manifest: Manifest, *, link: str = "") -> tuple[Group, ...]:
    """Return the conditions in groups, without empty facts and groups."""
    environment = part(manifest, "environment")
    made = (
        Group("Run", _run(manifest)),
        Group("Settings", _facts(part(manifest, "settings").items())),
        Group("Model", _model(part(manifest, "model"))),
        Group("Machine", _machine(manifest, environment, link)),
        Group("Versions", _facts(part(manifest, "versions").items())),
        Group("Source", _facts(part(manifest, "git").items())),
        Group("Environment variables", _facts(part(environment, "env").items(), code=True)),
    )
    return tuple(group for group in made if group.facts)


def ranks(manifest: Manifest) -> Table | None:
    """Tabulate where every rank ran."""
    entries = manifest.get("ranks")
    known = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    names = [name for name in _RANK_COLUMNS if any(plain(entry.get(name)) for entry in known)]
    columns = tuple(
        TableColumn(name.replace("_", " ").capitalize(), "number" if name in {"rank", "local_rank"} else "")
        for name in names
    )
    rows = tuple(
        tuple(
            link_name(cell) if name == "link" else cell for name in names for cell in [plain(entry.get(name))]
        )
        for entry in known
    )
    return Table("Ranks", "Where every rank ran.", columns, rows) if names else None


def topology(manifest: Manifest) -> str:
    """Return the topology as the machine printed it; empty when unknown."""
    return plain(part(manifest, "environment").get("topology")).strip("\n")


def differences(titles: Sequence[str], conditions: Sequence[tuple[Group, ...]]) -> Table | None:
    """Tabulate the conditions that differ between runs; None where nothing differs."""
    by_run = [{(g.title, f.name): f.value for g in groups for f in g.facts} for groups in conditions]
    known = dict.fromkeys(key for values in by_run for key in values)
    keys = sorted(
        known.keys() - _TRIVIAL, key=lambda key: (_DIFFER_FIRST.get(key[0], len(_DIFFER_FIRST)), *key)
    )
    rows = tuple(
        (f"{group}: {name}", *shown)
        for group, name in keys
        if len(set(shown := [values.get((group, name), "") for values in by_run])) > 1
    )
    columns = (TableColumn("Condition"), *(TableColumn(title) for title in titles))
    return Table("What differs between the runs", _DIFFERENCES_NOTE, columns, rows) if rows else None


def _run(manifest: Manifest) -> tuple[Fact, ...]:
    timing = part(manifest, "timing")
    argv = manifest.get("argv")
    command = plain(manifest.get("command")) or (" ".join(map(plain, argv)) if isinstance(argv, list) else "")
    return (
        *_facts(
            (
                ("name", manifest.get("name")),
                ("started (UTC)", manifest.get("created_utc")),
                ("total time", duration(finite(timing.get("total_s")))),
                ("start-up", duration(finite(timing.get("startup_s")))),
                ("share of time measured", quantity(finite(timing.get("timed_share_pct")), "%")),
                ("rounds", timing.get("rounds")),
                ("stopped because", timing.get("stopped_because")),
                ("seed", manifest.get("seed")),
                ("results schema", _schema(manifest)),
            )
        ),
        *_facts((("plan", manifest.get("plan_hash")), ("command", command)), code=True),
    )


def _schema(manifest: Manifest) -> str:
    version = plain(manifest.get("schema_version"))
    return f"{version} (this version {READS})" if version else ""


def _model(model: Manifest) -> tuple[Fact, ...]:
    flops = finite(model.get("forward_flops_per_image"))
    return _facts(
        (
            ("model", model.get("arch")),
            ("parameters", count(finite(model.get("num_params")))),
            ("gradients per step", mib(finite(model.get("gradient_bytes")))),
            ("forward pass", quantity(None if flops is None else flops / 1e9, "GFLOP/image")),
        )
    )


def _machine(manifest: Manifest, environment: Manifest, link: str) -> tuple[Fact, ...]:
    cgroup = part(environment, "cgroup")
    return _facts(
        (
            ("host", environment.get("host")),
            ("system", environment.get("os")),
            ("CPU", environment.get("cpu_model")),
            ("CPU cores", count(finite(environment.get("num_cores")))),
            ("memory", quantity(finite(environment.get("memory_gib")), "GiB")),
            ("CPU governor", environment.get("governors")),
            ("transparent huge pages", environment.get("huge_pages")),
            ("container's CPU quota", quantity(finite(cgroup.get("cpu_quota_cores")), "cores")),
            ("container's memory limit", quantity(finite(cgroup.get("memory_limit_gib")), "GiB")),
            ("container's cores", cgroup.get("cpuset")),
            ("GPUs", _gpus(gpus_of(environment) or ())),
            ("link between hosts", link),
            ("devices shared", manifest.get("oversubscription")),
        )
    )


def _gpus(gpus: Iterable[Any]) -> str:
    """Return `2 x NVIDIA H200, 143,771 MiB`, equal GPUs counted together."""
    known = [gpu for gpu in gpus if isinstance(gpu, dict)]
    names = (
        ", ".join(
            part for part in (plain(gpu.get("name")), quantity(finite(gpu.get("memory_mib")), "MiB")) if part
        )
        for gpu in known
    )
    return "; ".join(f"{how_many} {TIMES} {name}" for name, how_many in Counter(names).items() if name)


def _facts(pairs: Iterable[tuple[Any, Any]], *, code: bool = False) -> tuple[Fact, ...]:
    shown = ((str(name).replace("_", " ") if not code else str(name), plain(value)) for name, value in pairs)
    return tuple(Fact(name, value, code) for name, value in shown if value)
