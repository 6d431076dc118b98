"""The next step of a gate, as a whole command: to decide it, or to make its sides comparable."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import scipy

from ..common.cli import NextStep, format_command
from ..common.numbers import format_count
from ..common.text import escape_controls
from ..findings.cautions import describe_load, is_busy
from ..machine.manifest import Manifest
from ..plan.resolve import write_options
from ..results.commands import COMMAND_MEANING, rewrite_command, write_command, write_watch_comparison
from ..stats.interval import Estimate
from .checkouts import WORKING_TREE
from .judge import Change, EndErrors
from .main import DEFAULT_LAUNCHES
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


def propose_command(
    sides: tuple[Manifest, Manifest],
    undecided: Sequence[Change],
    *,
    errors: EndErrors,
    launches: int,
    lacking: int,
    asked: Sequence[str] | None,
) -> DecidingCommand:
    """Return the command that would decide the `undecided` comparisons.

    Args:
        sides: the manifests of baseline and candidate, or of their first launch.
        undecided: comparisons without a verdict.
        errors: of each interval, at a single look.
        launches: how many there were; 0 of runs that did not take turns.
        lacking: the launches of its first look, where time ended the gate before that; else 0.
        asked: what was typed behind the name of an interleaved gate.
    """
    argv = [*shlex.split(format_command("gate")), *(asked or ())]
    once = dict.fromkeys(UNREPEATED_OPTIONS)
    each_s = estimate_duration_s(sides, in_turns=launches > 0)
    busy = next((side for side in sides if side.settings.device != "cuda" and is_busy(side)), None)
    if busy is not None or lacking:
        whole = rewrite_command(argv, **once) if asked is not None else write_interleave_command(*sides)
        minutes = round(lacking * each_s / 60, 1) if lacking and each_s is not None else None
        time = "more time" if minutes is None else f"about {math.ceil(minutes)} min"
        enough = f"give the gate {time} ({format_count(lacking, 'launch')})" if lacking else "then gate again"
        free = f"free the machine first: {describe_load(busy)}; " if busy else ""
        return DecidingCommand(f"{free}{enough}{_explain(whole)}", whole, minutes)
    wanted = max(_estimate_launches(one, launches, errors) for one in undecided)
    if wanted > MAX_LAUNCHES:
        why = "find what disturbs this machine, then gate again: more launches would take over an hour"
        return DecidingCommand(why, format_command("doctor"))
    if asked is None and sides[1].link:
        longer = write_command(sides[1], rounds=str(MAX_LAUNCHES), out=None)
        return DecidingCommand("measure more rounds: this command would decide it", longer)
    if asked is None:
        whole = write_interleave_command(*sides, "--launches", str(wanted))
    else:
        whole = rewrite_command(argv, **{**once, "launches": str(wanted)})
    minutes = None if each_s is None else round(wanted * each_s / 60, 1)
    took = "" if minutes is None else f" in about {math.ceil(minutes)} min"
    why = f"measure {wanted} launches, interleaved: this command would decide it{took}{_explain(whole)}"
    return DecidingCommand(why, whole, minutes)


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


def estimate_duration_s(sides: Sequence[Manifest], *, in_turns: bool) -> float | None:
    """Return the seconds that a launch took, or two separate runs; None where a manifest does not tell."""
    found = [side.timing.total_s for side in sides if side.timing.total_s is not None]
    if len(found) < len(sides):
        return None
    # Runs in turns wait for each other: each has taken as long as both.
    return max(found) if in_turns else sum(found)


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
        if (
            Estimate(0.0, scatter / math.sqrt(wanted), wanted - 1)
            .compute_quantile_interval(error, error)
            .high
            <= reach
        ):
            return wanted
    return MAX_LAUNCHES + 1
