"""The head of a page: what was measured on what, how the run ended, what to know before any number."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..bench.findings.numbers import about, plural
from ..bench.findings.verdicts import Verdict
from ..bench.findings.wording import device_noun, stand_ins
from ..bench.manifest import Manifest
from ..bench.results.case_result import CaseResult
from ..bench.results.store import RunData
from . import conditions
from .cases import WorkloadCases

_MOST_HOSTS = 4
_MOMENT = re.compile(r"([0-9-]{10})T([0-9]{2}:[0-9]{2}):[0-9]{2}(?:Z|\+00:00)")
_MODEL = re.compile(r"(?P<family>(?:wide_)?resne(?:x)?t)(?P<rest>[0-9].*)")
_FAMILIES = {"resnet": "ResNet", "resnext": "ResNeXt", "wide_resnet": "Wide ResNet"}


def heading(cases: Sequence[CaseResult]) -> str:
    """Name what was measured on what: `ResNet-18, 1\N{EN DASH}4 CPU cores`."""
    shown = [case for case in cases if case.is_ok] or cases
    names = " and ".join(dict.fromkeys(model_name(case.arch) for case in shown if case.arch))
    own = [case for case in shown if not case.oversubscribed] or shown
    counts = [case.num_devices for case in own if case.num_devices]
    noun = " or ".join(dict.fromkeys(device_noun(case.device_type) for case in shown if case.device_type))
    if not counts or not noun:
        return names
    low, high = min(counts), max(counts)
    where = plural(low, noun) if low == high else f"{low}\N{EN DASH}{plural(high, noun)}"
    num_hosts = max(case.num_nodes for case in shown)
    where += f" of {num_hosts:,d} hosts" if num_hosts > 1 else ""
    return ", ".join(filter(None, (names, where)))


def model_name(arch: str) -> str:
    """Write a built-in architecture as papers do: `ResNet-18`; another name as it is."""
    found = _MODEL.fullmatch(arch)
    return arch if found is None else f"{_FAMILIES[found['family']]}-{found['rest']}"


def status(manifest: Manifest, cases: Sequence[CaseResult], verdicts: Sequence[Verdict]) -> str:
    """Say in one line how the run ended and how much of its questions it answered."""
    why = manifest.timing.stopped_because or ""
    num_skipped = sum(case.status == "skipped" for case in cases)
    answered = sum(not verdict.is_open for verdict in verdicts)
    ok = [case for case in cases if case.is_ok]
    if not ok:
        said = "nothing measured"
    elif not verdicts:
        shared = any(case.answers_nothing for case in ok)
        said = "it works; shared GPUs tell nothing about speed" if shared else "nothing to compare"
    elif not answered:
        said = "undecided"
    else:
        every = answered == len(verdicts)
        said = "answered" if every else f"{answered} of {plural(len(verdicts), 'question')} answered"
    rounds = max((case.num_rounds for case in ok), default=0)
    took = manifest.timing.measuring_s
    interrupted = why == "interrupted"
    parts = (
        f"Interrupted, {said}" if interrupted else f"{said[:1].upper()}{said[1:]}",
        f"{len(ok):,d} of {plural(len(cases), 'case')} measured",
        f"{num_skipped:,d} skipped" if num_skipped else "",
        plural(rounds, "round") if rounds else "",
        f"{about(took)} of measuring" if took else "",
        f"ended: {why}" if why and not interrupted else "",
    )
    return " · ".join(part for part in parts if part)


def subtitle(run: RunData, measured: Sequence[WorkloadCases], title: str) -> list[str]:
    """Say what trained on what: workload, processor, backend, torch, hosts, time."""
    manifest, cases = run.manifest, run.results
    machine = manifest.environment
    named = dict.fromkeys(case.device_name for case in cases)
    if all(case.device_type == "cpu" for case in cases) and machine.cpu_model:
        cores = f", {plural(machine.num_cores, 'core')}" if machine.num_cores else ""
        named = {f"{machine.cpu_model}{cores}": None}
    hosts = list(dict.fromkeys(filter(None, (machine.host, *(rank.host for rank in manifest.ranks)))))
    more = f" and {plural(len(hosts) - _MOST_HOSTS, 'other')}" if len(hosts) > _MOST_HOSTS else ""
    torch = manifest.versions.get("torch") or max(case.torch_version for case in cases)
    link, moment = conditions.link(manifest, cases), manifest.created_utc or ""
    stamp = _MOMENT.fullmatch(moment)
    parts = (
        measured[0].label if len(measured) == 1 else plural(len(measured), "workload") if measured else "",
        *named,
        *dict.fromkeys(f"backend {case.backend}" for case in cases if case.backend),
        f"torch {torch}" if torch else "",
        f"{'hosts' if len(hosts) > 1 else 'host'} {', '.join(hosts[:_MOST_HOSTS])}{more}" if hosts else "",
        f"link {link}" if link else "",
        f"{stamp[1]} {stamp[2]} UTC" if stamp else moment,
        f"run {title}" if title != "run" else "",
    )
    return [part for part in parts if part]


def warnings(cases: Sequence[CaseResult], link: str) -> list[str]:
    """Return what a reader must know before any number; `link` is that of a lab."""
    tried = [case for case in cases if case.status != "skipped"]
    broken = sum(case.has_failed for case in tried)
    stand_in = " ".join(f"{said}." for said in stand_ins(cases))
    made = [stand_in] if stand_in else []
    made += ["Hosts and link are made by bench.lab on one machine."] if link else []
    if any(case.oversubscribed for case in tried if case.is_ok):
        made.append(
            "Cases with more devices than the machine has share cores or GPUs (“shared”, drawn hollow): they "
            "say nothing about scaling."
        )
    if broken:
        made.append(f"{broken:,d} of {plural(len(tried), 'case')} did not finish: see “Not measured”.")
    return made
