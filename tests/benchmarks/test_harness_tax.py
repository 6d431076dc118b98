"""What the suite adds to a training step: its block against a bare hand-written loop, interleaved.

Both drive the same module, optimizer and batch, so nothing but the harness differs. Run with
`python -m pytest tests/benchmarks --benchmark-only`.
"""

import pytest
from rank_pool import Ranks

from ddp_bench.bench.stats.interval import compute_median_interval

LOOPS = """
import random, time
from ddp_bench.bench.measure.clock import make_clock
from ddp_bench.bench.measure.timed import run_block

n = cluster.world_size
case = case_of(mode="ddp" if n > 1 else "single", num_devices=n, arch="resnet18", image_size=64,
               batch_per_device=16, backend="gloo")
workload = make_resnet_workload("resnet18", 64)
mode = build_mode(case, workload.module(), cluster.place, cluster.group(n, "gloo"))
source = open_source(workload, "device", Share(batch_size=16, rank=cluster.rank))
trainer = Trainer(case, mode, workload, source)
inputs, targets = source.get_batch()
model, optimizer, clock = mode.wrapped, trainer.optimizer, make_clock(cluster.place.device)

def suite(steps):
    return run_block(trainer.step, steps, clock).block_ms

def bare(steps):
    start = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
    return (time.perf_counter() - start) * 1000

for _ in range(4):
    suite(1)
mode.stop_sampling()
order, pairs = random.Random(0), []
for _ in range(ROUNDS):
    times = {}
    for loop in order.sample([suite, bare], 2):
        cluster.barrier()
        times[loop.__name__] = max(cluster.gather(loop(2)))
    pairs.append([times["suite"], times["bare"]])
report(pairs)
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("mode", "num_ranks"), [("single", 1), ("ddp", 2)])
def test_the_harness_costs_nothing(benchmark, tmp_path, mode, num_ranks):
    made = Ranks(num_ranks, tmp_path)
    rounds = 80 if num_ranks == 1 else 60
    pairs = benchmark.pedantic(lambda: made.play(LOOPS.replace("ROUNDS", str(rounds)))[0], rounds=1)
    made.end()
    ratio = compute_median_interval([bare / suite for suite, bare in pairs])
    interval = f"{ratio.estimate:.4f} [{ratio.low:.4f}, {ratio.high:.4f}]"
    text = f"{mode}: images/s of the suite / bare loop = {interval}"
    benchmark.extra_info["ratio"] = text
    print(text)
    assert ratio.low <= 1.01
    assert ratio.high >= 0.99
    assert abs(ratio.estimate - 1) < 0.01
