"""A simulated GPU: a host that launches, streams that work in order, events that note when.

All in ms of one clock. A launch takes the host `launch_ms`; what is launched begins when the host has got so
far and its stream has done what came before. A full stream makes the host wait, as CUDA's does.
"""

import contextlib
import functools
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from ddp_bench.bench.measure import collectives
from ddp_bench.bench.measure.clock import Clock

DEVICE = torch.device("cuda", 1)
CYCLES_PER_MS = 1_500_000.0
CUDA = ("Event", "Stream", "stream", "current_stream", "synchronize", "device", "_sleep")
QUEUE = 1024
ALL_REDUCE_OPERATIONS = 6


def _on_meta(make, *sizes, device, **how):
    assert device == DEVICE
    return make(*sizes, device="meta", **how)


@dataclass
class FakeStream:
    name: str
    free_ms: float = 0.0
    ends: list[float] = field(default_factory=list)
    most_pending: int = 0


class FakeGpu:
    def __init__(self, monkeypatch, *, launch_ms, comm_ms=0.0):
        self.now_ms = 0.0
        self.launch_ms = launch_ms
        self.comm_ms = comm_ms
        self.current, self.nccl = FakeStream("current"), FakeStream("nccl")
        self.log = []
        self.holds_ms = []
        for name in ("zeros", "empty"):
            without_memory = functools.partial(_on_meta, getattr(torch, name))
            monkeypatch.setattr(torch, name, without_memory)
        for name in CUDA:
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr("torch.distributed.all_reduce", self.all_reduce)
        monkeypatch.setattr(Clock, "now", lambda _: round(self.now_ms * 1e6))
        collectives._storage.cache_clear()

    def launch(self, ms, stream=None, *, operations=1):
        """Queue a kernel of `ms` on a stream, the current one unless told."""
        stream = stream or self.current
        self.now_ms += self.launch_ms
        stream.ends = [end for end in stream.ends if end > self.now_ms]
        if len(stream.ends) + operations > QUEUE:
            self.now_ms = max(self.now_ms, stream.ends[len(stream.ends) + operations - QUEUE - 1])
        stream.free_ms = max(self.now_ms, stream.free_ms) + ms
        stream.ends += [stream.free_ms] * operations
        stream.most_pending = max(stream.most_pending, len(stream.ends))

    def all_reduce(self, _, *, async_op=False, **__):
        """Behind what the current stream has to do, as NCCL's; work then waits on the current stream."""
        if not async_op:
            self.launch(0.01)
            return None
        self.log.append("all-reduce")
        self.nccl.free_ms = max(self.nccl.free_ms, self.current.free_ms)
        self.launch(self.comm_ms, self.nccl, operations=ALL_REDUCE_OPERATIONS)
        end_ms = self.nccl.free_ms

        def wait():
            self.current.free_ms = max(self.current.free_ms, end_ms)

        return SimpleNamespace(wait=wait)

    # What torch.cuda has.

    def Event(self, *, enable_timing):  # noqa: N802
        assert enable_timing
        return FakeEvent(self)

    def Stream(self, device):  # noqa: N802
        assert device == DEVICE
        return FakeStream("side")

    @contextlib.contextmanager
    def stream(self, stream):
        self.current, before = stream, self.current
        yield
        self.current = before

    def current_stream(self, device):
        assert device == DEVICE
        return self.current

    def synchronize(self, device=DEVICE):
        assert device == DEVICE
        self.log.append("synchronize")
        self.now_ms = max(self.now_ms, self.current.free_ms, self.nccl.free_ms)

    @contextlib.contextmanager
    def device(self, device):
        assert device == DEVICE
        yield

    def _sleep(self, cycles):
        self.log.append("sleep")
        self.launch(cycles / CYCLES_PER_MS)
        self.holds_ms.append(cycles / CYCLES_PER_MS)


def forbid_cuda(monkeypatch):
    def asked(*_, **__):
        pytest.fail("a CPU has no CUDA")

    for name in CUDA:
        monkeypatch.setattr(torch.cuda, name, asked)


class FakeEvent:
    def __init__(self, gpu):
        self._gpu = gpu
        self._at_ms = float("nan")

    def record(self, stream=None):
        stream = stream or self._gpu.current
        self._gpu.log.append(f"record {stream.name}")
        self._at_ms = max(self._gpu.now_ms, stream.free_ms)

    def elapsed_time(self, end):
        assert self._gpu.log[-1] == "synchronize", "the events are not there yet"
        return end._at_ms - self._at_ms
