"""Says what was found of a user's own training that was watched."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..common.cli import format_command
from ..common.numbers import format_count, format_interval, format_number
from ..common.text import escape_controls
from ..machine.load import describe_busy_cores, is_busy
from ..machine.manifest import Manifest
from ..machine.watched import LateRank, Measured, Watched, WatchedRank, WatchedSetting
from ..results.case_result import CaseResult
from ..results.commands import COMMAND_MEANING, choose_new_folder
from ..results.comparisons import FASTER
from ..results.store import RunData
from ..stats.interval import Interval
from .findings import Conclusion, conclude_run
from .verdicts import CAP, COMMUNICATION, MIN_SHARE, RESOLVED, Verdict
from .watched_settings import Cost, conclude_settings, describe_share, make_interval, predict_step

PART_NAMES = {
    "data": "data loading",
    "forward": "the forward",
    "backward": "the backward",
    "optimizer": "the optimizer",
    "evaluation": "evaluation",
    "other": "work outside of the model and the optimizer",
}
"""Parts of a rank's own work in a sentence."""

WAITING = "communication and waiting"
BUFFERS, COLLECTIVES = "broadcast of buffers", "the script's own collectives"
PART_HEADINGS = {"waits": WAITING, "buffers": BUFFERS, "collectives": COLLECTIVES}
"""Headings of parts that are not headed by their own names; a rank waits after its last bucket is ready."""

MIN_SLOWER_PART = 0.02
"""Share of the step by which a part is surely longer on one rank, to be told where none is late in all."""

EQUAL_RANKS_REMEDY = "Give all ranks the same cores, clocks and batches"
REMEDIES = {
    "data": "Give the loader of rank {rank} more workers, or look at its storage",
    "evaluation": "Let all ranks evaluate a part each",
    "other": "Look at what rank {rank} alone does {place} (logging, checkpoints, moving batches)",
}
"""Remedy for a straggler, by the part that is late."""

OVERLAPPING_SAVINGS = (
    "Savings may overlap: two fixes together save at least as much as the larger one, and may save less than "
    "the sum."
)

FEWER_BYTES_REMEDY = (
    "Communicate less often or less: a larger batch, accumulation under no_sync(), or 16-bit gradients "
    "(register_comm_hook with bf16_compress_hook), which change the training."
)


def list_parts(ranks: Sequence[WatchedRank]) -> dict[str, str]:
    """Return the headings of parts that take time on any of these ranks, by part in the order of the step."""
    known = [part for part in ranks[0].parts if all(part in one.parts for one in ranks)] if ranks else []
    shown = (part for part in known if any(one.parts[part].estimate > 0 for one in ranks))
    return {part: PART_HEADINGS.get(part, part) for part in shown}


def make_measured(found: Interval) -> Measured:
    """Turn an interval into what a manifest holds."""
    low, high = (end if math.isfinite(end) else None for end in (found.low, found.high))
    return Measured(estimate=found.estimate, low=low, high=high)


def write_ms(found: Measured | None) -> str:
    """Write milliseconds with their interval; empty when missing."""
    return "" if found is None else format_interval(make_interval(found), "ms")


