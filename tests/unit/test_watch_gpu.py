"""A watched training on a GPU, simulated: a stream that works behind its host, and events that tell when."""

import json
import re
from dataclasses import dataclass

import msgspec
import pytest
from watched_folders import EXPOSED_S, OWN_S, list_rows, training, watched_run, write_rows

from ddp_bench.bench.findings.watched import conclude_watch
from ddp_bench.bench.predict.main import main as predict
from ddp_bench.bench.watch.ranks.clock import MAX_MARKS, PartClock
from ddp_bench.bench.watch.ranks.steps import Watch
from ddp_bench.bench.watch.rows import Step
from ddp_bench.bench.watch.settings import measure_host_bound_pct
from ddp_bench.bench.watch.steps import read_process

GPU_BOUND = {"forward": (0.001, 0.010), "backward": (0.001, 0.020), "optimizer": (0.001, 0.005)}
"""Seconds by part: of the host to queue it, of the GPU to do it."""

HOST_BOUND = {part: (gpu_s, host_s) for part, (host_s, gpu_s) in GPU_BOUND.items()}


class Stream:
    """A GPU's stream: it does what a host has queued, in order, as soon as it is queued."""

    def __init__(self):
        self.host_s = self.done_s = 5.0

    def launch(self, host_s, gpu_s):
        self.host_s += host_s
        self.done_s = max(self.done_s, self.host_s) + gpu_s

    def synchronize(self):
        self.host_s = max(self.host_s, self.done_s)

    def event(self):
        return Event(self, max(self.done_s, self.host_s))


@dataclass
class Event:
    stream: Stream
    at_s: float

    def query(self):
        return self.at_s <= self.stream.host_s

    def elapsed_time(self, end):
        assert self.query(), "an event that is not past cannot be read"
        assert end.query(), "an event that is not past cannot be read"
        return 1000 * (end.at_s - self.at_s)


def clock_of(stream):
    return PartClock(stream.event, lambda: stream.host_s)


def train(stream, clock, parts):
    """Take a step of these parts."""
    for part, work in parts.items():
        depth = clock.enter(part)
        stream.launch(*work)
        clock.leave(depth)


def steps_of(stream, parts, *, num_steps=6, waits=False):
    """Take steps, with `waits` as a script that reads its loss in each; the rows of all but the first."""
    clock, taken = clock_of(stream), []
    for _ in range(num_steps):
        train(stream, clock, parts)
        if waits:
            stream.synchronize()
        taken.append(clock.cut())
    stream.synchronize()
    rows = [{"n": n, **clock.describe_step(one)} for n, one in enumerate(taken)]
    return [msgspec.convert(row, Step) for row in rows[1:]]


@pytest.mark.parametrize("waits", [False, True])
def test_parts_are_those_of_the_gpu_where_it_is_behind(waits):
    for step in steps_of(Stream(), GPU_BOUND, waits=waits):
        for part, (host_s, gpu_s) in GPU_BOUND.items():
            idle_s = host_s if waits and part == "forward" else 0.0  # the loss was read: nothing is queued
            assert getattr(step.parts, part) == pytest.approx(gpu_s + idle_s)


def test_parts_are_those_of_the_host_where_the_gpu_waits_for_it():
    whole_s = sum(host_s for host_s, _ in HOST_BOUND.values())
    for step in steps_of(Stream(), HOST_BOUND):
        assert step.step_s == pytest.approx(whole_s)


@pytest.mark.parametrize(
    ("parts", "waits", "percent"), [(GPU_BOUND, False, 0), (GPU_BOUND, True, 0), (HOST_BOUND, False, 100)]
)
def test_a_gpu_that_waits_for_its_host_is_told_from_one_that_is_behind(parts, waits, percent):
    stream = Stream()
    # Some other step in which the GPU was not behind, as after a checkpoint.
    stream.launch(0.001, 0)
    steps = steps_of(stream, parts, waits=waits)
    assert measure_host_bound_pct(steps).estimate == pytest.approx(percent, abs=10)


def test_a_step_is_written_when_the_gpu_has_come_to_its_end(tmp_path):
    (tmp_path / "ranks").mkdir()
    stream = Stream()
    config = {"folder": str(tmp_path), "launch": "x", "steps": 9, "hook_at": 5, "race": None}
    watch = Watch(config | {"probes": True, "seed": 0})
    watch.clock = clock_of(stream)
    for _ in range(3):
        train(stream, watch.clock, GPU_BOUND)
        watch.cut()
    assert len(watch.untold) == 3, "the host is ahead, and asks for nothing"
    stream.synchronize()
    train(stream, watch.clock, GPU_BOUND)
    watch.cut()
    watch.rows.flush()
    process = read_process(next((tmp_path / "ranks").glob("*.jsonl")))
    assert [step.n for step in process.steps] == [1, 2, 3]
    assert process.steps[2].parts.backward == pytest.approx(GPU_BOUND["backward"][1])


