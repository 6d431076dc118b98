"""Says at the top of the page what a run answers: heading, status, a card per question, what to run next."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import pandas as pd

from ddp_bench.bench.findings.findings import Conclusion
from ddp_bench.bench.findings.notes import skipped_cases
from ddp_bench.bench.findings.numbers import about, finite, plural
from ddp_bench.bench.findings.verdicts import CAP, COMMUNICATION, RESOLVED, WRAPPER, Verdict
from ddp_bench.bench.findings.wording import CPU_STAND_IN, device_noun, text, truth
from ddp_bench.bench.manifest import Manifest
from ddp_bench.bench.results.comparisons import EQUAL, FASTER, SLOWER
from ddp_bench.bench.text import visible
from ddp_bench.report.model import Card, Following

_TITLES = {WRAPPER: "Which wrapper", CAP: "DDP's settings", COMMUNICATION: "Communication"}
_STATES = {FASTER: "found", SLOWER: "found", RESOLVED: "found", EQUAL: "equal"}
_MODEL = re.compile(r"(?P<family>(?:wide_)?resne(?:x)?t)(?P<rest>[0-9].*)")
_FAMILIES = {"resnet": "ResNet", "resnext": "ResNeXt", "wide_resnet": "Wide ResNet"}
_STAND_IN = f"{CPU_STAND_IN}. “DP stand-in (CPU)” is nn.DataParallel's stages, carried out on CPU cores."
_SHARED = (
    "Cases with more devices than the machine has share cores or GPUs (“shared”, drawn hollow): they say "
    "nothing about scaling."
)


def heading(cases: pd.DataFrame) -> str:
    """Name what was measured on what: `ResNet-18, 1\N{EN DASH}4 CPU cores`."""
    ok = cases[cases["status"] == "ok"]
    shown = cases if ok.empty else ok
    names = dict.fromkeys(model_name(name) for cell in shown["arch"] if (name := text(cell)))
    counts = [int(n) for n in shown["num_devices"].dropna()]
    nouns = dict.fromkeys(device_noun(text(kind)) for kind in shown["device_type"] if text(kind))
    if not counts or not nouns:
        return " and ".join(names)
    low, high = min(counts), max(counts)
    noun = " or ".join(nouns)
    where = plural(high, noun) if low == high else f"{low}\N{EN DASH}{plural(high, noun)}"
    num_hosts = max((int(n) for n in shown["num_nodes"].dropna()), default=1)
    where += f" of {num_hosts:,d} hosts" if num_hosts > 1 else ""
    return ", ".join(filter(None, (" and ".join(names), where)))


def model_name(arch: str) -> str:
    """Write a built-in architecture as papers do: `ResNet-18`; another name as it is."""
    found = _MODEL.fullmatch(arch)
    return arch if found is None else f"{_FAMILIES[found['family']]}-{found['rest']}"


def status(manifest: Manifest, cases: pd.DataFrame, verdicts: Sequence[Verdict]) -> str:
    """Say in one line how the run ended and how much of its questions it answered."""
    why = manifest.timing.stopped_because or ""
    ended = {"interrupted": "Interrupted", "time limit reached": "Time limit reached"}.get(why, "Finished")
    skipped = len(skipped_cases(cases))
    num_open = sum(verdict.is_open for verdict in verdicts)
    ok = cases[cases["status"] == "ok"]
    if ok.empty:
        said = "nothing measured"
    elif not verdicts:
        said = "nothing to compare"
    elif num_open == len(verdicts):
        said = "inconclusive"
    else:
        answered = len(verdicts) - num_open
        said = "answered" if not num_open else f"{answered} of {plural(len(verdicts), 'question')} answered"
    rounds = finite(ok["num_rounds"].max()) if len(ok) else None
    took = manifest.timing.measuring_s
    parts = (
        f"{ended}, {said}",
        f"{len(ok):,d} of {plural(int((cases['status'] != 'skipped').sum()), 'case')} measured",
        f"{skipped:,d} skipped" if skipped else "",
        plural(rounds, "round") if rounds else "",
        f"{about(took)} of measuring" if took else "",
        f"stopped: {why}" if ended == "Finished" and why else "",
    )
    return " · ".join(part for part in parts if part)


def cards(verdicts: Iterable[Verdict]) -> tuple[Card, ...]:
    """Make a card per answer."""
    return tuple(
        Card(
            title=", ".join(filter(None, (_TITLES.get(verdict.question, verdict.question), verdict.of))),
            state=_STATES.get(verdict.answer, "open"),
            label=verdict.label,
            sentence=visible(verdict.sentence),
            paste=visible(verdict.paste),
            leave=verdict.question == CAP and verdict.answer == EQUAL,
        )
        for verdict in verdicts
    )


def following(conclusion: Conclusion) -> Following | None:
    """Return the command to run next, which is complete."""
    step = conclusion.next_step
    return None if step is None else Following(step.why, step.command)


def warnings(cases: pd.DataFrame) -> tuple[str, ...]:
    """Return what a reader must know before any number."""
    ok = cases["status"] == "ok"
    broken = cases[~ok & (cases["status"] != "skipped")]
    made = (
        _STAND_IN if (cases["device_type"] == "cpu").any() else "",
        _SHARED if any(truth(value) for value in cases.loc[ok, "oversubscribed"]) else "",
        f"{plural(len(broken), 'case')} of {len(cases)} did not finish: see “Not measured”."
        if len(broken)
        else "",
    )
    return tuple(warning for warning in made if warning)