@dataclass(frozen=True)
class WatchConclusion:
    """Findings of a watched training, for the terminal and for its page."""

    run: Conclusion
    """Findings of its folder as of a run's; what a run would do next is no command of the user's."""
    costs: tuple[Cost, ...]
    """Findings that cost time, the most expensive first; those whose cost was not measured last."""
    others: tuple[Verdict, ...]
    """Answers that cost nothing, or are open."""
    notes: tuple[str, ...]
    path: Path
    """Results folder, for the commands to type."""

    @property
    def step(self) -> Interval | None:
        """Return milliseconds of a step of the slowest rank."""
        return self.run.cases[0].step_ms if self.run.cases else None

    @property
    def headline(self) -> str:
        """Return the most expensive finding, from `MIN_SHARE` of the step on; else that there is none."""
        least_ms = MIN_SHARE * self.step.estimate if self.step else 0.0
        found = [one.fact for one in self.costs if not one.ms or one.ms.estimate >= least_ms]
        found += [one.sentence for one in self.others if one.is_open]
        found += [f"No finding costs {100 * MIN_SHARE:.0f}% of a step or more."] if self.step else []
        return next(iter(found), "")

    @property
    def changes(self) -> list[str]:
        """Return the changes to make, the one to begin with first."""
        faster = [one for one in self.others if one.question == CAP and one.answer == FASTER]
        return [
            *(one.change for one in self.costs if one.change and one.ms),
            *(f"Write {one.paste} in your script" for one in faster),
            *(one.change for one in self.costs if one.change and not one.ms),
        ]

    @property
    def advice(self) -> str:
        """Say what to do first; empty without evidence."""
        if self.changes:
            return f"{self.changes[0]}; then watch again and compare{COMMAND_MEANING}"
        if any(one.question in (CAP, COMMUNICATION) and one.is_open for one in self.others):
            return "Watch a longer training, while no other program uses these cores."
        return FEWER_BYTES_REMEDY if self.costs else ""

    @property
    def trust(self) -> dict[str, str]:
        """Return how far to trust the sizes, and the order where bucket caps were raced."""
        if not self.run.trust:
            return {}
        raced = any(one.question == CAP for one in self.run.verdicts)
        again = choose_new_folder("again")
        return {
            "by how much": self.run.trust.size.replace("rounds", "steps"),
            **({"which is faster": self.run.trust.order} if raced else {}),
            "next run": "Unknown, for one watch cannot tell. Watch the same command again, with --out "
            f"{again}: {format_command('gate', str(self.path), again)} says how far two watches differ.",
        }


def conclude_watch(run: RunData) -> WatchConclusion:
    """Conclude a watched training."""
    watched = run.manifest.watched or Watched()
    told = (*_describe_steps(watched), *_compare_ranks(run.manifest, watched), *watched.notes)
    found = conclude_run(run)
    case = found.cases[0] if found.cases else None
    costs = list_costs(run.manifest, case, watched.settings) if case else []
    added = [one for one in found.verdicts if one.question == COMMUNICATION and one.answer == RESOLVED]
    if added and case and case.exposed_comm_ms is not None:
        fact, more = added[0].split_sentence()
        then = predict_step(case.step_ms, case.get_interval("no_sync_step_ms"))
        remedy = [f"{more}." if more else "", f"Without communication {then}." if then else ""]
        costs.append(Cost(added[0].title, f"{fact}.", " ".join(filter(None, remedy)), case.exposed_comm_ms))
    num_savings = sum(bool(one.after_ms) for one in costs)
    savings = [OVERLAPPING_SAVINGS] if num_savings > 1 else []
    return WatchConclusion(
        found,
        tuple(sorted(costs, key=lambda one: -one.ms.estimate if one.ms else 0.0)),
        tuple(one for one in found.verdicts if one not in added),
        tuple(map(escape_controls, [*savings, *told])),
        run.path,
    )


def list_costs(manifest: Manifest, case: CaseResult, settings: Iterable[WatchedSetting]) -> list[Cost]:
    """List what these settings and a late rank cost a step of a watched training."""
    load = describe_busy_cores(manifest) if is_busy(manifest) and case.device_type == "cpu" else ""
    costs = conclude_settings(settings, case.exposed_comm_ms, case.step_ms, load)
    return costs + conclude_late_rank(manifest, (manifest.watched or Watched()).late, case.step_ms)


def _get_step_ms(watched: Watched) -> float:
    """Return milliseconds of a step of the first rank."""
    return sum(part.estimate for part in watched.ranks[0].parts.values()) if watched.ranks else 0.0


