"""Which code two runs measured: the user's workload by repository, commit and content, and ddp-bench."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_bench.bench.conditions import Manifest, code_of_workload, part
from ddp_bench.bench.errors import UsageError

SHORT = 7
"""Digits of a commit that a reader is shown, as git does; JSON has all."""


@dataclass(frozen=True)
class Code:
    """What the two manifests say of their code; `interleaved` where both sides took turns."""

    baseline: Manifest
    candidate: Manifest
    interleaved: bool

    @property
    def is_identical(self) -> bool | None:
        """Whether both imported files of the same content; None where a manifest does not tell.

        Built-in models are code of ddp-bench: a commit of it without changes.
        """
        if not any(part(side, "workload") for side in (self.baseline, self.candidate)):
            ours, theirs = (part(side, "git") for side in (self.baseline, self.candidate))
            known = all(state.get("commit") and state.get("dirty") is False for state in (ours, theirs))
            return ours["commit"] == theirs["commit"] if known else None
        hashes = [code_of_workload(side) for side in (self.baseline, self.candidate)]
        return None if None in hashes else hashes[0] == hashes[1]

    def lines(self) -> list[str]:
        """The two workloads' commits, whether their code is the same, and ddp-bench's; none without them."""
        sides = (self.baseline, self.candidate)
        if not any(part(side, "workload") for side in sides):
            return []
        lines = [f"workload: {_between(*(_commit(part(side, 'workload')) for side in sides))}"]
        if self.is_identical:
            lines.append(self._identical())
        own = [_own(side) for side in sides]
        return [*lines, f"measured with {_between(*own)}"] if all(own) else lines

    def _identical(self) -> str:
        if not self.interleaved:
            return "both runs imported identical code of the workload"
        same = part(self.baseline, "versions") == part(self.candidate, "versions")
        what = "this is an A/A comparison" if same else "what differs is the environment"
        return f"both sides import identical code: {what}"

    def as_dict(self) -> dict[str, Any]:
        """The same for a program, per side; what a manifest does not tell is empty."""
        keys = ("workload", "ddp_bench", "git")
        both = {"baseline": self.baseline, "candidate": self.candidate}
        sides = {name: {key: dict(part(side, key)) for key in keys} for name, side in both.items()}
        return {"identical": self.is_identical, **sides}


def check_one_code(launches: Sequence[Manifest]) -> None:
    """Raise UsageError where the launches of a side measured different code: it was edited meanwhile."""
    hashes = {code_of_workload(manifest) for manifest in launches}
    if len(hashes) > 1:
        raise UsageError(
            "the workload's code was changed while it was measured; leave its files alone and measure again"
        )


def _between(ours: str, theirs: str) -> str:
    """`mynet 1a2b3c4 -> 5d6e7f8`: what is the same in both is said once."""
    if ours == theirs:
        return ours
    name, _, rest = theirs.partition(" ")
    return f"{ours} -> {rest if rest and ours.partition(' ')[0] == name else theirs}"


def _commit(code: Mapping[str, Any]) -> str:
    """`mynet 1a2b3c4 with uncommitted changes`, or where the code comes from as far as that is known."""
    if not code:
        return "not recorded"
    if "commit" not in code:
        return f"{code.get('file', code.get('spec'))} in no repository with a commit"
    return f"{code.get('repository')} {_state(code)}"


def _own(manifest: Manifest) -> str:
    """`ddp-bench 0.1.0 (1a2b3c4)`; empty of a manifest from before versions were recorded."""
    version, git = part(manifest, "ddp_bench").get("version"), part(manifest, "git")
    if version is None:
        return ""
    return f"ddp-bench {version}" + (f" ({_state(git)})" if "commit" in git else "")


def _state(code: Mapping[str, Any]) -> str:
    return str(code["commit"])[:SHORT] + (" with uncommitted changes" if code.get("dirty") is True else "")
