"""The instrumented passes on real ranks: what they find, and that they leave nothing behind."""

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from held import CPU, place_of, trainer_of
from made import case_of
from stand_ins import stand_in
from torch import nn

from ddp_bench.bench.measure import anatomy
from ddp_bench.bench.measure.anatomy import (
    Anatomy,
    compute_bucket_ready_ms,
    list_timed_methods,
    run_anatomy,
)
from ddp_bench.bench.measure.timed import Trainer, pause_gc
from ddp_bench.bench.modes import base
from ddp_bench.bench.modes.dp import DataParallelStandIn
from ddp_bench.models.registry import make_resnet_workload


def trainer(mode, num_devices, **settings):
    case = case_of(mode=mode, num_devices=num_devices, **settings)
    return trainer_of(case, make_resnet_workload("resnet20", 16), place_of())


@pytest.fixture
def waited_for(monkeypatch):
    """Indices of the GPUs that are waited for, on a machine that seems to have eight."""
    found = []
    stand_in(monkeypatch, base, {"torch.cuda.device_count": lambda: 8})
    stand_in(monkeypatch, anatomy, {"torch.cuda.synchronize": found.append})
    return found


@pytest.mark.parametrize("accumulate", [1, 3])
def test_phases_and_dp_stages_make_up_the_step_and_leave_nothing_in_it(waited_for, accumulate):
    """Take one step, all its micro-batches: medians over several need not add up. It waits for no GPU."""
    made = trainer("dp", 2, accumulate=accumulate)
    made.step()
    times = run_anatomy(made, 1, CPU, local_steps=0)
    detail = times.detail
    phases = [detail[f"{phase}_ms"] for phase in ("data", "forward", "backward", "optimizer")]
    assert min(phases) > 0
    assert sum(phases) == pytest.approx(times.block_ms, abs=0.001)
    forward = [detail[f"dp_{stage}_ms"] for stage in ("scatter", "replicate", "apply", "gather")]
    assert min(forward) > 0
    assert 0.6 * detail["forward_ms"] < sum(forward) < detail["forward_ms"]
    backward = [detail[f"dp_{stage}_ms"] for stage in ("backward", "reduce")]
    assert min(backward) > 0
    assert sum(backward) < detail["backward_ms"]
    assert 0 < detail["dp_device0_pct"] < 100
    assert isinstance(made.mode.wrapped, DataParallelStandIn)
    assert "parallel_apply" not in vars(made.mode.wrapped), "the class's own method shows again"
    assert type(made) is Trainer
    assert not any(parameter._post_accumulate_grad_hooks for parameter in made.mode.module.parameters())
    assert waited_for == []
    made.close()


class Scattering(nn.DataParallel[nn.Module]):
    def __init__(self):
        nn.Module.__init__(self)
        self.device_ids = [1, 3]

    def scatter(self, *_):
        return "scattered"


def test_a_stage_waits_for_the_gpus_of_its_case_alone(waited_for):
    """A wait for another GPU makes a context on it, which takes memory that belongs to nobody's case."""
    parallel = Scattering()
    looked = Anatomy(SimpleNamespace(hook_phases=nullcontext), CPU)
    with looked.time_methods(*list_timed_methods(SimpleNamespace(wrapped=parallel))):
        found, *_ = looked.measure_step(parallel.scatter)
    assert waited_for == [1, 3, 1, 3]
    assert found["dp_scatter_ms"] > 0


RANKS = """
import gc, gzip, time, weakref
from ddp_bench.bench.measure import allreduce
from ddp_bench.bench.measure.anatomy import run_anatomy
from ddp_bench.bench.measure.clock import make_clock
from ddp_bench.bench.measure.allreduce import BucketReplay
from ddp_bench.bench.measure.trace import run_trace
workload, device = make_resnet_workload("resnet20", 16), cluster.place.device
def traced(trainer, keep=True):
    "A trace pass, and the events with a duration."
    num_buckets = len(trainer.mode.read_bucket_layout().num_bytes)
    times = run_trace(trainer, device, num_buckets, group=cluster.group(2, "gloo"), keep=keep)
    every = json.loads(gzip.decompress(times.trace))["traceEvents"] if keep else []
    return times, [event for event in every if event["ph"] == "X"]
def made(**settings):
    case = case_of(**dict(image_size=16, backend="gloo", bucket_cap_mb="0.25") | settings)
    trainer = trainer_of(case, workload, cluster.place, cluster.group(2, "gloo"))
    for _ in range(3):
        trainer.step()
    trainer.mode.stop_sampling()
    return trainer
def gradients(trainer):
    return torch.cat([p.grad.flatten() for p in trainer.mode.module.parameters()])
"""


