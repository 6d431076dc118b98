"""Compare what a change of a setting saves with what the watch has promised, on two ranks on CPU.

    python tests/benchmarks/watch_changes.py 5      each setting as it is and changed, in turns, 5 times

The script measures its own steps, unwatched; what is promised is watched. Leave the machine alone meanwhile.
"""

import contextlib
import itertools
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

import scipy
import torch
from torch import nn
from watch_accuracy import joining_ranks, run_ranks

from ddp_bench.bench.findings.watched import conclude_watch
from ddp_bench.bench.results.store import load_run

MICRO_STEPS, SAMPLE_S = 4, 0.002


class Slow(torch.utils.data.Dataset):
    """Samples that a disk takes a while to read."""

    def __len__(self):
        return 10**6

    def __getitem__(self, index):
        time.sleep(SAMPLE_S)
        return torch.full((256,), float(index % 7))


def module_of(kind):
    torch.manual_seed(0)
    if kind == "unused":
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(300)))
    wide = nn.Sequential(
        nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 8)
    )
    if kind == "buffers":
        wide.register_buffer("table", torch.zeros(2**21))
    return wide


def train(kind, is_changed, steps, told):
    """Train under DDP; what each rank tells is the median of its steps, in seconds."""
    searches, sends = kind == "unused" and not is_changed, kind == "buffers" and not is_changed
    ddp = nn.parallel.DistributedDataParallel(
        module_of(kind), find_unused_parameters=searches, broadcast_buffers=sends
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
    loader = torch.utils.data.DataLoader(
        Slow(), batch_size=8, num_workers=3 if is_changed else 0, prefetch_factor=4 if is_changed else None
    )
    batches = (
        iter(loader) if kind == "loader" else itertools.repeat(torch.ones(4, 8 if kind == "unused" else 256))
    )
    micro_steps, times = MICRO_STEPS if kind == "micro-steps" else 1, []
    for _ in range(steps):
        times.append(time.perf_counter())
        optimizer.zero_grad()
        for i in range(micro_steps):
            waits = is_changed and i < micro_steps - 1
            with ddp.no_sync() if waits else contextlib.nullcontext():
                ddp(next(batches)).square().mean().backward()
        optimizer.step()
    told["median_s"] = statistics.median(b - a for a, b in itertools.pairwise(times[20:]))


def started(kind, is_changed, steps, folder=None):
    """Train on two ranks, watched into a folder or not; milliseconds of a step."""
    return 1000 * run_ranks(__file__, "train", kind, int(is_changed), steps, watch=folder)[0]["median_s"]


def interval(values):
    """Mean and 95% interval of values that are independent."""
    half = scipy.stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), statistics.mean(values) - half, statistics.mean(values) + half


def main():
    if sys.argv[1] == "train":
        with joining_ranks() as told:
            train(sys.argv[2], sys.argv[3] == "1", int(sys.argv[4]), told)
        return
    number = int(sys.argv[1])
    print("setting        promised (ms)            saved (ms)               holds", flush=True)
    for kind in sys.argv[2:] or ("micro-steps", "unused", "buffers", "loader"):
        with tempfile.TemporaryDirectory() as folder:
            started(kind, False, 120, Path(folder) / "watched")
            found = conclude_watch(load_run(Path(folder) / "watched")).costs
        found = [one for one in found if one.change.startswith("Try ") and one.ms]
        ms = found[0].ms
        saved = interval([started(kind, False, 100) - started(kind, True, 100) for _ in range(number)])
        holds = ms.low <= saved[2] and saved[1] <= ms.high
        promised = (ms.estimate, ms.low, ms.high)
        said = ["{:.2f} ({:.2f} to {:.2f})".format(*one) for one in (promised, saved)]
        print(
            f"{kind:<14} {said[0]:<24} {said[1]:<24} {'yes' if holds else 'no'}; {found[0].change}",
            flush=True,
        )


if __name__ == "__main__":
    main()
