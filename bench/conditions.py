"""The conditions of a run, compared between two runs or hosts; `machine` and `gpus` read them.

`conditions_of` is the one table of what has to be the same for which question.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeAlias

ANALYSIS_PACKAGES = ("pandas", "scipy", "matplotlib")
"""They evaluate what was measured, and take no part in a step."""

INTERNAL_ENV_PREFIX = "BENCH_"
"""The suite's own variables, such as a start time: no conditions. Earlier versions recorded them."""
UNKNOWN = "unknown"
NONE = "none"

Manifest: TypeAlias = Mapping[str, Any]
"""A run's manifest.json, or as much of one as is known. It may be anyone's: any part may be missing."""


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


@dataclass(frozen=True)
class Difference:
    """A condition that two runs do not share; `blocking` where the question needs it to be the same."""

    name: str
    then: str
    now: str
    blocking: bool


def variables_of(environment: Manifest) -> dict[str, Any]:
    """The environment variables of a manifest's `environment`, without the suite's own."""
    listed = part(environment, "env").items()
    return {name: value for name, value in listed if not name.startswith(INTERNAL_ENV_PREFIX)}


def differences(then: Manifest, now: Manifest, question: Question) -> list[Difference]:
    """The conditions that differ, blocking ones first; one that is needed and unknown blocks as well."""
    ours, theirs = ({c.name: c for c in conditions_of(manifest)} for manifest in (then, now))
    found = []
    for name in dict.fromkeys([*ours, *theirs]):
        pair = [side[name] for side in (ours, theirs) if name in side]
        blocking = any(question in c.needed for c in pair)
        if not blocking and not any(question in c.mentioned for c in pair):
            continue
        left, right = (side[name].value if name in side else NONE for side in (ours, theirs))
        unknown = UNKNOWN in (left, right)  # as what earlier versions did not record: no difference to name
        if (blocking and unknown) or (left != right and not unknown):
            found.append(Difference(name, left, right, blocking))
    return sorted(found, key=lambda difference: not difference.blocking)


def needed(manifest: Manifest, question: Question) -> dict[str, str]:
    """The conditions that have to be the same for `question`, by name."""
    return {c.name: c.value for c in conditions_of(manifest) if question in c.needed}


def conditions_of(manifest: Manifest) -> list[Condition]:
    """Every condition that a manifest tells: the table of what is needed for which question."""
    machine, versions, git, model, settings = (
        part(manifest, name) for name in ("environment", "versions", "git", "model", "settings")
    )
    listed = gpus_of(machine)
    gpus = [gpu for gpu in listed or () if isinstance(gpu, dict)]
    known = listed is not None and all(gpu.get("name") for gpu in gpus) and len(gpus) == len(listed)
    from_files = settings.get("data") not in ("device", "host")
    cuda = f" (CUDA {versions['cuda']})" if versions.get("cuda") else ""
    cgroup, governors = part(machine, "cgroup"), machine.get("governors")
    rows: list[tuple[str, Any, Iterable[Question], Iterable[Question]]] = [
        # name, value, needed by, mentioned to
        ("plan", manifest.get("plan_hash"), (RESUME,), ()),
        ("ranks", manifest.get("ranks"), (RESUME,), ()),
        ("device", manifest.get("device"), (HOSTS,), ()),
        ("ranks per host", manifest.get("num_ranks"), (HOSTS,), ()),
        ("CPU", machine.get("cpu_model"), (RESUME, GATE), ()),
        ("CPU cores", machine.get("num_cores"), (RESUME, GATE), ()),
        ("GPUs", _counted(gpus, "name") if known else None, (RESUME, GATE), ()),
        ("GPU power limits, W", _counted(gpus, "power_limit_w"), (GATE,), ()),
        ("GPU driver", _distinct(gpus, "driver"), (HOSTS, RESUME), (GATE,)),
        ("torch", f"{versions['torch']}{cuda}" if versions.get("torch") else None, Question, ()),
        ("python", versions.get("python", NONE), (HOSTS, RESUME), (GATE,)),
        ("NCCL backend", versions.get("nccl_backend", NONE), Question, ()),
        ("model parameters", model.get("num_params"), (GATE,), ()),
        ("gradient bytes", model.get("gradient_bytes"), (GATE,), ()),
        ("CPU governor", "/".join(map(str, governors)) if isinstance(governors, list) else None, (), (GATE,)),
        ("transparent huge pages", machine.get("huge_pages"), (), (GATE,)),
        ("container's CPU quota, cores", cgroup.get("cpu_quota_cores"), (), (GATE,)),
        ("container's memory limit, GiB", cgroup.get("memory_limit_gib"), (), (GATE,)),
        ("container's cores", cgroup.get("cpuset"), (), (GATE,)),
        ("ranks bound to cores", _bound(manifest.get("ranks")), (), (GATE,)),
        ("data workers", settings.get("data_workers") if from_files else NONE, (GATE,), ()),
        ("prefetch", prefetches(settings), (GATE,), ()),
        ("steps per block", settings.get("steps", NONE), (), (GATE,)),
        ("seed", settings.get("seed", NONE), (), (GATE,)),
        ("host", machine.get("host", NONE), (), (GATE,)),
        ("ddp-bench commit", git.get("commit", NONE), (HOSTS,), (GATE,)),
        ("ddp-bench uncommitted changes", git.get("dirty", NONE), (HOSTS,), (GATE,)),
    ]
    for name, value in versions.items():
        if name not in ("torch", "cuda", "python", "nccl_backend"):
            rows.append((name, value, (RESUME,), () if name in ANALYSIS_PACKAGES else (GATE,)))
    rows += [(name, value, (), (GATE,)) for name, value in variables_of(machine).items()]
    for name, value in settings.items():
        if name not in ("out", "preset", "name"):
            rows.append((f"--{name.replace('_', '-')}", str(value), (HOSTS,), ()))
    return [
        Condition(name, UNKNOWN if value is None else str(value), frozenset(by), frozenset(to))
        for name, value, by, to in rows
    ]