@pytest.fixture
def instrumented(ranks):
    return lambda script: ranks(RANKS + script)


def test_a_parameter_without_gradient_is_ready_when_the_first_gradient_is():
    assert compute_bucket_ready_ms({0: 5.0, 1: 2.0, 3: 4.0}, [(3, 1), (0, 2), (2,)]) == [4.0, 5.0, 2.0]


def test_buckets_of_unused_parameters_are_not_sent(instrumented):
    """Counted in the trace: of the buckets 0.25 MiB that hold the spare layers alone, none is reduced."""
    found = instrumented("""
from ddp_bench.models.resnet import ResNet20
def with_spare():
    module = ResNet20()
    module.spare = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3)))
    return module
workload = replace(workload, module=with_spare)
def sent(**settings):
    trainer = made(static_graph=True, **settings)
    trainer.mode.set_sample_rate(1)
    layout = trainer.mode.read_bucket_layout()
    _, events = traced(trainer)
    begun = min(e["ts"] for e in events if e["name"] == "step")
    reduced = sum(e["name"] == "gloo:all_reduce" and e["ts"] > begun for e in events)
    count = sum(p.requires_grad for p in ResNet20().parameters())
    unused = sum(all(i >= count for i in bucket) for bucket in layout.parameters)
    run_anatomy(trainer, 1, device, local_steps=1)
    return reduced, len(layout.num_bytes), unused
report([sent(), sent(skip_all_reduce_unused_params=True)])
""")
    for plain, skipping in found:
        assert plain[0] == plain[1]
        assert skipping[1:] == plain[1:]
        assert skipping[2] > 0
        assert skipping[0] == skipping[1] - skipping[2]


def test_anatomy_and_trace_of_ddp(instrumented):
    found = instrumented("""
trainer = made()
layout = trainer.mode.read_bucket_layout()
before = [trainer.mode.ddp._get_ddp_logging_data()["iteration"]]
for _ in range(4):
    trainer.step()
before.append(trainer.mode.ddp._get_ddp_logging_data()["iteration"])
assert trainer.mode.read_bucket_layout() == layout
how = {"local_steps": 2, "buckets": layout.parameters}
anatomy = run_anatomy(trainer, 4, device, **how)
one_step = run_anatomy(trainer, 1, device, **how | {"local_steps": 0}).detail
sampled = trainer.mode.ddp._get_ddp_logging_data()["iteration"]
trace, events = traced(trainer)
for _ in range(3):
    trainer.step()
after = trainer.mode.ddp._get_ddp_logging_data()["iteration"]
hooks = sum(len(p._post_accumulate_grad_hooks or ()) for p in trainer.mode.module.parameters())
detail = {k: v for k, v in anatomy.detail.items() if k != "ready_ms"}
ready = [one_step["ready_ms"], one_step["last_ready_ms"]]
names = [e["name"] for e in events]
span = [trace.block_ms, sum(e["dur"] for e in events if e["name"] == "step") / 1000]
report([detail, ready, [trace.detail, span], names, hooks, [before, sampled, after], len(layout.num_bytes)])
""")
    for detail, (ready, last_ready), traced, names, hooks, (before, sampled, after), num_buckets in found:
        trace, (block_ms, annotated_ms) = traced
        assert num_buckets > 1
        assert ready == sorted(ready), "buckets become ready in all-reduce order"
        assert max(ready) == last_ready > 0
        assert detail["last_ready_ms"] > 0
        assert detail["local_last_ready_ms"] > 0
        assert 0 < detail["sync_buffers_ms"] < detail["forward_ms"]
        assert 0 <= detail["overlap_window_pct"] <= 100
        assert 0 <= trace["overlap_trace_pct"] <= 100
        assert len(trace["start_ms"]) == len(trace["done_ms"]) == num_buckets
        assert all(s < d for s, d in zip(trace["start_ms"], trace["done_ms"], strict=True))
        for name in ("step", "data", "forward", "backward", "optimizer"):
            assert names.count(name) == 1
        assert names.count("gloo:all_reduce") == 1 + num_buckets, "one small one brings the ranks together"
        assert block_ms == pytest.approx(annotated_ms, rel=0.05)
        assert hooks == 0
        assert before[0] == before[1] >= 2, "it has sampled, and is silent once settled"
        assert before[1] < sampled, "the logger samples during the pass"
        assert after <= sampled + 1, "and is silent again after it"


