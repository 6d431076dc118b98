"""The answers of a run as records; the `sentence` of each is where its codes and numbers become words."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from ..results.comparisons import EQUAL, FASTER, OPEN, SLOWER, TOO_FEW, UNRESOLVED, Comparison
from ..stats.interval import Interval
from ..stats.one_run import MIN_ROUNDS
from ..text import listed
from .numbers import about, between, percent, quantity, short_percent, span
from .numbers import with_interval as written
from .wording import hides_none

WRAPPER, CAP, COMMUNICATION, COMPILE = "wrapper", "DDP settings", "communication", "torch.compile"

RESOLVED = "resolved"
"""Answer of a question that compares nothing."""

LITTLE_EXPOSED = 0.05
"""Share of the step below which exposed communication counts as none."""

OWN_COST = "That is DDP's own cost: on one device nothing is communicated"

_LEAST_GAIN = 0.001
"""A smaller gain is said as this one."""


@dataclass(frozen=True)
class Ratio:
    """How many times as fast one is as the other: every ratio is said in this direction."""

    faster: str
    slower: str
    times: Interval

    @classmethod
    def of(cls, one: str, other: str, ratio: Interval) -> Ratio:
        """The ratio of one's rate over the other's, turned so that it is above 1."""
        return cls(other, one, ratio.inverted()) if ratio.estimate < 1 else cls(one, other, ratio)

    def says(self, where: str = "", *, subject: str | None = None) -> str:
        """Say it, with its interval: `DDP is 1.31 times as fast as DP on 2 GPUs (1.28\N{EN DASH}1.34)`."""
        said = f"{subject or self.faster} is {self.times.estimate:.2f} times as fast as {self.slower}"
        return f"{said}{where} {between(self.times)}"

    def bounds(self) -> str:
        """Say what an interval that holds 1 leaves open."""
        first = f"{self.faster} is at most {self.times.high:.2f} times as fast as {self.slower}"
        return f"{first}, {self.slower} at most {1 / self.times.low:.2f} times as fast as {self.faster}"


@dataclass(frozen=True, kw_only=True)
class Finding(ABC):
    """Something that a run shows: numbers and names, and the sentence that is formed of them."""

    of: str = ""
    """The cases that it speaks of, by `compile_label`, where a run has several modes of torch.compile."""

    @property
    @abstractmethod
    def sentence(self) -> str:
        """The whole of it."""

    @property
    def said(self) -> str:
        """The sentence, and which cases it speaks of."""
        return f"{self.of.capitalize()}: {self.sentence}" if self.of else self.sentence


@dataclass(frozen=True, kw_only=True)
class Verdict(Finding):
    """One answer; `answer` is one of `bench.results.comparisons.ANSWERS`, or `RESOLVED`."""

    question: ClassVar[str]
    answer: str
    paste: str = ""
    """A line of code that follows from it."""
    comparisons: tuple[Comparison, ...] = ()
    """The first one decides."""

    @property
    @abstractmethod
    def label(self) -> str:
        """The answer in a few words."""

    @property
    @abstractmethod
    def decides(self) -> str:
        """What more rounds would decide where it is open: `whether cap 25 gains up to 6%`."""

    @property
    def excess(self) -> float | None:
        """Half its interval over the half that would settle it, where no comparison tells that."""
        return None

    @property
    def within_margin(self) -> bool:
        """Whether all of the interval is what the user calls equal."""
        return bool(self.comparisons) and self.comparisons[0].within_margin

    @property
    def is_open(self) -> bool:
        """Whether more rounds are needed."""
        return self.answer in OPEN


@dataclass(frozen=True, kw_only=True)
class RatioVerdict(Verdict):
    """Whether one thing is faster than another."""

    ratio: Ratio
    where: str
    """Such as `on 2 GPUs`."""
    margin: float
    is_advice: bool = False
    """Whether to use the faster one: on CPU cores, where nn.DataParallel does nothing, it says nothing."""

    @property
    def compared(self) -> str:
        """The comparison, without a capital letter and a full stop."""
        where, ratio, margin = f" {self.where}", self.ratio, short_percent(self.margin)
        if self.answer == TOO_FEW and self.comparisons:
            few = f"{self.comparisons[0].num_rounds}, {MIN_ROUNDS} at least"
            return f"too few rounds{where} to compare {ratio.faster} with {ratio.slower}: {few}"
        if self.answer == UNRESOLVED:
            return f"unresolved{where}: {ratio.bounds()}"
        if self.answer == EQUAL:
            return f"either{where}: no difference above {margin}; {ratio.says()}"
        if self.within_margin:
            small = f"{ratio.faster} is faster by less than {margin}"
            return f"either{where}: {small}; {ratio.says(subject='it')}"
        return (
            f"use {ratio.faster}{where}: {ratio.says(subject='it')}" if self.is_advice else ratio.says(where)
        )

    @property
    def label(self) -> str:
        if self.answer == EQUAL:
            return f"no difference above {short_percent(self.margin)}"
        less = f", by less than {short_percent(self.margin)}" if self.within_margin else ""
        return self.answer if self.is_open else f"{self.ratio.faster} is faster{less}"

    @property
    def decides(self) -> str:
        return f"which of {self.ratio.faster} and {self.ratio.slower} is faster {self.where}"


NOT_MEASURABLE = (
    "DP against DDP is not measurable without GPUs; published of GPT-2 on 2 TITAN RTX: one GPU 102 s, "
    "DP 111 s, "
    "DDP 102 s with NVLink, 131 s without (transformers documentation)"
)
"""On CPU cores PyTorch has no DataParallel: what is measured there is this suite's own code."""


