"""Samples GPUs through NVML in a process of its own, and tells what they did in a span of time. No torch.

`python -m bench.measure.sampler UUID…`, with a socket as standard input. Each line on it is a question,
`{"start_s", "end_s", "gpus"}`, on the monotonic clock. Each answer is a line: `{"gpus": {name: summary}}`
by the beginning of a GPU's UUID, or `{"error": why}`. It ends when the other end of the socket does.
"""

from __future__ import annotations

import contextlib
import json
import select
import signal
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, linear_regression
from typing import Any

import pynvml

from ..gpus import THROTTLING, ClockReason, ask_nvml, clock_reasons, is_mig, nvml_devices

INTERVAL_S = 0.05
"""Between two samples: twenty in a block of a second, and little work for the driver."""

KEPT_S = 600.0
"""Samples are kept so long, a few MiB per GPU: of a longer block its last ten minutes are told."""

NAME_LENGTH = 8
"""Characters of a UUID that name a GPU in a table: the chance that two of eight agree is 1 in 10^8."""

LEAST_COUNTED_S = 0.2
"""Least time from which the energy counter tells the power: it moves in steps of up to 0.1 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The readings of one GPU at one moment; None for what it does not report."""

    moment_s: float
    """On the monotonic clock, which all processes of a host share."""
    sm_clock_mhz: float | None = None
    energy_j: float | None = None
    """Used since the driver was loaded."""
    power_w: float | None = None
    """Read only where there is no energy counter."""
    temperature_c: float | None = None
    reasons: frozenset[ClockReason] | None = None


@dataclass
class SampledGpu:
    """A GPU and its samples of the last `KEPT_S`."""

    handle: Any
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=int(KEPT_S / INTERVAL_S)))

    def within(self, start_s: float, end_s: float) -> list[Sample]:
        return [sample for sample in self.samples if start_s <= sample.moment_s <= end_s]


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """What a GPU did while it was sampled; without what it does not report."""
    clocks = [s.sm_clock_mhz for s in samples if s.sm_clock_mhz is not None]
    found = {
        "sm_clock_mhz": fmean(clocks) if clocks else None,
        "power_w": power_w(samples),
        "temperature_c": max((s.temperature_c for s in samples if s.temperature_c is not None), default=None),
    }
    told = {name: round(value, 2) for name, value in found.items() if value is not None}
    return told | throttling([s.reasons for s in samples if s.reasons is not None])


def power_w(samples: Sequence[Sample]) -> float | None:
    """The mean power: how fast the energy counter rises, else the mean of readings; None where unknown.

    Since Ampere (but GA100) a reading is an average over the last second, which may lie before the block.
    GPUs without a counter are older than Volta, and read the power of the moment.
    """
    counted = [(s.moment_s, s.energy_j) for s in samples if s.energy_j is not None]
    if not counted:
        readings = [s.power_w for s in samples if s.power_w is not None]
        return fmean(readings) if readings else None
    moments_s, energies_j = zip(*counted, strict=True)
    if moments_s[-1] - moments_s[0] < LEAST_COUNTED_S:
        return None
    # All samples, not the first and last alone: each is late by up to a step of the counter.
    slope = float(linear_regression(moments_s, energies_j).slope)
    return slope if slope > 0 else None  # a counter that stands still counts nothing


def throttling(reasons: Sequence[frozenset[ClockReason]]) -> dict[str, Any]:
    """The share of samples with clocks held down by heat or power, in percent: of any reason, and of each."""
    if not reasons:
        return {}
    held = [found & THROTTLING for found in reasons]
    counts = Counter(why for found in held for why in found)
    return {
        "throttled_pct": round(100 * sum(map(bool, held)) / len(held), 2),
        "throttled_by_pct": {str(why): round(100 * n / len(held), 2) for why, n in sorted(counts.items())},
    }


def read(handle: Any) -> Sample:
    """Sample a GPU now; the moment is that of the energy counter."""
    energy_mj = ask_nvml("nvmlDeviceGetTotalEnergyConsumption", handle)
    moment_s = time.monotonic()
    power_mw = ask_nvml("nvmlDeviceGetPowerUsage", handle) if energy_mj is None else None
    return Sample(
        moment_s=moment_s,
        sm_clock_mhz=ask_nvml("nvmlDeviceGetClockInfo", handle, pynvml.NVML_CLOCK_SM),
        energy_j=None if energy_mj is None else energy_mj / 1000,
        power_w=None if power_mw is None else power_mw / 1000,
        temperature_c=ask_nvml(
            "nvmlDeviceGetTemperatureV|nvmlDeviceGetTemperature", handle, pynvml.NVML_TEMPERATURE_GPU
        ),
        reasons=clock_reasons(handle),
    )


def chosen(handles: Sequence[Any], uuids: Sequence[str]) -> dict[str, SampledGpu]:
    """The GPUs with these UUIDs, as torch writes them. Raises LookupError for one that is no whole GPU.

    Of a part of a GPU (MIG), NVML reads neither clocks nor power; those of the whole would be others' too.
    """
    found: dict[str, SampledGpu] = {}
    for handle in handles:
        # NVML puts GPU- before the UUID of a whole one; torch leaves it out.
        uuid = str(ask_nvml("nvmlDeviceGetUUID", handle)).removeprefix("GPU-")
        if uuid in uuids and not is_mig(handle):
            found[uuid] = SampledGpu(handle)
    missing = [uuid for uuid in uuids if uuid not in found]
    if missing:
        raise LookupError(f"NVML has no whole GPU {missing[0]} (MIG, or a container hides it)")
    return found


def answer(question: Mapping[str, Any], gpus: Mapping[str, SampledGpu]) -> dict[str, Any]:
    """What the GPUs asked for did, each by its name.

    Not by NVML's number: where a cgroup hides the others, as Slurm's does, every rank's own GPU is 0.
    """
    span = question["start_s"], question["end_s"]
    return {"gpus": {uuid[:NAME_LENGTH]: summary(gpus[uuid].within(*span)) for uuid in question["gpus"]}}


def serve(peer: socket.socket, gpus: Mapping[str, SampledGpu]) -> None:
    """Sample and answer until the other end has gone."""
    questions = peer.makefile("r", encoding="utf-8")
    while True:
        next_s = time.monotonic() + INTERVAL_S
        for gpu in gpus.values():
            gpu.samples.append(read(gpu.handle))
        while select.select([peer], [], [], max(next_s - time.monotonic(), 0.0))[0]:
            question = questions.readline()
            if not question:
                return
            _send(peer, answer(json.loads(question), gpus))


def main() -> None:
    """Sample the GPUs that the command line names, or tell why not."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the rank
    with socket.socket(fileno=sys.stdin.fileno()) as peer, contextlib.suppress(OSError):
        try:
            with nvml_devices() as handles:
                serve(peer, chosen(handles, sys.argv[1:]))
        except Exception as error:  # noqa: BLE001 - whatever it is, the run goes on and says it in one line
            _send(peer, {"error": str(error) or type(error).__name__})


def _send(peer: socket.socket, message: Mapping[str, Any]) -> None:
    peer.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
