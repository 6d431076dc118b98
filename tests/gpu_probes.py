"""What a GPU has to show that no run of the suite shows by itself; `tests/on_gpu.py` starts these.

`python tests/gpu_probes.py NAME` prints one JSON line per figure. Without a GPU the same code runs small on a
CPU core, and what needs CUDA says "skipped: no GPU". A probe that raises says so and the next one goes on.
"""

import json
import os
import signal
import statistics
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

import pynvml
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

from ddp_bench import Workload
from ddp_bench.bench.measure.clock import float32_precision, make_clock
from ddp_bench.bench.measure.hold import hold, rehearse
from ddp_bench.bench.measure.telemetry import Telemetry
from ddp_bench.bench.measure.timed import Trainer, run_block
from ddp_bench.bench.modes import Place
from ddp_bench.bench.modes.base import SingleMode
from ddp_bench.bench.settings import Settings
from ddp_bench.bench.stats.interval import median_of_ratios
from ddp_bench.bench.worker.job import resolve_job
from ddp_bench.bench.worker.proof import Prover
from ddp_bench.models.data import open_source
from ddp_bench.models.step import placed
from ddp_bench.models.workload import make_module

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")
NO_GPU = {"skipped": "no GPU"}
SMALL = {"arch": "resnet20", "batch_size": 4, "image_size": 32, "device": "cpu"}
"""Settings of a machine without a GPU."""
TURNS = 20 if HAS_GPU else 3
STEPS = 5 if HAS_GPU else 1
FAILS_AFTER_S = 8.0 if HAS_GPU else 4.0
"""Since the first forward: the cases are prepared by then, and rounds under way."""


def say(name, **figures):
    print(json.dumps({"probe": name, **figures}), flush=True)


def resolved(**settings):
    """`single` with the suite's defaults for this device, and the workload."""
    asked = Settings(modes=("single",), **(settings if HAS_GPU else SMALL | settings))
    job, workload = resolve_job(asked)
    return job.plan[0].case, replace(workload, channels_last=job.settings.channels_last)


def trainer_of(**settings):
    """The suite's step of `single`, with its defaults for this device; the trainer and its precision."""
    case, workload = resolved(**settings)
    module = placed(make_module(workload), case, DEVICE)
    source = open_source(
        workload,
        data="device",
        batch_size=case.global_batch,
        rank=0,
        world_size=1,
        device=DEVICE,
        seed=0,
    )
    return Trainer(case, SingleMode(module), workload, source), case.precision


def step_ms(step, *, lead_in=2):
    return run_block(step, STEPS, make_clock(DEVICE), lead_in=lead_in).block_ms / STEPS


def events():
    """CUDA events against the wall clock, over the same steps."""
    trainer, _ = trainer_of()
    step_ms(trainer.step)
    ratios = []
    for _ in range(TURNS):
        _synchronize()
        began_s = time.perf_counter()
        by_clock_ms = run_block(trainer.step, STEPS, make_clock(DEVICE)).block_ms
        ratios.append(by_clock_ms / (1000 * (time.perf_counter() - began_s)))
    say("events over wall clock", median=statistics.median(ratios), least=min(ratios), most=max(ratios))


def hold_length():
    """How long a hold lasts against what was asked, and what small kernels take behind one and without."""
    if not HAS_GPU:
        return say("hold", **NO_GPU)
    small = torch.zeros(1024, device=DEVICE)

    def work():
        for _ in range(100):
            small.add_(1)

    queue_ms = rehearse(work, DEVICE)
    for wanted_ms in (1.0, 10.0, 100.0):
        clock = make_clock(DEVICE)
        clock.begin()
        hold(wanted_ms, DEVICE)
        clock.mark()
        say("hold", queue_ms=wanted_ms, lasted_ms=clock.read_ms()[0])
    free_ms = run_block(work, 1, make_clock(DEVICE)).block_ms
    clock = make_clock(DEVICE)
    hold(queue_ms, DEVICE)
    clock.begin()
    work()
    clock.mark()
    return say("100 small kernels", queue_ms=queue_ms, free_ms=free_ms, behind_a_hold_ms=clock.read_ms()[0])


def proof_dtype():
    """In which type the proof of the default model runs, and how long its first gradient takes."""
    _, workload = resolved()
    place = Place(rank=0, device=DEVICE, cores=(0,))
    prover = Prover(workload, place, seed=0)
    began_s = time.perf_counter()
    say("proof", dtype=str(prover.dtype), why=prover.why_float32, seconds=time.perf_counter() - began_s)


