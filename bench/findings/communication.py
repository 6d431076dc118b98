"""Answers what communication costs: what it adds to a step, what a step consists of, who is waited for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import scipy

from ..common.numbers import plural, to_places, with_interval
from ..machine.manifest import Manifest
from ..results.case_result import CaseResult
from ..results.comparisons import EQUAL, TOO_FEW, UNRESOLVED
from ..results.round_times import RoundTimes
from ..stats.fit import FITTED, Column
from ..stats.interval import Interval
from .verdicts import COMMUNICATION, MIN_SHARE, RESOLVED, TOO_FEW_ROUNDS, Saving, Verdict
from .wording import hidden_share, place

EXPOSED, ALL_REDUCE = "communication that is not overlapped", "all-reduce that is not overlapped"
CONTENTION, BUFFERS = "contention and waiting during communication", "DDP's broadcast of buffers"
COPIES, OWN_WORK = "copying gradients into buckets and back", "DDP's own overhead on one device"
RANKS, DATA = "waiting for the slowest rank", "data loading"

OF_COMMUNICATION = (EXPOSED, ALL_REDUCE)
"""Savings that smaller or better placed messages bring."""

REMEDIES = {
    **dict.fromkeys(
        OF_COMMUNICATION,
        "--comm-hook bf16 (halves the bytes, but changes the training), a larger batch or a faster link",
    ),
    CONTENTION: "cores or GPUs that nothing else uses",
    BUFFERS: "--sync-buffers off, where ranks may keep buffers of their own",
    COPIES: "--gradient-as-bucket-view on",
    OWN_WORK: "a larger batch, with which it does not grow",
    RANKS: "the same cores, clocks and batches for all ranks",
    DATA: "more --data-workers or a faster source",
}
"""Remedies, by the part of the step that they save."""

MIN_SLOWEST_SHARE = 0.75
"""Share of the rounds in which a straggler is the slowest rank."""

MAX_FALSE_POSITIVE_RATE = 0.05
"""Probability that one of equal ranks is taken for a straggler."""


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """Milliseconds of a training step: the whole, and those parts that were measured."""

    total: Interval
    parts: Mapping[str, Interval] = field(default_factory=dict)
    """Parts of the step beside communication, by name."""
    exposed: Interval | None = None
    """Time that communication adds to the step."""
    alone: Interval | None = None
    """Time that communication takes by itself; None also where it is hardly known."""
    contention: Interval | None = None
    """Exposed time beyond communication alone, where rounds tell it better than the difference."""
    other: Interval | None = None
    """Rest of the step, where rounds tell it better than the difference."""
    overheads: Mapping[str, Interval] = field(default_factory=dict)
    """Other costs that have a remedy, by their names in `REMEDIES`; they may lie within parts."""


@dataclass(frozen=True)
class Step:
    """Explanation of a step."""

    consists_of: str
    """The sum of its parts, in words; empty where none is known."""
    savings: tuple[Saving, ...]
    """The largest first."""


def explain_step(step: StepParts) -> Step:
    """Say what a step consists of and what of it could be saved.

    A saving has an interval above 0 and at least `MIN_SHARE` of the step; savings may overlap.
    """
    exposed, all_reduce, contention = step.exposed, None, None
    if exposed and exposed.low > 0:
        all_reduce = min(exposed, step.alone or exposed, key=lambda ms: ms.estimate)
        contention = step.contention or (None if all_reduce is exposed else exposed.less(all_reduce))
    other = step.other
    if other is None:
        other = step.total
        for part in (*step.parts.values(), *([exposed] if exposed else [])):
            other = other.less(part)
    is_split = bool(all_reduce and step.alone)
    sent = {"all-reduce" if is_split else "communication": all_reduce or exposed}
    sums = {**step.parts, **sent, "contention and waiting": contention}
    sums |= {} if other.low <= 0 else {"other": other}
    words = [f"{with_interval(ms, 'ms')} {name}" for name, ms in sums.items() if ms and ms.estimate > 0]
    costs = {ALL_REDUCE if is_split else EXPOSED: all_reduce, CONTENTION: contention, **step.overheads}
    savings = [
        Saving(ms, what, REMEDIES[what])
        for what, ms in costs.items()
        if ms and ms.low > 0 and ms.estimate > MIN_SHARE * step.total.estimate
    ]
    return Step(
        " + ".join(words) if step.parts else "",
        tuple(sorted(savings, key=lambda saving: -saving.ms.estimate)),
    )


def answer_communication(ddp: CaseResult | None, straggler: str = "") -> Verdict | None:
    """Say what communication adds to DDP's step, and how much of it is overlapped; None if not measured.

    `straggler` is what `describe_straggler` says of the case.
    """
    if ddp is None or ddp.exposed_comm_ms is None or ddp.step_ms is None:
        return None
    exposed, step_ms, alone = ddp.exposed_comm_ms, ddp.step_ms.estimate, ddp.comm_ms
    fact = f"communication adds {with_interval(exposed, 'ms')} to each DDP step"
    label, background, width = "", "", math.inf
    if math.isnan(exposed.low):
        answer, text = TOO_FEW, f"{TOO_FEW} to tell what communication adds: {TOO_FEW_ROUNDS}"
    elif exposed.excludes(0):
        answer, label = RESOLVED, f"adds {with_interval(exposed, 'ms')}"
        overlap, background = _describe_overlap(ddp, exposed, alone)
        text = f"{fact}, {100 * exposed.estimate / step_ms:.0f}% of it{overlap}"
    else:
        text = f"{fact}, at most {100 * exposed.high / step_ms:.0f}% of it"
        answer, label = EQUAL, "adds little"
        if exposed.high >= MIN_SHARE * step_ms:
            answer, label, text = UNRESOLVED, "", f"{UNRESOLVED}: {text}"
        # It is decided where the interval leaves out 0, or ends below what is little.
        decided = max(abs(exposed.estimate), MIN_SHARE * step_ms - exposed.estimate)
        width = (exposed.high - exposed.low) / 2 / decided
    return Verdict(
        question=COMMUNICATION,
        answer=answer,
        heading="Communication",
        in_words=label,
        text=text,
        notes=(straggler,) if straggler else (),
        background=(background,) if background else (),
        width_ratio=width,
    )


def _describe_overlap(ddp: CaseResult, exposed: Interval, alone: Interval | None) -> tuple[str, str]:
    """Continue the answer by what is overlapped, as far as it is known, and say why nothing is."""
    hidden, skew, background = hidden_share(ddp), ddp.rank_skew_ms, ""
    if hidden is None:
        return "; how much is overlapped is not known yet" if ddp.hidden_pct else "", ""
    if hidden.high < 0:
        on_cpu = ddp.device_type == "cpu"
        why = "all-reduces run on the cores that compute" if on_cpu else "it slows the compute"
        apart = f": ranks' own work is {with_interval(skew, 'ms')} apart" if skew and skew.low > 0 else ""
        background = f"Why communication adds more than it takes alone: {why}, or ranks wait{apart}"
    if alone is None:
        return "", background
    by_itself = f"; by itself it takes {with_interval(alone, 'ms')}"
    if hidden.estimate >= 0:
        return f"{by_itself}, of which {to_places(hidden, 0, '%')} is overlapped", background
    on_top = with_interval(exposed.less(alone), "ms")
    return f"{by_itself}: nothing is overlapped, and contention, waiting and copies add {on_top}", background


def explain_ddp_step(
    ddp: CaseResult | None, cases: Iterable[CaseResult], times: RoundTimes, *, has_straggler: bool
) -> Step | None:
    """Say what the step of this DDP case consists of and what could be saved; None where neither is known.

    Each part has a measurement of its own: what `no_sync` saves, all-reduces alone, the broadcast of buffers
    alone, what DDP adds on one device, what views of the buckets save, how far behind a straggler is, and
    the time in the loader. Their differences are of one fit.
    """
    if ddp is None or ddp.step_ms is None:
        return None
    alike = [case for case in cases if case.is_ok and case.compile == ddp.compile]
    typical, exposed, alone, buffers = times.fitted(), ddp.exposed_comm_ms, ddp.comm_ms, ddp.buffers_ms
    step, local, comm = ((ddp.case_id, phase) for phase in FITTED)

    def rest(plus: Sequence[Column], *minus: Column) -> Interval | None:
        known = typical.rest(plus, minus).interval()
        return None if math.isnan(known.low) else known

    def timed(is_meant: Callable[[CaseResult], bool]) -> Column:
        return next((case.case_id for case in alike if is_meant(case)), ""), "timed"

    single = timed(lambda case: case.mode == "single")
    one = timed(lambda case: case.mode == "ddp" and case.num_devices == 1 and not case.changed())
    views = timed(lambda case: case.changed(ddp) == {"gradient_as_bucket_view": "True"})
    if hidden_share(ddp) is None and ddp.hidden_pct:
        alone = None  # nor is it known then what the exposed time consists of
    sent = [comm] if alone else []
    is_resolved = bool(exposed and exposed.low > 0)
    contention = rest([step], local, comm) if alone and is_resolved else None
    # DDP's own overhead is exposed, too, and has a remedy of its own.
    beside = rest([step, single], local, one, *sent) if is_resolved else None
    costs = {
        CONTENTION if alone else EXPOSED: beside or contention,
        COPIES: rest([step], views),
        OWN_WORK: rest([one, views], single, step) or rest([one], single),
        RANKS: ddp.rank_skew_ms if has_straggler else None,
        DATA: ddp.data_ms,
    }
    singles = (case.step_ms for case in alike if case.mode == "single")
    single_ms = next(singles, None) if exposed and ddp.scaling == "weak" else None
    parts = {"single-device step": single_ms} if single_ms else {}
    if buffers and buffers.estimate > MIN_SHARE * ddp.step_ms.estimate:
        costs |= {BUFFERS: buffers} | ({} if alone else {EXPOSED: beside and beside.less(buffers)})
        exposed, alone = (ms and ms.less(buffers) for ms in (exposed, alone))
        parts |= {"buffers": buffers} if parts else {}
    explained = explain_step(
        StepParts(
            total=ddp.step_ms,
            parts=parts,
            exposed=exposed,
            alone=alone,
            contention=contention,
            other=rest([local], single),
            overheads={what: ms for what, ms in costs.items() if ms},
        )
    )
    if not explained.consists_of and not explained.savings:
        return None
    dps = [case for case in alike if case.mode == "dp" and not case.is_stand_in]
    dp = next((case.step_ms for case in dps if case.num_devices == ddp.num_devices), None)
    whole = f"A DDP step on {place(ddp)} takes {with_interval(ddp.step_ms, 'ms')}"
    whole += f", under DP {with_interval(dp, 'ms')}" if dp else ""
    whole += f": {explained.consists_of}" if explained.consists_of else ""
    return replace(explained, consists_of=f"{whole}.")


def find_straggler(counts: Mapping[int, int], num_rounds: int, num_ranks: int) -> int | None:
    """Return the rank that others wait for; None where equal ranks could look so by chance.

    Args:
        counts: by rank, the rounds in which it was the slowest.
        num_rounds: of the run.
        num_ranks: that took part in each.
    """
    rank = min(counts, key=lambda rank: (-counts[rank], rank), default=None)
    if rank is None or counts[rank] < MIN_SLOWEST_SHARE * num_rounds:
        return None
    by_chance = scipy.stats.binom.sf(counts[rank] - 1, num_rounds, 1 / num_ranks)
    return None if num_ranks * by_chance > MAX_FALSE_POSITIVE_RATE else rank


def describe_straggler(ddp: CaseResult | None, manifest: Manifest, times: RoundTimes) -> str:
    """Name the straggler of a DDP case, how often it is the slowest and by how much; empty without one."""
    skew, step = (ddp.rank_skew_ms, ddp.step_ms) if ddp else (None, None)
    if not ddp or not skew or not step or skew.estimate <= MIN_SHARE * step.estimate:
        return ""
    slowest = times.of_case(ddp.case_id).slowest
    if (rank := find_straggler(slowest, slowest.total(), ddp.num_devices)) is None:
        return ""
    hosts = {one.rank: f" on {one.host}" for one in manifest.ranks if one.host}
    return (
        f"Rank {rank}{hosts.get(rank, '')} is a straggler: slowest of {place(ddp)} in {slowest[rank]} of "
        f"{plural(slowest.total(), 'round')}, by {with_interval(skew, 'ms')} per step "
        f"({100 * skew.estimate / step.estimate:.0f}%) of its own work; the others wait for it"
    )
