"""Answers what communication costs: what it adds to a step, what a step consists of, who is waited for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import scipy

from ..common.numbers import plural, to_places, with_interval
from ..machine.manifest import Manifest
from ..results.case_result import CaseResult
from ..results.comparisons import EQUAL, TOO_FEW, UNRESOLVED, Comparison
from ..results.round_times import RoundTimes
from ..stats.fit import MIN_ROUNDS, in_pairs
from ..stats.interval import Interval
from .verdicts import COMMUNICATION, MIN_SHARE, RESOLVED, TOO_FEW_ROUNDS, Saving, Verdict
from .wording import hidden_share, place

EXPOSED, ALL_REDUCE = "communication that is not overlapped", "all-reduce that is not overlapped"
CONTENTION, BUFFERS = "contention and waiting during communication", "DDP's broadcast of buffers"
COPIES, OWN_WORK = "copying gradients into buckets and back", "DDP's own overhead on one device"
RANKS, DATA = "waiting for the slowest rank", "data loading"

OF_COMMUNICATION = (EXPOSED, ALL_REDUCE)
"""Savings that smaller or better placed messages bring."""

_FEWER_BYTES = (
    "--comm-hook bf16 (halves the bytes, but changes the training), a larger batch or a faster link"
)
REMEDIES = {
    EXPOSED: _FEWER_BYTES,
    ALL_REDUCE: _FEWER_BYTES,
    CONTENTION: "cores or GPUs that nothing else uses",
    BUFFERS: "--sync-buffers off, where ranks may keep buffers of their own",
    COPIES: "--gradient-as-bucket-view on",
    OWN_WORK: "a larger batch, with which it does not grow",
    RANKS: "the same cores, clocks and batches for all ranks",
    DATA: "more --data-workers or a faster source",
}
"""What would save the time, by cost."""

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
    sums = {
        **step.parts,
        "all-reduce" if is_split else "communication": all_reduce or exposed,
        "contention and waiting": contention,
        "other": other,
    }
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


def answer_communication(ddp: CaseResult | None) -> Verdict | None:
    """Say what communication adds to DDP's step, and how much of it is overlapped; None if not measured."""
    if ddp is None or ddp.exposed_comm_ms is None or ddp.step_ms is None:
        return None
    exposed, step_ms, alone = ddp.exposed_comm_ms, ddp.step_ms.estimate, ddp.comm_ms
    fact, background, width = f"communication adds {with_interval(exposed, 'ms')} to each DDP step", "", 0.0
    if math.isnan(exposed.low):
        answer, label, width = TOO_FEW, TOO_FEW, math.inf
        text = f"too few rounds to tell what communication adds: {TOO_FEW_ROUNDS}"
    elif exposed.low <= 0 <= exposed.high:
        is_little = exposed.high < MIN_SHARE * step_ms
        answer, label = (EQUAL, "adds little") if is_little else (UNRESOLVED, UNRESOLVED)
        text = (
            f"{'' if is_little else 'unresolved: '}{fact}, at most {100 * exposed.high / step_ms:.0f}% of it"
        )
        # It is decided where the interval leaves out 0, or ends below what is little.
        decided = max(abs(exposed.estimate), MIN_SHARE * step_ms - exposed.estimate)
        width = (exposed.high - exposed.low) / 2 / decided
    else:
        answer, label = RESOLVED, f"adds {with_interval(exposed, 'ms')}"
        overlap, background = _describe_overlap(ddp, exposed, alone)
        text = f"{fact}, {100 * exposed.estimate / step_ms:.0f}% of it{overlap}"
    return Verdict(
        question=COMMUNICATION,
        answer=answer,
        heading="Communication",
        label=label,
        text=text,
        background=(background,) if background else (),
        width_ratio=width,
    )


