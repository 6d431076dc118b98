"""Answers of a run, records of one kind for every question, and what a change would save."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..common.numbers import format_percent, format_ratio
from ..common.text import begin_sentence
from ..results.comparisons import EQUAL, FASTER, OPEN_ANSWERS, SLOWER, TOO_FEW, UNRESOLVED, Comparison
from ..stats.fit import MIN_ROUNDS
from ..stats.interval import Interval

WRAPPER, CAP, COMMUNICATION, COMPILE = "wrapper", "DDP settings", "communication", "torch.compile"
PUBLISHED, BATCH = "published efficiency", "batch size"

RESOLVED = "resolved"
"""Answer of a question that compares nothing."""

MIN_SHARE = 0.05
"""Share of the step from which on a cost counts: less is what runs differ by."""

TOO_FEW_ROUNDS = f"at least {MIN_ROUNDS} are needed"


@dataclass(frozen=True)
class Saving:
    """Time per step that a change may save."""

    ms: Interval
    """Milliseconds of each step: the most that the remedy saves."""
    what: str
    """Name of what takes the time."""
    remedy: str
    part_of: str = ""
    """Name of a larger cost that this one is a part of."""

    @property
    def label(self) -> str:
        """Name of the cost, and of the larger one that it is a part of."""
        return f"{self.what} (part of {self.part_of})" if self.part_of else self.what


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Answer to one question; `answer` is one of `ANSWERS`, or `RESOLVED`."""

    question: str
    answer: str
    heading: str
    """The question as terminal and page name it."""
    text: str
    """The answer as a sentence, without its capital and its full stop."""
    in_words: str = ""
    """The answer in a few words, where its code does not say it."""
    scope: str = ""
    """The cases that it speaks of, by batch size and mode of torch.compile, where a run has several."""
    paste: str = ""
    """A line of code that follows from it."""
    notes: tuple[str, ...] = ()
    """Notes on the answer, a sentence each without its full stop."""
    comparisons: tuple[Comparison, ...] = ()
    """The first one decides."""
    faster_id: str = ""
    """The case that is the faster one, where one is."""
    width_ratio: float = math.inf
    """Width of an open answer's interval over the width that decides; infinite without an interval."""
    no_cap_helps: bool = False
    """True where bucket caps alone were compared, and none is faster than the default."""

    @property
    def title(self) -> str:
        """The question in words, and the cases that it is about."""
        return ", ".join(filter(None, (self.heading, self.scope)))

    @property
    def label(self) -> str:
        """The answer in a few words."""
        return self.in_words or self.answer

    @property
    def is_open(self) -> bool:
        """True where more rounds are needed."""
        return self.answer in OPEN_ANSWERS

    @property
    def sentence(self) -> str:
        """The answer, the faster one and the number first; a setting stands as it is typed."""
        is_typed = "=" in self.text.partition(" ")[0]
        return f"{self.text if is_typed else begin_sentence(self.text)}."

    def split_sentence(self) -> tuple[str, str]:
        """Return the first sentence, and those that continue it, without their last full stop."""
        first, _, more = self.sentence.removesuffix(".").partition(". ")
        return first, more

    @property
    def said(self) -> str:
        """The sentence, and the cases that it is about."""
        return f"{self.scope.capitalize()}: {self.sentence}" if self.scope else self.sentence


def answer_by_ratio(
    question: str,
    one: Comparison,
    names: tuple[str, str],
    where: str = "",
    *,
    turns: bool = True,
    **more: Any,
) -> Verdict:
    """Answer a question by a comparison of two that have `names`; it `turns` so that its ratio is above 1."""
    is_slower = one.ratio.estimate < 1
    faster, slower = reversed(names) if is_slower else names
    margin = format_percent(one.margin)
    is_turned = is_slower and turns
    first, second = (faster, slower) if turns else names
    ratio = format_ratio(one.ratio.invert() if is_turned else one.ratio)
    fact = f"{first} is {ratio} as fast as {second}{where}"
    is_found, few = one.answer in (FASTER, SLOWER) and not one.within_margin, ""
    if one.answer == TOO_FEW:
        fact = f"{TOO_FEW} to compare {faster} with {slower}{where}: {TOO_FEW_ROUNDS}"
    elif one.answer == UNRESOLVED:
        fact = f"{UNRESOLVED}: {fact}"
    elif one.answer == EQUAL:
        few = f"no difference above {margin}"
        fact = f"{few}: {fact}"
    else:
        few = f"{faster} is faster{'' if is_found else f', by less than {margin}'}"
        if is_found and is_slower and not turns:
            fact = f"{first} is slower than {second}: {ratio} as fast{where}"
        fact = fact if is_found else f"{fact}; within your {margin} margin"
    return Verdict(
        question=question,
        answer=one.answer,
        text=fact,
        in_words=few,
        comparisons=(one,),
        faster_id="" if not is_found else one.reference_id if is_slower else one.case_id,
        width_ratio=compute_width_ratio([one]),
        **more,
    )


def compute_width_ratio(comparisons: Iterable[Comparison]) -> float:
    """Divide the widest open interval by the width that decides; infinite where one is not known."""
    left = [one for one in comparisons if one.answer in OPEN_ANSWERS]
    if any(one.answer == TOO_FEW for one in left):
        return math.inf
    return max((one.half_width / (math.log1p(one.margin) / 2) for one in left), default=0.0)
