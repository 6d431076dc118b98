"""The conditions of a run, compared between two runs or hosts; `machine` and `gpus` read them.

`list_conditions` is the one table of what has to be the same for which question.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from .manifest import Host, Manifest, NcclChoices, NcclMessage, RankPlace
from .records import Record

ANALYSIS_PACKAGES = ("pandas", "scipy", "matplotlib")
"""They evaluate what was measured, and take no part in a step."""

UNKNOWN = "unknown"
NONE = "none"


class Question(Enum):
    """Why conditions are compared; each question needs others of them to be the same."""

    HOSTS = auto()
    """May these hosts train together?"""
    RESUME = auto()
    """Would this go on with the same run?"""
    GATE = auto()
    """May the absolute figures of two runs be compared?"""


HOSTS, RESUME, GATE = Question


@dataclass(frozen=True)
class Condition:
    """One condition as text, the questions that need it to be the same, and those that only mention it."""

    name: str
    value: str
    needed: frozenset[Question]
    mentioned: frozenset[Question]


class Difference(Record, frozen=True, rename={"then": "baseline", "now": "candidate"}):
    """A condition that two runs do not share, as a gate prints it."""

    name: str
    then: str
    now: str
    blocking: bool
    """True where it makes the runs not comparable."""


def find_differences(then: Manifest, now: Manifest, question: Question) -> list[Difference]:
    """Find the conditions that differ, blocking ones first; one that is needed and unknown blocks as well."""
    ours, theirs = ({c.name: c for c in list_conditions(manifest)} for manifest in (then, now))
    found = []
    for name in dict.fromkeys([*ours, *theirs]):
        pair = [side[name] for side in (ours, theirs) if name in side]
        blocking = any(question in c.needed for c in pair)
        if not blocking and not any(question in c.mentioned for c in pair):
            continue
        left, right = (side[name].value if name in side else NONE for side in (ours, theirs))
        unknown = UNKNOWN in (left, right)
        if (blocking and unknown) or (left != right and not unknown):
            found.append(Difference(name=name, then=left, now=right, blocking=blocking))
    return sorted(found, key=lambda difference: not difference.blocking)


def select_required(manifest: Manifest, question: Question) -> dict[str, str]:
    """Select the conditions that have to be the same for `question`, by name."""
    return {c.name: c.value for c in list_conditions(manifest) if question in c.needed}


def list_conditions(manifest: Manifest) -> list[Condition]:
    """Every condition that a manifest tells: the table of what is needed for which question."""
    machine, versions = manifest.environment, manifest.versions
    model, settings, nccl = manifest.model, manifest.settings, manifest.nccl
    gpus = machine.gpus or ()
    known = machine.gpus is not None and all(gpu.name for gpu in gpus)
    from_files = settings.data not in ("device", "host")
    cuda = f" (CUDA {versions['cuda']})" if versions.get("cuda") else ""
    cgroup, dirty = machine.cgroup, manifest.git.dirty
    rows: list[tuple[str, Any, Iterable[Question], Iterable[Question]]] = [
        # name, value, needed by, mentioned to
        ("plan", manifest.plan_hash, (RESUME,), ()),
        ("ranks", describe_devices(manifest.ranks), (RESUME,), ()),
        ("CPU", machine.cpu_model, (RESUME, GATE), ()),
        ("CPU cores", machine.num_cores, (RESUME, GATE), ()),
        ("GPUs", _format_counts(gpu.name for gpu in gpus) if known else None, (RESUME, GATE), ()),
        ("GPU power limits, W", _format_counts(gpu.power_limit_w for gpu in gpus), (GATE,), ()),
        ("GPU driver", _join_unique(str(gpu.driver) for gpu in gpus), (HOSTS, RESUME), (GATE,)),
        ("torch", f"{versions['torch']}{cuda}" if versions.get("torch") else None, Question, ()),
        ("python", versions.get("python", NONE), (HOSTS, RESUME), (GATE,)),
        ("NCCL backend", versions.get("nccl_backend", NONE), Question, ()),
        ("NCCL transport", nccl and ", ".join(nccl.transports), (), (GATE,)),
        ("NCCL algorithms", nccl and format_nccl_choices(nccl.messages), (), (GATE,)),
        ("model parameters", model.num_params, (GATE,), ()),
        ("gradient bytes", model.gradient_bytes, (GATE,), ()),
        ("CPU governor", None if machine.governors is None else "/".join(machine.governors), (), (GATE,)),
        ("transparent huge pages", machine.huge_pages, (), (GATE,)),
        ("container's CPU quota, cores", cgroup.cpu_quota_cores, (), (GATE,)),
        ("container's memory limit, GiB", cgroup.memory_limit_gib, (), (GATE,)),
        ("container's cores", cgroup.cpuset, (), (GATE,)),
        ("ranks bound to cores", _join_unique(rank.bound_cores for rank in manifest.ranks), (), (GATE,)),
        ("data workers", settings.data_workers if from_files else NONE, (GATE,), ()),
        ("steps per block", settings.steps, (), (GATE,)),
        ("seed", settings.seed, (), (GATE,)),
        ("host", machine.host or NONE, (), (GATE,)),
        ("ddp-bench commit", manifest.git.commit or NONE, (HOSTS,), (GATE,)),
        ("ddp-bench uncommitted changes", NONE if dirty is None else dirty, (HOSTS,), (GATE,)),
    ]
    for name, value in versions.items():
        if name not in ("torch", "cuda", "python", "nccl_backend"):
            rows.append((name, value, (RESUME,), () if name in ANALYSIS_PACKAGES else (GATE,)))
    rows += [(name, value, (), (GATE,)) for name, value in machine.env.items()]
    for name, value in settings.stored().items():
        if name not in ("out", "preset", "name"):
            rows.append((f"--{name.replace('_', '-')}", str(value), (HOSTS,), ()))
    return [
        Condition(name, UNKNOWN if value is None else str(value), frozenset(by), frozenset(to))
        for name, value, by, to in rows
    ]


def describe_machine_kind(manifest: Manifest) -> dict[str, Any]:
    """Return the facts that make two machines of one kind, whatever their host name, driver or OS."""
    machine = manifest.environment
    torch = re.findall(r"\d+", manifest.versions.get("torch", ""))
    return {
        "device": manifest.settings.device,
        "gpus": sorted(Counter(str(gpu.name) for gpu in machine.gpus or ()).items()),
        "cpu_model": machine.cpu_model,
        "num_cores": machine.num_cores,
        "torch": ".".join(torch[:2]),
    }


def name_machine(machine: Host) -> str:
    """Name a machine as calibrations do: processor, cores, number of GPUs."""
    return f"{machine.cpu_model or ''} x {machine.num_cores or ''}, {len(machine.gpus or ())} GPUs"


def describe_devices(ranks: Sequence[RankPlace]) -> str | None:
    """Write how many ranks there are and on which devices they train; None where it is not told."""
    names = sorted({rank.device_name or rank.device for rank in ranks})
    return f"{len(ranks)} on {', '.join(names)}" if ranks else None


def _format_counts(values: Iterable[object]) -> str:
    """`2 x NVIDIA H200`, or `none`."""
    known = Counter(str(value) for value in values if value is not None)
    return ", ".join(f"{count} x {value}" for value, count in sorted(known.items())) or NONE


def _join_unique(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(filter(None, values))) or NONE


NCCL_VARIABLES = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,TUNING"}
"""Variables that make NCCL log how it sends gradients: transports under INIT, the rest under TUNING."""

# By the formats in libnccl.so of 2.28.9 and 2.30.7.
_MESSAGE = re.compile(r"AllReduce: (\d+) Bytes -> Algo (\w+) proto (\w+)")
_SYMMETRIC = re.compile(r"AllReduce \[(Symmetric)\]: (\d+) Bytes -> Kernel (\w+)")
_TRANSPORT = re.compile(r"\bvia (P2P/(?:direct pointer|[A-Za-z]+)|SHM|(?:COLL)?NET/\w+)(?:\S*(/GDRDMA))?")


def parse_nccl_log(logs: Iterable[str]) -> NcclChoices | None:
    """Read NCCL's choices from the `logs` of all ranks; None where it logged none that this can read."""
    transports: set[str] = set()
    messages: set[NcclMessage] = set()
    for line in itertools.chain.from_iterable(log.splitlines() for log in logs):
        if found := _TRANSPORT.search(line):
            transports.add("".join(filter(None, found.groups())))
        elif found := _MESSAGE.search(line):
            messages.add(NcclMessage(bytes=int(found[1]), algorithm=found[2], protocol=found[3]))
        elif found := _SYMMETRIC.search(line):
            messages.add(NcclMessage(bytes=int(found[2]), algorithm=found[1], protocol=found[3]))
    if not messages:
        return None
    by_size = sorted(messages, key=lambda one: (one.bytes, one.algorithm, one.protocol))
    return NcclChoices(transports=tuple(sorted(transports)), messages=tuple(by_size))


def format_nccl_choices(messages: Iterable[NcclMessage]) -> str:
    """Messages by size, those in a row that are sent alike together: `1,024 to 65,536 bytes: TREE/LL`."""
    parts = []
    for how, group in itertools.groupby(messages, key=lambda one: f"{one.algorithm}/{one.protocol}"):
        sizes = [f"{one.bytes:,d}" for one in group]
        parts.append(f"{' to '.join(dict.fromkeys((sizes[0], sizes[-1])))} bytes: {how}")
    return ", ".join(parts)
