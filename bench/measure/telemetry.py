"""What a rank's GPUs do during its timed blocks: sampled by another process, asked for after each block.

Every rank has a sampler of its own, `bench.measure.sampler`. Where each rank sees its own GPU alone, as under
Slurm's --gpus-per-task, one for all ranks of a host would not see the others'.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from ..case import Case
from ..modes import Place, devices_of
from ..package import own_command
from ..process import end_all, ended_with_us
from ..results.block_times import GPUS, TELEMETRY_FAILED, BlockTimes
from ..settings import Settings

ANSWER_S = 5.0
"""So long a rank waits for an answer, which takes milliseconds; a first one may wait for the driver."""

END_S = 1.0
"""So long a sampler has to end; it ends at once, unless the driver holds it."""


class Telemetry:
    """A rank's end of its sampler, which ends with it; once something fails it tells nothing more."""

    def __init__(self, uuids: Mapping[int, str]) -> None:
        """Start sampling these GPUs, by their CUDA index; takes no time of this process."""
        self._uuids = uuids
        self._peer, theirs = socket.socketpair()
        self._peer.settimeout(ANSWER_S)
        self._answers = self._peer.makefile("r", encoding="utf-8")
        self._process: list[subprocess.Popen[str]] = []
        self._is_open = True
        command = ended_with_us(own_command("-m", "ddp_bench.bench.measure.sampler", *uuids.values()))
        nowhere = subprocess.DEVNULL
        with theirs, contextlib.suppress(OSError):
            self._process.append(
                subprocess.Popen(command, stdin=theirs.fileno(), stdout=nowhere, stderr=nowhere, text=True)
            )

    def of(self, times: BlockTimes, devices: Sequence[int]) -> BlockTimes:
        """Add to a block that has just ended what these GPUs did in it.

        Its start is counted back from its end: steps before it that are not timed are left out.
        """
        end_s = time.monotonic()
        if not self._is_open:
            return times
        start_s = end_s - times.block_ms / 1000
        question = {"start_s": start_s, "end_s": end_s, "gpus": [self._uuids[i] for i in devices]}
        answer = {"error": "the process that samples the GPUs has ended, or hangs"}
        with contextlib.suppress(OSError):  # it has ended; why, it may have sent before
            self._peer.sendall(json.dumps(question).encode() + b"\n")
        with contextlib.suppress(OSError, ValueError):
            answer = json.loads(self._answers.readline())
        if "error" in answer:
            self.close()
            return replace(times, detail={**times.detail, TELEMETRY_FAILED: answer["error"]})
        return replace(times, detail={**times.detail, GPUS: answer["gpus"]})

    def close(self) -> None:
        self._is_open = False
        self._answers.close()
        self._peer.close()
        end_all(self._process, within_s=END_S)


def sampled(settings: Settings, cases: Iterable[Case], place: Place) -> Telemetry | None:
    """Start to sample the GPUs that this rank uses in `cases`; None without one, or where it is off."""
    if place.device.type != "cuda" or not settings.telemetry:
        return None
    mine = [case for case in cases if place.rank < case.num_ranks]
    devices = sorted({index for case in mine for index in gpus_of(case, place)})
    return Telemetry({index: str(torch.cuda.get_device_properties(index).uuid) for index in devices})


def gpus_of(case: Case, place: Place) -> list[int]:
    """CUDA indices of the GPUs that a rank uses in a case, each once; none on CPU cores."""
    return sorted({device.index for device in devices_of(case, place) if device.type == "cuda"})