def _describe_overlap(ddp: CaseResult, exposed: Interval, alone: Interval | None) -> tuple[str, str]:
    """Continue the answer by what is overlapped, as far as it is known, and say why nothing is."""
    hidden, skew, background = hidden_share(ddp), ddp.rank_skew_ms, ""
    if hidden is None:
        return "; how much is overlapped is not known yet" if ddp.hidden_pct else "", ""
    if hidden.high < 0:
        why = (
            "all-reduces run on the cores that compute"
            if ddp.device_type == "cpu"
            else "it slows the compute"
        )
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
    ddp: CaseResult | None,
    cases: Iterable[CaseResult],
    comparisons: Iterable[Comparison],
    times: RoundTimes,
    *,
    has_straggler: bool,
) -> Step | None:
    """Say what the step of this DDP case consists of and what could be saved; None where neither is known.

    Each part has a measurement of its own: what `no_sync` saves, all-reduces alone, the broadcast of buffers
    alone, what DDP adds on one device, what views of the buckets save, how far behind a straggler is, and
    the time in the loader.
    """
    if ddp is None or ddp.step_ms is None:
        return None
    alike = [case for case in cases if case.is_ok and case.step_ms and case.compile == ddp.compile]
    single = next((case for case in alike if case.mode == "single" and case.scaling == "weak"), None)
    own, copies = _own_work(alike), _copies(ddp, alike, comparisons)
    buffers = ddp.buffers_ms
    if buffers and not buffers.estimate > MIN_SHARE * ddp.step_ms.estimate:
        buffers = None
    # Where it is hardly known what is overlapped, it is not known either what exposed time consists of.
    alone = ddp.comm_ms if hidden_share(ddp) or not ddp.hidden_pct else None
    exposed, alone = (_subtract(whole, buffers) for whole in (ddp.exposed_comm_ms, alone))
    timed, local, comm = ((ddp.case_id, phase) for phase in ("timed", "no_sync", "comm"))
    parts, other, contention = {}, None, None
    if exposed and alone and alone.estimate < exposed.estimate:
        contention = _within_rounds(times, exposed.less(alone), timed, local, comm)
    if single and single.step_ms and ddp.exposed_comm_ms:
        parts = {"single-device step": single.step_ms} | ({"buffers": buffers} if buffers else {})
        rest = ddp.step_ms.less(single.step_ms).less(ddp.exposed_comm_ms)
        other = _within_rounds(times, rest, local, (single.case_id, "timed"))
    costs = {
        CONTENTION: contention and _subtract(contention, own),
        BUFFERS: buffers,
        COPIES: copies,
        OWN_WORK: _subtract(own, copies),
        RANKS: ddp.rank_skew_ms if has_straggler else None,
        DATA: ddp.data_ms,
    }
    step = explain_step(
        StepParts(
            total=ddp.step_ms,
            parts=parts,
            exposed=exposed,
            alone=alone,
            contention=contention,
            other=other,
            overheads={what: ms for what, ms in costs.items() if ms},
        )
    )
    if not step.consists_of and not step.savings:
        return None
    dps = [case for case in alike if case.mode == "dp" and not case.is_stand_in]
    dp = next((case.step_ms for case in dps if case.num_devices == ddp.num_devices), None)
    whole = f"A DDP step on {place(ddp)} takes {with_interval(ddp.step_ms, 'ms')}"
    whole += f", under DP {with_interval(dp, 'ms')}" if dp else ""
    whole += f": {step.consists_of}" if step.consists_of else ""
    return replace(step, consists_of=f"{whole}.")


def _own_work(alike: Iterable[CaseResult]) -> Interval | None:
    """Return what DDP adds to a step on one device; its ratio over `single` is taken within rounds."""
    one = next((c for c in alike if c.mode == "ddp" and c.num_devices == 1 and not c.changed()), None)
    if one is None or one.speedup is None or one.step_ms is None:
        return None
    return _saved(one.step_ms, one.speedup)


def _copies(
    ddp: CaseResult, alike: Iterable[CaseResult], comparisons: Iterable[Comparison]
) -> Interval | None:
    """Return what a step saves where gradients are views of the buckets, if that was measured."""
    views = {c.case_id for c in alike if c.changed(ddp) == {"gradient_as_bucket_view": "True"}}
    one = next((c for c in comparisons if c.reference_id == ddp.case_id and c.case_id in views), None)
    return None if one is None or ddp.step_ms is None else _saved(ddp.step_ms, one.ratio.inverted())


def _saved(step_ms: Interval, share: Interval) -> Interval | None:
    """Return what a step saves that then takes `share` of its time; None where that has no interval."""
    if math.isnan(share.low):
        return None
    return Interval(*(step_ms.estimate * (1 - end) for end in (share.estimate, share.high, share.low)))


def _subtract(whole: Interval | None, part: Interval | None) -> Interval | None:
    """Return the rest, as far as both are known."""
    return whole if whole is None or part is None else whole.less(part)


def _within_rounds(
    times: RoundTimes, rest: Interval, whole: tuple[str, str], *parts: tuple[str, str]
) -> Interval:
    """Give the rest of a whole the interval that its rounds tell: what they have in common cancels.

    Args:
        times: the blocks of the run.
        rest: its estimate, and the interval that holds whatever the dependence of the parts.
        whole: case and phase.
        parts: case and phase of each part.
    """
    first, *others = (times.of_case(case_id).step_ms.get(phase, {}) for case_id, phase in (whole, *parts))
    rounds = [r for r in first if all(r in other for other in others)]
    if len(rounds) < MIN_ROUNDS:
        return rest
    scale = max(first.values())  # the fit takes logarithms, whose exponentials must not overflow
    left = [(first[r] - sum(other[r] for other in others)) / scale for r in sorted(rounds)]
    known = in_pairs(left).interval().scaled(scale)
    return known.plus(rest.estimate - known.estimate)


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
        f"({100 * skew.estimate / step.estimate:.0f}%) of its own work; the others wait for it."
    )