def allocations():
    """What each of the first steps asks the driver for."""
    if not HAS_GPU:
        return say("allocations", **NO_GPU)
    trainer, _ = trainer_of()
    found = []
    for _ in range(10):
        before = torch.cuda.memory_stats().get("num_device_alloc", 0)
        run_block(trainer.step, 1, make_clock(DEVICE))
        found.append(torch.cuda.memory_stats().get("num_device_alloc", 0) - before)
    return say("allocations", by_step=found)


def dp_on_one_gpu():
    """`nn.DataParallel` of two replicas on one GPU, under bf16 autocast: types and gradients."""
    if not HAS_GPU:
        return say("dp", **NO_GPU)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 900, 10)).to(DEVICE)
    images, labels = torch.randn(8, 3, 32, 32, device=DEVICE), torch.arange(8, device=DEVICE)
    found = {}
    for name, model in (("plain", plain), ("dp", nn.DataParallel(plain, device_ids=[0, 0]))):
        plain.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            outputs = model(images)
            cross_entropy(outputs, labels).backward()
        found[name] = (str(outputs.dtype), torch.cat([p.grad.flatten() for p in plain.parameters()]))
    (dtype, reference), (dp_dtype, gradient) = found["plain"], found["dp"]
    error = float((gradient - reference).norm() / reference.norm())
    return say("dp", plain_dtype=dtype, dp_dtype=dp_dtype, gradient_error=error)


def pieces():
    for one in (events, hold_length, proof_dtype, allocations, dp_on_one_gpu):
        guarded(one)


def profiler():
    """Steps before and after a profile, in one process."""
    trainer, _ = trainer_of()
    step_ms(trainer.step)
    before = [step_ms(trainer.step) for _ in range(TURNS)]
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if HAS_GPU else [])]
    with profile(activities=activities):
        run_block(trainer.step, 1, make_clock(DEVICE))
    after = [step_ms(trainer.step) for _ in range(TURNS)]
    ratio = statistics.median(after) / statistics.median(before)
    say("after over before a profile", ratio=ratio, before_ms=before, after_ms=after)


def bare():
    """A loop as a user writes it and the suite's own step, in turns."""
    trainer, precision = trainer_of()
    inputs, labels = trainer._fetch()
    model = trainer.mode.module
    autocast = torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=precision == "bf16")
    optimizer = trainer.optimizer

    def loop():
        optimizer.zero_grad(set_to_none=True)
        with autocast:
            loss = cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()

    with float32_precision(precision, DEVICE):
        pairs = [(step_ms(loop), step_ms(trainer.step)) for _ in range(TURNS)]
    loop_ms, suite_ms = (dict(enumerate(times)) for times in zip(*pairs, strict=True))
    found = median_of_ratios(loop_ms, suite_ms)
    say(
        "bare loop",
        suite_rate_over_loop=[found.low, found.estimate, found.high],
        images_per_s=1000 * len(inputs) / statistics.median(suite_ms.values()),
        batch=len(inputs),
        precision=precision,
    )


def two_reads():
    """Power and throttling of blocks by the sampling process, and by two reads of NVML's counters."""
    if not HAS_GPU:
        return say("two reads", **NO_GPU)
    trainer, _ = trainer_of()
    step_ms(trainer.step, lead_in=20)
    telemetry = Telemetry({0: str(torch.cuda.get_device_properties(0).uuid)})
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)

    def read():
        energy_mj = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        held_ns = [
            pynvml.nvmlDeviceGetViolationStatus(handle, policy).violationTime
            for policy in (pynvml.NVML_PERF_POLICY_POWER, pynvml.NVML_PERF_POLICY_THERMAL)
        ]
        return time.monotonic(), energy_mj / 1000, *held_ns

    began_s = time.perf_counter()
    for _ in range(100):
        read()
    say("one read", ms=10 * (time.perf_counter() - began_s))
    ticks, last = [], read()
    while len(ticks) < 10:
        now = read()
        if now[1] != last[1]:
            ticks.append(now[0] - last[0])
            last = now
    say("energy counter moves every", ms=[1000 * tick for tick in ticks])
    for steps in (5, 20, 20, 20, 20, 20):
        torch.cuda.synchronize()
        before = read()
        times = run_block(trainer.step, steps, make_clock(DEVICE))
        after = read()
        sampled = telemetry.of(times, [0]).detail["gpus"]
        took_s, joules, *held_ns = (b - a for a, b in zip(before, after, strict=True))
        held_pct = [ns / took_s / 1e7 for ns in held_ns]
        say("two reads", took_s=took_s, power_w=joules / took_s, held_pct=held_pct, sampler=sampled)
    telemetry.close()
    return None