def test_a_moment_within_a_cuda_graph_is_one_of_the_host():
    stream = Stream()
    clock = PartClock(lambda: None, lambda: stream.host_s)
    begin = clock.take_moment()
    stream.launch(0.25, 100.0)
    assert clock.take_moment().is_past()
    assert clock.take_moment().compute_seconds_since(begin) == pytest.approx(0.25)


def test_an_evaluation_of_many_batches_keeps_few_moments():
    clock = PartClock()
    for _ in range(2 * MAX_MARKS):
        clock.leave(clock.enter("evaluation"))
    taken = clock.cut()
    assert len(taken.marks) <= MAX_MARKS + 1
    whole_s = taken.end.compute_seconds_since(taken.start)
    assert clock.describe_step(taken)["step_s"] == pytest.approx(whole_s, abs=1e-6)


def on_gpus(folder, steps):
    """Write rows of a training on two GPUs, whose probes tell when its backward begins."""
    for row in list_rows(steps):
        before_s = sum(s for part, s in row["parts"].items() if part not in ("backward", "optimizer"))
        for sync in row["syncs"]:
            sync["begin_s"] = before_s
    return write_rows(folder, steps, start=[{"device": f"cuda:{rank}"} for rank in range(2)])


def test_a_host_that_its_gpu_waits_for_is_named_with_what_to_try(tmp_path):
    steps = training(59, hook_at=99)
    waits_s, step_s = (sum(OWN_S.values()) + EXPOSED_S - s for s in (OWN_S["data"], 0.0))
    for n, step in enumerate(steps):  # in each second step its forward is queued in time
        for row in step:
            late = "forward" if n % 2 else ""
            row["marks"] = [(part, s, float(part == late)) for part, s in row["parts"].items()]
    run = watched_run(on_gpus(tmp_path / "watched", steps))
    (found,) = [one for one in conclude_watch(run).costs if "host" in one.fact]
    low, high = (f"{100 * s / step_s:.0f}" for s in (waits_s - OWN_S["forward"], waits_s))
    assert re.search(f"make .*% .{low}.*{high}.* of a step", found.fact), "with its interval"
    assert (found.ms, "torch.compile" in found.remedy) == (None, True)


def test_a_watched_training_on_gpus_is_forecast(tmp_path, capsys):
    """Over a free network a step is the one without communication; over a slow one, what that takes."""
    folder = tmp_path / "watched"
    watched_run(on_gpus(folder, training()))
    networks = tmp_path / "nets.toml"
    text = '[{name}]\nlevel = "intra"\nbusbw_gb_per_s = {rate}\nhop_ms = 0.0\nsource = "test"\n'
    networks.write_text(text.format(name="fast", rate=1e6) + text.format(name="slow", rate=4e-6))
    own_ms = 1000 * sum(OWN_S.values())
    slow_ms = 4000 / 4e-6 / 1e6  # 2 (n - 1) / n of 4,000 bytes on 2 ranks; compute beside it takes 1.19 times
    for name, least_ms, most_ms in (
        ("fast", own_ms, 1.001 * own_ms),
        ("slow", slow_ms, 1.01 * (slow_ms + 1.19 * own_ms)),
    ):
        asked = [str(folder), "--gpus", "2", "--intra", f"{networks}:{name}", "--json"]
        assert predict(asked) == 0
        (found,) = json.loads(capsys.readouterr().out)["predictions"]
        assert least_ms <= found["step_ms"]["estimate"] * 1.0001
        assert found["step_ms"]["estimate"] <= most_ms
        assert found["unit"] == "steps"


@pytest.mark.parametrize(
    ("argv", "reason"), [([], "too few probes"), (["--batch-size", "2"], "batch is not known")]
)
def test_what_a_watched_training_does_not_tell_is_refused_in_a_line(tmp_path, capsys, argv, reason):
    watched_run(on_gpus(tmp_path / "watched", training(39, hook_at=99)))
    assert predict([str(tmp_path / "watched"), "--gpus", "8", "--intra", "nvlink-h100", *argv]) == 2
    said = capsys.readouterr().err
    assert reason in said
    assert said.count("\n") == 1
