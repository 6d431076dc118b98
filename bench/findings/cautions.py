"""Cautions: what speaks against trusting a run, its conditions and its rounds, as pyperf's checks do.

No check of rounds speaks of differences too small to matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy

from ..common.cli import format_command, get_message_prefix
from ..common.numbers import format_count, format_percent, format_rate_unit, format_short
from ..machine.gpus import FAULTS
from ..machine.load import describe_busy_cores, is_busy
from ..machine.manifest import Manifest
from ..results.aggregate import compute_images_per_s
from ..results.case_result import CaseResult
from ..results.round_times import ByRound, RoundTimes
from ..results.store import RunData
from ..stats.interval import Interval
from .answers import label_variants, select_headline
from .wording import label_case

MAX_SPLIT_EFFECT = 1e-2
"""More of `split_effect` is no rounding: float32 leaves 1e-3 at most."""

MAX_THROTTLED_PCT = 5.0
"""Share of samples with clocks held down below which nothing is said.

Clocks a fifth lower in so many samples make 1% of the rate, which is what a GPU's margin calls equal.
"""

MAX_CLOCK_RATIO = 1.02
"""Ratio of two cases' clocks above which they were compared at different speeds: twice a GPU's margin."""

DIRECTION, SIZES, TRANSFER = "direction", "sizes", "transfer"

LARGE_DRIFT = "large drift"

WEAKENED_BY = {
    "few rounds": DIRECTION,
    "not proved": DIRECTION,
    "unequal weights": DIRECTION,
    "unequal clocks": DIRECTION,
    "other load": SIZES,
    "evaluation mode": SIZES,
    "slowed GPUs": SIZES,
    "slow steps": SIZES,
    "scattered rounds": SIZES,
    LARGE_DRIFT: SIZES,
    "drift": TRANSFER,
    "slow links": TRANSFER,
}
"""The first claim that a kind of caution weakens: which is faster; by how much, in this run; whether times
and rates are those of another run. Ratios are formed within rounds, so drift seldom moves them."""


@dataclass(frozen=True, kw_only=True)
class Caution:
    """Something to know before trusting a run; `case_id` is the worst of the cases concerned, if any."""

    kind: str
    """One of `WEAKENED_BY`."""
    text: str
    advice: str
    case_id: str | None = None
    short: str = ""
    """Name and size of it in the confidence; by default its kind."""

    @property
    def sentence(self) -> str:
        """Say the finding and what to do about it, on one line."""
        return f"{self.text}. What helps: {self.advice}"


def find_cautions(run: RunData) -> list[Caution]:
    """Return what to know before trusting a run, most general first, one per kind."""
    measured = [case for case in run.results if case.is_ok and case.images_per_s is not None]
    # Those that share devices are measured a few times only, and say nothing of scaling.
    ranked = [case for case in measured if not case.is_stand_in]
    ok = [case for case in ranked if not case.oversubscribed] or ranked or measured
    return [*check_conditions(run.manifest, run.results, ok), *check_rounds(ok, run.times)]


def check_conditions(
    manifest: Manifest, cases: Sequence[CaseResult], ok: Sequence[CaseResult]
) -> Iterator[Caution]:
    """Find what speaks against the `cases` of a run but for their rounds, `ok` being the measured ones."""
    if unproved := [case for case in cases if case.not_proved]:
        yield Caution(
            kind="not proved",
            case_id=unproved[0].case_id,
            text=f"{format_count(len(unproved), 'case')} of {len(cases)} could not be proved to train right: "
            f"{unproved[0].not_proved}",
            advice=unproved[0].proved_by,
        )
    if manifest.model.in_evaluation:
        yield Caution(
            kind="evaluation mode",
            text="the module comes in evaluation mode, and so it is measured: without dropout, batch norm "
            "frozen",
            advice="call train() on it in module(), unless your training has it so",
        )
    if is_busy(manifest) and any(case.device_type == "cpu" for case in cases):
        yield Caution(
            kind="other load",
            text=f"{describe_busy_cores(manifest)} during the rounds: steps are longer than "
            "on an idle machine",
            advice=f"stop other programs, or use a dedicated "
            f"machine; {format_command('doctor')} shows the load",
        )
    split_effect = max((case.split_effect or 0.0 for case in cases), default=0.0)
    if split_effect > MAX_SPLIT_EFFECT:
        yield Caution(
            kind="unequal weights",
            text="the loss is no mean over rows of equal weight: its mean over the devices' parts of a batch "
            f"has a gradient up to {format_short(100 * split_effect, 2)}% off that of the whole; so modes "
            "train differently",
            advice="compare their speed, not their losses; or average within each row first, then over rows",
        )
    slowed = {case: share for case in ok if (share := case.throttled_pct or 0.0) > MAX_THROTTLED_PCT}
    if slowed:
        worst = max(slowed, key=slowed.__getitem__)
        reasons = sorted({why for case in slowed for why in case.throttle_reasons.split(", ") if why})
        raised = "raise the power limit (sudo nvidia-smi -pl), or compare only runs under this one"
        cooled = f"look at cooling and power supply ({format_command('doctor')}), then measure again"
        yield Caution(
            kind="slowed GPUs",
            case_id=worst.case_id,
            text=f"{format_count(len(slowed), 'case')} of {len(ok)} ran with a GPU slowed by "
            f"{' and '.join(reasons)} (at worst {label_case(worst)}: {slowed[worst]:.0f}% of samples)",
            advice=raised if FAULTS.isdisjoint(reasons) else cooled,
        )
    clocks = {case: case.sm_clock_mhz for case in ok if case.sm_clock_mhz}
    low, high = (end(clocks, key=clocks.__getitem__, default=None) for end in (min, max))
    if low and high and clocks[high] > MAX_CLOCK_RATIO * clocks[low]:
        yield Caution(
            kind="unequal clocks",
            case_id=low.case_id,
            text=f"GPU clocks differ by {100 * (clocks[high] / clocks[low] - 1):.1f}% between cases "
            f"({label_case(low)}: {clocks[low]:.0f} MHz; {label_case(high)}: {clocks[high]:.0f} MHz): their "
            "comparison is partly one of clocks",
            advice="lock the clocks (sudo nvidia-smi -lgc) at a value that every case can hold",
        )
    rates = {case: (case.images_per_s, case.get_number("images_per_s_sustained")) for case in ok}
    lost = {case: 1 - whole / usual.estimate for case, (usual, whole) in rates.items() if usual and whole}
    least, most = (end(lost, key=lost.__getitem__, default=None) for end in (min, max))
    if least and most and lost[most] - lost[least] > manifest.margin:
        percent = format_percent(lost[most])
        yield Caution(
            kind="slow steps",
            case_id=most.case_id,
            short=f"slow steps cost {label_case(most)} {percent} of its throughput",
            text=f"slow steps cost {label_case(most)} {percent} of its throughput, more than other cases: "
            "step, throughput and speed-up are of typical steps",
            advice="compare the sustained throughput too, in the table Every column of the report",
        )
    if (links := find_slow_links(manifest, cases)) is not None:
        yield links


def find_slow_links(manifest: Manifest, cases: Iterable[CaseResult]) -> Caution | None:
    """Find slow pairs of GPUs that measured cases used; what is not known is not told."""
    pairs = [(name, pair) for name, host in manifest.hosts.items() for pair in host.gpu_pairs]
    with_nvlink = {name for name, pair in pairs if pair.nvlink}
    slow = [
        {(name, pair.first), (name, pair.second)}
        for name, pair in pairs
        if pair.peer_access is False or (pair.nvlink is False and name in with_nvlink)
    ]
    on_gpus = [case for case in cases if case.is_ok and case.device_type == "cuda" and case.num_devices > 1]
    used = {case: sum(pair <= _list_gpus(manifest, case) for pair in slow) for case in on_gpus}
    worst = max(used, key=used.__getitem__, default=None)
    if worst is None or not used[worst]:
        return None
    return Caution(
        kind="slow links",
        case_id=worst.case_id,
        text=f"{label_case(worst)} used {format_count(used[worst], 'pair')} of GPUs without peer access, or "
        "without the NVLink that others of the machine have: the slowest link sets the pace of an all-reduce",
        advice=f"{format_command('doctor')}, line GPU links; choose GPUs with CUDA_VISIBLE_DEVICES",
    )


def _list_gpus(manifest: Manifest, case: CaseResult) -> set[tuple[str, int]]:
    """Host and place there of each GPU of a case, as far as UUIDs tell; DP's replicas are on the first."""
    ranks = manifest.ranks[: case.num_devices]
    if case.mode == "dp":
        return {(ranks[0].host if ranks else "", i) for i in range(case.num_devices)}
    hosts = manifest.hosts.items()
    places = {gpu.uuid: (name, i) for name, host in hosts for i, gpu in enumerate(host.gpus or ())}
    return {places[rank.gpu] for rank in ranks if rank.gpu in places}


