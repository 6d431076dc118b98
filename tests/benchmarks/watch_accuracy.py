"""How right a watched training is: late ranks, what watching costs, and communication against `bench.run`.

    python tests/benchmarks/watch_accuracy.py late 20     a rank sleeps 30 ms a step in one part of its work
    python tests/benchmarks/watch_accuracy.py costs 5     a step without and with the watch, in turns
    python tests/benchmarks/watch_accuracy.py pairs 10    exposed communication, watched and by `bench.run`
    python tests/benchmarks/watch_accuracy.py caps 10     bucket caps over 1 Gbit/s, raced and by `bench.run`

The script measures its own sleep and its own steps. Leave the machine alone meanwhile.
"""

import argparse
import contextlib
import csv
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median

import torch
import torchvision
from torch import nn
from torch.nn import functional

from ddp_bench.bench.results.store import load_run

PARTS = ("data", "forward", "backward", "optimizer", "other")
SLEEP_S = 0.03
IMAGE, BATCH = 64, 16
SEQ, WIDTH, VOCAB = 128, 128, 512
CAPS = "default,1,5,25"


class Gpt(nn.Module):
    """Four layers over `SEQ` tokens."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(SEQ))

    def forward(self, tokens):
        return self.head(self.layers(self.words(tokens), mask=self.mask, is_causal=True)).flatten(0, 1)


def resnet18():
    """For `bench.run --workload`: the model that `train` trains."""
    return torchvision.models.resnet18(num_classes=10)


def batch_of(kind, generator):
    if kind == "gpt":
        tokens = torch.randint(VOCAB, (4, SEQ), generator=generator)
        return tokens, tokens.flatten()
    size = IMAGE if kind == "resnet18" else 16
    return torch.randn(BATCH, 3, size, size, generator=generator), torch.randint(
        10, (BATCH,), generator=generator
    )


@contextlib.contextmanager
def joining_ranks():
    """Join the ranks of torchrun, each on a core of its own; what `told` holds at the end is a line of it."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    told = {"rank": torch.distributed.get_rank()}
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))  # a host of a lab has one
        os.sched_setaffinity(0, {cores[told["rank"] % len(cores)]})
    torch.manual_seed(0)
    yield told
    # One write: both ranks have one pipe.
    os.write(1, json.dumps(told).encode() + b"\n")
    torch.distributed.destroy_process_group()
    time.sleep(0.2)  # torch aborts where a thread of gloo holds an all-reduce as Python ends


