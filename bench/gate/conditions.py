"""What two runs were measured under, and where that differs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bench.gate.runs import SWEPT, GateCase, GateRun
from bench.results.schema import IDENTITY

UNKNOWN = "unknown"

PLANNED = tuple(
    column.name
    for column in IDENTITY
    if column.name not in {*SWEPT, "case_id", "status", "reason", "global_batch", "device_name", "link"}
)
"""Settings and places of a case, known of unmeasured ones too; global_batch follows from them."""

SEEN = ("device_name", "link")
"""Known only of cases that were measured."""


@dataclass(frozen=True)
class Difference:
    """One condition that the two runs do not share; `blocking` makes absolute figures incomparable."""

    name: str
    baseline: str
    candidate: str
    blocking: bool


def differences(
    baseline: GateRun, candidate: GateRun, pairs: Iterable[tuple[GateCase, GateCase]]
) -> tuple[Difference, ...]:
    """Conditions that differ, blocking ones first. One that a manifest does not tell counts as different."""
    found = _between_cases(list(pairs))
    for blocking, told in ((True, _blocking), (False, _other)):
        ours, theirs = told(baseline.manifest), told(candidate.manifest)
        for name in dict.fromkeys([*ours, *theirs]):
            left, right = ours.get(name, ""), theirs.get(name, "")
            if left != right or (blocking and UNKNOWN in (left, right)):
                found.append(Difference(name, left or "none", right or "none", blocking))
    return tuple(sorted(found, key=lambda difference: not difference.blocking))


def _between_cases(pairs: list[tuple[GateCase, GateCase]]) -> list[Difference]:
    found = []
    for name in (*PLANNED, *SEEN):
        changed = [
            (a.row.get(name, "none"), b.row.get(name, "none"))
            for a, b in pairs
            if a.row.get(name) != b.row.get(name) and (name in PLANNED or (a.ok and b.ok))
        ]
        if changed:
            left, right = (", ".join(dict.fromkeys(side)) for side in zip(*changed, strict=True))
            found.append(Difference(name, left, right, blocking=True))
    return found


def _blocking(manifest: Mapping[str, Any]) -> dict[str, str]:
    """The machine, torch and the workload, as far as cases.csv does not tell them."""
    machine, versions = _part(manifest, "environment"), _part(manifest, "versions")
    model, settings = _part(manifest, "model"), _part(manifest, "settings")
    cuda = f" (CUDA {versions['cuda']})" if versions.get("cuda") else ""
    told = {
        "CPU": machine.get("cpu_model"),
        "CPU cores": machine.get("num_cores"),
        "torch": f"{versions['torch']}{cuda}" if versions.get("torch") else None,
        "model parameters": model.get("num_params"),
        "gradient bytes": model.get("gradient_bytes"),
        "data workers": settings.get("data_workers") if _reads_files(settings) else "none",
    }
    gpus = [_gpu(gpu) for gpu in machine["gpus"]] if isinstance(machine.get("gpus"), list) else [UNKNOWN]
    return {
        **{name: UNKNOWN if value is None else str(value) for name, value in told.items()},
        "GPUs": ", ".join(
            f"{gpus.count(gpu)} x {gpu}" if gpu != UNKNOWN else gpu for gpu in dict.fromkeys(gpus)
        ),
    }


def _other(manifest: Mapping[str, Any]) -> dict[str, str]:
    """What may explain a change, and may be the very change that is gated."""
    machine, git = _part(manifest, "environment"), _part(manifest, "git")
    versions = {k: v for k, v in _part(manifest, "versions").items() if k not in ("torch", "cuda")}
    gpus = machine.get("gpus")
    drivers = (
        [str(gpu.get("driver")) for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []
    )
    env = {k: v for k, v in _part(machine, "env").items() if not k.startswith("BENCH_")}
    settings = _part(manifest, "settings")
    told = {
        **versions,
        **env,
        "host": machine.get("host"),
        "GPU driver": ", ".join(dict.fromkeys(drivers)),
        "steps per block": settings.get("steps"),
        "seed": settings.get("seed"),
        "commit": git.get("commit"),
        "uncommitted changes": git.get("dirty"),
    }
    return {name: str(value) for name, value in told.items() if value is not None}


def _reads_files(settings: Mapping[str, Any]) -> bool:
    return settings.get("data") not in ("device", "host")


def _gpu(gpu: Any) -> str:
    if not isinstance(gpu, dict) or not gpu.get("name"):
        return UNKNOWN
    limit = f", {gpu['power_limit_w']:g} W" if isinstance(gpu.get("power_limit_w"), int | float) else ""
    return f"{gpu['name']}{limit}"


def _part(manifest: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = manifest.get(name)
    return part if isinstance(part, dict) else {}
