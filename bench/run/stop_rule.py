"""When a run has measured enough: its rounds, its precision target or its time limit."""

from __future__ import annotations

from collections.abc import Callable

from bench.results.recorder import Recorder
from bench.settings import Settings

MIN_ROUNDS_FOR_TARGET = 5
"""Fewer rounds can agree by chance."""


class StopRule:
    """Asked on every rank; `recorder` exists on rank 0 only, whose answer counts."""

    def __init__(self, settings: Settings, recorder: Recorder | None, elapsed_s: Callable[[], float]) -> None:
        self._settings = settings
        self._recorder = recorder
        self._elapsed_s = elapsed_s
        self._left_at_first_s: float | None = None

    def reason(self, num_rounds: int) -> str:
        """Why the run ends after so many rounds; empty while it goes on."""
        if self._recorder is None or not num_rounds:
            return ""
        if self._settings.rounds is not None:
            if num_rounds >= self._settings.rounds:
                return "all rounds done"
        elif (
            num_rounds >= MIN_ROUNDS_FOR_TARGET
            and self._recorder.half_width() <= self._settings.precision_target
        ):
            return "precision target reached"
        return "time limit reached" if self.out_of_time() else ""

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
        """Whether the time limit has passed."""
        left = self.left_s()
        return left is not None and left <= 0