def run_ranks(*words, watch=None):
    """Run a script with words on two ranks, watched into a folder or not; what each rank told."""
    ours = ["-m", "ddp_bench", "watch", "--quiet", "--out", str(watch), "--", sys.executable] if watch else []
    command = [
        sys.executable,
        *ours,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        *map(str, words),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return {one["rank"]: one for one in map(json.loads, filter(None, done.stdout.splitlines()))}


def train(kind, steps, late, told):
    """Train under DDP; what each rank tells is its step and its sleep, in seconds."""
    rank = told["rank"]
    small = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(2048, 10)
    )
    ddp = nn.parallel.DistributedDataParallel({"resnet18": resnet18, "gpt": Gpt}.get(kind, lambda: small)())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    generator, slept = torch.Generator().manual_seed(rank), []

    def sleep(part):
        if late == f"{part}-{rank}":
            begin = time.perf_counter()
            time.sleep(SLEEP_S)
            slept.append(time.perf_counter() - begin)

    class Batches(torch.utils.data.IterableDataset):
        def __iter__(self):
            while True:
                sleep("data")
                yield batch_of(kind, generator)

    class Sleeping(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            sleep("forward")
            return x.clone()

        @staticmethod
        def backward(_, gradient):
            sleep("backward")
            return gradient

    times, batches = [], iter(torch.utils.data.DataLoader(Batches(), batch_size=None))
    optimizer.register_step_pre_hook(lambda *_: sleep("optimizer"))
    ddp.module.register_forward_hook(lambda _module, _inputs, output: Sleeping.apply(output))
    for _ in range(steps):
        times.append(time.perf_counter())
        inputs, targets = next(batches)
        sleep("other")
        optimizer.zero_grad()
        functional.cross_entropy(ddp(inputs), targets).backward()
        optimizer.step()
    ends = [b - a for a, b in itertools.pairwise(times[10:])]
    told |= {"step_s": mean(ends), "slept_s": mean(slept or [0])}
    told["steps_ms"] = [1000 * (b - a) for a, b in itertools.pairwise(times)]


def started(kind, steps, late="none", watch=None):
    """Train on two ranks, watched into a folder or not; what each rank says."""
    return run_ranks(__file__, "train", kind, steps, late, watch=watch)


def straggler_of(folder):
    late = load_run(folder).manifest.watched.late
    return late if late and late.is_straggler else None


def late(number, folder):
    """Name the part and rank of each training, and whether they are right."""
    right = held = 0
    errors = []
    for i in range(number):
        part, rank = PARTS[i % len(PARTS)], i // len(PARTS) % 2
        said = started("small", 160, f"{part}-{rank}", folder / f"late{i}")
        found, slept_ms = straggler_of(folder / f"late{i}"), 1000 * said[rank]["slept_s"]
        if found is None:
            print(f"{part} on rank {rank}: none named")
            continue
        ms = found.later_ms
        right += (found.part, found.rank) == (part, rank)
        held += ms.low <= slept_ms <= ms.high
        errors.append(abs(ms.estimate - slept_ms))
        print(
            f"{part} on rank {rank}: {found.part} on rank {found.rank}, {ms.estimate:.1f} ms "
            f"({ms.low:.1f} to {ms.high:.1f}), slept {slept_ms:.1f}",
            flush=True,
        )
    false = 0
    for i in range(number):
        started("small", 160, watch=folder / f"none{i}")
        false += straggler_of(folder / f"none{i}") is not None
    print(
        f"right: {right} of {number}; interval holds the sleep: {held}; median error {median(errors):.2f} ms"
    )
    print(f"stragglers named without one: {false} of {number}")


def costs(number, folder):
    """Compare steps of a training without and with the watch, in turns."""
    for kind, steps in (("resnet18", 80), ("gpt", 160)):
        slower, off = [], []
        for i in range(number):
            plain = started(kind, steps)[0]
            seen = started(kind, steps, watch=folder / f"{kind}{i}")[0]
            rows = csv.DictReader((folder / f"{kind}{i}" / "steps.csv").read_text().splitlines())
            reported = {
                int(row["step"]): float(row["step_ms"])
                for row in rows
                if row["rank"] == "0" and row["kind"] == "light" and int(row["step"]) < steps
            }
            # The same steps of the plain training: a process gets faster or slower as it goes.
            same = [plain["steps_ms"][step - 1] for step in reported]
            slower.append(100 * (seen["step_s"] / plain["step_s"] - 1))
            off.append(100 * (median(reported.values()) / median(same) - 1))
            before = f"{kind}: {1000 * plain['step_s']:.1f} ms"
            print(f"{before}; watched {slower[-1]:+.1f}%, reported step {off[-1]:+.1f}%", flush=True)
        found = [f"{median(one):+.2f}% (from {min(one):+.1f} to {max(one):+.1f})" for one in (slower, off)]
        print(f"{kind}: training slower by {found[0]}, reported step off by {found[1]} (medians)")


def exposed(folder):
    return next(case.exposed_comm_ms for case in load_run(folder).results if case.exposed_comm_ms)


def run_of(out, caps, limit, before=()):
    """Measure the same model by `bench.run`, behind the words of a lab or none."""
    run = (
        f"--workload {Path(__file__).stem}:resnet18 --device cpu --modes ddp --gpus 2 --image-size {IMAGE} "
        f"--batch-size {BATCH} --bucket-cap-mb {caps} --max-time {limit} --quiet --out"
    )
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    here = {**os.environ, "PYTHONPATH": path}
    subprocess.run(
        [*before, sys.executable, "-m", "ddp_bench", "run", *run.split(), str(out)], env=here, check=True
    )


def pairs(number, folder):
    """Hold exposed communication of the same model against `bench.run`, watched and run in turns."""
    inside = 0
    for i in range(number):
        run_of(folder / f"run{i}", "default", "30s")
        started("resnet18", 200, watch=folder / f"watch{i}")
        ours, theirs = exposed(folder / f"watch{i}"), exposed(folder / f"run{i}")
        # The errors of two independent estimates add as squares.
        half = sum(((one.high - one.low) / 2) ** 2 for one in (ours, theirs)) ** 0.5
        difference = ours.estimate - theirs.estimate
        inside += abs(difference) <= half
        print(f"watched {ours}, run {theirs}: {difference:+.1f} ± {half:.1f} ms", flush=True)
    print(f"the interval of the difference holds 0 in {inside} of {number}")


def rates_of(folder):
    """Rates of caps over that of the default, and what counts as equal."""
    run = load_run(folder)
    caps = {case.case_id: case.get_setting("bucket_cap_mb") for case in run.results}
    rates = {caps[one.case_id]: one.ratio.estimate for one in run.compared}
    return {"default": 1.0, **rates}, run.manifest.margin


def caps(number, folder):
    """Hold the race of bucket caps over a link of 1 Gbit/s against `bench.run` over it, in turns."""
    lab = [sys.executable, "-m", "ddp_bench", "lab", "--hosts", "2", "--rate", "1gbit", "--"]
    same = 0
    for i in range(number):
        run_of(folder / f"run{i}", CAPS, "120s", lab)
        options = f"--quiet --bucket-cap-mb {CAPS} --steps 40 --out".split()
        watch = [sys.executable, "-m", "ddp_bench", "watch", *options, str(folder / f"watch{i}")]
        subprocess.run([*lab, *watch, __file__, "train", "resnet18", "260", "none"], check=True)
        (raced, margin), (run, _) = rates_of(folder / f"watch{i}"), rates_of(folder / f"run{i}")
        ours, theirs = max(raced, key=raced.get), max(run, key=run.get)
        # Where the two differ, each must be equal to the other's winner within the margin.
        apart = max(raced[ours] / raced[theirs], run[theirs] / run[ours]) - 1
        same += apart <= margin
        print(f"raced {ours} {raced}, run {theirs} {run}: {100 * apart:.1f}% apart", flush=True)
    print(f"the same winner, or equal within {100 * margin:.0f}%, in {same} of {number}")


def main():
    if sys.argv[1:2] == ["train"]:
        with joining_ranks() as told:
            train(sys.argv[2], int(sys.argv[3]), sys.argv[4], told)
        return
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("what", choices=("late", "costs", "pairs", "caps"))
    made.add_argument("number", type=int)
    options = made.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        globals()[options.what](options.number, Path(folder))


if __name__ == "__main__":
    main()