MAX_FALSE_POSITIVE_RATE = 0.01
"""Share of runs with noise only in which drift is told."""

MIN_DRIFT = 0.02
"""Change of pace, a share, below which nothing is said."""

MAX_DRIFT = 0.2
"""Change of pace, a share, above which the sizes of answers are in doubt."""

MIN_ROUNDS = 5

MAX_SCATTER = 0.10
"""Scatter of the rounds of a case about its median, a share; the fit bounds what each of them does."""


def check_rounds(ok: Sequence[CaseResult], times: RoundTimes) -> Iterator[Caution]:
    """Yield what the rounds say against the measured cases `ok` of a run, one per kind."""
    by_id = {case.case_id: case for case in ok}
    found = {
        by_id[case_id]: rates
        for case_id, by_round in compute_images_per_s(times, ok).items()
        if (rates := {r: rate for r, rate in by_round.items() if 0 < rate < math.inf})
    }
    if not found:
        return
    fewest = min(found, key=lambda case: len(found[case]))
    if (num_rounds := len(found[fewest])) < MIN_ROUNDS:
        num_few = sum(len(by_round) < MIN_ROUNDS for by_round in found.values())
        yield Caution(
            kind="few rounds",
            case_id=fewest.case_id,
            text=f"{format_count(num_few, 'case')} of {len(found)} with fewer than {MIN_ROUNDS} rounds "
            f"({label_case(fewest)}: {num_rounds}): intervals are wide, and drift could not be seen",
            advice=f"{get_message_prefix('run')} --rounds 10, or a longer --max-time",
        )
    paces = compute_pace(found)
    per_round = 0.0
    if (change := _estimate_drift(paces)) is not None:
        per_round, first, last = change.estimate, min(paces), max(paces)
        slopes = per_round, change.low, change.high
        percent, low, high = (100 * math.expm1(slope * (last - first)) for slope in slopes)
        ends = sorted((abs(low), abs(high)))
        is_large = abs(percent) > 100 * MAX_DRIFT
        ratios = "and, at this size, perhaps in" if is_large else "and not in"
        yield Caution(
            kind=LARGE_DRIFT if is_large else "drift",
            short=f"the machine became {abs(percent):.0f}% {'faster' if percent > 0 else 'slower'} "
            "during the run",
            text=f"all cases became {abs(percent):.0f}% ({ends[0]:.0f}\N{EN DASH}{ends[1]:.0f}) "
            f"{'faster' if percent > 0 else 'slower'} from round {first} to {last}: this is in "
            f"{format_rate_unit(ok[0].unit)} and ms, {ratios} ratios, which are taken within rounds",
            advice=f"{format_command('doctor')} for the cause; compare versions "
            f"with {get_message_prefix('gate')} --interleave",
        )
    answering = {case.case_id for _, group in label_variants(ok) for case in select_headline(group)}
    beyond = {
        case: _compute_scatter(by_round, per_round)
        for case, by_round in found.items()
        if answering and (case.case_id in answering or case.mode == "single") and len(by_round) >= MIN_ROUNDS
    }
    worst = max(beyond, key=beyond.__getitem__, default=None)
    if worst is not None and beyond[worst] > MAX_SCATTER:
        num_wide = sum(share > MAX_SCATTER for share in beyond.values())
        size = f"{math.expm1(beyond[worst]):.0%}"
        yield Caution(
            kind="scattered rounds",
            case_id=worst.case_id,
            short=f"rounds vary by up to {size}",
            text=f"rounds vary by up to {size} about the median "
            f"(worst case: {label_case(worst)}; {format_count(num_wide, 'case')} of {len(beyond)} by more "
            f"than {100 * MAX_SCATTER:.0f}%)",
            advice=f"{format_command('doctor')} for what else runs; more --rounds, which narrow intervals",
        )


