"""What to measure in a round, and when it is enough: many short visits, time where the answer is open.

With `--rounds` every case is measured in every round, so that two runs are alike.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.special import stdtrit

from ddp_bench.bench.buckets import BucketLayout
from ddp_bench.bench.case import Case
from ddp_bench.bench.console import format_s
from ddp_bench.bench.expected_time import timed_block_s
from ddp_bench.bench.plan import Planned
from ddp_bench.bench.results.comparisons import Comparison
from ddp_bench.bench.results.ratios import LAUNCH_FREEDOM, LAUNCH_SD
from ddp_bench.bench.results.recorder import Recorder
from ddp_bench.bench.results.round_times import ByRound
from ddp_bench.bench.run.phases import fixed_phases, is_calibrated, is_seldom, is_traced, shuffled
from ddp_bench.bench.run.reopen import Completion
from ddp_bench.bench.settings import ResolvedSettings
from ddp_bench.bench.stats.interval import paired_ratio
from ddp_bench.bench.stats.one_run import MIN_ROUNDS
from ddp_bench.bench.worker.messages import GroupKey

FIRST_LOOK = 10
"""Rounds before the first look at the widths; each later look comes after twice as many."""

SHARES = {"no_sync": 0.15, "comm": 0.03, "instrumented": 0.05, "calibration": 0.2, "shared": 0.04}
"""Most of the measuring time that each kind of block may take; what is left is for timed steps.

