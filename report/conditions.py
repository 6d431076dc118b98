"""Shows the conditions of a run, from its manifest; what is not known shows nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..bench.conditions import variables_of
from ..bench.findings.cautions import said_load
from ..bench.findings.numbers import TIMES, count, duration, mib, plain, quantity, singular
from ..bench.findings.wording import link_name, samples_noun
from ..bench.manifest import Manifest, WorkloadCode
from ..bench.results.case_result import CaseResult, finite
from ..bench.settings import IMAGES
from .table import Heading, Table

_RANK_COLUMNS = ("rank", "host", "local_rank", "device", "device_name", "bound_cores", "link")


class Fact(NamedTuple):
    """One condition of a run; `code` marks text to be read letter by letter."""

    name: str
    value: str
    code: bool = False


class Group(NamedTuple):
    """Conditions that belong together."""

    title: str
    facts: tuple[Fact, ...]


def link(manifest: Manifest, cases: Sequence[CaseResult]) -> str:
    """Return the rate of the link between the hosts of a lab; empty on a real network."""
    known = dict.fromkeys((manifest.link or "", *(case.link for case in cases)))
    return ", ".join(link_name(rate) for rate in known if rate)


def groups(manifest: Manifest, cases: Sequence[CaseResult]) -> list[Group]:
    """Return the conditions in groups, without empty facts and groups."""
    timing, machine, git = manifest.timing, manifest.environment, manifest.git
    model, code = manifest.model, manifest.workload or WorkloadCode()
    flops = model.forward_flops_per_image
    first = cases[0] if cases else CaseResult.of({})
    each = first.units_per_sample
    gpus = Counter(
        ", ".join(filter(None, (gpu.name, quantity(gpu.memory_mib, "MiB")))) for gpu in machine.gpus or ()
    )
    made = (
        _group(
            "Run",
            {
                "name": manifest.name,
                "started (UTC)": manifest.created_utc,
                "total time": duration(timing.total_s),
                "start-up": duration(timing.startup_s),
                "share of time measured": quantity(timing.timed_share_pct, "%"),
                "load": said_load(manifest),
                "rounds": timing.rounds,
                "stopped because": timing.stopped_because,
                "seed": manifest.seed,
            },
            {"plan": manifest.plan_hash, "command": manifest.command or " ".join(manifest.argv)},
        ),
        _group("Settings", {k.replace("_", " "): v for k, v in manifest.settings.stored().items()}),
        _group(
            "Model",
            {
                "model": model.arch,
                "parameters": count(model.num_params),
                "gradients per step": mib(model.gradient_bytes),
                "forward pass": quantity(flops and flops / 1e9, f"GFLOP/{singular(samples_noun(first))}"),
                "throughput counts": ""
                if first.unit == IMAGES
                else first.unit + ("" if each == 1 else f", {each:,d} per sample"),
            },
        ),
        _group(
            "Machine",
            {
                "host": machine.host,
                "system": machine.os,
                "CPU": machine.cpu_model,
                "CPU cores": count(machine.num_cores),
                "memory": quantity(machine.memory_gib, "GiB"),
                "CPU governor": machine.governors,
                "transparent huge pages": machine.huge_pages,
                "container's CPU quota": quantity(finite(machine.cgroup.cpu_quota_cores), "cores"),
                "container's memory limit": quantity(finite(machine.cgroup.memory_limit_gib), "GiB"),
                "container's cores": machine.cgroup.cpuset,
                "GPUs": "; ".join(f"{how_many} {TIMES} {name}" for name, how_many in gpus.items() if name),
                "link between hosts": link(manifest, cases),
            },
        ),
        _group("Versions", {name.replace("_", " "): version for name, version in manifest.versions.items()}),
        _group(
            "Workload's code",
            {
                "workload": code.spec,
                "file": code.file,
                "repository": code.repository,
                "origin": code.origin,
                "commit": code.commit,
                "uncommitted changes": code.dirty,
            },
            {"SHA-256 of the file": code.sha256, "SHA-256 of all imported files": code.code_sha256},
        ),
        _group(
            "ddp-bench",
            {
                "version": manifest.ddp_bench.version,
                "commit": git.commit,
                "uncommitted changes": git.dirty,
            },
        ),
        _group("Environment variables", {}, variables_of(machine)),
    )
    return [group for group in made if group.facts]


def _group(title: str, facts: Mapping[str, Any], codes: Mapping[str, Any] | None = None) -> Group:
    """Leave out what is not known; `codes` are to be read letter by letter."""
    pairs = [(facts, False), (codes or {}, True)]
    shown = [Fact(name, plain(value), code) for told, code in pairs for name, value in told.items()]
    return Group(title, tuple(fact for fact in shown if fact.value))


def ranks(manifest: Manifest) -> Table | None:
    """Tabulate where every rank ran."""
    told = [{name: plain(getattr(rank, name)) for name in _RANK_COLUMNS} for rank in manifest.ranks]
    names = [name for name in _RANK_COLUMNS if any(rank[name] for rank in told)]
    columns = tuple(
        Heading(name.replace("_", " ").capitalize(), "number" if name in {"rank", "local_rank"} else "")
        for name in names
    )
    rows = tuple(tuple(link_name(r[name]) if name == "link" else r[name] for name in names) for r in told)
    return Table("Ranks", "Where every rank ran.", columns, rows) if names else None
