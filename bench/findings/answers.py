"""The three answers of a run: which wrapper, which bucket cap, how much communication is hidden."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from ddp_bench.bench.axes import DDP_KINDS
from ddp_bench.bench.estimate import MIN_ROUNDS
from ddp_bench.bench.findings.numbers import between, percent, short, times
from ddp_bench.bench.findings.wording import (
    Row,
    compile_label,
    ddp_call,
    estimate,
    hidden_share,
    mode_label,
    mode_name,
    own_devices,
    place,
    setting_names,
    settings,
    short_mode,
    text,
)
from ddp_bench.bench.results.comparisons import (
    EQUAL,
    FASTER,
    OPEN,
    SLOWER,
    TOO_FEW,
    UNRESOLVED,
    Comparison,
    compile_mode,
    default_of,
)
from ddp_bench.bench.results.schema import EXPOSED_COMM, records
from ddp_bench.bench.settings import MARGINS
from ddp_bench.bench.stats import Interval

WRAPPER, CAP, COMMUNICATION = "wrapper", "DDP settings", "communication"

RESOLVED = "resolved"
"""Answer of a question that compares nothing."""

LITTLE_EXPOSED = 0.05
"""Share of the step below which exposed communication counts as none."""

_NAMED = 3
"""Cases that a sentence names."""

ALTERS = {name for name, kind in DDP_KINDS.items() if kind == "training"}
ARGUMENTS = {name for name, kind in DDP_KINDS.items() if kind == "argument"}


@dataclass(frozen=True)
class Verdict:
    """One answer; `answer` is one of `bench.results.comparisons.ANSWERS`, or `RESOLVED`."""

    question: str
    answer: str
    sentence: str
    paste: str = ""
    """A line of code that follows from it."""
    comparisons: tuple[Comparison, ...] = ()
    label: str = ""
    """The answer in a few words, where `answer` does not say it."""
    excess: float | None = None
    """Half its interval over the half that would settle it, where no comparison tells that."""
    of: str = ""
    """The cases that it speaks of, by `compile_label`, where a run has several modes of torch.compile."""

    @property
    def said(self) -> str:
        """The sentence, and which cases it speaks of."""
        return f"{self.of.capitalize()}: {self.sentence}" if self.of else self.sentence

    @property
    def is_open(self) -> bool:
        """Whether more rounds are needed."""
        return self.answer in OPEN


def verdicts(
    cases: pd.DataFrame, comparisons: Sequence[Comparison], *, margin: float = MARGINS["cpu"]
) -> list[Verdict]:
    """Answer what the run allows, at the largest device count that the cases have for themselves.

    By mode of torch.compile where there are several: each is a workload of its own.
    """
    return [
        replace(verdict, of=label)
        for label, group in by_compile_label(cases)
        for verdict in _verdicts(group, comparisons, margin)
    ]


def by_compile_label(cases: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Cases by mode of torch.compile, with its label where there are several, in order of appearance."""
    modes = [compile_mode(row) for row in records(cases)]
    names = dict.fromkeys(modes)
    if len(names) < 2:
        return [("", cases)]
    return [(compile_label(name), cases[[mode == name for mode in modes]]) for name in names]


def _verdicts(cases: pd.DataFrame, comparisons: Sequence[Comparison], margin: float) -> list[Verdict]:
    here = headline(cases)
    if here.empty:
        return []
    rows = {str(row["case_id"]): row for _, row in here.iterrows()}
    known = [c for c in comparisons if c.case_id in rows and c.reference_id in rows]
    default = default_of(records(here))
    wrapper = _wrapper(rows, [c for c in known if rows[c.reference_id]["mode"] == "dp"], default, margin)
    settings_verdict = _settings(
        rows, [c for c in known if rows[c.case_id]["mode"] == rows[c.reference_id]["mode"] == "ddp"]
    )
    communication = _communication(rows[default]) if default else None
    return [v for v in (wrapper, settings_verdict, communication) if v is not None]


def headline(cases: pd.DataFrame) -> pd.DataFrame:
    """The measured cases of the largest device count that they have for themselves, else of the largest."""
    several = cases[
        (cases["status"] == "ok") & cases["images_per_s"].notna() & (cases["num_devices"].fillna(0) > 1)
    ]
    if several.empty:
        return several
    several = own_devices(several)
    found: pd.DataFrame = several[several["num_devices"] == several["num_devices"].max()]
    return found


