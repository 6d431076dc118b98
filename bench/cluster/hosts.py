"""Whether all hosts of a job are alike: GPU, driver, software, code and settings. Pure but `facts`."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from bench import conditions
from bench.cluster.ranks import host_name
from bench.errors import AgreedError
from bench.settings import Settings

WORDS = {
    "device": "device",
    "num_ranks": "ranks",
    "driver": "driver",
    "torch": "torch",
    "python": "Python",
    "cuda": "CUDA",
    "code": "code",
}


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What must be the same on every host."""

    host: str
    device: str
    num_ranks: str
    driver: str
    torch: str
    python: str
    cuda: str
    code: str
    settings: Mapping[str, str]


def facts(settings: Settings, *, device: str, num_local_ranks: int) -> Facts:
    """This host's facts."""
    git = conditions.git_state()
    code = f"{git['commit'][:12]}{' with changes' if git['dirty'] else ''}" if git else "unknown"
    chosen = {k: str(v) for k, v in settings.stored().items() if k not in ("out", "preset", "name")}
    drivers = sorted({str(gpu.get("driver")) for gpu in conditions.gpus()})
    return Facts(
        host=host_name(),
        device=device,
        num_ranks=str(num_local_ranks),
        driver=", ".join(drivers) or "none",
        torch=str(torch.__version__),
        python=platform.python_version(),
        cuda=str(torch.version.cuda or "none"),
        code=code,
        settings=chosen,
    )


def check_alike(found: Sequence[Facts | None]) -> None:
    """Raise AgreedError with every difference between hosts; None are ranks that speak for no host."""
    hosts = list({f.host: f for f in found if f is not None}.values())
    differences = []
    told = [(one.host, _told(one)) for one in hosts]
    for name in dict.fromkeys(name for _, facts_told in told for name in facts_told):
        values: dict[str, list[str]] = {}
        for host, facts_told in told:
            values.setdefault(facts_told.get(name, "none"), []).append(host)
        if len(values) > 1:
            differences.append(", ".join(f"{_named(h)}: {name} {value}" for value, h in values.items()))
    if differences:
        raise AgreedError(f"the hosts differ: {'; '.join(differences)}; make them alike or leave some out")


def _told(one: Facts) -> dict[str, str]:
    settings = {f"--{name.replace('_', '-')}": value for name, value in one.settings.items()}
    return {word: str(getattr(one, name)) for name, word in WORDS.items()} | settings


def _named(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
