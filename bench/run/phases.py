"""What is measured of a case in a round: one block per phase, in a seeded order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from ..case import Case
from ..plan import Planned, is_calibrated
from ..results.recorder import Recorder
from ..settings import ResolvedSettings

INSTRUMENTED = ("anatomy", "trace")

INSTRUMENTED_EVERY = 5
"""With `--rounds`, anatomy and trace come in the first round and every fifth; on GPUs traces come last."""

AFTER_ROUNDS = 0
"""The round of a trace that comes after all rounds: a run that is resumed for more of them has it already."""


class Placed(Protocol):
    """A case of a plan, prepared or not."""

    @property
    def case(self) -> Case: ...

    @property
    def oversubscribed(self) -> bool: ...


def passes_of(case: Case, settings: ResolvedSettings) -> list[str]:
    """What is measured of a case beside timed steps, within the rounds."""
    found = ["no_sync", "comm", "anatomy"] if case.communicates else ["anatomy"]
    if is_traced(case, settings, last=False):
        found.append("trace")
    wanted = set(settings.passes) - case.unmeasured
    found = [phase for phase in found if phase in wanted]
    return [*found, "calibration"] if is_calibrated(case, settings) else found


def fixed_phases(one: Placed, *, round_index: int, settings: ResolvedSettings) -> list[str]:
    """The phases of a case in a round of a run with `--rounds`, in their order."""
    # Devices that share a core time each other: one look at those is enough.
    looks = round_index == 1 or (round_index % INSTRUMENTED_EVERY == 1 and not one.oversubscribed)
    passes = [phase for phase in passes_of(one.case, settings) if looks or phase not in INSTRUMENTED]
    return shuffled(["timed", *passes], f"{settings.seed}/{round_index}/{one.case.case_id}")


def shuffled(phases: list[str], seed: str) -> list[str]:
    """Timed steps and those under `no_sync` in random order, what looks inside after them.

    Neither of the two always follows the other: what a block leaves behind would look like exposure.
    """
    plain = [phase for phase in phases if phase in ("timed", "no_sync")]
    random.Random(seed).shuffle(plain)
    return plain + [phase for phase in phases if phase not in plain]


def is_traced(case: Case, settings: ResolvedSettings, *, last: bool) -> bool:
    """Whether the trace pass looks into it: after the `last` round on GPUs, within the rounds elsewhere.

    CUPTI stays attached to a process, or goes at a time of its own, and slows what is timed meanwhile:
    pytorch#144455, kineto#1264.
    """
    wanted = "trace" in settings.passes and (case.communicates or settings.trace)
    return wanted and "trace" not in case.unmeasured and last == (case.device_type == "cuda")


def unfinished(
    plan: Sequence[Planned], settings: ResolvedSettings, recorder: Recorder
) -> list[tuple[int, Planned]]:
    """The cases of a plan that have something left to measure, with their places in it."""
    settled = recorder.journal.state.settled
    measured = recorder.measured()

    def is_done(planned: Planned) -> bool:
        case_id = planned.case.case_id
        return settings.rounds is not None and all(
            (case_id, phase, r) in measured for phase, r in _fixed_blocks(planned, settings, settings.rounds)
        )

    return [
        (i, p)
        for i, p in enumerate(plan)
        if p.skip_reason is None and (i not in settled or settled[i].status == "ok") and not is_done(p)
    ]


def _fixed_blocks(planned: Planned, settings: ResolvedSettings, num_rounds: int) -> list[tuple[str, int]]:
    """Phase and round of every block of a case in a run with `--rounds`."""
    found = [
        (phase, r)
        for r in range(1, num_rounds + 1)
        for phase in fixed_phases(planned, round_index=r, settings=settings)
    ]
    return [*found, ("trace", AFTER_ROUNDS)] if is_traced(planned.case, settings, last=True) else found