`shared` are all blocks of cases that are visited seldom.
"""

INSTRUMENTED = ("anatomy", "trace")

LEAST_VISITS = {"no_sync": 2 * MIN_ROUNDS, "comm": 2 * MIN_ROUNDS, "calibration": MIN_ROUNDS}
"""Visits that these phases get beyond their share, where steps are long: fewer give no or a wide interval."""

CALIBRATION_STEPS = 20
"""A visit of the calibration pass takes about as long as so many steps; once measured, what it took."""

FINALISTS = 2
"""Cases that stay beside their reference: with one alone the best would be lost more often."""

FINAL_SHARE = 0.6
"""Share of the time that they and the reference have for themselves."""

LEAST_ROUNDS = 4
"""No case is dropped earlier: a single disturbance must not decide."""

LAUNCH_EVERY = 8
"""Workers measure for about so many times what it takes to start them."""

USUAL_START_S = 8.0
"""What that takes on CPU cores; for a forecast."""

TIMED_SHARE = 0.55
"""Share of the measuring time that timed steps took where all kinds of blocks were due; for a forecast."""


def is_look(num_rounds: int) -> bool:
    """Whether widths are looked at after so many rounds: 10, 20, 40, 80, ..."""
    factor, rest = divmod(num_rounds, FIRST_LOOK)
    return rest == 0 and factor > 0 and factor & (factor - 1) == 0


@dataclass
class LiveCase:
    """A case that is ready to be measured."""

    index: int
    case: Case
    oversubscribed: bool
    layout: BucketLayout | None = None
    longest_step_s: float = 0.0
    """Of the warm-up, over all ranks."""
    step_s: float = 0.0
    """A usual one at the end of the warm-up, on the slowest rank."""
    by_device: tuple[int, ...] | None = None
    """Layers of each device, of a case that is split by them."""

    @property
    def group(self) -> GroupKey:
        """Of its ranks."""
        return self.case.num_ranks, self.case.backend


@dataclass
class Schedule:
    """The visits of a run, round by round; `spent_s` and `visits` are kept by `add`."""

    settings: ResolvedSettings
    spent_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of blocks by kind: the keys of `SHARES`, and `timed`."""
    visits: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Blocks by case and phase."""
    took_s: dict[tuple[str, str], float] = field(default_factory=dict)
    """Seconds of the last of them."""

    def add(self, one: LiveCase, phase: str, seconds: float) -> None:
        if phase in ("warmup", "sustained"):
            return
        case_id = one.case.case_id
        kind = "instrumented" if phase in INSTRUMENTED else phase
        self.spent_s["shared" if is_seldom(one, self.settings) else kind] += seconds
        self.visits[case_id, phase] += 1
        self.took_s[case_id, phase] = seconds

    def round(
        self, live: Sequence[LiveCase], round_index: int, *, resting: Collection[str] = frozenset()
    ) -> dict[int, list[str]]:
        """The phases of every case to be visited in a round, by its place in the plan.

        Every case begins with timed blocks alone, as many as an interval takes, whatever they cost.
        """
        if self.settings.rounds is not None:
            return {
                one.index: fixed_phases(one, round_index=round_index, settings=self.settings) for one in live
            }
        own = [one for one in live if not is_seldom(one, self.settings)] or list(live)
        chosen = {one.index: ["timed"] for one in own if one.case.case_id not in resting}
        open_cases = [one for one in own if one.index in chosen]
        for kind, cases, most in (
            ("no_sync", open_cases, len(open_cases)),
            ("comm", open_cases, len(open_cases)),
            ("instrumented", own, len(INSTRUMENTED)),
            ("calibration", own, 1),
        ):
            phases = INSTRUMENTED if kind == "instrumented" else (kind,)
            wanted = [
                (one, phase)
                for phase in phases
                for one in cases
                if self.has_enough(one) and phase in self._passes(one.case)
            ]
            for one, phase in self._affordable(wanted, kind, per_round=most):
                chosen.setdefault(one.index, []).append(phase)
        shared = [one for one in live if one not in own]
        chosen |= {one.index: ["timed"] for one in shared if not self.has_enough(one)}
        for one in self._shared([one for one in shared if self.has_enough(one)]):
            chosen[one.index] = self._passes_of_shared(one.case)
        seed = f"{self.settings.seed}/{round_index}"
        return {index: shuffled(phases, f"{seed}/{index}") for index, phases in chosen.items()}

    def shortage(self, live: Sequence[LiveCase], left_s: float) -> str:
        """Say that the time left gives no intervals, and what would; empty where it is enough."""
        if self.settings.rounds is not None:
            return ""
        round_s = sum(self._expected_s(one, "timed") for one in live)
        open_s = sum(self._expected_s(one, "timed") for one in live if not self.has_enough(one))
        calibration_s = LEAST_VISITS["calibration"] * sum(
            self._expected_s(one, "calibration")
            for one in live
            if is_calibrated(one.case, self.settings) and not self.visits[one.case.case_id, "calibration"]
        )
        needed_s = MIN_ROUNDS * open_s + calibration_s
        if needed_s <= left_s:
            return ""
        longest = max(live, key=lambda one: self._expected_s(one, "timed"))
        calibrated = " and a calibration" if calibration_s else ""
        return (
            f"The time is too short: {format_s(left_s)} are left after preparation, and intervals take "
            f"{MIN_ROUNDS} rounds{calibrated}, about {format_s(needed_s)}; give "
            f"a longer --max-time or fewer cases ({longest.case.case_id} takes "
            f"{100 * self._expected_s(longest, 'timed') / round_s:.0f}% of a round)"
        )

    def has_enough(self, one: LiveCase) -> bool:
        """Whether its timed blocks are enough for an interval."""
        return self.visits[one.case.case_id, "timed"] >= MIN_ROUNDS

    def _passes(self, case: Case) -> list[str]:
        """What is measured of a case beside timed steps, within the rounds."""
        found = ["anatomy"]
        if case.communicates:
            found.append("no_sync")
        if is_traced(case, self.settings, last=False):
            found.append("trace")
        if case.communicates:
            found.append("comm")
        wanted = set(self.settings.passes) - case.unmeasured
        found = [phase for phase in found if phase in wanted]
        return [*found, "calibration"] if is_calibrated(case, self.settings) else found

    def _passes_of_shared(self, case: Case) -> list[str]:
        """One look inside is enough; throughput and its like without communication at every visit."""
        found = self._passes(case)
        often = [phase for phase in found if phase == "no_sync"]
        once = [phase for phase in found if phase != "no_sync" and not self.visits[case.case_id, phase]]
        return ["timed", *often, *once]

    def _affordable(
        self, wanted: Sequence[tuple[LiveCase, str]], kind: str, *, per_round: int
    ) -> list[tuple[LiveCase, str]]:
        """Those cases and phases visited least, as many as the share of their kind allows.

        Where the next is too much now nothing comes: a cheaper one would always be before it.
        """
        total_s, spent_s = sum(self.spent_s.values()), self.spent_s[kind]
        found: list[tuple[LiveCase, str]] = []
        by_visits = sorted(wanted, key=lambda pair: self.visits[pair[0].case.case_id, pair[1]])
        for one, phase in by_visits[:per_round]:
            cost_s = self._expected_s(one, phase)
            if not self._is_due(one, phase) and spent_s + cost_s > SHARES[kind] * (total_s + cost_s):
                break
            spent_s, total_s = spent_s + cost_s, total_s + cost_s
            found.append((one, phase))
        return found

    def _is_due(self, one: LiveCase, phase: str) -> bool:
        """Whether a pass comes whatever it costs, after every second timed block until it has its least."""
        visits, timed = (self.visits[one.case.case_id, name] for name in (phase, "timed"))
        return visits < LEAST_VISITS.get(phase, 1) and timed > 2 * visits

    def _shared(self, shared: Sequence[LiveCase]) -> list[LiveCase]:
        """All cases that share devices, where their share of the time allows a visit to each."""
        cost_s = sum(2 * self._expected_s(one, "timed") for one in shared)
        total_s = sum(self.spent_s.values())
        affordable = self.spent_s["shared"] + cost_s <= SHARES["shared"] * (total_s + cost_s)
        return list(shared) if affordable else []

    def _expected_s(self, one: LiveCase, phase: str) -> float:
        """Seconds of the next block of a phase: those of the last one, or else by the case's step."""
        steps = self.steps_of(phase, one.step_s)
        return self.took_s.get((one.case.case_id, phase), steps * one.step_s)

    def steps_of(self, phase: str, step_s: float) -> int:
        """Steps that a block of a phase is expected to take of a case whose step takes so many seconds."""
        if phase == "calibration":
            return CALIBRATION_STEPS
        return self.settings.steps_per_block(step_s) if phase in ("timed", "no_sync") else 1


