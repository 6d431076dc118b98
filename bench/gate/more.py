"""The next step of a gate, as a whole command: to decide it, or to make its sides comparable."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import scipy

from ..common.cli import NextStep, format_command
from ..common.numbers import format_count
from ..common.text import escape_controls
from ..machine.load import describe_load, is_busy
from ..machine.manifest import Manifest
from ..plan.resolve import write_options
from ..results.commands import COMMAND_MEANING, rewrite_command, write_command, write_watch_comparison
from ..stats.interval import Estimate
from .checkouts import WORKING_TREE
from .code import is_same_code
from .judge import Change, EndErrors
from .main import DEFAULT_LAUNCHES
from .result import NOT_IN_CANDIDATE, Gate
from .runs import PLANNED_COLUMNS, SWEPT_COLUMNS

MAX_LAUNCHES = 60
"""More would take hours: a quieter machine helps more."""

MIN_DISTANCE = 0.25
"""Share of the threshold: a change nearer to it is not told from it in a time that can be promised."""

MIN_CERTAINTY = 0.7
"""Chance that the scatter of the launches is no larger than it is taken to be."""

UNKNOWN_REF, OLD_PYTHON = "REF", "PYTHON"
"""Words in place of a commit or an interpreter that no manifest tells."""

UNREPEATED_SETTINGS = ("out", "name", "race", "trace", "calibrate", "allreduce_curve")
"""Settings that are not repeated: the gate decides on folders, and compares nothing of the others."""

UNREPEATED_OPTIONS = ("out", "markdown", "json", "quiet", "max_time")
"""Options of one gate alone: the form of its output, a folder that is taken, too short a time."""


@dataclass(frozen=True)
class DecidingCommand(NextStep):
    """The next thing to do about a gate."""

    minutes: float | None = None
    """Minutes that it takes, about; None where the runs do not tell."""


def propose_command(gate: Gate) -> DecidingCommand | None:
    """Return the command that decides a gate, makes its sides comparable, or tells the code from the machine.

    None where none of ours does.
    """
    sides, verdict = (gate.baseline.manifest, gate.candidate.manifest), gate.decision.verdict
    if gate.needs_more_launches and not all(side.watched for side in sides):
        return _propose_launches(gate)
    gaps = SWEPT_COLUMNS if any(c.reason == NOT_IN_CANDIDATE for c in gate.comparisons) else ()
    if gate.obstacle or (verdict == "missing" and gaps and not gate.interleaved):
        return measure_alike(*sides, [*(one.name for one in gate.blocking), *gaps])
    has_changed = gate.differences or not is_same_code(*sides)
    if has_changed and not gate.interleaved and (gate.undecided or verdict == "regression"):
        return write_distinguishing_command(*sides, gate.candidate.path)
    return None


def _propose_launches(gate: Gate) -> DecidingCommand:
    """Return the command that would decide the undecided comparisons of a gate."""
    sides = gate.baseline.manifest, gate.candidate.manifest
    busy = next((side for side in sides if side.settings.device != "cuda" and is_busy(side)), None)
    if busy is not None or gate.num_lacking:
        whole, minutes = _write_gate(gate), _estimate_min(gate, gate.num_lacking)
        time = "more time" if minutes is None else f"about {math.ceil(minutes)} min"
        lacking = format_count(gate.num_lacking, "launch")
        enough = f"give the gate {time} ({lacking})" if gate.num_lacking else "then gate again"
        free = f"free the machine first: {describe_load(busy)}; " if busy else ""
        return DecidingCommand(f"{free}{enough}{_explain(whole)}", whole, minutes)
    can_fail = sum(c.decides and c.column is not None and c.column.has_interval for c in gate.comparisons)
    errors = replace(gate.policy, looks=()).divide_error(can_fail, 0)
    launches = gate.num_launches * gate.interleaved
    wanted = max(_estimate_launches(one, launches, errors) for one in gate.undecided)
    if wanted > MAX_LAUNCHES:
        why = "find what disturbs this machine, then gate again: more launches would take over an hour"
        return DecidingCommand(why, format_command("doctor"))
    if gate.asked is None and sides[1].link:
        longer = write_command(sides[1], rounds=str(MAX_LAUNCHES), out=None)
        return DecidingCommand("measure more rounds: this command would decide it", longer)
    whole, minutes = _write_gate(gate, launches=str(wanted)), _estimate_min(gate, wanted)
    took = "" if minutes is None else f" in about {math.ceil(minutes)} min"
    why = f"measure {wanted} launches, interleaved: this command would decide it{took}{_explain(whole)}"
    return DecidingCommand(why, whole, minutes)


def _write_gate(gate: Gate, **changes: str) -> str:
    """Write the interleaved gate anew, or one of two results folders as interleaved."""
    if gate.asked is None:
        options = (word for name, value in changes.items() for word in (f"--{name}", value))
        return write_interleave_command(gate.baseline.manifest, gate.candidate.manifest, *options)
    argv = [*shlex.split(format_command("gate")), *gate.asked]
    return rewrite_command(argv, **{**dict.fromkeys(UNREPEATED_OPTIONS), **changes})


def _estimate_min(gate: Gate, launches: int) -> float | None:
    """Estimate the minutes of so many launches; None of none, and where the manifests do not tell."""
    return round(launches * gate.launch_s / 60, 1) if launches and gate.launch_s is not None else None


def measure_alike(
    baseline: Manifest, candidate: Manifest, differing: Collection[str]
) -> DecidingCommand | None:
    """Return the command after which sides that differ in these conditions can be compared.

    Options are those of the baseline again; where machine or versions differ, both sides take turns. None of
    watched trainings.
    """
    if baseline.watched or candidate.watched:
        return None
    whole = ""
    if not {"link", "data workers", *PLANNED_COLUMNS, *SWEPT_COLUMNS}.intersection(differing):
        old = ("--python", OLD_PYTHON) if "torch" in differing else ()
        whole = write_interleave_command(baseline, candidate, *old)
    if whole:
        return DecidingCommand(
            f"measure both interleaved on one machine: then no difference blocks{_explain(whole)}", whole
        )
    whole = write_command(baseline, out=None)
    return DecidingCommand(
        "measure the candidate on the baseline's machine with its options, then gate that run", whole
    )


def write_distinguishing_command(
    baseline: Manifest, candidate: Manifest, path: Path
) -> DecidingCommand | None:
    """Return the command that tells a change of the code from one of the machine; None without one."""
    if baseline.watched:  # which no gate starts
        why = f"watch the baseline again: this tells the script from the machine{COMMAND_MEANING}"
        steps = f"{baseline.watched.num_steps}"  # it may have no more
        return DecidingCommand(why, write_watch_comparison("again", "--steps", steps, candidate=str(path)))
    whole = write_interleave_command(baseline, candidate)
    why = f"interleave both where they were started: this tells the code from the machine{_explain(whole)}"
    return DecidingCommand(why, whole) if whole else None


def _explain(whole: str) -> str:
    """Explain the words of a command that the manifests do not tell."""
    words = {UNKNOWN_REF: "the baseline's commit", OLD_PYTHON: "the baseline's interpreter"}
    return "".join(f"; {word} is {what}" for word, what in words.items() if f" {word} " in whole)


def is_interleaved(runs: Sequence[Manifest]) -> bool:
    """Tell whether these manifests are of runs that one gate interleaved, and of no others.

    A run that was gone on with later has rounds beyond those in turns.
    """
    ids = {manifest.interleaved_id for manifest in runs}
    return len(ids) == 1 and None not in ids and not any(manifest.resumed for manifest in runs)


def write_interleave_command(baseline: Manifest, candidate: Manifest, *options: str) -> str:
    """Write the command that measures what two manifests tell of in turns, as the candidate was measured.

    `UNKNOWN_REF` stands for the baseline's commit, of the repository that holds what trains, where its
    manifest does not know it. Empty of a lab's runs and of watched trainings, which no gate can measure.
    """
    if candidate.link or baseline.watched or candidate.watched:
        return ""
    # Not what was typed: the two sides may be of versions that have other defaults.
    arguments = write_options(candidate.settings, UNREPEATED_SETTINGS)
    code, other = (one.workload if candidate.settings.workload else one.git for one in (baseline, candidate))
    reference = code.commit[:12] if code and code.commit else UNKNOWN_REF
    if code and code.commit and other and code.commit == other.commit:
        reference = WORKING_TREE  # a checkout of another commit would compare code that neither has run
    return escape_controls(format_command("gate", "--interleave", reference, *options, "--", *arguments))


def _estimate_launches(one: Change, launches: int, errors: EndErrors) -> int:
    """Return the number of launches, of as many rounds as before, that are likely to decide it."""
    if one.ratio is None or one.threshold is None or one.error is None or one.column is None:
        return DEFAULT_LAUNCHES[-1]
    worse = (one.ratio.estimate - 1) * (-1 if one.column.higher_is_better else 1)
    reach, error = worse, errors.better
    if worse <= one.threshold:
        reach, error = max(one.threshold - worse, MIN_DISTANCE * one.threshold), errors.worse
    freedom = launches - 1 if launches > 1 else math.inf
    scatter = one.error * math.sqrt(max(launches, 1))
    if math.isfinite(freedom):
        scatter *= math.sqrt(freedom / scipy.special.chdtri(freedom, MIN_CERTAINTY))
    for wanted in range(max(launches + 1, DEFAULT_LAUNCHES[0]), MAX_LAUNCHES + 1):
        expected = Estimate(0.0, scatter / math.sqrt(wanted), wanted - 1)
        if expected.compute_quantile_interval(error, error).high <= reach:
            return wanted
    return MAX_LAUNCHES + 1
