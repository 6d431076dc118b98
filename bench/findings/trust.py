"""How far to trust a run: what a caution is, and the one line that sums all of them up."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ddp_bench.bench.results.comparisons import FASTER, OPEN, SLOWER

MOST_BUSY = 0.05
"""Share of the cores that other programs may use while every core stands in for a device. 5% is the gate's
default threshold: a load of that size can pass for a regression."""

MOST_STEAL = 0.02
"""Share of time that the hypervisor may give to other guests (proc(5), "steal")."""

DIRECTION, SIZES, TRANSFER = "direction", "sizes", "transfer"

WEAKENS = {
    "few rounds": DIRECTION,
    "unequal weights": DIRECTION,
    "unequal clocks": DIRECTION,
    "other load": SIZES,
    "unsteady": SIZES,
    "wide intervals": SIZES,
    "slowed GPUs": SIZES,
    "warm-up": SIZES,
    "two levels": SIZES,
    "outliers": SIZES,
    "drift": TRANSFER,
    "steady rate": TRANSFER,
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
        return f"{self.text}. Next: {self.advice}"


@dataclass(frozen=True)
class Trust:
    """What the answers of a run are worth: the kinds of caution against each claim."""

    direction: tuple[str, ...]
    sizes: tuple[str, ...]
    transfer: tuple[str, ...]
    answers: frozenset[str]
    """What was answered, as `Verdict.answer`."""
    on_cpu: bool

    @classmethod
    def of(cls, cautions: Sequence[Caution], answers: Collection[str], *, on_cpu: bool) -> Trust:
        """Sort cautions by what they weaken of these answers."""
        against = {
            claim: tuple(one.kind for one in cautions if WEAKENS[one.kind] == claim)
            for claim in (DIRECTION, SIZES, TRANSFER)
        }
        return cls(**against, answers=frozenset(answers), on_cpu=on_cpu)

    @property
    def sentence(self) -> str:
        """The verdict in one line: direction, sizes, transfer."""
        doubt = f"in doubt ({', '.join(self.direction)})" if self.direction else ""
        sizes = f"only roughly ({', '.join(self.sizes)})" if self.sizes else ""
        if self.answers <= set(OPEN):
            held = f"are {doubt}" if doubt else f"hold {sizes}".rstrip()
            answered = f"nothing is resolved, either may be faster; the bounds of that {held}"
        else:
            what = "which is faster" if self.answers & {FASTER, SLOWER} else "what is resolved"
            held = f"is {doubt}" if doubt else "holds"
            answered = f"{what} {held}; by how much, {sizes or 'within the intervals'}"
        where = f"not for other runs ({', '.join(self.transfer)})" if self.transfer else "for like machines"
        gpus = (", nor for GPUs" if self.transfer else ", not for GPUs") if self.on_cpu else ""
        return f"Trust: {answered}; ms and rates hold {where}{gpus}."