def compute_pace(found: Mapping[Any, ByRound]) -> ByRound:
    """Return, for every round, the median over its cases of throughput over the case's own median."""
    relative: dict[int, list[float]] = {}
    for by_round in found.values():
        usual = float(np.median(list(by_round.values())))
        for r, value in by_round.items():
            relative.setdefault(r, []).append(value / usual)
    # A round broken off by the time limit holds few cases, and the first of them are no sample.
    whole = max(map(len, relative.values()))
    return {r: float(np.median(v)) for r, v in sorted(relative.items()) if 2 * len(v) >= whole}


def _estimate_drift(paces: ByRound) -> Interval | None:
    """Test the log pace for drift (Kendall); its slope per round (Theil-Sen), None without drift."""
    rounds, logs = np.array(list(paces), dtype=float), np.log(list(paces.values()))
    if len(rounds) <= MIN_ROUNDS or scipy.stats.kendalltau(rounds, logs).pvalue > MAX_FALSE_POSITIVE_RATE:
        return None
    slope, _, low, high = map(float, scipy.stats.theilslopes(logs, rounds))
    return None if abs(slope) * (rounds[-1] - rounds[0]) < MIN_DRIFT else Interval(slope, low, high)


def _compute_scatter(by_round: ByRound, per_round: float) -> float:
    """Return the scatter of rounds without drift, in logs; a twentieth on either side is left out."""
    logs = np.log(list(by_round.values())) - per_round * np.array(list(by_round))
    return float(np.abs(np.quantile(logs, (0.05, 0.95)) - np.median(logs)).max())
