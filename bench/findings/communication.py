"""Answers what communication costs: what it adds to a step, and what a step consists of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..common.numbers import (
    choose_places,
    format_interval,
    format_number,
    format_quantity,
    format_to_places,
)
from ..results.case_result import CaseResult
from ..results.comparisons import EQUAL, FASTER, TOO_FEW, UNRESOLVED
from ..results.store import RunData
from ..stats.fit import FITTED_PHASES, Column, FittedSteps
from ..stats.interval import Interval
from .verdicts import COMMUNICATION, MIN_SHARE, RESOLVED, TOO_FEW_ROUNDS, Saving, Verdict
from .wording import get_hidden_share, name_devices, name_samples

EXPOSED, ALL_REDUCE = "exposed communication", "all-reduce that is not overlapped"
CONTENTION, BUFFERS = "contention, waiting and copies", "DDP's broadcast of buffers"
COPIES, OWN_WORK = "copying gradients into buckets and back", "DDP's own overhead on one device"
DEFAULTS = "DDP's default settings"
RANKS, DATA = "waiting for the slowest rank", "data loading"
COMMUNICATION_SAVINGS = (EXPOSED, ALL_REDUCE)
"""Savings that smaller or better placed messages bring."""

_LARGER = "a larger batch"

REMEDIES = {
    **dict.fromkeys(
        COMMUNICATION_SAVINGS,
        f"{_LARGER} or --comm-hook bf16, which both change the training, or a faster link",
    ),
    CONTENTION: f"cores and GPUs that nothing else uses, or {_LARGER}",
    BUFFERS: "--sync-buffers off, where ranks may keep buffers of their own",
    COPIES: "--gradient-as-bucket-view on",
    OWN_WORK: _LARGER,
    RANKS: "the same cores, clocks and batches for all ranks",
    DATA: "more --data-workers or a faster source",
}
"""Remedies, by the part of the step that they save."""

_NOTHING = Interval(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class StepExplanation:
    """Explanation of a step."""

    consists_of: str
    """The step, and the sum of its parts where they are known."""
    savings: tuple[Saving, ...]
    """The largest first."""


def estimate_half_bytes(ddp: CaseResult, exposed: Interval) -> Interval:
    """Return the most that 16-bit gradients save of `exposed` ms: half of what is sent, without buffers."""
    if not ddp.comm_ms:
        return exposed
    sent = ddp.comm_ms.subtract(ddp.buffers_ms) if ddp.buffers_ms else ddp.comm_ms
    return min(exposed, sent.scale(0.5), key=lambda ms: ms.estimate)


def format_most(ms: Interval) -> str:
    """Write the upper end of an interval in milliseconds: `at most 16 ms`."""
    return f"at most {format_quantity(max(ms.estimate, ms.high), 'ms', 2)}"


def _make_concrete(ddp: CaseResult, savings: Iterable[Saving]) -> list[Saving]:
    """Name the next batch size and what 16-bit gradients save, and say which costs are part of another."""
    size = f"--batch-size {2 * ddp.batch:.0f}" if ddp.batch and not ddp.batch_name else _LARGER
    why = f" (spreads it over twice the {name_samples(ddp)})"
    found, whole = list[Saving](), ""
    for one in savings:
        what, remedy = one.what, one.remedy.replace(_LARGER, f"{size}{why}")
        why = "" if remedy != one.remedy else why
        half = estimate_half_bytes(ddp, one.ms)
        if what in COMMUNICATION_SAVINGS and half is not one.ms:
            remedy = remedy.replace("bf16", f"bf16 (saves {format_most(half)})")
        whole = what if what in (EXPOSED, CONTENTION) else whole
        found.append(replace(one, remedy=remedy, part_of=whole if what in (OWN_WORK, COPIES) else ""))
    return found


def _write_sum(
    total: Interval, parts: Mapping[str, Interval | None], other: Interval | None, device_type: str
) -> str:
    """Write a sum of parts and what is left; empty where one is not known, without what rounding leaves out.

    `other` is what is left where rounds tell it better than the difference.
    """
    rest = total
    for part in filter(None, parts.values()):
        rest = rest.subtract(part)
    least = 0.5 * 10.0 ** -choose_places(total)
    every = {**parts, "other": other or rest}
    shown = {name: ms for name, ms in every.items() if ms and not abs(ms.estimate) < least}
    if any(math.isnan(ms.low) for ms in (total, *shown.values())):
        return ""
    words = ""
    for name, ms in shown.items():
        sign, size = ("-", _NOTHING.subtract(ms)) if ms.estimate < 0 else ("+", ms)
        words += f" {sign} {format_interval(size, 'ms')} {name}"
    if device_type == "cpu" and "other" in shown and shown["other"].low > 0:
        words += " (mostly compute that is slower while all cores work)"
    return words.removeprefix(" + ")


def answer_communication(ddp: CaseResult | None, typical: FittedSteps, straggler: str = "") -> Verdict | None:
    """Say what communication adds to DDP's step, and how much of it is overlapped; None if not measured.

    `typical` is the fit of the run, `straggler` what `describe_straggler` says of the case.
    """
    if ddp is None or ddp.exposed_comm_ms is None or ddp.step_ms is None:
        return None
    exposed, step_ms = ddp.exposed_comm_ms, ddp.step_ms.estimate
    fact = f"communication adds {format_interval(exposed, 'ms')} to each DDP step"
    label, width = "", math.inf
    if math.isnan(exposed.low):
        answer, text = TOO_FEW, f"{TOO_FEW} to tell what communication adds: {TOO_FEW_ROUNDS}"
    elif exposed.high < 0:
        answer, label = EQUAL, "adds nothing"
        shorter = format_interval(_NOTHING.subtract(exposed), "ms")
        text = f"communication adds nothing: each DDP step is {shorter} shorter than without synchronising"
    elif exposed.low > 0:
        answer, label = RESOLVED, f"adds {format_interval(exposed, 'ms')}"
        overlap = _describe_overlap(ddp, estimate_contention(ddp, typical))
        text = f"{fact}, {100 * exposed.estimate / step_ms:.0f}% of it{overlap}"
    else:
        text = (
            f"communication adds 0 to {format_number(exposed.high, 2)} ms to each DDP step, "
            f"at most {min(100 * exposed.high / step_ms, 100):.0f}% of it"
        )
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
        width_ratio=width,
    )


def estimate_contention(ddp: CaseResult, typical: FittedSteps) -> Interval | None:
    """Return what communication adds beyond what it takes alone; None where that is not known."""
    if ddp.exposed_comm_ms is None or ddp.comm_ms is None:
        return None
    step, local, comm = ((ddp.case_id, phase) for phase in FITTED_PHASES)
    found = typical.estimate_total({step: 1.0, local: -1.0, comm: -1.0}).compute_interval()
    return ddp.exposed_comm_ms.subtract(ddp.comm_ms) if math.isnan(found.low) else found


def estimate_saved_by_overlap(ddp: CaseResult, typical: FittedSteps, contention: Interval) -> Interval:
    """Return 1 - step / (step under `no_sync` + communication alone), percent; below 0 where it is longer.

    Where rounds do not tell it, it is that of `contention` in ms.
    """
    columns = [(ddp.case_id, phase) for phase in FITTED_PHASES]
    share = typical.estimate(lambda ms: 100 * (1 - math.exp(ms[0]) / np.exp(ms[1:]).sum()), *columns)
    found = share.compute_interval()
    if math.isnan(found.low) and ddp.step_ms:
        return contention.negate().scale(100 / (ddp.step_ms.estimate - contention.estimate))
    return found


def _describe_overlap(ddp: CaseResult, contention: Interval | None) -> str:
    """Continue the answer by what is overlapped, as far as it is known."""
    hidden, alone = get_hidden_share(ddp), ddp.comm_ms
    if hidden is None:
        return (
            ". How much of it is overlapped is not known: the interval is too wide" if ddp.hidden_pct else ""
        )
    if alone is None or contention is None:
        return ""
    by_itself = f". By itself it takes {format_interval(alone, 'ms')}"
    if contention.low > 0:
        on_top = f"Contention, waiting and copies add another {format_interval(contention, 'ms')}"
        return f"{by_itself}. Overlap hides none of this communication. {on_top}"
    if hidden.low < 0:
        return f"{by_itself}, of which at most {max(hidden.high, 0):.0f}% is overlapped"
    return f"{by_itself}, of which {format_to_places(hidden, 0, '%')} is overlapped"


def explain_ddp_step(
    ddp: CaseResult | None, run: RunData, *, has_straggler: bool, faster: Verdict | None = None
) -> StepExplanation | None:
    """Say what the step of this DDP case consists of and what would save time; None where neither is known.

    `faster` is the answer that another setting is faster and trains the same. A saving has an interval above
    0 and at least `MIN_SHARE` of the step; savings may overlap.

    Each part has a measurement of its own: what `no_sync` saves, all-reduces alone, the broadcast of buffers
    alone, what DDP adds on one device, what views of the buckets save, how far behind a straggler is, and
    the time in the loader. Their differences are of one fit.
    """
    if ddp is None or ddp.step_ms is None:
        return None
    alike = [case for case in run.results if case.is_ok and case.variant == ddp.variant]
    exposed, alone, buffers = ddp.exposed_comm_ms, ddp.comm_ms, ddp.buffers_ms
    step, local = ((ddp.case_id, phase) for phase in FITTED_PHASES[:2])

    def estimate_total(weights: Mapping[Column, float]) -> Interval | None:
        known = run.typical.estimate_total(weights).compute_interval()
        return None if math.isnan(known.low) else known

    def find_least(*found: Interval | None) -> Interval | None:
        return min(filter(None, found), key=lambda ms: ms.estimate, default=None)

    def find_timed(is_meant: Callable[[CaseResult], bool]) -> Column:
        return next((case.case_id for case in alike if is_meant(case)), ""), "timed"

    single = find_timed(lambda case: case.mode == "single")
    one = find_timed(lambda case: case.mode == "ddp" and case.num_devices == 1 and not case.list_changed())
    proved = {one.case_id for one in run.compared if one.answer == FASTER}
    views = find_timed(
        lambda case: case.case_id in proved and case.list_changed(ddp) == {"gradient_as_bucket_view": "True"}
    )
    # SyncBatchNorm's messages are exposed, and not among those that were sent alone.
    if (get_hidden_share(ddp) is None and ddp.hidden_pct) or ddp.get_setting("sync_batchnorm") == "True":
        alone = None  # nor is it known then what the exposed time consists of
    is_resolved = bool(exposed and exposed.low > 0)
    own_work = {one: 1.0, single: -1.0}
    costs: dict[str, Interval | None] = {
        COPIES: find_least(estimate_total({step: 1.0, views: -1.0}), exposed) if views[0] else None,
        OWN_WORK: estimate_total(own_work | {views: 1.0, step: -1.0}) or estimate_total(own_work),
        RANKS: ddp.rank_skew_ms if has_straggler else None,
        DATA: ddp.data_ms,
    }
    batches = int(ddp.get_number("accumulate") or 1)
    share, name = float(batches), f"{batches} single-device steps" if batches > 1 else "single-device step"
    if ddp.scaling == "strong":
        share, name = 1 / ddp.num_devices, f"1/{ddp.num_devices} of the single-device step"
    single_ms = next((c.step_ms for c in alike if c.mode == "single"), None) if exposed else None
    parts = {name: single_ms.scale(share)} if single_ms else {}
    if is_resolved and buffers and buffers.estimate > MIN_SHARE * ddp.step_ms.estimate:
        buffers = find_least(buffers, exposed, alone) or buffers
        costs |= {BUFFERS: buffers}
        exposed, alone = (ms and ms.subtract(buffers) for ms in (exposed, alone))
        parts |= {"buffers": buffers} if parts else {}
    if exposed and is_resolved:
        split = {ALL_REDUCE: alone, CONTENTION: estimate_contention(ddp, run.typical)}
        costs |= split if alone and alone.estimate < exposed.estimate else {EXPOSED: exposed}
    other = estimate_total({local: 1.0, single: -share})
    consists_of = (
        _write_sum(ddp.step_ms, {**parts, EXPOSED: exposed}, other, ddp.device_type) if parts else ""
    )
    savings = [Saving(ms, what, REMEDIES[what]) for what, ms in costs.items() if ms]
    saved = estimate_total({step: 1.0, (faster.faster_id, "timed"): -1.0}) if faster else None
    if faster and saved:
        savings.append(Saving(saved, DEFAULTS, f"{faster.paste} (measured)"))
    least = MIN_SHARE * ddp.step_ms.estimate
    large = (one for one in savings if one.ms.low > 0 and one.ms.estimate > least)
    savings = _make_concrete(ddp, sorted(large, key=lambda one: -one.ms.estimate))
    whole = _write_step(ddp, alike, consists_of)
    return StepExplanation(whole, tuple(savings)) if consists_of or savings else None


def _write_step(ddp: CaseResult, alike: Iterable[CaseResult], consists_of: str) -> str:
    """Say how long a step takes, under DP too, and what it consists of where that is known."""
    dps = [case for case in alike if case.mode == "dp" and not case.is_stand_in]
    dp = next((case.step_ms for case in dps if case.num_devices == ddp.num_devices), None)
    where = f"{name_devices(ddp)}{f' at {ddp.batch_name}' if ddp.batch_name else ''}"
    whole = f"A DDP step on {where} takes {format_interval(ddp.step_ms, 'ms')}"
    whole += f", under DP {format_interval(dp, 'ms')}" if dp else ""
    return f"{whole}{f': {consists_of}' if consists_of else ''}."
