"""Holds a GPU back until the host has queued what is to be timed.

The host takes 5 to 40 µs to launch one piece of work. A GPU that is done sooner waits for the next, and
events then time the host. In training, compute hides the launches of the all-reduces; where they are measured
by themselves a delay goes before them. On a CPU there is nothing to hide, and nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .clock import Clock, CudaClock

MARGIN = 2.0
"""A hold lasts so many times as long as queueing took in the rehearsal: the speed of a host varies."""

LEAST_MS = 1.0
"""A hold lasts so much longer: the alignment of the ranks is queued within it as well."""

MOST_MS = 1000.0
"""A hold lasts no longer. What queues for so long waits for the device, as fp16's loss scaling does."""

PROBE_CYCLES = 1_000_000
"""Length of the delay that tells the clock rate: half a millisecond at 2 GHz."""

MOST_QUEUED = 160
"""All-reduces that are queued behind a hold. The host waits for the device where a stream has about 1,024
operations to do, and an all-reduce is six on NCCL's stream: waits for other streams, a kernel, events."""


def rehearse(work: Callable[[], None], device: torch.device) -> float:
    """Run `work` untimed on a GPU; milliseconds that the host took to queue it. A CPU runs nothing: 0.

    It also warms up: what loads a kernel or allocates memory while the device is held waits for the device.
    """
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize(device)
    host = Clock()
    host.begin()
    work()
    host.mark()
    torch.cuda.synchronize(device)
    return host.read_ms()[0]


def hold(queue_ms: float, device: torch.device) -> None:
    """Delay what is queued next until the host, which needs `queue_ms` for it, has queued it all."""
    if device.type != "cuda":
        return
    length_ms = min(LEAST_MS + MARGIN * queue_ms, MOST_MS)
    with torch.cuda.device(device):
        # No public function of PyTorch queues a kernel that only keeps a stream busy.
        torch.cuda._sleep(int(length_ms * _cycles_per_ms(device)))


def _cycles_per_ms(device: torch.device) -> float:
    """Clock rate of the multiprocessors, by which a delay counts: now, as it follows load and temperature."""
    clock = CudaClock(device)
    torch.cuda._sleep(PROBE_CYCLES)  # loads the kernel, and hides the launch of the one that is timed
    clock.mark()
    torch.cuda._sleep(PROBE_CYCLES)
    clock.mark()
    return PROBE_CYCLES / clock.read_ms()[0]
