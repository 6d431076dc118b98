"""What speaks against trusting a run, but for its rounds, and the line that sums all of it up."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ..cli import command
from ..gpus import FAULTS
from ..manifest import Manifest, RankPlace, Record
from ..results.case_result import CaseResult
from ..results.comparisons import OPEN
from ..sharing import MOST_BUSY, MOST_STEAL
from .causes import SlowRank
from .numbers import plural, short
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

Pair: TypeAlias = tuple[str, int, int]
"""A host, and the places of two GPUs among those that its ranks saw, the lower one first."""


DIRECTION, SIZES, TRANSFER = "direction", "sizes", "transfer"

WEAKENS = {
    "few rounds": DIRECTION,
    "not proved": DIRECTION,
    "unequal weights": DIRECTION,
    "unequal clocks": DIRECTION,
    "other load": SIZES,
    "uneven ranks": SIZES,
    "evaluation mode": SIZES,
    "wide intervals": SIZES,
    "slowed GPUs": SIZES,
    "two levels": SIZES,
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

    @property
    def sentence(self) -> str:
        """Say the finding and what to do about it, on one line."""
        return f"{self.text}. What helps: {self.advice}"


class Trust(Record, frozen=True, omit_defaults=False):
    """How far to trust the answers of a run, a phrase for each claim that they make."""

    order: str
    """Which is faster."""
    size: str
    """By how much, in this run."""
    next_run: str
    """What another run of the same plan on this machine would give."""
    other_machines: str

    @property
    def lines(self) -> dict[str, str]:
        """The phrases by the claim that they are of."""
        names = ("which is faster", "by how much", "next run", "other machines")
        return dict(zip(names, (self.order, self.size, self.next_run, self.other_machines), strict=True))


def trust(
    cautions: Iterable[Caution], answers: Collection[str], *, on_cpu: bool, load: str = "", evidence: str = ""
) -> Trust | None:
    """What the answers of a run are worth; None without any.

    Args:
        cautions: against the run.
        answers: as `Verdict.answer`.
        on_cpu: whether cases ran on CPU cores.
        load: what others used of the cores, as `said_load` says it.
        evidence: of other runs, as `repeats.evidence` says it.
    """
    if not answers:
        return None
    against: dict[str, list[str]] = {DIRECTION: [], SIZES: [], TRANSFER: []}
    for one in cautions:
        against[WEAKENS[one.kind]].append(one.kind)
    direction, weak, transfer = (", ".join(kinds) for kinds in against.values())
    nothing = set(answers) <= set(OPEN)
    order = "nothing is resolved" if nothing else "holds"
    size = f"holds only roughly ({weak})" if weak else "holds within the intervals"
    changed = f"; ms and rates do not carry over ({transfer})" if transfer else ""
    return Trust(
        order=f"is in doubt ({direction})" if direction else order,
        size=f"{size}; {load}" if load else size,
        next_run=f"{evidence}{changed}",
        other_machines="not GPUs: a device here is a CPU core; measure there"
        if on_cpu
        else "not known: GPU, links and torch decide; measure there",
    )


class LoadShares(NamedTuple):
    """What others used of the cores of a run's ranks during the rounds; fractions."""

    busy: float
    steal: float
    """Other guests of the hypervisor."""


def load_shares(manifest: Manifest) -> LoadShares | None:
    """Return the largest shares of any machine of a run; None where the manifest does not tell."""
    shares = [
        LoadShares(load.others / load.cores, load.steal / load.cores) for load in manifest.load if load.cores
    ]
    return LoadShares(*map(max, zip(*shares, strict=True))) if shares else None


def said_load(manifest: Manifest) -> str:
    """Say what others used of the cores; empty where that is not known."""
    shares, before = load_shares(manifest), manifest.load_before
    if shares is None:
        return ""
    steal = f", other guests {100 * shares.steal:.0f}%" if shares.steal >= LEAST_STEAL else ""
    first = "" if before is None else f"; load average before the run {100 * before:.0f}% of them"
    return f"other programs used {100 * shares.busy:.0f}% of the cores{steal}{first}"


def other_load(manifest: Manifest, cases: Iterable[CaseResult]) -> Caution | None:
    """Find other programs or guests that used cores that stand in for devices."""
    shares = load_shares(manifest)
    if shares is None or all(case.device_type != "cpu" for case in cases):
        return None
    busy, steal = (f"{100 * share:.0f}%" for share in shares)
    said = [
        f"other programs used {busy} of the cores" if shares.busy > MOST_BUSY else "",
        f"the hypervisor gave {steal} of their time to other guests" if shares.steal > MOST_STEAL else "",
    ]
    if not any(said):
        return None
    return Caution(
        kind="other load",
        text=f"{' and '.join(filter(None, said))} during the rounds: steps are longer than on an idle "
        "machine, and vary more",
        advice=f"stop other programs, or use a dedicated machine; {command('doctor')} shows the load",
    )


def not_proved(cases: Sequence[CaseResult]) -> Caution | None:
    """Find cases of which nobody knows whether they train as the plain module does."""
    found = [case for case in cases if case.not_proved]
    if not found:
        return None
    return Caution(
        kind="not proved",
        case_id=found[0].case_id,
        text=f"{plural(len(found), 'case')} of {len(cases)} could not be proved to train right: "
        f"{found[0].not_proved}",
        advice=found[0].proved_by,
    )