def test_waiting_for_the_broadcast_of_buffers_is_no_work_of_a_rank(instrumented):
    """The first rank is late before it broadcasts, and the other one waits for it in its forward."""
    found = instrumented("""
trainer = made()
trainer.optimizer.register_step_pre_hook(lambda *_: time.sleep(0.2 * (cluster.rank == 0)))
trainer.step()
detail = run_anatomy(trainer, 3, device, local_steps=0).detail
report([detail, "_sync_buffers" in vars(trainer.mode.ddp)])
""")
    (first, second), is_left = zip(*found, strict=True)
    own = [d["optimizer_ms"] + d["data_ms"] + d["forward_ms"] - d["sync_buffers_ms"] for d in (first, second)]
    assert second["sync_buffers_ms"] > first["sync_buffers_ms"]
    assert own[0] > own[1] + 100
    assert is_left == (False, False), "the class's own method shows again"


def test_a_rank_whose_profiler_starts_late_is_not_traced_as_communication(instrumented):
    found = instrumented("""
from ddp_bench.bench.measure import trace
from ddp_bench.bench.measure.trace import compute_overlap_pct, split_spans
trainer = made()
if cluster.rank == 1:
    class SlowToStart(trace.profile):
        def start(self):
            time.sleep(1.0)
            super().start()
    patch.setattr(trace, "profile", SlowToStart)
times, events = traced(trainer)
[start] = [e["ts"] for e in events if e["name"] == "step"]
of_step = compute_overlap_pct(*split_spans([e for e in events if e["ts"] >= start]))
report([times.block_ms, max(times.detail["done_ms"]), times.detail["overlap_trace_pct"], of_step])
""")
    for block_ms, done_ms, overlap, of_step in found:
        assert max(block_ms, done_ms) < 1000, "a second is what the other rank was late"
        assert overlap == pytest.approx(of_step, abs=0.001), "the small all-reduce took it"


def test_a_step_without_communication_leaves_gradients_local_and_the_next_step_whole(instrumented):
    found = instrumented("""
out = []
for settings in ({}, {"static_graph": True}, {"gradient_as_bucket_view": True}, {"accumulate": 2}):
    trainer = made(**settings)
    trainer.step_locally()
    local = cluster.gather(gradients(trainer).norm().item())
    assert trainer.mode.ddp.require_forward_param_sync, "the next forward broadcasts buffers again"
    trainer.step()
    whole = cluster.gather(gradients(trainer).norm().item())
    out.append([local, whole])
report(out)
""")
    for local, whole in found[0]:
        assert local[0] != local[1], "each rank has its own batch, so its own gradient"
        assert whole[0] == whole[1]


def test_nothing_keeps_a_case_that_was_closed(instrumented):
    """What lived on in a cycle would keep its GPU memory until garbage is collected."""
    found = instrumented("""
made().close()  # torch loads some parts at their first use
kept = {}
hooks = [dict(comm_hook="fp16"), dict(comm_hook="powersgd", bucket_cap_mb="100")]
for settings in (*hooks, dict(static_graph=True), dict(accumulate=2)):
    trainer = made(**settings)
    gc.collect()
    gc.disable()
    run_anatomy(trainer, 2, device, local_steps=1)
    traced(trainer, keep=False)
    parts = [trainer, trainer.optimizer, trainer.mode.ddp, *trainer.mode.module.parameters()]
    parts = [weakref.ref(part) for part in parts]
    trainer.close()
    del trainer
    for _ in range(1000):  # gloo's threads let go of a hook's futures a moment later; a cycle stays
        kept[str(settings)] = sum(part() is not None for part in parts)
        if not kept[str(settings)]:
            break
        time.sleep(0.01)
report(kept)
""")
    assert [set(kept.values()) for kept in found] == [{0}, {0}]


