"""Time on a GPU, against a simulated one, and float32 arithmetic as PyTorch's settings have it.

The simulated GPU is a host that launches, streams that work in order, and events that note when. All in ms of
one clock: a launch takes the host `launch_ms`; what is launched begins when the host has got so far and its
stream has done what came before. A full stream makes the host wait, as CUDA's does.
"""

import contextlib
import functools
import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from held import held, place_of
from made import case_of
from stand_ins import stand_in
from torch import backends

from ddp_bench.bench.measure import allreduce, anatomy, calibration, clock, memory
from ddp_bench.bench.measure.allreduce import BucketReplay, measure_allreduce_ms
from ddp_bench.bench.measure.anatomy import run_anatomy
from ddp_bench.bench.measure.clock import Clock, make_clock
from ddp_bench.bench.measure.timed import Trainer, run_block
from ddp_bench.bench.modes.base import Mode
from ddp_bench.bench.plan.buckets import BucketLayout
from ddp_bench.bench.predict.from_pass import compute_slowdowns
from ddp_bench.bench.run.communication import CURVE_BYTES
from ddp_bench.bench.worker import held_case
from ddp_bench.models.data import DeviceSource
from ddp_bench.models.step import set_float32_precision
from ddp_bench.models.workload import Workload

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture(params=["none", "tf32", "ieee"])
def of_all_backends(request):
    """What a user's module may have set for all backends at once."""
    backends.fp32_precision = request.param
    yield request.param
    backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    backends.cudnn.allow_tf32 = True


def used():
    """As the kernels ask: for products, convolutions, recurrent layers."""
    return [k.fp32_precision for k in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)]


def allowed():
    """By PyTorch's older interface, which raises where it and the newer one contradict each other."""
    return backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32


@pytest.mark.usefixtures("of_all_backends")
@pytest.mark.parametrize(
    ("precision", "chosen"), [("fp32", "ieee"), ("tf32", "tf32"), ("bf16", "ieee"), ("fp16", "ieee")]
)
def test_tf32_is_used_where_it_was_asked_for(precision, chosen):
    with set_float32_precision(precision, GPU):
        assert used() == [chosen] * 3
        assert allowed() == (chosen == "tf32", chosen == "tf32")
        assert torch.get_float32_matmul_precision() == ("high" if chosen == "tf32" else "highest")


def test_what_an_error_leaves_is_what_was_before(of_all_backends):
    backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32 = True, False  # PyTorch's own default
    with pytest.raises(ZeroDivisionError), set_float32_precision("fp32", GPU):
        raise ZeroDivisionError
    assert used() == ["ieee", "tf32", "tf32"]
    assert allowed() == (False, True)
    assert of_all_backends == backends.fp32_precision


@pytest.mark.usefixtures("of_all_backends")
def test_a_cpu_keeps_what_the_user_chose():
    torch.set_float32_matmul_precision("high")
    with set_float32_precision("fp32", CPU):
        assert torch.get_float32_matmul_precision() == "high"


DEVICE = torch.device("cuda", 1)
CYCLES_PER_MS = 1_500_000.0
MAKERS = ("zeros", "empty")
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
        calls = {f"torch.cuda.{name}": getattr(self, name) for name in CUDA}
        for module in (allreduce, anatomy, calibration, clock):
            stand_in(monkeypatch, module, calls)
        made = {f"torch.{name}": functools.partial(_on_meta, getattr(torch, name)) for name in MAKERS}
        stand_in(monkeypatch, allreduce, made | {"dist.all_reduce": self.all_reduce})
        monkeypatch.setattr(Clock, "record_moment", lambda _: round(self.now_ms * 1e6))
        allreduce._make_storage.cache_clear()

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
        self.launch(cycles / CYCLES_PER_MS)
        self.holds_ms.append(cycles / CYCLES_PER_MS)


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


MIB = 2**20


def test_a_block_has_a_mark_around_each_step_and_one_wait_at_its_end(monkeypatch):
    gpu = FakeGpu(monkeypatch, launch_ms=0.0)
    lengths = iter((2.0, 3.0, 4.0))

    def step():
        gpu.log.append("step")
        gpu.launch(next(lengths))

    times = run_block(step, 3, make_clock(DEVICE))
    assert gpu.log == ["record current", *["step", "record current"] * 3, "synchronize"]
    assert times.steps_ms == pytest.approx((2.0, 3.0, 4.0))
    assert times.block_ms == pytest.approx(9.0)


