"""Readings of a rank's GPUs during its timed blocks, sampled through NVML by a process of its own. No torch.

Every rank has a sampler: where each sees its own GPU alone, as under Slurm's --gpus-per-task, one for all
ranks of a host would not see the others'. `python -m bench.measure.telemetry UUID…` is one, with a connection
as standard input. Each question is `(start_s, end_s, uuids)`, on the monotonic clock, each answer a dict of
summaries by the beginning of a GPU's UUID, or a text that says why not. It ends with the connection.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from statistics import fmean, linear_regression
from typing import Any

import pynvml

from ..common.process import end_all, make_package_command, tie_to_parent
from ..machine.gpus import (
    THROTTLING,
    ClockReason,
    ask_nvml,
    find_by_uuid,
    is_mig,
    open_nvml,
    read_clock_reasons,
)
from ..results.block_times import GPUS, TELEMETRY_FAILED

ANSWER_TIMEOUT_S = 5.0
"""Seconds that a rank waits for an answer, which takes milliseconds; a first one may wait for the driver."""

END_TIMEOUT_S = 1.0
"""Seconds that a sampler has to end; it ends at once, unless the driver holds it."""

INTERVAL_S = 0.05
"""Between two samples: twenty in a block of a second, and little work for the driver."""

MAX_SAMPLES_S = 600.0
"""Samples are kept so long, a few MiB per GPU: of a longer block its last ten minutes are told."""

UUID_DIGITS = slice(4, 12)
"""Characters of a UUID, behind `GPU-`, that name a GPU in a table: the chance that two of eight agree is 1 in
10^8. NVML's number cannot: where a cgroup hides the others, as Slurm's does, every rank's own GPU is 0."""

MIN_COUNTED_S = 0.2
"""Least time from which the energy counter tells the power: it moves in steps of up to 0.1 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The readings of one GPU at one moment; None for what it does not report."""

    moment_s: float
    """Time on the monotonic clock, which all processes of a host share."""
    sm_clock_mhz: float | None = None
    energy_j: float | None = None
    """Used since the driver was loaded; GPUs older than Volta do not count it."""
    temperature_c: float | None = None
    reasons: frozenset[ClockReason] | None = None


def summarize_samples(samples: Sequence[Sample]) -> dict[str, Any]:
    """Summarize what a GPU did while it was sampled; without what it does not report."""
    clocks = [s.sm_clock_mhz for s in samples if s.sm_clock_mhz is not None]
    found = {
        "sm_clock_mhz": fmean(clocks) if clocks else None,
        "power_w": compute_power_w(samples),
        "temperature_c": max((s.temperature_c for s in samples if s.temperature_c is not None), default=None),
    }
    told = {name: round(value, 2) for name, value in found.items() if value is not None}
    return told | compute_throttling([s.reasons for s in samples if s.reasons is not None])


def compute_power_w(samples: Sequence[Sample]) -> float | None:
    """Compute the mean power in W by the energy counter; None without one, or where the span is too short.

    Since Ampere (but GA100) a reading is an average over the last second, which may lie before the block.
    """
    counted = [(s.moment_s, s.energy_j) for s in samples if s.energy_j is not None]
    if not counted or counted[-1][0] - counted[0][0] < MIN_COUNTED_S:
        return None
    moments_s, energies_j = zip(*counted, strict=True)
    # All samples, not the first and last alone: each is late by up to a step of the counter.
    slope = float(linear_regression(moments_s, energies_j).slope)
    return slope if slope > 0 else None  # a counter that stands still counts nothing


def compute_throttling(reasons: Sequence[frozenset[ClockReason]]) -> dict[str, Any]:
    """Compute the percentage of samples with clocks held down by heat or power: by any reason, by each."""
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
    return Sample(
        moment_s=moment_s,
        sm_clock_mhz=ask_nvml("nvmlDeviceGetClockInfo", handle, pynvml.NVML_CLOCK_SM),
        energy_j=None if energy_mj is None else energy_mj / 1000,
        temperature_c=ask_nvml(
            "nvmlDeviceGetTemperatureV|nvmlDeviceGetTemperature", handle, pynvml.NVML_TEMPERATURE_GPU
        ),
        reasons=read_clock_reasons(handle),
    )