def resting_cases(comparisons: Sequence[Comparison], half_widths: Mapping[str, float]) -> frozenset[str]:
    """Case ids that need no more rounds: all that they are compared in is narrow enough for the margin.

    Args:
        comparisons: that the run answers.
        half_widths: of the rates of cases in no comparison, as fractions; `single` is to be left out.
    """
    if not comparisons:
        return frozenset()
    margin = comparisons[0].margin
    compared = {case_id for one in comparisons for case_id in (one.case_id, one.reference_id)}
    wide = {
        case_id for one in comparisons if not one.is_narrow for case_id in (one.case_id, one.reference_id)
    }
    alone = {c for c, width in half_widths.items() if c not in compared and width <= margin / 2}
    return frozenset((compared - wide) | alone)


def expected_half_width(
    plan: Sequence[Planned], settings: ResolvedSettings, probe_ms: Sequence[float], *, expected_s: float
) -> float | None:
    """Half the interval of a ratio of two cases, as a fraction; None where nothing is known or compared.

    Every case is taken to scatter as the steps of a probe do, from round to round by chance alone. On GPUs
    what another launch adds is not known.

    Args:
        plan: the cases.
        settings: of the run.
        probe_ms: steps of `single`.
        expected_s: seconds of measuring.
    """
    own = [p for p in plan if not p.skip_reason and not p.oversubscribed]
    logs = np.log(probe_ms)
    if len(own) < 2 or len(logs) < FIRST_LOOK:
        return None
    scatter = 1.4826 * float(np.median(np.abs(logs - np.median(logs))))
    batch, step_s = own[0].case.global_batch, math.exp(float(np.median(logs))) / 1000
    round_s = sum(timed_block_s(p, settings, step_s=step_s, single_batch=batch) for p in own)
    rounds = settings.rounds or int(TIMED_SHARE * expected_s / round_s)
    if rounds < MIN_ROUNDS:
        return None
    of_rounds = float(stdtrit(rounds - 1, 0.975)) * scatter * math.sqrt(2 / rounds)
    if settings.device != "cpu":
        return of_rounds
    launches = max(round(expected_s / (LAUNCH_EVERY * USUAL_START_S)), 1)
    return math.hypot(of_rounds, float(stdtrit(LAUNCH_FREEDOM, 0.975)) * LAUNCH_SD * math.sqrt(2 / launches))