@dataclass(frozen=True, kw_only=True)
class StandIn:
    """What the stages of DP's stand-in take of its step, in ms."""

    step_ms: float
    stages_ms: tuple[tuple[str, float], ...]

    @property
    def said(self) -> str:
        parts = ", ".join(f"{name} {quantity(ms, 'ms', 2)}" for name, ms in self.stages_ms)
        whole = quantity(sum(ms for _, ms in self.stages_ms), "ms", 2)
        return f"DP's stages cost its stand-in {whole} of a step of {quantity(self.step_ms, 'ms')}: {parts}"


@dataclass(frozen=True, kw_only=True)
class WrapperVerdict(RatioVerdict):
    """DDP against DP; of a run with one of them, or where DP is a stand-in, against one device."""

    question = WRAPPER
    of_ideal: tuple[tuple[str, Interval], ...] = ()
    """By mode the share of ideal scaling that it reaches."""
    strong: bool = False
    is_own_cost: bool = False
    """Whether it is of one device, where nothing is communicated."""
    beside_stand_in: bool = False
    """Whether DP was asked for where nothing is learnt of it."""
    stand_in: StandIn | None = None
    one_device: Ratio | None = None
    """One device alone over these devices, where it is faster."""

    @property
    def sentence(self) -> str:
        said = f"{self.compared[:1].upper()}{self.compared[1:]}"
        if self.of_ideal and not self.within_margin and self.answer not in (UNRESOLVED, EQUAL):
            reached = ", ".join(f"{mode} {percent(share)}" for mode, share in self.of_ideal)
            said += f"; of ideal {'strong ' if self.strong else ''}scaling: {reached}"
        alone = f" {self.one_device.says(subject='One device alone')}." if self.one_device else ""
        own = OWN_COST if self.is_own_cost and self.answer in (FASTER, SLOWER) else ""
        beside = (
            own,
            self.stand_in.said if self.stand_in else "",
            NOT_MEASURABLE if self.beside_stand_in else "",
        )
        return " ".join([f"{said}.{alone}", *(f"{one}." for one in beside if one)])


@dataclass(frozen=True, kw_only=True)
class CompileVerdict(RatioVerdict):
    """What a mode of torch.compile brings to DDP on most devices, else to one device."""

    question = COMPILE
    single: tuple[Ratio, ...] = ()
    compile_s: float | None = None

    @property
    def sentence(self) -> str:
        single = "".join(f"; {one.says(' for single')}" for one in self.single)
        took = "" if self.compile_s is None else f"; compiling took {about(self.compile_s)}"
        return f"torch.compile: {self.compared}{single}{took}."


