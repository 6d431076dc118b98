"""Workload, machine, conditions and end of a run; what is not known is not said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ..bench.common.cli import get_message_prefix
from ..bench.common.numbers import (
    format_count,
    format_duration,
    format_integer,
    format_mib,
    format_quantity,
    format_rough_duration,
    format_setting,
    make_singular,
)
from ..bench.common.text import begin_sentence
from ..bench.findings.answers import select_headline
from ..bench.findings.verdicts import Verdict
from ..bench.findings.wording import (
    describe_stand_ins,
    name_device,
    name_link,
    name_model,
    name_samples,
    name_workload_parts,
)
from ..bench.machine.conditions import NONE, UNKNOWN, list_conditions
from ..bench.machine.load import describe_load
from ..bench.machine.manifest import Manifest, WorkloadCode
from ..bench.page.page import Heading, Table
from ..bench.plan.buckets import BucketLayout
from ..bench.plan.settings import IMAGES, format_value
from ..bench.results.case_result import CaseResult
from ..bench.results.comparisons import select_unshared
from ..bench.results.store import RunData
from .cases import WorkloadCases

_MAX_HOSTS = 4
_RANK_COLUMNS = ("rank", "host", "local_rank", "device", "device_name", "bound_cores", "link")


def write_heading(cases: Sequence[CaseResult]) -> str:
    """Name what was measured on what: `ResNet-18, 1\N{EN DASH}4 CPU cores`."""
    shown = [case for case in cases if case.is_ok] or cases
    names = " and ".join(dict.fromkeys(name_model(case.arch) for case in shown if case.arch))
    own = [case for case in shown if not case.oversubscribed] or shown
    counts = [case.num_devices for case in own if case.num_devices]
    noun = " or ".join(dict.fromkeys(name_device(case.device_type) for case in shown if case.device_type))
    if not counts or not noun:
        return names
    low, high = min(counts), max(counts)
    where = format_count(low, noun) if low == high else f"{low}\N{EN DASH}{format_count(high, noun)}"
    num_hosts = max(case.num_nodes for case in shown)
    where += f" of {num_hosts:,d} hosts" if num_hosts > 1 else ""
    return ", ".join(filter(None, (names, where)))


def describe_status(manifest: Manifest, cases: Sequence[CaseResult], verdicts: Sequence[Verdict]) -> str:
    """Say in one line how the run ended and how much of its questions it answered."""
    why = manifest.timing.stopped_because or ""
    num_skipped = sum(case.status == "skipped" for case in cases)
    answered = sum(not verdict.is_open for verdict in verdicts)
    ok = [case for case in cases if case.is_ok]
    if not ok:
        said = "nothing measured"
    elif not verdicts:
        shared = any(case.shares_gpu for case in ok)
        said = "it works, but shared GPUs tell nothing about speed" if shared else "nothing to compare"
    elif not answered:
        said = "undecided"
    else:
        every = answered == len(verdicts)
        said = (
            "every question answered"
            if every
            else f"{answered} of {format_count(len(verdicts), 'question')} answered"
        )
    rounds = max((case.num_rounds for case in ok), default=0)
    took = manifest.timing.measuring_s
    interrupted = why == "interrupted"
    comparable = sum(not case.is_stand_in for case in select_unshared(ok))
    of_these = f", {comparable:,d} comparable" if 0 < comparable < len(ok) else ""
    parts = (
        f"Interrupted, {said}" if interrupted else begin_sentence(said),
        f"{len(ok):,d} of {format_count(len(cases), 'case')} measured{of_these}",
        f"{num_skipped:,d} skipped" if num_skipped else "",
        format_count(rounds, "round") if rounds else "",
        f"{format_rough_duration(took)} of measuring" if took else "",
        f"end of measuring: {why}" if why and not interrupted else "",
    )
    return " · ".join(part for part in parts if part)


def write_subtitle(run: RunData, measured: Sequence[WorkloadCases], title: str) -> list[list[str]]:
    """Say what trained, on from the heading; and how and where: data, processor, backend, hosts, time."""
    manifest, cases = run.manifest, run.results
    trained = name_workload_parts(measured[0].cases[0]) if len(measured) == 1 else []
    in_setup = [format_count(len(measured), "workload")] if measured and not trained else []
    if trained:
        in_setup = [part for part in trained if part.endswith(" scaling")]
        in_setup.append(_name_source(measured[0].cases[0]))
    machine = manifest.environment
    named = dict.fromkeys(case.device_name for case in cases)
    if all(case.device_type == "cpu" for case in cases) and machine.cpu_model:
        cores = f", {format_count(machine.num_cores, 'core')}" if machine.num_cores else ""
        named = {f"{machine.cpu_model}{cores}": None}
    hosts = list(dict.fromkeys(filter(None, (machine.host, *(rank.host for rank in manifest.ranks)))))
    more = f" and {format_count(len(hosts) - _MAX_HOSTS, 'other')}" if len(hosts) > _MAX_HOSTS else ""
    torch = manifest.versions.get("torch") or max(case.torch_version for case in cases)
    sent = BucketLayout.from_cell(next((case.bucket_bytes for case in cases if case.bucket_bytes), None))
    moment = manifest.created_utc or ""
    parts = (
        *in_setup,
        *named,
        *dict.fromkeys(f"backend {case.backend}" for case in cases if case.backend),
        f"torch {torch}" if torch else "",
        f"{'hosts' if len(hosts) > 1 else 'host'} {', '.join(hosts[:_MAX_HOSTS])}{more}" if hosts else "",
        moment.replace("T", " ").replace("+00:00", " UTC"),
        f"run {title}" if title != "run" else "",
    )
    first = (
        describe_link(manifest, cases),
        *(part for part in trained if part not in (cases[0].arch, *in_setup)),
        f"{format_mib(sum(sent.num_bytes))} of gradients" if sent else "",
    )
    return [[part for part in of if part] for of in (first, parts)]


def _name_source(case: CaseResult) -> str:
    """Name where batches come from; empty where that is not known."""
    if where := {"device": "on the device", "host": "from the host"}.get(case.data):
        return f"synthetic {name_samples(case)} {where}"
    return f"images from {case.data}" if case.data else ""


def list_warnings(manifest: Manifest, cases: Sequence[CaseResult]) -> list[str]:
    """Return what a reader must know before any number."""
    tried = [case for case in cases if case.status != "skipped"]
    broken = sum(case.has_failed for case in tried)
    made = [f"{said}." for said in describe_stand_ins(cases)]
    if describe_link(manifest, cases):
        made.append(f"Hosts and link are made by {get_message_prefix('lab')} on one machine.")
    if any(case.oversubscribed for case in select_headline(cases)):
        made.append(
            "Cases with more devices than the machine has share them: they say nothing about scaling."
        )
    if broken:
        made.append(f"{broken:,d} of {format_count(len(tried), 'case')} did not finish: see “Not measured”.")
    return made


def describe_link(manifest: Manifest, cases: Sequence[CaseResult]) -> str:
    """Name the link between the hosts of a lab by its rate; empty on a real network."""
    known = dict.fromkeys((manifest.link or "", *(case.link for case in cases)))
    return ", ".join(f"{name_link(rate)} link" for rate in known if rate)


def group_conditions(manifest: Manifest, cases: Sequence[CaseResult]) -> dict[str, dict[str, str]]:
    """Return the conditions by name in groups: what a gate compares, and how the run went."""
    timing, machine, model = manifest.timing, manifest.environment, manifest.model
    first = cases[0] if cases else CaseResult.from_row({})
    flops, each = model.forward_flops_per_image, f", {first.units_per_sample:,d} per sample"
    compared = {c.name: c.value for c in list_conditions(manifest) if c.value.lower() not in (UNKNOWN, NONE)}
    settings = {name: value for name, value in manifest.settings.stored().items() if value is not None}
    code = msgspec.structs.asdict(manifest.workload or WorkloadCode()) | {"files": None}
    env = machine.env
    made: dict[str, dict[str, Any]] = {
        "Run": {
            "name": manifest.name,
            "started": manifest.created_utc,
            "command": manifest.command if manifest.watched else None,  # others have it under "This run"
            "total time": format_duration(timing.total_s),
            "start-up": format_duration(timing.startup_s),
            "share of time measured": format_quantity(timing.timed_share_pct, "%"),
            "load": describe_load(manifest),
            "stopped because": timing.stopped_because,
            "throughput counts": None
            if first.unit == IMAGES
            else first.unit + each * (first.units_per_sample != 1),
            "forward pass": format_quantity(
                flops and flops / 1e9, f"GFLOP/{make_singular(name_samples(first))}"
            ),
        },
        "Model and machine": {
            **{name: value for name, value in compared.items() if name[:2] != "--" and name not in env},
            "model parameters": format_integer(model.num_params),
            "gradient bytes": format_integer(model.gradient_bytes),
            "system": machine.os,
            "memory": format_quantity(machine.memory_gib, "GiB"),
        },
        "Settings": {name.replace("_", " "): format_value(value) for name, value in settings.items()},
        "Workload's code": {name.replace("_", " "): value for name, value in code.items()},
        "Environment variables": env,
    }
    said = {
        title: {name: format_setting(value) for name, value in facts.items() if format_setting(value)}
        for title, facts in made.items()
    }
    return {title: facts for title, facts in said.items() if facts}


def tabulate_ranks(manifest: Manifest) -> Table | None:
    """Tabulate where every rank ran."""
    told = [{name: format_setting(getattr(rank, name)) for name in _RANK_COLUMNS} for rank in manifest.ranks]
    names = [name for name in _RANK_COLUMNS if any(rank[name] for rank in told)]
    columns = tuple(
        Heading(name.replace("_", " ").capitalize(), "number" if name in {"rank", "local_rank"} else "")
        for name in names
    )
    rows = tuple(tuple(name_link(r[name]) if name == "link" else r[name] for name in names) for r in told)
    return Table("Ranks", "Where every rank ran.", columns, rows) if names else None