def launches(gpu, count, ms):
    return lambda: [gpu.launch(ms) for _ in range(count)] and None


@pytest.mark.parametrize("slower", [1.0, 1.9])
@pytest.mark.parametrize("count", [1, 40, 900])
def test_behind_a_hold_short_work_takes_what_the_device_takes(monkeypatch, count, slower):
    """Even where the host is then slower than in the rehearsal."""
    gpu = FakeGpu(monkeypatch, launch_ms=0.04)
    work = launches(gpu, count, 0.005)
    queue_ms = allreduce.rehearse(work, DEVICE)
    gpu.launch_ms *= slower
    allreduce.delay_gpu(queue_ms, DEVICE)
    assert run_block(work, 1, make_clock(DEVICE)).block_ms == pytest.approx(0.005 * count)
    assert run_block(work, 1, make_clock(DEVICE)).block_ms > 0.04 * count, "without it the host is timed"


def test_a_hold_is_counted_in_cycles_of_the_clock_it_has_found(monkeypatch):
    gpu = FakeGpu(monkeypatch, launch_ms=0.04)
    for queue_ms, held_ms in ((0.0, 1.0), (10.0, 21.0), (1e6, 1000.0)):
        allreduce.delay_gpu(queue_ms, DEVICE)
        assert gpu.holds_ms[-1] == pytest.approx(held_ms)


@pytest.mark.parametrize("num_buckets", [1, 7, 150])
def test_replayed_buckets_run_once_untimed_and_then_show_no_launches(monkeypatch, num_buckets):
    gpu = FakeGpu(monkeypatch, launch_ms=0.04, comm_ms=0.01)
    replay = BucketReplay([MIB] * num_buckets, "none", None, DEVICE)
    assert replay.time_block(make_clock(DEVICE)).block_ms == pytest.approx(0.01 * num_buckets)
    assert gpu.log[: num_buckets + 2] == ["synchronize", *["all-reduce"] * num_buckets, "synchronize"]
    assert gpu.log.count("all-reduce") == 2 * num_buckets
    monkeypatch.setattr(allreduce, "delay_gpu", lambda *_: None)
    assert replay.time_block(make_clock(DEVICE)).block_ms > 0.03 * num_buckets, "the simulation can tell"


@pytest.mark.parametrize("size", CURVE_BYTES)
def test_a_message_takes_the_mean_of_a_row_that_shows_no_launches(monkeypatch, size):
    gpu = FakeGpu(monkeypatch, launch_ms=0.04, comm_ms=0.015)
    assert measure_allreduce_ms(size, None, DEVICE, make_clock(DEVICE)) == pytest.approx(0.015)
    timed, untimed = divmod(gpu.log.count("all-reduce"), 2)
    assert untimed == 0, "the same row twice"
    assert timed >= 20 or size > 3 * MIB
    assert timed * size <= max(64 * MIB, size), "no more memory than that"


def test_a_step_that_raised_leaves_nothing_in_the_clock_of_the_next_block():
    """Else the pause between two cases would be a step, and ranks would count their warm-up differently."""
    host = Clock()

    def fails():
        raise MemoryError

    with pytest.raises(MemoryError):
        run_block(fails, 1, host)
    assert len(run_block(lambda: None, 2, host).steps_ms) == 2


ALLOCATING_MS, FORWARD_MS = 500.0, 7.0


def trainer_on(gpu, module):
    """One whose first two forwards wait for memory that the driver has to find."""
    forwards_ms = itertools.chain([ALLOCATING_MS] * 2, itertools.repeat(FORWARD_MS))

    def loss(model, batch):
        gpu.launch(next(forwards_ms))
        return model(batch).sum()

    made = {"module": lambda: module, "batch": lambda *_: None, "optimizer": torch.optim.SGD}
    workload = Workload(name="waits", batch_loss=loss, **made)
    case = case_of(mode="single", num_devices=1, device_type="cuda")
    return Trainer(case, Mode(module), workload, DeviceSource(torch.ones(1)))