def matrix():
    """Matrix rate by size and by warm-up."""
    for size in (2048, 4096, 8192, 16384) if HAS_GPU else (256,):
        factors = [torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
        product = torch.empty_like(factors[0])
        for warm_up_s in (0.0, 0.5, 2.0) if HAS_GPU else (0.0,):
            time.sleep(0.5 if HAS_GPU else 0.0)  # the clock falls meanwhile

            def multiply():
                torch.mm(factors[0], factors[1], out=product)  # noqa: B023 - called within this turn

            until_s = time.perf_counter() + warm_up_s
            while time.perf_counter() < until_s:
                multiply()
                _synchronize()
            ms = statistics.median(run_block(multiply, 20, make_clock(DEVICE)).steps_ms)
            say("matrix", size=size, warm_up_s=warm_up_s, tflop_per_s=2 * size**3 / ms / 1e9)


def defaults():
    """Precision, memory format and fused optimizer, all combinations in turns in one process."""
    wanted = [
        {"precision": precision, "channels_last": channels_last, "fused_optimizer": fused}
        for precision in (("fp32", "tf32", "bf16") if HAS_GPU else ("fp32", "bf16"))
        for channels_last in (False, True)
        for fused in (False, True)
    ]
    trainers = [(settings, *trainer_of(**settings)) for settings in wanted]
    times = [[] for _ in trainers]
    until_s = time.perf_counter() + (60.0 if HAS_GPU else 0.0)
    while time.perf_counter() < until_s or len(times[0]) < 3:
        for found, (_, trainer, precision) in zip(times, trainers, strict=True):
            with float32_precision(precision, DEVICE):
                found.append(step_ms(trainer.step))
    for found, (settings, trainer, _) in zip(times, trainers, strict=True):
        rate = 1000 * len(trainer._fetch()[0]) / statistics.median(found)
        say("defaults", **settings, images_per_s=rate, step_ms=found)


class Failing(nn.Linear):
    """Fails once, on the last rank of those that a run starts, in a case that has one."""

    began_s = 0.0

    def __init__(self, fault):
        super().__init__(192, 4)
        self.fault = fault

    def forward(self, images):
        Failing.began_s = Failing.began_s or _first_forward_s()
        rank, size = (int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE"))
        if rank == size - 1 and time.time() > Failing.began_s + FAILS_AFTER_S and _is_first("has-failed"):
            images = self.fault(images)
        return super().forward(images.flatten(1))


def assertion(images):
    """An index out of range, which breaks a GPU for its process."""
    table = torch.zeros(4, device=images.device)
    return images + table[torch.tensor([7], device=images.device)]


def no_memory(images):
    return images + torch.empty(2**50, device=images.device)[0]


def signalled(number):
    def fault(images):
        os.kill(os.getpid(), number)
        return images

    return fault


def _first_forward_s():
    """When the first of the processes came here."""
    _is_first("first-forward")
    return Path("first-forward").stat().st_mtime


def _is_first(name):
    """Whether no process has asked before, as a file of this name in the current folder tells."""
    try:
        Path(name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _images(batch_size, generator):
    return torch.randn(batch_size, 3, 8, 8, generator=generator), torch.zeros(batch_size, dtype=torch.long)


def _failing(name, fault):
    return Workload(name=name, module=lambda: Failing(fault), batch=_images, image_size=8)


asserting = _failing("asserting", assertion)
full = _failing("full", no_memory)
killed = _failing("killed", signalled(signal.SIGKILL))
stopped = _failing("stopped", signalled(signal.SIGSTOP))


def _synchronize():
    if HAS_GPU:
        torch.cuda.synchronize()


def guarded(work):
    try:
        work()
    except Exception as error:  # noqa: BLE001 - the next probe is worth as much
        say(work.__name__, raised=f"{type(error).__name__}: {error}", at=traceback.format_exc(limit=-3))


if __name__ == "__main__":
    known = (pieces, profiler, bare, two_reads, matrix, defaults)
    guarded({one.__name__: one for one in known}[sys.argv[1]])