def in_evaluation(manifest: Manifest) -> Caution | None:
    """Find a module that is made in evaluation mode, in which it is trained as it comes."""
    if not manifest.model.in_evaluation:
        return None
    return Caution(
        kind="evaluation mode",
        text="the module comes in evaluation mode, and so it is measured: without dropout, batch norm frozen",
        advice="call train() on it in module(), unless your training has it so",
    )


def unequal_weights(cases: Iterable[CaseResult]) -> Caution | None:
    """Find whether modes train differently: the loss is no mean over rows of equal weight."""
    largest = max((case.split_effect or 0.0 for case in cases), default=0.0)
    if largest <= MOST_SPLIT_EFFECT:
        return None
    return Caution(
        kind="unequal weights",
        text="the loss is no mean over rows of equal weight: its mean over the devices' parts of a batch "
        f"has a gradient up to {short(100 * largest, 2)}% off that of the whole; so modes train "
        "differently",
        advice="compare their speed, not their losses; or average within each row first, then over rows",
    )


def uneven_ranks(slow: Iterable[SlowRank]) -> Caution | None:
    """Find ranks of DDP that differ, another one from round to round."""
    one = next((one for one in slow if one.is_uneven), None)
    if one is None:
        return None
    return Caution(
        kind="uneven ranks",
        text=f"on {one.place} ranks differ by {one.apart} of their own work, and it is not always the same "
        "rank that is the slowest",
        advice=f"{command('doctor')} for what else runs on the cores",
    )


def throttled(ok: Sequence[CaseResult]) -> Caution | None:
    """Find the measured cases of which heat or power slowed a GPU."""
    slowed = {case: share for case in ok if (share := case.throttled_pct or 0.0) > MOST_THROTTLED_PCT}
    if not slowed:
        return None
    worst = max(slowed, key=slowed.__getitem__)
    reasons = sorted({why for case in slowed for why in case.throttle_reasons.split(", ") if why})
    raised = "raise the power limit (sudo nvidia-smi -pl), or compare only runs under this one"
    cooled = f"look at cooling and power supply ({command('doctor')}), then measure again"
    return Caution(
        kind="slowed GPUs",
        case_id=worst.case_id,
        text=f"{plural(len(slowed), 'case')} of {len(ok)} ran with a GPU slowed by {' and '.join(reasons)} "
        f"(at worst {case_label(worst)}: {slowed[worst]:.0f}% of samples)",
        advice=raised if FAULTS.isdisjoint(reasons) else cooled,
    )


def unequal_clocks(ok: Iterable[CaseResult]) -> Caution | None:
    """Find whether the cases of a run were measured at different clocks."""
    clocks = {case: case.sm_clock_mhz for case in ok if case.sm_clock_mhz}
    if not clocks:
        return None
    slow, fast = min(clocks, key=clocks.__getitem__), max(clocks, key=clocks.__getitem__)
    if clocks[fast] <= UNEQUAL_CLOCKS * clocks[slow]:
        return None
    (low_mhz, low), (high_mhz, high) = ((clocks[case], case_label(case)) for case in (slow, fast))
    return Caution(
        kind="unequal clocks",
        case_id=slow.case_id,
        text=f"GPU clocks differ by {100 * (high_mhz / low_mhz - 1):.1f}% between cases "
        f"({low}: {low_mhz:.0f} MHz; {high}: {high_mhz:.0f} MHz): their comparison is partly one of clocks",
        advice="lock the clocks (sudo nvidia-smi -lgc) at a value that every case can hold",
    )


def slow_links(manifest: Manifest, cases: Iterable[CaseResult]) -> Caution | None:
    """Find slow pairs of GPUs that measured cases used; what is not known is not told."""
    known = {
        (name, pair.first, pair.second): pair
        for name, host in manifest.hosts.items()
        for pair in host.gpu_pairs
    }
    with_nvlink = {host for (host, _, _), pair in known.items() if pair.nvlink}
    slow = {
        place
        for place, pair in known.items()
        if pair.peer_access is False or (pair.nvlink is False and place[0] in with_nvlink)
    }
    on_gpus = [case for case in cases if case.is_ok and case.device_type == "cuda" and case.num_devices > 1]
    used = {case.case_id: _used(manifest, case) & slow for case in on_gpus}
    count = len(set().union(*used.values()))
    if not count:
        return None
    return Caution(
        kind="slow links",
        case_id=max(used, key=lambda case_id: len(used[case_id])),
        text=f"cases used {plural(count, 'pair')} of GPUs without peer access, or without NVLink that "
        "others of the machine have: the slowest link sets the pace of an all-reduce",
        advice=f"{command('doctor')}, line GPU links; choose GPUs with CUDA_VISIBLE_DEVICES",
    )


def _used(manifest: Manifest, case: CaseResult) -> set[Pair]:
    """The pairs of GPUs between which a case copies: any two of its ranks on a host, or of DP's replicas."""
    ranks = manifest.ranks
    if case.mode == "dp":
        host = ranks[0].host if ranks else ""
        return {(host, a, b) for a, b in itertools.combinations(range(case.num_devices), 2)}
    places = [_place(manifest, rank) for rank in ranks[: case.num_devices]]
    own = sorted({place for place in places if place is not None})
    return {(host, a, b) for (host, a), (other, b) in itertools.combinations(own, 2) if host == other}


def _place(manifest: Manifest, rank: RankPlace) -> tuple[str, int] | None:
    """Host and place of the GPU that a rank trained on; None where its UUID is not known."""
    host = manifest.hosts.get(rank.host)
    uuids = [gpu.uuid for gpu in (host.gpus if host else None) or ()]
    return (rank.host, uuids.index(rank.gpu)) if rank.gpu and rank.gpu in uuids else None