def test_what_looks_into_steps_leaves_out_those_that_wait_for_memory(monkeypatch):
    module = torch.nn.Linear(1, 1)
    gpu = FakeGpu(monkeypatch, launch_ms=0.0)
    times = run_anatomy(trainer_on(gpu, module), 2, DEVICE, local_steps=0)
    assert times.detail["forward_ms"] == FORWARD_MS
    assert times.steps_ms == (FORWARD_MS, FORWARD_MS)
    looked = calibration._measure_local_step(trainer_on(gpu, module), BucketLayout((8,)), DEVICE)
    assert looked["forward_ms"] == FORWARD_MS


@pytest.mark.parametrize(
    ("asking", "elsewhere", "blocks", "told"),
    [(0, 0, 1, 0), (2, 0, 1, 0), (3, 0, 2, 0), (99, 0, 3, 3), (0, 1, 3, 0)],
)
def test_a_block_whose_steps_ask_for_memory_only_leads_in(monkeypatch, asking, elsewhere, blocks, told):
    """`asking` first steps ask the driver for memory; on another rank of the case, some in every block."""
    FakeGpu(monkeypatch, launch_ms=0.0)
    taken = []
    stats = {"num_device_alloc": 5}

    def step():
        stats["num_device_alloc"] += len(taken) < asking
        taken.append(1)

    trainer = SimpleNamespace(step=step, check_loss=lambda: None, release_gradients=lambda: None)
    case, group = case_of(mode="ddp", num_devices=2), object() if elsewhere else None
    asked = {"torch.cuda.memory_stats": lambda gpu: dict(stats) if gpu == 1 else {}}
    stand_in(monkeypatch, memory, asked)
    monkeypatch.setattr(held_case, "find_longest", lambda own, *_: (max(*own, elsewhere),))
    trainer.num_lead_in = 2
    found = held(case, trainer, place_of(1, DEVICE), group).measure("timed", 3)
    assert found.detail == {"device_allocs": told}
    assert len(taken) == 5 * blocks


def gpu_bursts(monkeypatch, *, num_buckets, comm_ms, kernel_ms):
    """The bursts on a GPU whose compute (100 kernels) and communication share nothing."""
    gpu = FakeGpu(monkeypatch, launch_ms=0.03, comm_ms=comm_ms)
    trainer = SimpleNamespace(step_locally=lambda: [gpu.launch(kernel_ms) for _ in range(100)])
    monkeypatch.setattr(calibration, "find_longest", lambda times_ms, *_: times_ms)
    replay = BucketReplay([4096] * num_buckets, "none", None, DEVICE)
    return *calibration._measure_bursts(trainer, replay, make_clock(DEVICE)), gpu


GPUS = [
    {"num_buckets": 5, "comm_ms": 0.5, "kernel_ms": 0.2},
    {"num_buckets": 5, "comm_ms": 0.5, "kernel_ms": 0.005},  # launching takes longer than computing
    {"num_buckets": 5, "comm_ms": 0.02, "kernel_ms": 0.02},  # so do all-reduces
    {"num_buckets": 8, "comm_ms": 0.1, "kernel_ms": 2.0},  # compute outlasts all replays that may wait
    {"num_buckets": 5, "comm_ms": 30.0, "kernel_ms": 0.2},  # a slow network: several steps in a burst
]


@pytest.mark.parametrize("gpu", GPUS)
def test_on_a_gpu_that_shares_nothing_no_side_slows_the_other_down(monkeypatch, gpu):
    detail, _, _ = gpu_bursts(monkeypatch, **gpu)
    found = compute_slowdowns(detail)
    assert found.compute == pytest.approx(1.0, abs=1e-3)
    assert found.comm == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("num_buckets", [1, 2, 5, 30, 160])
def test_all_replays_of_a_burst_wait_in_a_queue_that_has_room_for_them(monkeypatch, num_buckets):
    *_, gpu = gpu_bursts(monkeypatch, num_buckets=num_buckets, comm_ms=0.02, kernel_ms=5.0)
    assert 0 < gpu.nccl.most_pending < 1000


def test_the_steps_of_the_block_show_their_launches_as_training_does(monkeypatch):
    detail, steps_ms, _ = gpu_bursts(monkeypatch, **GPUS[1])
    assert steps_ms == pytest.approx([100 * 0.03 + 0.005])
    assert detail["compute_alone_ms"][0] == pytest.approx(100 * 0.005)
