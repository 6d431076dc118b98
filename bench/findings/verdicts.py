"""The answers of a run: one record of facts, and a sentence by question and answer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..results.case_result import finite
from ..results.comparisons import EQUAL, FASTER, OPEN, SLOWER, TOO_FEW, UNRESOLVED, Comparison
from ..stats.interval import Interval
from ..stats.one_run import MIN_ROUNDS
from ..text import listed
from .numbers import quantity, short_percent, to_places
from .numbers import ratio as written_ratio
from .numbers import with_interval as written

WRAPPER, CAP, COMMUNICATION, COMPILE = "wrapper", "DDP settings", "communication", "torch.compile"

TITLES = {WRAPPER: "DP, DDP or one device", CAP: "DDP's settings", COMMUNICATION: "Communication"}
"""What a question is called on the terminal and on the page."""

RESOLVED = "resolved"
"""Answer of a question that compares nothing."""

WITHIN = "within the margin"
HIDDEN, HIDES_NONE, VAGUE = "hidden", "hides none", "vague"
"""How an answer is said where its code leaves that open."""

LITTLE_EXPOSED = 0.05
"""Share of the step below which exposed communication counts as none."""

_LEAST_GAIN = 0.001
"""A smaller gain is said as this one."""

_FASTER = "{faster} is {ratio} as fast as {slower}{where}"
_OF_RATIO = {
    FASTER: _FASTER,
    SLOWER: _FASTER,
    WITHIN: f"{_FASTER}; below {{margin}} counts as equal",
    EQUAL: "no difference above {margin}: {faster} is {ratio} as fast as {slower}{where}",
    UNRESOLVED: "unresolved: {faster} is {ratio} as fast as {slower}{where}",
    TOO_FEW: "too few rounds to compare {faster} with {slower}{where}: {least} are the least",
}
_ADDED = "{exposed} added by communication, {share} of the step"
SENTENCES = {
    WRAPPER: _OF_RATIO,
    COMPILE: _OF_RATIO,
    CAP: {
        FASTER: _FASTER,
        EQUAL: "keep {slower}: {tried}{faster} is {ratio} as fast",
        UNRESOLVED: "unresolved: {tried}{faster} is {ratio} as fast as {slower}",
        TOO_FEW: "too few rounds to compare {open} with {slower}",
    },
    COMMUNICATION: {
        RESOLVED: _ADDED,
        HIDDEN: f"{_ADDED}; alone it takes {{alone}}, of which {{hidden}} is hidden",
        HIDES_NONE: f"{_ADDED}; alone it takes {{alone}}, of which none is hidden",
        VAGUE: f"{_ADDED}; how much is hidden is not known yet",
        EQUAL: "{exposed} added by communication, at most {most_share} of the step",
        UNRESOLVED: "unresolved: {exposed} added by communication, at most {most_share} of the step",
        TOO_FEW: "too few rounds to tell what communication adds",
    },
}
"""By question and answer."""

_LABELS_OF_RATIO = {
    FASTER: "{faster} is faster",
    SLOWER: "{faster} is faster",
    WITHIN: "{faster} is faster, by less than {margin}",
    EQUAL: "no difference above {margin}",
}
LABELS = {
    WRAPPER: _LABELS_OF_RATIO,
    COMPILE: _LABELS_OF_RATIO,
    CAP: {FASTER: "{faster} is faster", EQUAL: "keep {slower}"},
    COMMUNICATION: {RESOLVED: "adds {exposed}", EQUAL: "adds little"},
}
"""The same in a few words; an open answer says itself."""

DECIDES = {
    WRAPPER: "which of {faster} and {slower} is faster{where}",
    COMPILE: "which of {faster} and {slower} is faster{where}",
    CAP: "whether {faster} gains up to {gain}",
    COMMUNICATION: "whether communication adds up to {most}",
}
"""What more rounds decide where an answer is open."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One answer, with the facts that its sentence names; `answer` is one of `ANSWERS`, or `RESOLVED`."""

    question: str
    answer: str
    of: str = ""
    """The cases that it speaks of, by `compile_label`, where a run has several modes of torch.compile."""
    paste: str = ""
    """A line of code that follows from it."""
    notes: tuple[str, ...] = ()
    """What is to be known beside it, a sentence each without its full stop."""
    comparisons: tuple[Comparison, ...] = ()
    """The first one decides."""
    margin: float = 0.0
    faster: str = ""
    """Of `CAP` the setting that may gain most."""
    slower: str = ""
    where: str = ""
    """Such as ` on 2 GPUs`."""
    ratio: Interval | None = None
    """Of the faster's rate over the slower's."""
    faster_id: str = ""
    """The case that is the faster one, where one is."""
    noun: str = ""
    """`cap` where only caps differ, else `setting`."""
    num_tried: int = 0
    open_settings: tuple[str, ...] = ()
    """Those that more rounds would decide."""
    exposed_ms: Interval | None = None
    step_ms: float = math.nan
    alone_ms: Interval | None = None
    hidden_pct: Interval | None = None
    is_vague: bool = False
    """Whether what is hidden was measured, but is not known to 50 percentage points."""

    @property
    def title(self) -> str:
        """The question in words, and which cases it is of."""
        return ", ".join(filter(None, (TITLES.get(self.question, self.question), self.of)))

    @property
    def is_open(self) -> bool:
        """Whether more rounds are needed."""
        return self.answer in OPEN

    @property
    def within_margin(self) -> bool:
        """Whether all of the interval is what the user calls equal."""
        return bool(self.comparisons) and self.comparisons[0].within_margin

    @property
    def form(self) -> str:
        """The key of its sentence: the answer, or how it is said."""
        if self.question in (WRAPPER, COMPILE) and self.answer in (FASTER, SLOWER) and self.within_margin:
            return WITHIN
        if self.answer == RESOLVED and self.hidden_pct and self.alone_ms:
            return HIDES_NONE if self.hidden_pct.estimate < 0 else HIDDEN
        return VAGUE if self.answer == RESOLVED and self.is_vague else self.answer

    @property
    def sentence(self) -> str:
        """The answer, the faster one and the number first."""
        said = SENTENCES[self.question][self.form].format_map(self._facts())
        is_typed = "=" in self.faster and self.form in (FASTER, SLOWER, WITHIN)
        return f"{said if is_typed else said[:1].upper() + said[1:]}."

    @property
    def said(self) -> str:
        """The sentence, and which cases it speaks of."""
        return f"{self.of.capitalize()}: {self.sentence}" if self.of else self.sentence

    @property
    def label(self) -> str:
        """The answer in a few words."""
        labels = LABELS[self.question]
        return (labels.get(self.form) or labels.get(self.answer, self.answer)).format_map(self._facts())

    @property
    def decides(self) -> str:
        """What more rounds would decide where it is open: `whether cap 25 gains up to 6%`."""
        return DECIDES[self.question].format_map(self._facts())

    @property
    def excess(self) -> float | None:
        """Half its interval over the half that would settle it, where no comparison tells that."""
        found = self.exposed_ms
        if found is None or self.answer not in (EQUAL, UNRESOLVED):
            return math.inf if self.answer == TOO_FEW and self.question == COMMUNICATION else None
        # It settles where the interval leaves out 0, or ends below what is little.
        settled = max(abs(found.estimate), LITTLE_EXPOSED * self.step_ms - found.estimate)
        return (found.high - found.low) / 2 / settled

    def _facts(self) -> dict[str, str]:
        """What the sentences name, in words and with units."""
        added, ratio = self.exposed_ms, self.ratio
        most = finite(added.high) if added else None
        gain = short_percent(max(ratio.high - 1, _LEAST_GAIN)) if ratio and ratio.high > 1 else ""
        gains = f"can gain more than {gain}" if gain else "is faster"
        return {
            "faster": self.faster,
            "slower": self.slower,
            "where": self.where,
            "ratio": written_ratio(ratio) if ratio else "",
            "margin": short_percent(self.margin),
            "least": f"{MIN_ROUNDS}",
            "gain": gain,
            "tried": f"none of {self.num_tried} {self.noun}s {gains}; " if self.num_tried > 1 else "",
            "open": listed(self.open_settings),
            "exposed": written(added, "ms"),
            "share": f"{100 * added.estimate / self.step_ms:.0f}%" if added else "",
            "most": quantity(most, "ms", 2),
            "most_share": "" if most is None else f"{100 * most / self.step_ms:.0f}%",
            "alone": quantity(self.alone_ms.estimate, "ms") if self.alone_ms else "",
            "hidden": to_places(self.hidden_pct, 0, "%") if self.hidden_pct else "",
        }