class StopRule:
    """Decides when a run has measured enough."""

    def __init__(
        self, settings: ResolvedSettings, recorder: Recorder, elapsed_s: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._recorder = recorder
        self._elapsed_s = elapsed_s
        self._left_at_first_s: float | None = None

    def reason(self, num_rounds: int) -> str:
        """Why the run ends after so many rounds; empty while it goes on."""
        if not num_rounds:
            return ""
        wanted, target = self._settings.rounds, self._settings.precision_target
        if wanted is not None:
            if num_rounds >= wanted:
                return Completion.ROUNDS
        elif target is not None:
            # Fewer rounds can agree by chance.
            if num_rounds >= MIN_ROUNDS and self._recorder.half_width() <= target:
                return Completion.TARGET
        elif is_look(num_rounds) and self._is_narrow():
            return Completion.NARROW
        return Completion.TIME if self.out_of_time() else ""

    def _is_narrow(self) -> bool:
        """Whether every comparison is narrow enough for the margin; without any, every rate.

        By width, never by significance: who stops once 1 is excluded finds winners that are not there.
        """
        if comparisons := self._recorder.comparisons:
            return all(one.is_narrow for one in comparisons)
        return self._recorder.half_width() <= self._settings.margin / 2

    def left_s(self) -> float | None:
        """Seconds until the time limit; None without one."""
        limit = self._settings.max_time
        return None if limit is None else limit - self._elapsed_s()

    def left_share(self, num_rounds: int) -> float:
        """Share of the rounds, or of the time since this was first asked, that is left after `num_rounds`."""
        if self._settings.rounds is not None:
            return 1 - num_rounds / self._settings.rounds
        left_s = self.left_s()
        if left_s is None:
            return 1.0
        if self._left_at_first_s is None:
            self._left_at_first_s = left_s
        return left_s / self._left_at_first_s if self._left_at_first_s > 0 else 0.0

    def out_of_time(self) -> bool:
        left = self.left_s()
        return left is not None and left <= 0


class LaunchRule:
    """Decides when workers are started anew, so that a run holds several launches: see docs/measuring.md.

    They come at even intervals, as many as keep what starting takes below a tenth of the time or so.
    """

    def __init__(self, stop_rule: StopRule, now_s: float, took_s: float) -> None:
        """Workers have been made ready at `now_s`; of what that took, `took_s` comes with each launch."""
        self._stop_rule = stop_rule
        stop_rule.left_share(0)  # of what is left from now on
        self._first_s = self._since_s = now_s
        self._took_s = took_s

    def started(self, now_s: float, took_s: float) -> None:
        """Others have been made ready, which took so many seconds."""
        self._since_s, self._took_s = now_s, took_s

    def is_due(self, now_s: float, num_rounds: int) -> bool:
        """Whether workers are to be started anew after so many rounds."""
        every_s, left = LAUNCH_EVERY * self._took_s, self._stop_rule.left_share(num_rounds)
        if left < 1:
            measuring_s = (now_s - self._first_s) / (1 - left)
            every_s = measuring_s / max(round(measuring_s / max(every_s, 1e-9)), 1)
            if left * measuring_s < every_s / 2:
                return False
        return now_s - self._since_s >= every_s


def dropped(
    pairs: Sequence[tuple[str, str]], rates: Mapping[str, ByRound], left_share: float
) -> frozenset[str]:
    """Name the cases that a race (`--race`) measures no further.

    Successive elimination: at even intervals the case that looks worst against its reference is dropped, and
    what remains of the time goes to the reference and the best two (after the successive rejects of Audibert,
    Bubeck and Munos, "Best Arm Identification in Multi-Armed Bandits", 2010). No test is involved, so no
    threshold either; what is said in the end rests on the run's intervals, for as many cases as began.

    Args:
        pairs: that the run compares, (case, reference); a reference is never dropped.
        rates: throughput by round, of every case that is still measured.
        left_share: of the time or the rounds for measuring, from 1 down to 0.
    """
    found: set[str] = set()
    for reference in dict.fromkeys(reference for _, reference in pairs):
        challengers = [case_id for case_id, its_reference in pairs if its_reference == reference]
        others = [case_id for case_id in challengers if case_id in rates]
        own = rates.get(reference, {})
        if all(len(rates[case_id].keys() & own.keys()) >= LEAST_ROUNDS for case_id in others):
            gains = {case_id: paired_ratio(rates[case_id], own).estimate for case_id in others}
            found |= set(sorted(others, key=lambda c: -gains[c])[num_kept(len(challengers), left_share) :])
    return frozenset(found - {reference for _, reference in pairs})


def num_kept(challengers: int, left_share: float) -> int:
    """Count the challengers that are still measured with `left_share` of the time left."""
    early = max((left_share - FINAL_SHARE) / (1 - FINAL_SHARE), 0.0)
    return min(FINALISTS + math.ceil((challengers - FINALISTS) * early), challengers)