def _wrapper(
    rows: Mapping[str, Row], comparisons: Sequence[Comparison], default: str | None, margin: float
) -> Verdict | None:
    if not comparisons:
        only = rows[default] if default else next(iter(rows.values()))
        return _alone(only, margin)
    (one,) = comparisons[:1]
    ddp, dp = rows[one.case_id], rows[one.reference_id]
    where, other, ratio = place(ddp), mode_label(dp), one.ratio
    said = f"{times(ratio.estimate)} the rate of {other} {between(ratio)}"
    winner = "ddp" if one.answer == FASTER else "dp" if one.answer == SLOWER else ""
    on_cpu = text(ddp["device_type"]) == "cpu"
    if one.answer == TOO_FEW:
        few = f"{one.num_rounds}, {MIN_ROUNDS} at least"
        sentence = f"Too few rounds on {where} to compare DDP with {other}: {few}."
    elif one.answer == UNRESOLVED:
        low, high = times(ratio.low), times(ratio.high)
        sentence = f"Unresolved on {where}: DDP {times(ratio.estimate)} {other}, "
        sentence += f"anywhere from {low} to {high}."
    elif one.answer == EQUAL:
        sentence = f"Either on {where}: no difference above {_margin(one)}; DDP has {said}."
    elif one.within_margin:
        best = "DDP" if winner == "ddp" else other
        sentence = f"Either on {where}: {best} is faster, but by less than {_margin(one)}; DDP has {said}."
    else:
        best = "DDP" if winner == "ddp" else other
        # On CPU cores it is no advice: nn.DataParallel does nothing there.
        advice = f"{best} is faster on {where}" if on_cpu else f"Use {best} on {where}"
        sentence = f"{advice}: DDP has {said}{_of_ideal(ddp, dp)}."
    sentence += _loses(ddp if winner != "dp" else dp)
    paste = {"ddp": "model = DDP(model)", "dp": "" if on_cpu else "model = nn.DataParallel(model)"}
    return Verdict(WRAPPER, one.answer, sentence, paste.get(winner, ""), (one,))


def _alone(row: Row, margin: float) -> Verdict | None:
    speedup = estimate(row, "speedup")
    if speedup is None:
        return None
    answer = UNRESOLVED
    if pd.isna(speedup.low):
        answer = TOO_FEW
    elif speedup.excludes(1.0):
        answer = FASTER if speedup.low > 1 else SLOWER
    elif 1 / (1 + margin) <= speedup.low and speedup.high <= 1 + margin:
        answer = EQUAL
    said = f"{mode_name(row)} on {place(row)} trains {times(speedup.estimate)} as fast as one device"
    slower = ": one device alone is faster" if answer == SLOWER else ""
    return Verdict(WRAPPER, answer, f"{said} {between(speedup)}{_of_ideal(row)}{slower}.")


def _of_ideal(*rows: Row) -> str:
    """Say how much of ideal scaling cases reach, each by its mode where there are several."""
    known = [(row, efficiency) for row in rows if (efficiency := estimate(row, "efficiency"))]
    if not known:
        return ""
    strong = " (strong scaling)" if text(rows[0]["scaling"]) == "strong" else ""
    if len(rows) == 1:
        return f", {percent(known[0][1])} of ideal scaling{strong}"
    reached = ", ".join(f"{short_mode(row)} {percent(efficiency)}" for row, efficiency in known)
    return f"; of ideal scaling{strong}: {reached}"


def _loses(row: Row) -> str:
    speedup = estimate(row, "speedup")
    if speedup is None or not speedup.high < 1:
        return ""
    said = f"{mode_label(row)} has {times(speedup.estimate)} its rate {between(speedup)}"
    return f" One device alone is faster: {said}."


def _margin(one: Comparison) -> str:
    return f"{100 * one.margin:g}%"


