"""A line of the doctor: what was looked at, how it is, what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "unknown", "caution", "bad"]

SEVERITY: tuple[Status, ...] = ("ok", "unknown", "caution", "bad")


@dataclass(frozen=True)
class Finding:
    """A line; `advice` is empty where nothing needs doing."""

    name: str
    status: Status
    text: str
    advice: str = ""


def unknown(name: str, text: str = "not readable here") -> Finding:
    """Say that something could not be read."""
    return Finding(name, "unknown", text)


def judged(name: str, status: Status, text: str, advice: str) -> Finding:
    """Make a line of any status; ok goes without the advice."""
    return Finding(name, status, text, "" if status == "ok" else advice)


def worst(statuses: Iterable[Status]) -> Status:
    """Find the gravest of the statuses; ok without any."""
    return max(statuses, key=SEVERITY.index, default="ok")


def graded(value: float, *, caution: float, bad: float) -> Status:
    """Grade a value that is better the smaller it is; a limit belongs to the worse side."""
    return "bad" if value >= bad else "caution" if value >= caution else "ok"


def figures(value: float) -> str:
    """Write cores and the like: `8`, `2.5`, `0.25`."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def gib(value_bytes: float) -> str:
    """Write bytes as `1.5 GiB`, or `64 MiB` below one GiB."""
    size_mib = value_bytes / 2**20
    return f"{size_mib / 1024:.1f} GiB" if size_mib >= 1024 else f"{size_mib:.0f} MiB"
