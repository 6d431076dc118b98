"""The measurements of a round: many short visits, time where the answer is open.

With `--rounds` every case is measured in every round, so that two runs are alike.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ..common.console import format_s
from ..plan.buckets import BucketLayout
from ..plan.case import Case
from ..plan.settings import ResolvedSettings
from ..plan.sweep import Planned, is_calibrated
from ..results.recorder import Recorder
from ..stats.fit import MIN_ROUNDS
from ..worker.messages import GroupKey

INSTRUMENTED = ("anatomy", "trace")

INSTRUMENTED_EVERY = 5
"""Period in rounds of anatomy and trace under `--rounds`, from the first on; on GPUs traces come last."""

AFTER_ROUNDS = 0
"""The round of a trace that comes after all rounds: a run that is resumed for more of them has it already."""


def draw_round_order(num_cases: int, *, seed: int, round_index: int) -> list[int]:
    """Draw a fresh random order of the cases for each round."""
    order = list(range(num_cases))
    random.Random(f"{seed}/{round_index}").shuffle(order)
    return order


def list_passes(case: Case, settings: ResolvedSettings) -> list[str]:
    """Return the passes that are measured of a case beside timed steps, within the rounds."""
    found = ["no_sync", "comm", "anatomy"] if case.communicates else ["anatomy"]
    if is_traced(case, settings, last=False):
        found.append("trace")
    wanted = set(settings.passes) - case.unmeasured
    found = [phase for phase in found if phase in wanted]
    return [*found, "calibration"] if is_calibrated(case, settings) else found


def list_fixed_phases(one: Planned | LiveCase, *, round_index: int, settings: ResolvedSettings) -> list[str]:
    """List the phases of a case in a round of a run with `--rounds`, in their order."""
    # Devices that share a core time each other: one look at those is enough.
    looks = round_index == 1 or (round_index % INSTRUMENTED_EVERY == 1 and not one.oversubscribed)
    passes = [phase for phase in list_passes(one.case, settings) if looks or phase not in INSTRUMENTED]
    return shuffle_phases(["timed", *passes], f"{settings.seed}/{round_index}/{one.case.case_id}")


def shuffle_phases(phases: list[str], seed: str) -> list[str]:
    """Shuffle timed steps and those under `no_sync` in random order, what looks inside after them.

    Neither of the two always follows the other: what a block leaves behind would look like exposure.
    """
    plain = [phase for phase in phases if phase in ("timed", "no_sync")]
    random.Random(seed).shuffle(plain)
    return plain + [phase for phase in phases if phase not in plain]


def is_traced(case: Case, settings: ResolvedSettings, *, last: bool) -> bool:
    """Tell whether a case is traced now: after the `last` round on GPUs, within the rounds elsewhere.

    CUPTI stays attached to a process, or goes at a time of its own, and slows what is timed meanwhile:
    pytorch#144455, kineto#1264.
    """
    wanted = "trace" in settings.passes and (case.communicates or settings.trace)
    return wanted and "trace" not in case.unmeasured and last == (case.device_type == "cuda")


def list_unfinished(
    plan: Sequence[Planned], settings: ResolvedSettings, recorder: Recorder
) -> list[tuple[int, Planned]]:
    """List the cases of a plan that have something left to measure, with their places in it."""
    settled = recorder.journal.state.settled
    measured = recorder.list_measured()

    def is_done(planned: Planned) -> bool:
        if settings.rounds is None:
            return False
        wanted = [
            (phase, r)
            for r in range(1, settings.rounds + 1)
            for phase in list_fixed_phases(planned, round_index=r, settings=settings)
        ]
        if is_traced(planned.case, settings, last=True):
            wanted.append(("trace", AFTER_ROUNDS))
        return all((planned.case.case_id, *block) in measured for block in wanted)

    return [
        (i, p)
        for i, p in enumerate(plan)
        if p.skip_reason is None and (i not in settled or settled[i].status == "ok") and not is_done(p)
    ]


SHARES = {"no_sync": 0.15, "comm": 0.03, "instrumented": 0.05, "calibration": 0.2}
"""Most of the measuring time that each kind of block may take; what is left is for timed steps."""

SHARED_VISITS = 2 * MIN_ROUNDS
"""Rounds of a case that shares devices, which says nothing about scaling: half of them with passes."""

MIN_VISITS = {"no_sync": 2 * MIN_ROUNDS, "comm": 2 * MIN_ROUNDS, "calibration": MIN_ROUNDS}
"""Visits that these phases get beyond their share, where steps are long: fewer give no or a wide interval."""

CALIBRATION_STEPS = 20
"""A visit of the calibration pass takes about as long as so many steps; once measured, what it took."""


@dataclass
class LiveCase:
    """A case that is ready to be measured."""

    index: int
    case: Case
    oversubscribed: bool
    layout: BucketLayout | None = None
    longest_step_s: float = 0.0
    """Seconds of the longest step of the warm-up, over all ranks."""
    step_s: float = 0.0
    """A usual one at the end of the warm-up, on the slowest rank."""

    @property
    def group(self) -> GroupKey:
        """Process group of its ranks."""
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
        if phase == "warmup":
            return
        case_id = one.case.case_id
        kind = "instrumented" if phase in INSTRUMENTED else phase
        self.spent_s[kind] += seconds
        self.visits[case_id, phase] += 1
        self.took_s[case_id, phase] = seconds

    def plan_round(
        self, live: Sequence[LiveCase], round_index: int, *, resting: Collection[str] = frozenset()
    ) -> dict[int, list[str]]:
        """Plan the phases of every case to be visited in a round, by its place in the plan.

        Every case begins with timed blocks alone, as many as an interval takes, whatever they cost.
        """
        if self.settings.rounds is not None:
            return {
                one.index: list_fixed_phases(one, round_index=round_index, settings=self.settings)
                for one in live
            }
        own = [one for one in live if not one.oversubscribed] or list(live)
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
                if self.has_enough(one) and phase in list_passes(one.case, self.settings)
            ]
            for one, phase in self._select_affordable(wanted, kind, per_round=most):
                chosen.setdefault(one.index, []).append(phase)
        for one in live:
            if one in own or self.visits[one.case.case_id, "timed"] >= SHARED_VISITS:
                continue
            passes = list_passes(one.case, self.settings) if self.has_enough(one) else []
            lacking = [p for p in passes if p == "no_sync" or not self.visits[one.case.case_id, p]]
            chosen[one.index] = ["timed", *lacking]
        seed = f"{self.settings.seed}/{round_index}"
        return {index: shuffle_phases(phases, f"{seed}/{index}") for index, phases in chosen.items()}

    def explain_shortage(self, live: Sequence[LiveCase], left_s: float | None) -> str:
        """Say that the time left gives no intervals, and what would; empty where it is enough."""
        if self.settings.rounds is not None or left_s is None or not live:
            return ""
        timed_s = sum(self._estimate_block_s(one, "timed") for one in live if not self.has_enough(one))
        calibration_s = sum(
            self._estimate_block_s(one, "calibration")
            for one in live
            if is_calibrated(one.case, self.settings) and not self.visits[one.case.case_id, "calibration"]
        )
        needed_s = MIN_ROUNDS * timed_s + MIN_VISITS["calibration"] * calibration_s
        if needed_s <= left_s:
            return ""
        return (
            f"The time is too short: {format_s(left_s)} are left after preparation, and intervals take "
            f"{MIN_ROUNDS} rounds, about {format_s(needed_s)}; give a longer --max-time or fewer cases"
        )

    def has_enough(self, one: LiveCase) -> bool:
        """Tell whether the timed blocks of a case are enough for an interval."""
        return self.visits[one.case.case_id, "timed"] >= MIN_ROUNDS

    def _select_affordable(
        self, wanted: Sequence[tuple[LiveCase, str]], kind: str, *, per_round: int
    ) -> list[tuple[LiveCase, str]]:
        """Those cases and phases visited least, as many as the share of their kind allows.

        Where the next is too much now nothing comes: a cheaper one would always be before it.
        """
        total_s, spent_s = sum(self.spent_s.values()), self.spent_s[kind]
        found: list[tuple[LiveCase, str]] = []
        by_visits = sorted(wanted, key=lambda pair: self.visits[pair[0].case.case_id, pair[1]])
        for one, phase in by_visits[:per_round]:
            cost_s = self._estimate_block_s(one, phase)
            if not self._is_due(one, phase) and spent_s + cost_s > SHARES[kind] * (total_s + cost_s):
                break
            spent_s, total_s = spent_s + cost_s, total_s + cost_s
            found.append((one, phase))
        return found

    def _is_due(self, one: LiveCase, phase: str) -> bool:
        """Tell whether a pass comes at any cost, after every second timed block until it has its least."""
        visits, timed = (self.visits[one.case.case_id, name] for name in (phase, "timed"))
        return visits < MIN_VISITS.get(phase, 1) and timed > 2 * visits

    def _estimate_block_s(self, one: LiveCase, phase: str) -> float:
        """Seconds of the next block of a phase: those of the last one, or else by the case's step."""
        steps = self.estimate_steps(phase, one.step_s)
        return self.took_s.get((one.case.case_id, phase), steps * one.step_s)

    def estimate_steps(self, phase: str, step_s: float) -> int:
        """Estimate the steps of a block of a phase, for a case whose step takes `step_s` seconds."""
        if phase == "calibration":
            return CALIBRATION_STEPS
        return self.settings.count_steps_per_block(step_s) if phase in ("timed", "no_sync") else 1