@dataclass(frozen=True, kw_only=True)
class SettingsVerdict(Verdict):
    """What to change about DDP, or that nothing measured is worth it."""

    question = CAP
    standing: str
    """What every other case is held against: `the default`."""
    noun: str
    """`cap` where only caps differ, else `setting`."""
    best: Ratio | None = None
    alters: bool = False
    """Whether the best one changes the training."""
    nearest: tuple[str, Interval] | None = None
    """The one that may gain most, and its rate over that of the standing one."""
    num_known: int = 0
    unresolved: tuple[str, ...] = ()
    few: tuple[str, ...] = ()
    worst: Ratio | None = None

    @property
    def sentence(self) -> str:
        if self.best is not None:
            loss = "; it changes the training, so check the loss" if self.alters else ""
            left = self.unresolved + self.few
            best = self.best.says()
            best = f"{best[:1].upper()}{best[1:]}" if self.noun == "cap" else best
            return f"{best}{loss}.{f' Unresolved: {listed(left)}.' if left else ''}"
        if self.nearest is None:
            return f"Undecided: too few rounds to compare {listed(self.few)}."
        name, ratio = self.nearest
        if self.answer == UNRESOLVED and self.num_known == 1:
            slower, faster = short_percent(1 - ratio.low), short_percent(ratio.high - 1)
            few = f" Too few rounds: {listed(self.few)}." if self.few else ""
            return (
                f"Undecided: {name} is between {slower} slower and {faster} faster than {self.standing}.{few}"
            )
        others = tuple(other for other in self.unresolved if other != name)
        if self.num_known > 1:
            gain = f"more than {self._most} faster ({name}: {span(ratio)})" if ratio.high > 1 else "faster"
            said = f"none of the {self.num_known} {self.noun}s tried is {gain}"
        elif ratio.high > 1:
            said = f"{name} is at most {self._most} faster {between(ratio)}"
        else:
            said = "" if self.worst else f"{name} is not faster"
        parts = (
            said,
            self.worst.says(subject=None if said else "it") if self.worst else "",
            f"unresolved{' too' if name in self.unresolved else ''}: {listed(others)}" if others else "",
            f"too few rounds: {listed(self.few)}" if self.few else "",
        )
        first = "Undecided" if self.answer == UNRESOLVED else f"Keep {self.standing}"
        return f"{first}: {'; '.join(part for part in parts if part)}."

    @property
    def _most(self) -> str:
        assert self.nearest is not None
        return short_percent(max(self.nearest[1].high - 1, _LEAST_GAIN))

    @property
    def label(self) -> str:
        if self.best is not None:
            return f"{self.best.faster} is faster"
        if self.answer == EQUAL:
            return f"keep {self.standing}"
        return self.answer

    @property
    def decides(self) -> str:
        if self.nearest is None or self.nearest[0] not in self.unresolved:
            left = self.unresolved + self.few
            return f"whether {listed(left)} {'is' if len(left) == 1 else 'are'} faster"
        return f"whether {self.nearest[0]} gains up to {self._most}"


@dataclass(frozen=True, kw_only=True)
class CommunicationVerdict(Verdict):
    """What communication adds to DDP's step, and how much of it is hidden."""

    question = COMMUNICATION
    exposed_ms: Interval
    step_ms: float
    place: str
    alone_ms: Interval | None = None
    hidden_pct: Interval | None = None
    skew_ms: Interval | None = None
    """Own work of the slowest rank beyond that of the fastest."""
    on_cpu: bool = False
    is_vague: bool = False
    """Whether what is hidden was measured, but is not known to 50 percentage points."""

    @property
    def sentence(self) -> str:
        if self.answer == TOO_FEW:
            return "Communication: too few rounds to tell what it adds."
        if self.answer != RESOLVED:
            most = quantity(self.exposed_ms.high, "ms", 2)
            share = f"{100 * self.exposed_ms.high / self.step_ms:.0f}%"
            return f"Communication adds at most {most}, {share} of DDP's step on {self.place}: {self._added}."
        said = f"Communication adds {self.cost}"
        hidden, takes = self.hidden_pct, f"the {written(self.alone_ms, 'ms')} that it takes alone"
        if hidden is None:
            vague = "; how much of it is hidden is not known to 50 percentage points"
            return f"{said}{vague if self.is_vague else ''}."
        if hides_none(hidden):
            slows = "none is hidden, and it slows the compute or makes ranks wait"
            if self.on_cpu:
                slows = "none is hidden, for all-reduces run on the cores that compute, and ranks wait"
            skew = self.skew_ms
            apart = f", whose own work is {written(skew, 'ms')} apart" if skew and skew.low > 0 else ""
            return f"{said}, more than {takes}: {slows}{apart}."
        if hidden.estimate < 0:
            return f"{said}, about {takes}: whether any is hidden is unresolved."
        return f"{said}; of {takes}, {hidden.estimate:.0f}% {between(hidden, 0)} is hidden."

    @property
    def cost(self) -> str:
        """What it adds, and to which step: `65 (55-75) ms, 26% of the step of 252 ms`."""
        share = f"{100 * self.exposed_ms.estimate / self.step_ms:.0f}%"
        return f"{self._added}, {share} of the step of {quantity(self.step_ms, 'ms')}"

    @property
    def _added(self) -> str:
        return written(self.exposed_ms, "ms")

    @property
    def label(self) -> str:
        if self.answer == EQUAL:
            return "adds little"
        return f"adds {self._added}" if self.answer == RESOLVED else self.answer

    @property
    def decides(self) -> str:
        if self.answer == TOO_FEW:
            return "what communication adds"
        return f"whether communication adds up to {quantity(self.exposed_ms.high, 'ms', 2)}"

    @property
    def excess(self) -> float | None:
        if self.answer not in (EQUAL, UNRESOLVED):
            return math.inf if self.answer == TOO_FEW else None
        # It settles where the interval leaves out 0, or ends below what is little.
        found = self.exposed_ms
        settled = max(abs(found.estimate), LITTLE_EXPOSED * self.step_ms - found.estimate)
        return (found.high - found.low) / 2 / settled
