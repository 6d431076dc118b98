"""All-reduces by themselves: of buckets, and of messages by size.

The host takes 5 to 40 µs to launch one piece of work. A GPU that is done sooner waits for the next, and
events then time the host. In training, compute hides the launches of the all-reduces; where they are measured
by themselves a delay on the GPU goes before them. On a CPU there is nothing to hide, and nothing is delayed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from ..results.block_times import BlockTimes
from .clock import Clock, CudaClock
from .timed import AUTOCAST_DTYPES, pause_gc

DELAY_FACTOR = 2.0
"""The delay lasts so many times as long as queueing took in the rehearsal: the speed of a host varies."""

MIN_DELAY_MS = 1.0
"""The delay lasts so much longer: the alignment of the ranks is queued within it as well."""

MAX_DELAY_MS = 1000.0
"""The delay lasts no longer. What queues for so long waits for the device, as fp16's loss scaling does."""

PROBE_CYCLES = 1_000_000
"""Length of the delay that tells the clock rate: half a millisecond at 2 GHz."""

MAX_QUEUED = 160
"""All-reduces that are queued behind a delay. The host waits for the device where a stream has about 1,024
operations to do, and an all-reduce is six on NCCL's stream: waits for other streams, a kernel, events."""


def rehearse(work: Callable[[], None], device: torch.device) -> float:
    """Run `work` untimed on a GPU; milliseconds that the host took to queue it. A CPU runs nothing: 0.

    It also warms up: what loads a kernel or allocates memory while the device is delayed waits for it.
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


def delay_gpu(queue_ms: float, device: torch.device) -> None:
    """Delay what is queued next until the host, which needs `queue_ms` for it, has queued it all."""
    if device.type != "cuda":
        return
    length_ms = min(MIN_DELAY_MS + DELAY_FACTOR * queue_ms, MAX_DELAY_MS)
    clock = CudaClock(device)
    with torch.cuda.device(device):
        # No public function of PyTorch queues a kernel that only keeps a stream busy. It counts by the clock
        # of the multiprocessors, which follows load and temperature.
        torch.cuda._sleep(PROBE_CYCLES)  # loads the kernel, and hides the launch of the one that is timed
        clock.mark()
        torch.cuda._sleep(PROBE_CYCLES)
        clock.mark()
        torch.cuda._sleep(int(length_ms * PROBE_CYCLES / clock.read_ms()[0]))


SMALL_BYTES = 4096
"""Size of the message with which ranks begin together."""

ALIGNED_BYTES = 512
"""Buckets begin at multiples of it, as what torch allocates on a GPU."""

MAX_ROW = 8
MAX_ROW_BYTES = 2**23
"""At most so many messages, of so many bytes together, are launched in a row."""

MAX_CUDA_ROW = 20
MAX_CUDA_ROW_BYTES = 2**26
"""The same on a GPU: as many as nccl-tests launches, in memory as small as a slow network allows."""


class BucketReplay:
    """All-reduces tensors of a case's bucket sizes as DDP does: launched in order, then waited for."""

    def __init__(
        self,
        bucket_bytes: Sequence[int],
        comm_hook: str,
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        dtypes: Sequence[str] = (),
        sparse: Mapping[int, torch.Tensor] = {},
    ) -> None:
        """`dtypes` are the gradients' own, by bucket (default: float32), of which a hook sends others.

        `sparse` has gradients in the place of buckets, by their number, each of this rank alone.
        """
        own = [getattr(torch, name) for name in dtypes] or [torch.float32] * len(bucket_bytes)
        sent = [AUTOCAST_DTYPES.get(comm_hook, dtype) for dtype in own]
        counts = [size // dtype.itemsize for size, dtype in zip(bucket_bytes, own, strict=True)]
        sizes = [count * dtype.itemsize for count, dtype in zip(counts, sent, strict=True)]
        begins = [0, *itertools.accumulate(size + -size % ALIGNED_BYTES for size in sizes)]
        storage = _make_storage(begins[-1], device)
        self._buckets = [
            storage[begin : begin + size].view(dtype)
            for begin, size, dtype in zip(begins, sizes, sent, strict=False)
        ]
        for number, gradient in sparse.items():
            self._buckets[number] = gradient
        self._small = torch.zeros(SMALL_BYTES // 4, device=device)
        self.num_buckets = len(bucket_bytes)
        self.group = group
        self.device = device

    def align(self, queue_ms: float) -> None:
        """Begin together: a rank whose buffers took longer to come by would be timed as communication.

        Where the host takes `queue_ms` to queue what follows, a GPU begins when that is done on all ranks.
        """
        delay_gpu(queue_ms, self.device)
        dist.all_reduce(self._small, group=self.group)

    def launch(self) -> list[dist.Work]:
        # An all-reduce of sparse tensors leaves all ranks' rows in each, which would be sent the next time.
        sent = [bucket.clone() if bucket.is_sparse else bucket for bucket in self._buckets]
        works = [dist.all_reduce(bucket, group=self.group, async_op=True) for bucket in sent]
        return [work for work in works if work is not None]

    def step(self) -> None:
        for work in self.launch():
            work.wait()

    def time_block(self, clock: Clock, first: Callable[[], None] | None = None) -> BlockTimes:
        """Time the communication of one step; every rank of the group calls this together.

        `first` is what the step sends before its buckets, DDP's buffers; the detail has its `buffers_ms`.
        """
        parts = [self.step] if first is None else [first, self.step]
        queue_ms = sum(rehearse(part, self.device) for part in parts)
        with pause_gc():
            self.align(queue_ms)
            clock.begin()
            for part in parts:
                part()
                clock.mark()
            parts_ms = clock.read_ms()
        detail = {} if first is None else {"buffers_ms": round(parts_ms[0], 4)}
        return BlockTimes(sum(parts_ms), (sum(parts_ms),), detail)


@functools.lru_cache(maxsize=1)
def _make_storage(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Memory of the buckets, kept and written to: DDP's is not new either, and page faults take time."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=device).zero_()


def measure_allreduce_ms(
    num_bytes: int, group: dist.ProcessGroup | None, device: torch.device, clock: Clock
) -> float:
    """Milliseconds of an all-reduce of `num_bytes` of float32, after a small untimed one.

    Small ones are launched in a row, as DDP's buckets are and in nccl-tests, and their mean is taken: gloo
    takes 0.3 ms for 4 KiB that are waited for at once, 2 ms each for many.
    """
    most, row_bytes = (
        (MAX_CUDA_ROW, MAX_CUDA_ROW_BYTES) if device.type == "cuda" else (MAX_ROW, MAX_ROW_BYTES)
    )
    count = max(min(most, row_bytes // num_bytes), 1)
    return BucketReplay([num_bytes] * count, "none", group, device).time_block(clock).block_ms / count
