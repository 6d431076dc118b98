"""The fixture for users' own steps, in test sessions of a user, on a clock that only their steps move."""

import json
import os

import pytest
import torch

import ddp_bench.bench.measure.timed  # noqa: F401 - a session within forgets its imports; parts of torch load once
from ddp_bench.bench import pytest_plugin

pytest_plugins = ["pytester"]

CLOCK = """
now_s = 0.0
def read():
    return now_s
def let_pass(seconds):
    global now_s
    now_s += seconds
"""

QUIET = """
import psutil
psutil.cpu_percent = lambda interval, percpu: [LOAD] * 1024
"""


@pytest.fixture(autouse=True)
def no_worker(monkeypatch):
    """In a worker of xdist, benchmarks are off."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)


def session(pytester, test, *options, load=0.0):
    """A user's session with one test, on a machine where others use `load` percent of each core."""
    pytester.syspathinsert()
    pytester.makepyfile(fake_clock=CLOCK)
    pytester.makeconftest(QUIET.replace("LOAD", str(load)))
    pytester.makepyfile(f"import os, torch, fake_clock\nfrom fake_clock import let_pass\n{test}")
    fixed = ("--benchmark-timer=fake_clock.read", "--benchmark-json=times.json", "-p", "no:xdist")
    return pytester.runpytest_inprocess(*fixed, "--benchmark-only", *options)


def stats(pytester):
    (found,) = json.loads((pytester.path / "times.json").read_text())["benchmarks"]
    return {**found["stats"], **found["extra_info"]}


STEADY = (
    "def test_it(train_step_benchmark):\n    train_step_benchmark(lambda: let_pass(3.0), steps=5, rounds=4)\n"
)


RISING = """
from itertools import count
def test_it(train_step_benchmark):
    seconds = count()
    train_step_benchmark(lambda: let_pass(next(seconds)), warmup=0, steps=5, rounds=4)
"""


def test_a_time_is_the_mean_of_the_steps_of_a_block(pytester):
    """The calls take 0, 1, 2, … s, so the blocks of five begin with 0 + 1 + 2 + 3 + 4 s."""
    session(pytester, RISING, "-W", "ignore").assert_outcomes(passed=1)
    found = stats(pytester)
    assert found["data"] == [2.0, 7.0, 12.0, 17.0]
    assert found["steps_per_round"] == 5


def test_a_slower_step_fails_the_comparison_and_an_equal_one_passes(pytester):
    session(pytester, STEADY, "--benchmark-save=first").assert_outcomes(passed=1)
    gate = ("--benchmark-compare", "--benchmark-compare-fail=median:5%")
    assert session(pytester, STEADY, *gate).ret == 0
    slower = session(pytester, STEADY.replace("3.0", "3.3"), *gate)
    assert slower.ret != 0
    slower.stderr.fnmatch_lines(["*Performance has regressed*"])


PINNED = """
def test_it(train_step_benchmark):
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    seen = []
    def step():
        seen.append((os.sched_getaffinity(0), torch.get_num_threads()))
        let_pass(1.0)
    train_step_benchmark(step, rounds=2)
    assert seen and all(one == ({min(cores)}, 1) for one in seen)
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == (cores, threads)
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system cannot pin")
def test_a_step_on_the_cpu_has_one_core_and_one_thread(pytester):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        session(pytester, PINNED).assert_outcomes(passed=1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_more_cores_than_there_are_is_one_line(pytester):
    result = session(pytester, STEADY.replace("steps=5", "cores=100000"), "-W", "ignore")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*cores=100000: this process may use *"])


UNSTEADY = """
def test_it(train_step_benchmark):
    calls = iter(range(1000))
    train_step_benchmark(lambda: let_pass(1.0 + SPREAD * (next(calls) % 2)), steps=1, rounds=20)
"""


@pytest.mark.parametrize(
    ("spread", "load", "said"),
    [
        (0.02, 5.0, None),
        (0.2, 5.0, "*noisy machine: the middle half*18%*"),
        (0.0, 50.0, "*other processes*50%*"),
    ],
)
def test_noise_is_warned_of_and_never_an_error(pytester, spread, load, said):
    result = session(pytester, UNSTEADY.replace("SPREAD", str(spread)), "-W", "error", load=load)
    result.assert_outcomes(passed=1, warnings=0 if said is None else 1)
    if said is not None:
        result.stdout.fnmatch_lines([f"{said}end what else runs*"])


def test_a_session_without_benchmarks_takes_a_step_and_warns_of_nothing(pytester):
    pytester.makeconftest(QUIET.replace("LOAD", "100"))
    pytester.makepyfile(STEADY.replace("let_pass(3.0)", "print('a step')"))
    result = pytester.runpytest_inprocess("--benchmark-disable", "-p", "no:xdist")
    result.assert_outcomes(passed=1, warnings=0)


class Benchmark:
    """Calls the step once for each iteration, as pytest-benchmark does."""

    disabled = True

    def __init__(self, done):
        self.extra_info = {}
        self._done = done

    def pedantic(self, step, *, rounds, iterations):
        for _ in range(rounds):
            self._done.append("round")
            for _ in range(iterations):
                step()


def test_a_gpu_is_waited_for_at_the_end_of_a_block_alone(monkeypatch):
    done = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append(f"wait for {device}"))
    fixture = pytest_plugin.train_step_benchmark
    run = fixture.__wrapped__(Benchmark(done))
    run(lambda: done.append("step"), device="cuda:1", warmup=2, steps=3, rounds=2)
    waited = "wait for cuda:1"
    warm_up, block = ["step"] * 2 + [waited], ["round"] + ["step"] * 3 + [waited]
    assert done == warm_up + block + block