def choose_gpus(handles: Sequence[Any], uuids: Sequence[str]) -> dict[str, Any]:
    """Choose the GPUs with these UUIDs. Raises LookupError for one that is no whole GPU.

    Of a part of a GPU (MIG), NVML reads neither clocks nor power; those of the whole would be others' too.
    """
    found = dict(zip(uuids, find_by_uuid(uuids, handles), strict=True))
    if odd := [uuid for uuid, handle in found.items() if handle is None or is_mig(handle)]:
        raise LookupError(f"NVML has no whole GPU {odd[0]} (MIG, or a container hides it)")
    return found


def serve(peer: Connection, gpus: Mapping[str, Any]) -> None:
    """Sample and answer until the other end has gone."""
    samples = {uuid: deque[Sample](maxlen=int(MAX_SAMPLES_S / INTERVAL_S)) for uuid in gpus}
    while True:
        next_s = time.monotonic() + INTERVAL_S
        for uuid, handle in gpus.items():
            samples[uuid].append(read(handle))
        while peer.poll(max(next_s - time.monotonic(), 0.0)):
            start_s, end_s, uuids = peer.recv()
            peer.send(
                {
                    uuid[UUID_DIGITS]: summarize_samples(select_span(samples[uuid], start_s, end_s))
                    for uuid in uuids
                }
            )


def select_span(samples: Iterable[Sample], start_s: float, end_s: float) -> list[Sample]:
    """Select the samples of a span of time."""
    return [sample for sample in samples if start_s <= sample.moment_s <= end_s]


def main() -> None:
    """Sample the GPUs that the command line names, or tell why not."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the rank
    with Connection(os.dup(sys.stdin.fileno())) as peer, contextlib.suppress(OSError):
        try:
            with open_nvml() as handles:
                serve(peer, choose_gpus(handles, sys.argv[1:]))
        except Exception as error:  # noqa: BLE001 - whatever it is, the run goes on and says it in one line
            peer.send(str(error) or type(error).__name__)


class Telemetry:
    """A rank's end of its sampler, which ends with it; once something fails it tells nothing more."""

    def __init__(self, uuids: Mapping[int, str]) -> None:
        """Start sampling these GPUs, by their CUDA index; takes no time of this process."""
        self._uuids = uuids
        self._peer, theirs = Pipe()
        self._process: list[subprocess.Popen[str]] = []
        command = tie_to_parent(make_package_command("-m", __name__, *uuids.values()))
        nowhere = subprocess.DEVNULL
        with theirs, contextlib.suppress(OSError):
            self._process.append(
                subprocess.Popen(command, stdin=theirs.fileno(), stdout=nowhere, stderr=nowhere, text=True)
            )

    def summarize_between(self, start_s: float, end_s: float, gpus: Sequence[int]) -> dict[str, Any]:
        """Summarize what these GPUs did between two moments of the monotonic clock, as details of a block.

        Empty once sampling has failed, which is told once.
        """
        if self._peer.closed:
            return {}
        answer: Any = "the process that samples the GPUs has ended, or hangs"
        with contextlib.suppress(OSError):  # it has ended; why, it may have sent before
            self._peer.send((start_s, end_s, [self._uuids[i] for i in gpus]))
        with contextlib.suppress(OSError, EOFError):
            if self._peer.poll(ANSWER_TIMEOUT_S):
                answer = self._peer.recv()
        if isinstance(answer, str):
            self.close()
        return {TELEMETRY_FAILED if isinstance(answer, str) else GPUS: answer}

    def close(self) -> None:
        self._peer.close()
        end_all(self._process, within_s=END_TIMEOUT_S)


if __name__ == "__main__":
    main()
