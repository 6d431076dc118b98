"""Cautions: what speaks against trusting a run, but for its rounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..common.cli import command
from ..common.numbers import plural, short
from ..machine.gpus import FAULTS
from ..machine.load import MOST_BUSY, MOST_STEAL
from ..machine.manifest import Manifest
from ..results.case_result import CaseResult
from .wording import case_label

MOST_SPLIT_EFFECT = 1e-2
"""More of `split_effect` is no rounding: float32 leaves 1e-3 at most."""

MOST_THROTTLED_PCT = 5.0
"""Share of samples with clocks held down below which nothing is said.

Clocks a fifth lower in so many samples make 1% of the rate, which is what a GPU's margin calls equal.
"""

UNEQUAL_CLOCKS = 1.02
"""Ratio of two cases' clocks above which they were compared at different speeds: twice a GPU's margin."""

LEAST_STEAL = 0.005
"""Share of the time that is no rounding of 0%."""

DIRECTION, SIZES, TRANSFER = "direction", "sizes", "transfer"

WEAKENS = {
    "few rounds": DIRECTION,
    "not proved": DIRECTION,
    "unequal weights": DIRECTION,
    "unequal clocks": DIRECTION,
    "other load": SIZES,
    "evaluation mode": SIZES,
    "slowed GPUs": SIZES,
    "scattered rounds": SIZES,
    "drift": TRANSFER,
    "slow links": TRANSFER,
}
"""The first claim that a kind of caution weakens: which is faster; by how much, in this run; whether times
and rates are those of another run. Ratios are formed within rounds, so drift leaves them as they are."""


@dataclass(frozen=True, kw_only=True)
class Caution:
    """Something to know before trusting a run; `case_id` is the worst of the cases concerned, if any."""

    kind: str
    """One of `WEAKENS`."""
    text: str
    advice: str
    case_id: str | None = None
    short: str = ""
    """What the confidence names it by, with its size; by default its kind."""

    @property
    def sentence(self) -> str:
        """Say the finding and what to do about it, on one line."""
        return f"{self.text}. What helps: {self.advice}"


def load_shares(manifest: Manifest) -> tuple[float, float] | None:
    """What others used of the cores of a run's ranks in its rounds, and other guests of the hypervisor.

    Fractions, the largest of any machine; None where the manifest does not tell.
    """
    found = [(load.others / load.cores, load.steal / load.cores) for load in manifest.load if load.cores]
    return (max(busy for busy, _ in found), max(steal for _, steal in found)) if found else None


def said_load(manifest: Manifest) -> str:
    """Say what others used of the cores; empty where that is not known."""
    if (shares := load_shares(manifest)) is None:
        return ""
    busy, steal = (f"{100 * share:.0f}%" for share in shares)
    guests = f", other guests {steal}" if shares[1] >= LEAST_STEAL else ""
    before = (
        "" if manifest.load_before is None else f" ({100 * manifest.load_before:.0f}% in the minute before)"
    )
    return f"other programs used {busy} of the cores{guests}{before}"


def of_conditions(
    manifest: Manifest, cases: Sequence[CaseResult], ok: Sequence[CaseResult]
) -> Iterator[Caution]:
    """What speaks against the `cases` of a run but for their rounds, `ok` being the measured ones."""
    if unproved := [case for case in cases if case.not_proved]:
        yield Caution(
            kind="not proved",
            case_id=unproved[0].case_id,
            text=f"{plural(len(unproved), 'case')} of {len(cases)} could not be proved to train right: "
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
    load, on_cpu = load_shares(manifest), any(case.device_type == "cpu" for case in cases)
    if load and on_cpu and (load[0] > MOST_BUSY or load[1] > MOST_STEAL):
        yield Caution(
            kind="other load",
            text=f"{said_load(manifest)} during the rounds: steps are longer than on an idle machine",
            advice=f"stop other programs, or use a dedicated machine; {command('doctor')} shows the load",
        )
    split_effect = max((case.split_effect or 0.0 for case in cases), default=0.0)
    if split_effect > MOST_SPLIT_EFFECT:
        yield Caution(
            kind="unequal weights",
            text="the loss is no mean over rows of equal weight: its mean over the devices' parts of a batch "
            f"has a gradient up to {short(100 * split_effect, 2)}% off that of the whole; so modes train "
            "differently",
            advice="compare their speed, not their losses; or average within each row first, then over rows",
        )
    slowed = {case: share for case in ok if (share := case.throttled_pct or 0.0) > MOST_THROTTLED_PCT}
    if slowed:
        worst = max(slowed, key=slowed.__getitem__)
        reasons = sorted({why for case in slowed for why in case.throttle_reasons.split(", ") if why})
        raised = "raise the power limit (sudo nvidia-smi -pl), or compare only runs under this one"
        cooled = f"look at cooling and power supply ({command('doctor')}), then measure again"
        yield Caution(
            kind="slowed GPUs",
            case_id=worst.case_id,
            text=f"{plural(len(slowed), 'case')} of {len(ok)} ran with a GPU slowed by "
            f"{' and '.join(reasons)} (at worst {case_label(worst)}: {slowed[worst]:.0f}% of samples)",
            advice=raised if FAULTS.isdisjoint(reasons) else cooled,
        )
    clocks = {case: case.sm_clock_mhz for case in ok if case.sm_clock_mhz}
    low, high = (end(clocks, key=clocks.__getitem__, default=None) for end in (min, max))
    if low and high and clocks[high] > UNEQUAL_CLOCKS * clocks[low]:
        yield Caution(
            kind="unequal clocks",
            case_id=low.case_id,
            text=f"GPU clocks differ by {100 * (clocks[high] / clocks[low] - 1):.1f}% between cases "
            f"({case_label(low)}: {clocks[low]:.0f} MHz; {case_label(high)}: {clocks[high]:.0f} MHz): their "
            "comparison is partly one of clocks",
            advice="lock the clocks (sudo nvidia-smi -lgc) at a value that every case can hold",
        )
    if (links := slow_links(manifest, cases)) is not None:
        yield links


def slow_links(manifest: Manifest, cases: Iterable[CaseResult]) -> Caution | None:
    """Find slow pairs of GPUs that measured cases used; what is not known is not told."""
    pairs = [(name, pair) for name, host in manifest.hosts.items() for pair in host.gpu_pairs]
    with_nvlink = {name for name, pair in pairs if pair.nvlink}
    slow = [
        {(name, pair.first), (name, pair.second)}
        for name, pair in pairs
        if pair.peer_access is False or (pair.nvlink is False and name in with_nvlink)
    ]
    on_gpus = [case for case in cases if case.is_ok and case.device_type == "cuda" and case.num_devices > 1]
    used = {case: sum(pair <= _gpus(manifest, case) for pair in slow) for case in on_gpus}
    worst = max(used, key=used.__getitem__, default=None)
    if worst is None or not used[worst]:
        return None
    return Caution(
        kind="slow links",
        case_id=worst.case_id,
        text=f"{case_label(worst)} used {plural(used[worst], 'pair')} of GPUs without peer access, or "
        "without the NVLink that others of the machine have: the slowest link sets the pace of an all-reduce",
        advice=f"{command('doctor')}, line GPU links; choose GPUs with CUDA_VISIBLE_DEVICES",
    )


def _gpus(manifest: Manifest, case: CaseResult) -> set[tuple[str, int]]:
    """Host and place there of each GPU of a case, as far as UUIDs tell; DP's replicas are on the first."""
    ranks = manifest.ranks[: case.num_devices]
    if case.mode == "dp":
        return {(ranks[0].host if ranks else "", i) for i in range(case.num_devices)}
    hosts = manifest.hosts.items()
    places = {gpu.uuid: (name, i) for name, host in hosts for i, gpu in enumerate(host.gpus or ())}
    return {places[rank.gpu] for rank in ranks if rank.gpu in places}