def _settings(rows: Mapping[str, Row], comparisons: Sequence[Comparison]) -> Verdict | None:
    """What to change about DDP, or that nothing measured is worth it."""
    if not comparisons:
        return None
    default = rows[comparisons[0].reference_id]
    named = {c.case_id: setting_names(settings(rows[c.case_id], default)) for c in comparisons}
    same = [c for c in comparisons if not ALTERS & settings(rows[c.case_id], default).keys()]
    standing = setting_names(settings(default)) or "the default"
    winners = [c for c in comparisons if c.answer == FASTER and not c.within_margin]
    best = max([c for c in winners if c in same] or winners, key=lambda c: c.ratio.estimate, default=None)
    if best is not None:
        gain = f"{times(best.ratio.estimate)} the rate of {standing} {between(best.ratio)}"
        alters = "" if best in same else "; it changes the training, so check the loss"
        given = {axis: value for axis, value in settings(rows[best.case_id]).items() if axis not in ALTERS}
        paste = ddp_call(given) if best in same and given.keys() <= ARGUMENTS else ""
        sentence = f"{named[best.case_id]}: {gain}{alters}.{_open(comparisons, named)}"
        return Verdict(CAP, FASTER, sentence, paste, tuple(comparisons))
    changed = {axis for case_id in named for axis in settings(rows[case_id], default)}
    subject = "bucket_cap_mb" if changed == {"bucket_cap_mb"} else "DDP"
    unresolved = [c for c in comparisons if c.answer == UNRESOLVED]
    if unresolved:
        widest = max(unresolved, key=lambda c: c.half_width)
        others = [named[c.case_id] for c in unresolved if c is not widest]
        equal = [named[c.case_id] for c in comparisons if c.answer == EQUAL]
        behind = [named[c.case_id] for c in comparisons if c.answer == SLOWER]
        said = f"{subject}: unresolved, so keep {standing}; {named[widest.case_id]} has "
        said += f"{times(widest.ratio.estimate)} its rate, "
        said += f"anywhere from {times(widest.ratio.low)} to {times(widest.ratio.high)}."
        said += f" Unresolved too: {_listed(others)}." if others else ""
        said += f" Slower: {_listed(behind)}." if behind else ""
        said += f" No difference above {_margin(widest)}: {_listed(equal)}." if equal else ""
        return Verdict(CAP, UNRESOLVED, said, "", tuple(comparisons))
    few = [named[c.case_id] for c in comparisons if c.answer == TOO_FEW]
    if few:
        sentence = f"{subject}: too few rounds to compare {_listed(few)}."
        return Verdict(CAP, TOO_FEW, sentence, "", tuple(comparisons))
    most = max(c.ratio.high for c in comparisons) - 1
    gains = f"no value tried is faster by more than {short(100 * max(most, 0.001), 2)}%"
    slower = [c for c in comparisons if c.answer == SLOWER and not c.within_margin]
    worst = min(slower, key=lambda c: c.ratio.estimate, default=None)
    said = f"{subject}: leave {standing}; {gains}"
    if worst is not None:
        said += f"; {named[worst.case_id]} is slower, {times(worst.ratio.estimate)} {between(worst.ratio)}"
    return Verdict(CAP, EQUAL, f"{said}.", "", tuple(comparisons))


def _open(comparisons: Sequence[Comparison], named: Mapping[str, str]) -> str:
    left = [named[c.case_id] for c in comparisons if c.answer in OPEN]
    return f" Unresolved: {_listed(left)}." if left else ""


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _communication(row: Row) -> Verdict | None:
    """What communication adds to DDP's step, and how much of it is hidden."""
    exposed, hidden = estimate(row, EXPOSED_COMM), hidden_share(row)
    step = estimate(row, "step_ms")
    if exposed is None or step is None:
        return None
    if pd.isna(exposed.low):
        return Verdict(COMMUNICATION, TOO_FEW, "Communication: too few rounds to tell what it adds.")
    share = 100 * exposed.estimate / step.estimate
    added = _ms(exposed)
    if exposed.low <= 0 <= exposed.high:
        sentence = f"Communication adds {added} to the step of DDP on {place(row)}: not told from nothing."
        little = LITTLE_EXPOSED * step.estimate
        answer = EQUAL if exposed.high < little else UNRESOLVED
        # It settles where the interval leaves out 0, or ends below what is little.
        settled = max(abs(exposed.estimate), little - exposed.estimate)
        return Verdict(COMMUNICATION, answer, sentence, excess=(exposed.high - exposed.low) / 2 / settled)
    sentence, label = f"Communication adds {added}, {share:.0f}% of the step", f"adds {_plain_ms(exposed)}"
    alone = estimate(row, "comm_ms")
    if hidden is not None and hidden.estimate < 0:
        takes = f"the {_ms(alone)} that it takes alone" if alone is not None else "it takes alone"
        if hidden.high < 0:
            sentence += f", more than {takes}: none is hidden, and it slows the compute or makes ranks wait"
            label = "none is hidden"
        else:
            sentence += ", about what it takes alone: whether any is hidden is unresolved"
    elif hidden is not None:
        sentence += f"; {hidden.estimate:.0f}% {between(hidden, 0)} of it is hidden"
        label = f"{hidden.estimate:.0f}% is hidden"
    elif estimate(row, "hidden_pct") is not None:
        sentence += "; how much of it is hidden is not known to 50 percentage points"
    return Verdict(COMMUNICATION, RESOLVED, f"{sentence}.", label=label)


def _ms(found: Interval) -> str:
    return f"{_plain_ms(found)} {between(found, _digits(found))}"


def _plain_ms(found: Interval) -> str:
    return f"{found.estimate:.{_digits(found)}f} ms"


def _digits(found: Interval) -> int:
    return 0 if abs(found.estimate) >= 10 else 1 if abs(found.estimate) >= 1 else 2
