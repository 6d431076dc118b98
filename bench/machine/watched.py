"""A user's own training that was watched, as its manifest holds it."""

from __future__ import annotations

from .records import Amount, Count, Record


class Measured(Record, frozen=True):
    """A value with its 95% interval, where it is known."""

    estimate: float
    low: float | None = None
    high: float | None = None


class LateRank(Record, frozen=True):
    """A rank that the others wait for."""

    rank: Count
    later_ms: Measured
    """Milliseconds of a step by which its own work takes longer than that of every other rank."""
    parts: dict[str, Measured] = {}
    """The same by part of the work, over the median of the others."""
    share_pct: Amount = 0.0
    """Percent of the step by which it is later."""
    lines: tuple[str, ...] = ()
    """FILE:LINE of the user's code before and after most of its `other` work; empty where not known."""
    is_straggler: bool = True
    """True where it is surely later by enough to be named a straggler."""

    @property
    def part(self) -> str:
        """The part that exceeds that of the others most."""
        return max(self.parts, key=lambda part: self.parts[part].estimate, default="")


class WatchedRank(Record, frozen=True):
    """A rank of a watched training: milliseconds of a step by part."""

    rank: Count
    parts: dict[str, Measured] = {}
    step_ms: Measured | None = None
    """The median step, in which a step's parts are not all at their medians."""


class WatchedSetting(Record, frozen=True):
    """A setting of a watched training that may cost time; `findings.watched_settings` says what it means."""

    name: str
    cost_ms: Measured | None = None
    """Milliseconds of each step; None where they were not measured."""
    line: str = ""
    """FILE:LINE of the user's code; empty where nobody knows it."""
    made_by: str = ""
    """Package that set it for the user, such as transformers."""
    amount: Count = 0
    of: Count = 0
    value: str = ""


SETTINGS = {
    "loader": ("num_workers", "{0.amount}", "no DataLoader"),
    "pinning": ("pin_memory", "False", "True"),
    "micro-steps": ("averages of gradients before the last micro-step", "{0.amount}", "0"),
    "threads": ("threads of operators", "{0.amount} on {0.of} cores", "no more than cores"),
    "debug": ("TORCH_DISTRIBUTED_DEBUG", "{0.value}", "OFF"),
}
"""Settings that only a watch records: their name, their value, and that of a training without a finding."""


class Watched(Record, frozen=True):
    """A user's own training that was watched."""

    command: tuple[str, ...] = ()
    """The user's command, which stays in this file, as does the environment."""
    env: dict[str, str] = {}
    script: str = ""
    """File name of the script, where the command has one."""
    exit_code: int = 0
    num_steps: Count = 0
    """Optimizer steps that were seen on the first rank."""
    num_compared: Count = 0
    """Steps of one kind that all ranks took, after the warm-up."""
    num_others: Count = 0
    ranks: tuple[WatchedRank, ...] = ()
    settings: tuple[WatchedSetting, ...] = ()
    late: LateRank | None = None
    num_probes: Count = 0
    """Compared steps that held gradients back."""
    own_ms: Amount = 0.0
    """Milliseconds of each step in the watch's own code, by its own clock, on the rank where it is most."""
    own_pct: Amount = 0.0
    """Percent of that rank's steps."""
    notes: tuple[str, ...] = ()
    """Messages of the ranks."""

    def find_setting(self, name: str) -> WatchedSetting | None:
        """Return the setting of this name; None where the watch did not record it."""
        return next((one for one in self.settings if one.name == name), None)

    def list_settings(self) -> dict[str, str]:
        """Return the values of `SETTINGS` by their names."""
        found = ((self.find_setting(name), told) for name, told in SETTINGS.items())
        return {label: text.format(one) if one else usual for one, (label, text, usual) in found}