def prefetches(settings: Manifest) -> bool:
    """Whether a run with these settings copies batches ahead: to a GPU, from elsewhere."""
    copied = settings.get("device") == "cuda" and settings.get("data") != "device"
    return copied and settings.get("prefetch") is True


def machine_kind(manifest: Manifest) -> dict[str, Any]:
    """What makes two machines of one kind, whatever their host name, driver or operating system."""
    environment = part(manifest, "environment")
    gpus = [str(gpu.get("name")) for gpu in gpus_of(environment) or () if isinstance(gpu, dict)]
    torch = re.findall(r"\d+", str(part(manifest, "versions").get("torch", "")))
    return {
        "device": part(manifest, "settings").get("device"),
        "gpus": sorted(Counter(gpus).items()),
        "cpu_model": environment.get("cpu_model"),
        "num_cores": environment.get("num_cores"),
        "torch": ".".join(torch[:2]),
    }


def machine_name(environment: Manifest) -> str:
    """Name a machine by a manifest's `environment`, as calibrations do: processor, cores, number of GPUs."""
    num_gpus = len(gpus_of(environment) or ())
    return f"{environment.get('cpu_model', '')} x {environment.get('num_cores', '')}, {num_gpus} GPUs"


def visible(setting: str | None, names: Sequence[Sequence[str]]) -> list[int]:
    """Find the GPUs that CUDA_VISIBLE_DEVICES leaves, by their places in `names`.

    `names` are the UUIDs of every GPU, its own and those of its MIG slices, in NVML's order: CUDA shares it
    for equal GPUs. The setting lists indices or beginnings of UUIDs, ended by the first that is not there
    (CUDA programming guide). Where it names slices that NVML does not, all GPUs are taken.
    """
    if setting is None:
        return list(range(len(names)))
    chosen: list[int] = []
    for word in (part.strip() for part in setting.split(",")):
        match = [i for i, own in enumerate(names) if str(i) == word or _is_named(word, own)]
        if len(match) != 1:
            break
        chosen += match
    if not chosen and setting.strip().startswith("MIG-"):
        return list(range(len(names)))
    return sorted(set(chosen))


def _is_named(word: str, names: Sequence[str]) -> bool:
    return word.startswith(("GPU-", "MIG-")) and any(name.startswith(word) for name in names)


def gpus_of(environment: Manifest) -> list[Any] | None:
    """The GPUs that a run's ranks saw, of a manifest's `environment`; None where it does not tell.

    Without UUIDs it is of a version that listed all GPUs of the machine, whatever CUDA_VISIBLE_DEVICES left.
    """
    listed = environment.get("gpus")
    if not isinstance(listed, list):
        return None
    setting = part(environment, "env").get("CUDA_VISIBLE_DEVICES")
    if not isinstance(setting, str) or any("uuid" in gpu for gpu in listed if isinstance(gpu, dict)):
        return listed
    if setting.strip().startswith(("GPU-", "MIG-")):
        return listed[: setting.count(",") + 1]  # which ones cannot be told; equal ones are compared alike
    return [listed[i] for i in visible(setting, [()] * len(listed))]


def code_of_workload(manifest: Manifest) -> str | None:
    """The SHA-256 of the user's code that a run imported; None without such code, or where it is not told."""
    found = part(manifest, "workload").get("code_sha256")
    return found if isinstance(found, str) else None


def part(manifest: Manifest, name: str) -> Manifest:
    """A part of a manifest that should be a table; empty where it is missing or something else."""
    found = manifest.get(name)
    return found if isinstance(found, dict) else {}


def _counted(gpus: Iterable[Manifest], key: str) -> str:
    """`2 x NVIDIA H200`, or `none`."""
    known = Counter(str(gpu.get(key)) for gpu in gpus if gpu.get(key) is not None)
    return ", ".join(f"{count} x {value}" for value, count in sorted(known.items())) or NONE


def _bound(ranks: Any) -> str:
    """Which cores ranks were kept on, each set once; `none` also of runs from before ranks were bound."""
    known = [rank for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []
    cores = dict.fromkeys(str(rank["bound_cores"]) for rank in known if rank.get("bound_cores"))
    return ", ".join(cores) or NONE


def _distinct(gpus: Iterable[Manifest], key: str) -> str:
    return ", ".join(dict.fromkeys(str(gpu.get(key)) for gpu in gpus)) or NONE
