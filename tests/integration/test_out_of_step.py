"""Ranks that fail in mid-backward, after some buckets were launched: do they go on, or start again?"""

from __future__ import annotations

from typing import Any

import pytest

STEP = """
from ddp_bench.bench.cluster.ranks import Cluster
from ddp_bench.bench.recovery.lockstep import Lockstep, RestartError
cluster = Cluster("cpu")
group = cluster.group(2, "gloo")
class Guard:
    def arm(self, what, limit_s): pass
    def tell(self, status, reason, **more): pass
steps = Lockstep(cluster, Guard(), None, 0.0)
torch.manual_seed(0)
layers = [torch.nn.Linear(64, 64, bias=False) for _ in range(6)]
ddp = torch.nn.parallel.DistributedDataParallel(
    torch.nn.Sequential(*layers), process_group=group, bucket_cap_mb=0.01
)
failing = None
def fail_at(layer):
    def hook(_gradient):
        if layer == failing:
            raise ValueError("in mid-backward")
    return hook
for i, layer in enumerate(layers):
    layer.weight.register_hook(fail_at(i))
def step():
    ddp(torch.ones(2, 64)).sum().backward()
for _ in range(3):
    step()  # the buckets are rebuilt: one for each layer
sizes = ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"]
released = []
def outcome(layers):
    global failing
    failing = layers[cluster.rank]
    _, reports = steps.run(0, "round 1 (timed)", step, limit_s=60, group=group)
    said = [r.reason for r in reports]
    counts = [r.launched for r in reports]
    try:
        steps.settle(reports, group, lambda: released.append(layers))
    except RestartError:
        return said, counts, "restart"
    sent = torch.tensor([1.0 + cluster.rank])
    dist.all_reduce(sent, group=group)
    return said, counts, float(sent)
"""
FAILED = ["ValueError: in mid-backward"] * 2


@pytest.mark.parametrize("layer", [5, 3, 0])
def test_ranks_that_launched_the_same_go_on(layer: int, ranks: Any) -> None:
    """Buckets of the layers after this one are under way on both; the next all-reduce is right."""
    script = f"report([sizes, outcome([{layer}, {layer}]), released])\ncluster.close()\n"
    for sizes, (said, counts, end), released in ranks(STEP + script, 2):
        assert sizes.split(", ") == ["16384"] * 6
        assert said == FAILED
        assert counts[0] == counts[1]
        assert end == 1 + 2
        assert released == [[layer, layer]]


def test_ranks_that_launched_different_buckets_start_again(ranks: Any) -> None:
    """The first fails before the gradient of layer 4, the second before that of layer 1."""
    script = "report([outcome([4, 1]), released])\nos._exit(0)\n"
    for (said, counts, end), released in ranks(STEP + script, 2):
        assert said == FAILED
        assert counts[1] - counts[0] == 3
        assert end == "restart"
        assert released == [], "nothing waits for all-reduces that never end"


def test_a_rank_that_cannot_use_its_device_starts_all_again(ranks: Any) -> None:
    script = """
def work():
    if cluster.rank == 1:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")
_, reports = steps.run(0, "round 1 (timed)", work, limit_s=60, group=group)
try:
    steps.settle(reports, group, lambda: released.append(True))
except RestartError:
    report([[r.status for r in reports], released])
os._exit(0)
"""
    assert ranks(STEP + script, 2) == [[["ok", "failed"], []]] * 2


def test_memory_that_cannot_be_given_back_starts_all_again(ranks: Any) -> None:
    """On a GPU, after an error that nobody has seen yet."""
    script = """
import dataclasses
cluster.place = dataclasses.replace(cluster.place, device=torch.device("cuda", 0))
def work():
    raise torch.OutOfMemoryError("CUDA out of memory")
def empty_cache():
    if cluster.rank == 1:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
torch.cuda.synchronize = released.append
torch.cuda.empty_cache = empty_cache
_, reports = steps.run(0, "round 1 (timed)", work, limit_s=60, group=group)
try:
    steps.settle(reports, group, lambda: released.append("case"))
except RestartError:
    report([[r.status for r in reports], list(map(str, released))])
os._exit(0)
"""
    assert ranks(STEP + script, 2) == [[["oom", "oom"], ["cuda:0", "case"]]] * 2


def test_all_reduces_under_way_end_before_memory_is_given_back(ranks: Any) -> None:
    """The second rank is late with the first of them."""
    script = """
import time
works = []
def work():
    if cluster.rank == 1:
        return None
    works.append(dist.all_reduce(torch.ones(2**20), group=group, async_op=True))
    raise ValueError("after the launch")
_, reports = steps.run(0, "round 1 (timed)", work, limit_s=60)
if cluster.rank == 1:
    time.sleep(1)
    works.append(dist.all_reduce(torch.ones(2**20), group=group, async_op=True))
ended = []
steps.settle(reports, group, lambda: ended.append(works[0].is_completed()))
report(ended)
cluster.close()
"""
    assert ranks(STEP + script, 2) == [[True], [True]]


def test_ranks_whose_backend_does_not_count_start_again(ranks: Any) -> None:
    script = """
class Silent:
    def _get_sequence_number_for_group(self):
        raise RuntimeError("Backend mute does not implement getSequenceNumberForGroup")
_, reports = steps.run(0, "round 1 (timed)", fail_at(None), limit_s=60, group=Silent())
try:
    steps.settle(reports, group, lambda: None)
except RestartError:
    report([r.launched for r in reports])
os._exit(0)
"""
    assert ranks(STEP + script, 2) == [[None, None]] * 2