@pytest.mark.parametrize(("mode", "num_devices"), [("single", 1), ("dp", 2)])
def test_nothing_keeps_a_case_of_one_process(mode, num_devices):
    trainer(mode, num_devices).step()  # torch loads some parts at their first use
    made = trainer(mode, num_devices)
    made.step()
    gc.collect()
    with pause_gc():
        run_anatomy(made, 1, CPU, local_steps=0)
        parts = [weakref.ref(part) for part in (made, made.optimizer, made.mode.wrapped, made.mode.module)]
        made.close()
        del made
        assert [part for part in parts if part() is not None] == []


def test_the_replay_sends_as_many_bytes_as_ddp_whatever_the_gradients_type(instrumented):
    found = instrumented("""
from types import SimpleNamespace
def both(dtype, hook):
    case = case_of(image_size=8, backend="gloo", comm_hook=hook)
    layers = torch.nn.Linear(30, 20), torch.nn.Linear(20, 10)
    group = cluster.group(2, "gloo")
    mode = build_mode(case, torch.nn.Sequential(*layers).to(dtype), cluster.place, group)
    for _ in range(3):
        with Collectives() as of_ddp:
            mode.wrapped(torch.ones(4, 30, dtype=dtype)).sum().backward()
    layout = mode.read_bucket_layout()
    trainer = SimpleNamespace(mode=mode, check_loss=lambda: None, release_gradients=lambda: None)
    live = held(case, trainer, cluster.place, group)
    live.layout = layout
    with Collectives() as of_replay:
        live.measure("comm", 1)
    return of_ddp.num_bytes, of_replay.num_bytes[-1:]
report([both(dtype, hook) for dtype in (torch.bfloat16, torch.float32, torch.float64)
        for hook in ("none", "fp16", "bf16")])
""")
    num_gradients = 30 * 20 + 20 + 20 * 10 + 10
    halved, own = 2 * num_gradients, (size * num_gradients for size in (2, 4, 8))
    assert found[0] == [[[size]] * 2 for plain in own for size in (plain, halved, halved)]


def test_a_rank_slow_to_come_by_its_buffers_is_not_timed_as_communication(instrumented):
    found = instrumented("""
if cluster.rank == 1:
    def slow_empty(*arguments, **options):
        time.sleep(1.0)
        return torch.empty(*arguments, **options)
    stand_in(patch, allreduce, {"torch.empty": slow_empty})
cluster.barrier()
replay = BucketReplay([4000], "none", cluster.group(2, "gloo"), device)
report(replay.time_block(make_clock(device)).block_ms)
""")
    assert max(found) < 1000, "a second is what the other rank was late"


def test_communication_alone_holds_the_buffers_that_a_step_broadcasts(instrumented):
    found = instrumented("""
group = cluster.group(2, "gloo")
details, sent = {}, {}
for sync in (True, False):
    case = case_of(image_size=16, batch_per_device=2, backend="gloo", sync_buffers=sync)
    mode = build_mode(case, make_resnet_workload("resnet20", 16).module(), cluster.place, group)
    replay = BucketReplay([4000], "none", group, device)
    with Collectives() as seen:
        times = replay.time_block(make_clock(device), first=mode.broadcast_buffers)
    sent[sync] = sum(size for name, size in zip(seen.names, seen.num_bytes) if name == "broadcast_")
    details["on" if sync else "off"] = times.detail.get("buffers_ms"), times.block_ms
buffers = sum(buffer.nbytes for buffer in mode.module.buffers())
report([details, sent[True], sent[False], buffers])
""")
    for details, sent, sent_without, buffers in found:
        assert sent == buffers > 0
        assert sent_without == 0
        part, whole = details["on"]
        assert 0 < part < whole
        assert details["off"][0] is None
