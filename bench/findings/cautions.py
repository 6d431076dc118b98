"""What speaks against trusting a run, but for its rounds, and the line that sums all of it up."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import pandas as pd

from ..cli import command
from ..cluster.load import MOST_BUSY, MOST_STEAL
from ..gpus import FAULTS
from ..manifest import Manifest, RankPlace
from ..results.comparisons import FASTER, OPEN, SLOWER
from ..results.schema import records
from .numbers import finite, plural, short
from .slow_ranks import SlowRank
from .wording import text

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


def trust(
    cautions: Iterable[Caution], answers: Collection[str], *, on_cpu: bool, load: str = "", evidence: str = ""
) -> str:
    """What the answers of a run are worth, in one line: direction, sizes, and what other runs tell of it.

    Args:
        cautions: against the run.
        answers: as `Verdict.answer`; empty without any.
        on_cpu: whether cases ran on CPU cores.
        load: what others used of the cores, as `said_load` says it.
        evidence: of other runs, as `repeats.evidence` says it.
    """
    if not answers:
        return ""
    against: dict[str, list[str]] = {DIRECTION: [], SIZES: [], TRANSFER: []}
    for one in cautions:
        against[WEAKENS[one.kind]].append(one.kind)
    direction, weak, transfer = (", ".join(kinds) for kinds in against.values())
    doubt = f"in doubt ({direction})" if direction else ""
    sizes = f"only roughly ({weak})" if weak else ""
    if set(answers) <= set(OPEN):
        held = f"are {doubt}" if doubt else f"hold {sizes}".rstrip()
        answered = f"nothing is resolved, either may be faster; the bounds of that {held}"
    else:
        what = "which is faster" if {FASTER, SLOWER} & set(answers) else "what is resolved"
        held = f"is {doubt}" if doubt else "holds"
        answered = f"{what} {held}; by how much, {sizes or 'within the intervals'}"
    changed = f"; ms and rates do not carry over ({transfer})" if transfer else ""
    gpus = "Nothing of it tells which is faster on GPUs: measure there" if on_cpu else ""
    said = (f"Trust, of this run: {answered}{changed}", load, evidence, gpus)
    return " ".join(f"{part}." for part in said if part)


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
    first = "" if before is None else f"; in the minute before it, the load was {100 * before:.0f}% of them"
    steal = f", other guests {100 * shares.steal:.0f}%" if shares.steal >= LEAST_STEAL else ""
    return f"Other programs used {100 * shares.busy:.0f}% of the cores during the rounds{steal}{first}"


def other_load(manifest: Manifest, cases: pd.DataFrame) -> Caution | None:
    """Find other programs or guests that used cores that stand in for devices."""
    shares = load_shares(manifest)
    if shares is None or not (cases["device_type"] == "cpu").any():
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


def not_proved(cases: pd.DataFrame) -> Caution | None:
    """Find cases of which nobody knows whether they train as the plain module does."""
    found = records(cases[cases["not_proved"].notna()])
    if not found:
        return None
    reason, _, advice = text(found[0]["not_proved"]).partition("; ")
    return Caution(
        kind="not proved",
        case_id=text(found[0]["case_id"]),
        text=f"{plural(len(found), 'case')} of {len(cases)} could not be proved to train right: {reason}",
        advice=advice or "a smaller model, or one in which nothing is random",
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


def unequal_weights(cases: pd.DataFrame) -> Caution | None:
    """Find whether modes train differently: the loss is no mean over rows of equal weight."""
    largest = finite(cases["split_effect"].max())
    if largest is None or largest <= MOST_SPLIT_EFFECT:
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
        text=f"on {one.place} the slowest rank's own work takes {one.apart} longer than the fastest's, and "
        "it is not always the same rank",
        advice=f"{command('doctor')} for what else runs on the cores",
    )


def throttled(ok: pd.DataFrame) -> Caution | None:
    """Find the measured cases of which heat or power slowed a GPU."""
    slowed = ok[ok["throttled_pct"] > MOST_THROTTLED_PCT]
    if slowed.empty:
        return None
    worst = max(records(slowed), key=lambda row: float(row["throttled_pct"]))
    reasons = sorted({why for cell in slowed["throttle_reasons"] for why in text(cell).split(", ") if why})
    raised = "raise the power limit (sudo nvidia-smi -pl), or compare only runs under this one"
    cooled = f"look at cooling and power supply ({command('doctor')}), then measure again"
    return Caution(
        kind="slowed GPUs",
        case_id=str(worst["case_id"]),
        text=f"{plural(len(slowed), 'case')} of {len(ok)} ran with a GPU slowed by {' and '.join(reasons)} "
        f"(at worst {worst['case_id']}: {worst['throttled_pct']:.0f}% of samples)",
        advice=raised if FAULTS.isdisjoint(reasons) else cooled,
    )


def unequal_clocks(ok: pd.DataFrame) -> Caution | None:
    """Find whether the cases of a run were measured at different clocks."""
    clocks = ok.loc[ok["sm_clock_mhz"] > 0, ["sm_clock_mhz", "case_id"]]
    ordered = sorted(clocks.itertuples(index=False, name=None))
    if not ordered or ordered[-1][0] <= UNEQUAL_CLOCKS * ordered[0][0]:
        return None
    (low_mhz, slow), *_, (high_mhz, fast) = ordered
    return Caution(
        kind="unequal clocks",
        case_id=str(slow),
        text=f"GPU clocks differ by {100 * (high_mhz / low_mhz - 1):.1f}% between cases "
        f"({slow}: {low_mhz:.0f} MHz, {fast}: {high_mhz:.0f} MHz): their comparison is partly one of clocks",
        advice="lock the clocks (sudo nvidia-smi -lgc) at a value that every case can hold",
    )


def slow_links(manifest: Manifest, cases: pd.DataFrame) -> Caution | None:
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
    ok = cases[(cases["status"] == "ok") & (cases["device_type"] == "cuda") & (cases["num_devices"] > 1)]
    used = {text(row["case_id"]): _used(manifest, row) & slow for row in records(ok)}
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


def _used(manifest: Manifest, row: Mapping[Any, Any]) -> set[Pair]:
    """The pairs of GPUs between which a case copies: any two of its ranks on a host, or of DP's replicas."""
    ranks = manifest.ranks
    if row["mode"] == "dp":
        host = ranks[0].host if ranks else ""
        return {(host, a, b) for a, b in itertools.combinations(range(int(row["num_devices"])), 2)}
    places = [_place(manifest, rank) for rank in ranks[: int(row["num_devices"])]]
    own = sorted({place for place in places if place is not None})
    return {(host, a, b) for (host, a), (other, b) in itertools.combinations(own, 2) if host == other}


def _place(manifest: Manifest, rank: RankPlace) -> tuple[str, int] | None:
    """Host and place of the GPU that a rank trained on; None where its UUID is not known."""
    host = manifest.hosts.get(rank.host)
    uuids = [gpu.uuid for gpu in (host.gpus if host else None) or ()]
    return (rank.host, uuids.index(rank.gpu)) if rank.gpu and rank.gpu in uuids else None
