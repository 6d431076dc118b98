"""What a GPU has to show that no run of the suite shows by itself; `tests/on_gpu.py` starts these.

`python tests/gpu_probes.py NAME` prints one JSON line per figure. Without a GPU the same code runs small on a
CPU core, and what needs CUDA says "skipped: no GPU". A probe that raises says so.
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

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ddp_bench import Workload
from ddp_bench.bench.measure.clock import make_clock
from ddp_bench.bench.measure.timed import Trainer, run_block
from ddp_bench.bench.modes.base import Mode
from ddp_bench.bench.plan.settings import Settings
from ddp_bench.bench.run.job import make_job
from ddp_bench.bench.stats.interval import compute_median_ratio
from ddp_bench.bench.worker.messages import Inspect, Look
from ddp_bench.bench.worker.rank import Rank
from ddp_bench.models.data import Share, open_source
from ddp_bench.models.registry import make_workload
from ddp_bench.models.step import move_and_compile, set_float32_precision
from ddp_bench.models.workload import make_module

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")
SMALL = {"arch": "resnet20", "batch_size": 4, "image_size": 32, "device": "cpu"}
"""Settings of a machine without a GPU."""
TURNS = 20 if HAS_GPU else 3
STEPS = 5 if HAS_GPU else 1
FAILS_AFTER_S = 8.0 if HAS_GPU else 4.0
"""Since the first forward: the cases are prepared by then, and rounds under way."""


def say(name, **figures):
    print(json.dumps({"probe": name, **figures}), flush=True)


def trainer_of():
    """The suite's step of `single`, with its defaults for this device; the trainer and its precision."""
    asked = Settings.from_stored({"modes": ["single"]} | ({} if HAS_GPU else SMALL))
    rank = Rank(0, 0)
    devices = rank.compute_reply(Look(device=asked.device))
    job = make_job(asked, [devices], lambda settings: rank.compute_reply(Inspect(settings=settings)))
    case, workload = job.plan[0].case, make_workload(job.settings)
    workload = replace(workload, channels_last=case.channels_last)
    module = move_and_compile(make_module(workload), case, DEVICE)
    source = open_source(workload, "device", Share(batch_size=case.global_batch, device=DEVICE))
    return Trainer(case, Mode(module), workload, source), case.precision


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

    with set_float32_precision(precision, DEVICE):
        pairs = [(step_ms(loop), step_ms(trainer.step)) for _ in range(TURNS)]
    loop_ms, suite_ms = (dict(enumerate(times)) for times in zip(*pairs, strict=True))
    found = compute_median_ratio(loop_ms, suite_ms)
    say(
        "bare loop",
        suite_rate_over_loop=[found.low, found.estimate, found.high],
        images_per_s=1000 * len(inputs) / statistics.median(suite_ms.values()),
        batch=len(inputs),
        precision=precision,
    )


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


if __name__ == "__main__":
    work = {"events": events, "bare": bare}[sys.argv[1]]
    try:
        work()
    except Exception as error:  # noqa: BLE001 - it is told in the log that comes back
        say(work.__name__, raised=f"{type(error).__name__}: {error}", at=traceback.format_exc(limit=-3))
