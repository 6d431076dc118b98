"""The answers of a run: one record of facts, and a label and a sentence by question and answer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..common.numbers import ratio, short_percent, to_places, with_interval
from ..common.text import listed
from ..results.comparisons import EQUAL, FASTER, OPEN, SLOWER, TOO_FEW, UNRESOLVED, Comparison
from ..stats.fit import MIN_ROUNDS
from ..stats.interval import Interval

WRAPPER, CAP, COMMUNICATION, COMPILE = "wrapper", "DDP settings", "communication", "torch.compile"

TITLES = {WRAPPER: "DP, DDP or one device", CAP: "DDP's settings", COMMUNICATION: "Communication"}
"""What a question is called on the terminal and on the page."""

ALONE = "DDP or one device"
"""The wrapper's, where DP is not measurable."""

RESOLVED = "resolved"
"""Answer of a question that compares nothing."""

WITHIN = "within the margin"
HIDDEN, VAGUE = "hidden", "vague"
"""How an answer is said where its code leaves that open."""

LITTLE_EXPOSED = 0.05
"""Share of the step below which exposed communication counts as none."""

_LEAST_GAIN = 0.001
"""A smaller gain is said as this one."""

_IS_FASTER = "{faster} is {ratio} as fast as {slower}{where}"
_TOO_FEW = "too few rounds to compare"
_OF_RATIO = {
    FASTER: ("{faster} is faster", _IS_FASTER),
    SLOWER: ("{faster} is faster", _IS_FASTER),
    WITHIN: ("{faster} is faster, by less than {margin}", f"{_IS_FASTER}; below {{margin}} counts as equal"),
    EQUAL: ("no difference above {margin}", f"no difference above {{margin}}: {_IS_FASTER}"),
    UNRESOLVED: (UNRESOLVED, f"unresolved: {_IS_FASTER}"),
    TOO_FEW: (TOO_FEW, f"{_TOO_FEW} {{faster}} with {{slower}}{{where}}: {MIN_ROUNDS} are the least"),
}
_ADDED = "{exposed} added by communication, {share} of the step"
_AT_MOST = "{exposed} added by communication, at most {most_share} of the step"
TEMPLATES = {
    WRAPPER: _OF_RATIO,
    COMPILE: _OF_RATIO,
    CAP: {
        FASTER: _OF_RATIO[FASTER],
        EQUAL: ("keep {slower}", "keep {slower}: {gains}"),
        UNRESOLVED: (UNRESOLVED, "unresolved: {tried} is {ratio} as fast as {slower}"),
        TOO_FEW: (TOO_FEW, f"{_TOO_FEW} {{open}} with {{slower}}"),
    },
    COMMUNICATION: {
        RESOLVED: ("adds {exposed}", _ADDED),
        HIDDEN: ("adds {exposed}", f"{_ADDED}; alone it takes {{alone}}, {{hidden}}"),
        VAGUE: ("adds {exposed}", f"{_ADDED}; how much is hidden is not known yet"),
        EQUAL: ("adds little", _AT_MOST),
        UNRESOLVED: (UNRESOLVED, f"unresolved: {_AT_MOST}"),
        TOO_FEW: (TOO_FEW, "too few rounds to tell what communication adds"),
    },
}
"""By question and answer a few words, and the answer in a sentence."""


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
    background: tuple[str, ...] = ()
    """What the page alone says of it."""
    comparisons: tuple[Comparison, ...] = ()
    """The first one decides."""
    faster: str = ""
    """Of `CAP` the setting that may gain most."""
    slower: str = ""
    where: str = ""
    """Such as ` on 2 GPUs`."""
    without_dp: bool = False
    """Whether nothing can be said of DP."""
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
        title = ALONE if self.without_dp else TITLES.get(self.question, self.question)
        return ", ".join(filter(None, (title, self.of)))

    @property
    def is_open(self) -> bool:
        """Whether more rounds are needed."""
        return self.answer in OPEN

    @property
    def within_margin(self) -> bool:
        """Whether all of the interval is what the user calls equal."""
        return bool(self.comparisons) and self.comparisons[0].within_margin

    @property
    def sentence(self) -> str:
        """The answer, the faster one and the number first."""
        said = self._said(1)
        is_typed = "=" in self.faster and said.startswith(self.faster)
        return f"{said if is_typed else said[:1].upper() + said[1:]}."

    @property
    def said(self) -> str:
        """The sentence, and which cases it speaks of."""
        return f"{self.of.capitalize()}: {self.sentence}" if self.of else self.sentence

    @property
    def label(self) -> str:
        """The answer in a few words."""
        return self._said(0)

    @property
    def excess(self) -> float:
        """Of an open answer half its interval over the half that settles it; infinite without one."""
        if self.answer == TOO_FEW:
            return math.inf
        if (found := self.exposed_ms) is None:
            left = (one for one in self.comparisons if one.answer in OPEN)
            return max(one.half_width / (math.log1p(one.margin) / 2) for one in left)
        # It settles where the interval leaves out 0, or ends below what is little.
        settled = max(abs(found.estimate), LITTLE_EXPOSED * self.step_ms - found.estimate)
        return (found.high - found.low) / 2 / settled

    def _said(self, which: int) -> str:
        form = self.answer
        if self.question in (WRAPPER, COMPILE) and self.answer in (FASTER, SLOWER) and self.within_margin:
            form = WITHIN
        elif self.answer == RESOLVED and self.hidden_pct and self.alone_ms:
            form = HIDDEN
        elif self.answer == RESOLVED and self.is_vague:
            form = VAGUE
        return TEMPLATES[self.question][form][which].format_map(self._facts())

    def _facts(self) -> dict[str, str]:
        """What the sentences name, in words and with units."""
        facts = {
            "faster": self.faster,
            "slower": self.slower,
            "where": self.where,
            "open": listed(self.open_settings),
            "alone": with_interval(self.alone_ms, "ms"),
        }
        if self.hidden_pct:
            facts["hidden"] = f"of which {to_places(self.hidden_pct, 0, '%')} is hidden"
            if self.hidden_pct.estimate < 0 and self.exposed_ms and self.alone_ms:
                on_top = with_interval(self.exposed_ms.less(self.alone_ms), "ms")
                facts["hidden"] = f"no net hiding; {on_top} contention, waits, copies"
        if self.ratio and self.comparisons:
            gain = short_percent(max(self.ratio.high - 1, _LEAST_GAIN)) if self.ratio.high > 1 else ""
            gains = f"gains more than {gain} (95%)" if gain else "is faster"
            several = f"none of {self.num_tried} {self.noun}s {gains}"
            tried = f"{several}; the best, {self.faster}," if self.num_tried > 1 else self.faster
            facts["gains"] = (
                several if self.num_tried > 1 else f"{self.faster} is {ratio(self.ratio)} as fast"
            )
            margin = short_percent(self.comparisons[0].margin)
            facts |= {"ratio": ratio(self.ratio), "margin": margin, "tried": tried}
        if (added := self.exposed_ms) and not math.isnan(added.high):
            share, most = (f"{100 * ms / self.step_ms:.0f}%" for ms in (added.estimate, added.high))
            facts |= {"exposed": with_interval(added, "ms"), "share": share, "most_share": most}
        return facts
