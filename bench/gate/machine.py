"""Tells the state of the machine while both sides of a gate were measured: load, clocks, throttling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from msgspec import structs

from ..findings.cautions import MAX_CLOCK_RATIO, check_conditions
from ..findings.wording import CPU_STAND_IN
from ..machine.load import describe_load
from ..machine.manifest import Load
from .runs import GateCase, GateRun

GATE_CAUTIONS = ("other load", "slowed GPUs")
"""Cautions of a run that speak against comparing it with another, too."""


def add_conditions(
    sides: Sequence[GateRun], variables: Sequence[Mapping[str, str]], load: Sequence[Load]
) -> tuple[GateRun, GateRun]:
    """Return both sides with their own variables, and what other programs used of the cores meanwhile."""
    # What a run reads of the minute before it is the gate's previous launch.
    told = {"load": tuple(load), "load_before": None}
    ours, theirs = (
        replace(side, manifest=structs.replace(side.manifest, **told), variables=own)
        for side, own in zip(sides, variables, strict=True)
    )
    return ours, theirs


def describe_machine(
    baseline: GateRun, candidate: GateRun, pairs: Sequence[tuple[GateCase, GateCase]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Say what both runs tell of the machine, and what of that speaks against comparing them.

    `pairs` are the cases that both have measured.
    """
    loads, cautions, clocks = dict[str, list[str]](), dict[str, list[str]](), list[float]()
    for name, run, place in (("baseline", baseline, 0), ("candidate", candidate, 1)):
        cases = [pair[place].result for pair in pairs]
        loads[name] = [describe_load(run.manifest)]
        found = check_conditions(run.manifest, cases, cases)
        stand_in = [CPU_STAND_IN] if any(one.result.device_type == "cpu" for one in run.cases) else []
        cautions[name] = [*stand_in, *(one.sentence for one in found if one.kind in GATE_CAUTIONS)]
        clocks += [fmean(known)] if (known := [c.sm_clock_mhz for c in cases if c.sm_clock_mhz]) else []
    against, facts = _name_sides(cautions), _name_sides(loads)
    if len(clocks) == 2:
        before, after = (f"{clock:,.0f} MHz" for clock in clocks)
        facts.append(f"the GPU clock was {before} for the baseline, {after} for the candidate")
        if max(clocks) > MAX_CLOCK_RATIO * min(clocks):
            against.append(f"{facts[-1]}: lock it (sudo nvidia-smi -lgc) and gate again")
    return tuple(one for one in facts if not any(one in caution for caution in against)), tuple(against)


def _name_sides(by_side: Mapping[str, Sequence[str]]) -> list[str]:
    """Name the side of each sentence that is not said of both."""
    found: dict[str, list[str]] = {}
    for name, sentences in by_side.items():
        for sentence in filter(None, sentences):
            found.setdefault(sentence, []).append(name)
    return [said if len(names) > 1 else f"{names[0]}: {said}" for said, names in found.items()]
