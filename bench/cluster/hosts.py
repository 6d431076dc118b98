"""Whether all hosts of a job are alike: GPU, driver, software, code and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.conditions import Question, git_state, machine, needed, versions
from bench.errors import AgreedError
from bench.settings import Settings


def described(host: str, settings: Settings, *, device: str, num_local_ranks: int) -> dict[str, Any]:
    """This host as a manifest describes a run, with what its ranks train on."""
    return {
        "environment": machine(host),
        "versions": versions(),
        "git": git_state(),
        "settings": settings.stored(),
        "device": device,
        "num_ranks": num_local_ranks,
    }


def check_alike(found: Sequence[Mapping[str, Any] | None]) -> None:
    """Raise AgreedError with every difference between hosts; None are ranks that speak for no host."""
    hosts = {str(one["environment"]["host"]): needed(one, Question.HOSTS) for one in found if one is not None}
    differences = []
    for name in dict.fromkeys(name for told in hosts.values() for name in told):
        values: dict[str, list[str]] = {}
        for host, told in hosts.items():
            values.setdefault(told.get(name, "none"), []).append(host)
        if len(values) > 1:
            differences.append(", ".join(f"{_named(h)}: {name} {value}" for value, h in values.items()))
    if differences:
        raise AgreedError(f"the hosts differ: {'; '.join(differences)}; make them alike or leave some out")


def _named(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