def conclude_late_rank(manifest: Manifest, late: LateRank | None, step: Interval | None) -> list[Cost]:
    """Say which rank the others wait for, by how much and in which part; nothing without one."""
    if late is None or not late.is_straggler:
        return []
    later = make_interval(late.later_ms)
    rank, part = name_rank(manifest, late.rank), PART_NAMES.get(late.part, late.part)
    waited, longer = write_ms(late.later_ms), write_ms(late.parts.get(late.part))
    fact = f"Rank {rank} is a straggler: the others wait {waited} for it, {describe_share(later, step)}."
    place = f"after {' and before '.join(late.lines)}" if late.lines else "in each step"
    change = REMEDIES.get(late.part, EQUAL_RANKS_REMEDY).format(rank=rank, place=place)
    after_ms = step and step.subtract(later)
    then = predict_step(step, after_ms)
    longer = f"On rank {rank}, {part} takes {longer} longer than on the other ranks"
    remedy = f"{longer}. {change}{f': {then}' if then else ''}."
    return [Cost("Straggler", fact, remedy, later, change, after_ms)]


def name_rank(manifest: Manifest, rank: int) -> str:
    """Name a rank by its number, and by its host where there are several."""
    hosts = {one.rank: one.host for one in manifest.ranks}
    has_several = len({*hosts.values()}) > 1
    return escape_controls(f"{rank} on {hosts[rank]}") if has_several and rank in hosts else f"{rank}"


def _compare_ranks(manifest: Manifest, watched: Watched) -> Iterator[str]:
    """Say what ranks wait for beside DDP's communication, and which parts of a step take one rank longer."""
    waiting = max(watched.ranks, key=_get_collectives_ms, default=None)
    if waiting is not None and _get_collectives_ms(waiting) > MIN_SHARE * _get_step_ms(watched):
        taken_ms, name = write_ms(waiting.parts["collectives"]), name_rank(manifest, waiting.rank)
        yield (
            f"Collectives that the script calls itself, or its Trainer, take {taken_ms} of a step of rank "
            f"{name}, waiting for other ranks included; what communication adds is beside that."
        )
    late = watched.late
    if late is None or late.is_straggler:
        return
    name, later_ms = name_rank(manifest, late.rank), write_ms(late.later_ms)
    more = f"{later_ms} more than the others in each step, {late.share_pct:.0f}% of it"
    is_known = (late.later_ms.low or 0.0) > 0
    yield f"No rank is a straggler.{f' Rank {name} works longest, {more}.' if is_known else ''}"
    for rank, part, more_ms in _find_slower_parts(watched):
        name = name_rank(manifest, rank)
        yield f"Rank {name} takes {write_ms(more_ms)} more than the others in {PART_NAMES[part]}."


def _get_collectives_ms(rank: WatchedRank) -> float:
    found = rank.parts.get("collectives")
    return found.estimate if found else 0.0


def _find_slower_parts(watched: Watched) -> Iterator[tuple[int, str, Measured]]:
    """Find parts of its own work that take a rank surely longer than every other one."""
    for part, rank in ((part, rank) for part in PART_NAMES for rank in watched.ranks):
        others = [
            make_interval(one.parts[part]) for one in watched.ranks if one is not rank and part in one.parts
        ]
        if others and part in rank.parts:
            more = make_interval(rank.parts[part]).subtract(max(others, key=lambda ms: ms.estimate))
            if more.low > MIN_SLOWER_PART * _get_step_ms(watched):
                yield rank.rank, part, make_measured(more)


def _describe_steps(watched: Watched) -> Iterator[str]:
    """Say which steps are not compared, how many ranks there are, and what watching took."""
    if watched.num_others:
        yield f"Not compared: {format_count(watched.num_others, 'step')} that consist of other parts."
    if watched.own_ms:
        steps = f"{format_count(watched.num_probes, 'step')} (probes)"
        probes = f"; {steps} ran without overlap, to measure communication" if watched.num_probes else ""
        took = f"{format_number(watched.own_ms, 2)} ms of each step ({format_number(watched.own_pct, 2)}%)"
        yield f"Watching itself took {took} by its own clock{probes}."
