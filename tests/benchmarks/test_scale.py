"""How a large run is borne: time, memory and size of its page; time and memory to plan, store, resume and
summarise its records, without a device. The full size:
`python -m pytest tests/benchmarks/test_scale.py --benchmark-only -s`.

Step times come from a fixed pattern. `os.fsync` is left out: its time is the disk's.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import made
import numpy as np
import pandas as pd
import pytest
from commands import ROOT

from ddp_bench.bench.findings.findings import conclude_run
from ddp_bench.bench.plan.resolve import fill_device_defaults
from ddp_bench.bench.plan.settings import Settings
from ddp_bench.bench.plan.sweep import Machine, expand_cases, hash_plan
from ddp_bench.bench.results.block_times import BlockTimes
from ddp_bench.bench.results.columns import ALLREDUCE, BLOCKS, BUCKETS, COMPARISONS, make_frame
from ddp_bench.bench.results.journal import JOURNAL, Completion, Layout, read
from ddp_bench.bench.results.recorder import Recorder
from ddp_bench.bench.results.run_folder import write_table
from ddp_bench.bench.results.store import RunData, load_run
from ddp_bench.bench.run.open_folder import begin_attempt
from ddp_bench.bench.run.rounds import Rounds
from ddp_bench.bench.run.schedule import draw_round_order
from ddp_bench.bench.stats.fit import fit_two_way

NUM_STEPS = 3


def plan(num_caps, num_ranks):
    settings = Settings(
        modes=("ddp",),
        gpus=(num_ranks,),
        axes={
            "bucket_cap_mb": tuple(map(str, range(1, num_caps + 1))),
            "gradient_as_bucket_view": (False, True),
            "static_graph": (False, True),
            "comm_hook": ("none", "fp16", "bf16"),
            "accumulate": (1, 2, 4, 8),
        },
    )
    machine = Machine(
        device_type="cuda",
        devices_per_node=8,
        rank_hosts=tuple(f"host{rank // 8}" for rank in range(num_ranks)),
    )
    resolved = fill_device_defaults(settings, device_type="cuda", num_local_devices=8)
    return expand_cases(resolved, machine, arch="resnet50", image_size=224)


def times_of(index, round_index, num_ranks, share=1.0, detail=None):
    """Host, rank and times of each rank of a block."""
    found = []
    for rank in range(num_ranks):
        steps = [100 + (7 * index + 3 * round_index + rank + step) % 11 / 10 for step in range(NUM_STEPS)]
        times = BlockTimes(share * round(sum(steps), 4), tuple(steps), detail or {})
        found.append((f"node-{rank // 8}", rank, times))
    return found


def begun(folder, planned):
    """The record of a run of this plan whose cases are prepared."""
    told = {"plan_hash": hash_plan(planned), "created_utc": "2026-01-02T03:04:05+00:00"}
    told |= {"settings": {"margin": 0.05, "device": "cuda"}}
    recorder = Recorder.begin(planned, made.new_run(folder, **told))
    begin_attempt(recorder, {})
    for index, one in enumerate(planned):
        if one.skip_reason is None:
            recorder.set_outcome(index, "ok", "", {"num_buckets": 4, "device_name": "NVIDIA H200"})
            recorder.append_event(Layout(case_id=one.case.case_id, num_bytes=(4, 4, 4, 4)))
    return recorder


def recorded_run(folder, num_caps, num_rounds, num_ranks):
    """Numbers of cases and blocks, processor time of every part, and peak memory."""
    os.fsync, folder = lambda _descriptor: None, Path(folder)
    cpu_s = {}

    @contextmanager
    def timed(part):
        start_s = time.process_time()
        yield
        cpu_s[part] = cpu_s.get(part, 0.0) + time.process_time() - start_s

    with timed("plan"):
        planned = plan(num_caps, num_ranks)
    recorder, ranks = begun(folder, planned), [p.case.num_devices for p in planned]
    for round_index in range(1, num_rounds + 1):
        for index in draw_round_order(len(planned), seed=0, round_index=round_index):
            found = times_of(index, round_index, ranks[index])
            place = (planned[index].case.case_id, "timed", round_index, index, 10.0 * round_index)
            with timed("store"):
                recorder.add_block(*place, found)
        with timed("summarise"):
            recorder.refresh()
            assert len(recorder.tables.cases) == len(planned)
    del recorder
    with timed("resume"):
        recorder = Recorder.reopen(folder)
        cases = recorder.tables.cases
    with timed("tables"):
        recorder.write()
    told = make_frame([one.to_row() for one in recorder.tables.comparisons], COMPARISONS)
    nothing = (make_frame([], columns) for columns in (BLOCKS, BUCKETS, ALLREDUCE))
    run = RunData(folder, recorder.manifest, cases, *nothing, told)
    vars(run)["times"] = recorder.times
    with timed("findings"):
        assert conclude_run(run).verdicts
    assert len(cases) == len(planned)
    return {
        "cases": len(planned),
        "blocks": sum(ranks) * num_rounds,
        "cpu_s": cpu_s,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def play(what, *arguments):
    """Call a function of this file in a process of its own, so that the memory is its own."""
    done = subprocess.run(
        [sys.executable, __file__, what, json.dumps(arguments, default=str)],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_caps", [2, 21, 208])
def test_page_of_a_large_run(benchmark, tmp_path, num_caps):
    """Of 48 cases a cap, on eight ranks."""
    folder = tmp_path / "run"
    num_cases = play("recorded_run", folder, num_caps, 30, 8)["cases"]
    command = [sys.executable, "-m", "report", str(folder)]
    benchmark.pedantic(lambda: subprocess.run(command, cwd=ROOT, check=True, capture_output=True), rounds=1)
    page_mb = (folder / "report.html").stat().st_size / 1e6
    # The largest child so far, so sizes must grow from test to test, and these tests come first.
    peak_mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    benchmark.extra_info |= {"page_mb": page_mb, "peak_mib": peak_mib}
    print(f"{num_cases} cases: {benchmark.stats.stats.mean:.1f} s, {peak_mib:.0f} MiB, page {page_mb:.2f} MB")
    if num_caps == 21:
        assert page_mb < 5
        assert peak_mib < 1024


@pytest.mark.campaign
def test_memory_and_work_grow_with_the_blocks_and_no_faster(tmp_path):
    small, large = (
        play("recorded_run", tmp_path / "small", 1, 8, 64),
        play("recorded_run", tmp_path / "large", 4, 8, 64),
    )
    factor = large["blocks"] / small["blocks"]
    assert factor == pytest.approx(4, rel=0.05)
    # Rows kept as dictionaries would take above 500 bytes each: 18 MiB here, 5 GiB at full size.
    grown_bytes = (large["peak_mib"] - small["peak_mib"]) * 2**20
    assert grown_bytes / (large["blocks"] - small["blocks"]) < 250
    # With the square it would grow 16-fold. Processor time, so a busy machine does not matter.
    assert sum(large["cpu_s"].values()) / sum(small["cpu_s"].values()) < 2 * factor


@pytest.mark.timeout(1200)
def test_5000_cases_of_64_ranks_in_30_rounds(benchmark, tmp_path):
    found = benchmark.pedantic(lambda: play("recorded_run", tmp_path / "run", 104, 30, 64), rounds=1)
    parts = ", ".join(f"{part} {cpu_s:.0f} s" for part, cpu_s in found["cpu_s"].items())
    print(f"{found['cases']} cases, {found['blocks']:,} blocks: {parts}; {found['peak_mib']:.0f} MiB")
    benchmark.extra_info |= found
    assert found["blocks"] > 9_500_000
    assert found["peak_mib"] < 1024


def fitted(num_cases, num_rounds):
    """Processor time and memory of a fit of three phases, a fifth not visited, and of intervals."""
    rng = np.random.default_rng(0)
    shape = num_rounds, 3 * num_cases
    log_ms = 4 + rng.random(shape[1]) + 0.02 * rng.standard_normal((num_rounds, 1))
    log_ms = log_ms + 0.03 * rng.standard_normal(shape)
    log_ms[rng.random(shape) < 0.2] = np.nan
    begun_s = time.process_time()
    found = fit_two_way(np.exp(log_ms))
    fit_s = time.process_time() - begun_s
    for column in range(3, shape[1], 3):
        found.estimate(lambda at: at[0] - at[1], column, 0)
    intervals_s = time.process_time() - begun_s - fit_s
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"fit_s": fit_s, "intervals_s": intervals_s, "peak_mib": peak_mib}


def reread(folder, num_caps, num_ranks, num_buckets):
    """Processor time to begin a run of 48 cases a cap, and to load it with the buckets of nine of them."""
    os.fsync, folder = lambda _descriptor: None, Path(folder)
    begun_s = time.process_time()
    planned = plan(num_caps, 2)
    Recorder.begin(planned, made.new_run(folder)).write()
    begin_s = time.process_time() - begun_s
    ends = {
        f"{name}_ms{end}": 12.3456
        for name in ("ready", "launch", "start", "done")
        for end in ("", "_low", "_high")
    }
    bucket = {"case_id": planned[-1].case.case_id, "bytes": 2**20, "num_params": 3, **ends}
    rows = make_frame([bucket | {"bucket": index} for index in range(num_buckets)], BUCKETS)
    every = pd.concat([rows.assign(rank=rank) for rank in range(num_ranks)] * 9)
    write_table(folder, "buckets.csv", every)
    begun_s = time.process_time()
    run = load_run(folder)
    load_s = time.process_time() - begun_s
    assert read(folder).plan == planned
    assert (len(run.cases), len(run.buckets)) == (48 * num_caps + 1, len(every))
    mb = {name: (folder / name).stat().st_size / 1e6 for name in ("cases.csv", "buckets.csv", JOURNAL)}
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"begin_s": begin_s, "load_s": load_s, "peak_mib": peak_mib, **mb}


@pytest.mark.parametrize(("num_cases", "num_rounds"), [(500, 30), (2000, 30), (5000, 30), (5000, 400)])
def test_fit_of_many_cases(benchmark, num_cases, num_rounds):
    found = benchmark.pedantic(lambda: play("fitted", num_cases, num_rounds), rounds=1)
    print(f"fit of {num_cases} cases in {num_rounds} rounds: {found}")
    benchmark.extra_info |= found
    assert found["peak_mib"] < 1024


@pytest.mark.timeout(1200)
def test_20000_cases_and_buckets_of_1024_ranks_are_read_again(benchmark, tmp_path):
    found = benchmark.pedantic(lambda: play("reread", tmp_path / "run", 417, 1024, 66), rounds=1)
    print(f"20,017 cases, 608,256 buckets: {found}")
    benchmark.extra_info |= found


def log_of(folder, num_caps, num_rounds, num_ranks):
    """Write a run by its recorder; the rows, seconds of measuring, and those that its ranks wait for it."""
    os.fsync, folder = lambda _descriptor: None, Path(folder)
    planned = plan(num_caps, num_ranks)
    recorder = begun(folder, planned)
    run = SimpleNamespace(recorder=recorder, settings=Settings(race=True), _refresh_at_s=30.0)
    run.console = SimpleNamespace(show_table=lambda _: None)
    run.get_elapsed_s = lambda: recorder.times.elapsed_s + wait_s + time.perf_counter() - begun_s
    wait_s = num_rows = 0
    for round_index in range(1, num_rounds + 1):
        passes = ("timed", "no_sync", "anatomy")[: 3 if round_index % 5 == 0 else 2]
        for index, phase in product(draw_round_order(len(planned), seed=0, round_index=round_index), passes):
            share = 1.0 if phase == "timed" else 0.8 + (index + 5 * round_index) % 13 / 100
            detail = {"ready_ms": [1.0, 2.0, 3.0, 4.0], "backward_ms": 50.0} if phase == "anatomy" else {}
            times = times_of(index, round_index, planned[index].case.num_ranks, share, detail)
            begun_s = time.perf_counter()
            recorder.record_start(index, f"round {round_index} ({phase})")
            recorder.add_block(
                planned[index].case.case_id, phase, round_index, index, recorder.times.elapsed_s, times
            )
            wait_s, num_rows = wait_s + time.perf_counter() - begun_s, num_rows + len(times)
        begun_s = time.perf_counter()
        Rounds._take_look(run, round_index)
        wait_s += time.perf_counter() - begun_s
    shutil.copytree(folder, f"{folder}-killed")
    begun_s = time.perf_counter()
    recorder.write()
    recorder.close(Completion.ROUNDS)
    return {
        "cases": len(planned),
        "rows": num_rows,
        "measuring_s": recorder.times.elapsed_s,
        "waiting_s": wait_s,
        "tables_s": time.perf_counter() - begun_s,
    }


def spent(*command, compiled):
    """Seconds and peak MiB of a Python command of its own; `compiled` is the folder of its bytecode."""
    begun_s = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    # As pip installs packages: compiled.
    environment |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(compiled)}
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, time.perf_counter() - begun_s, usage.ru_maxrss / 1024


LOAD = "import sys; from ddp_bench import load_run; load_run(sys.argv[1])"
REOPEN = """
import sys; from pathlib import Path; from ddp_bench.bench.results.recorder import Recorder
Recorder.reopen(Path(sys.argv[1])).list_measured()
"""
FINISH = """
import sys; from pathlib import Path; from ddp_bench.bench.run.close import close_broken_run
close_broken_run(Path(sys.argv[1]), "killed")
"""
COMMANDS = {
    "load": ("-c", LOAD, "{run}"),
    "load of a killed run": ("-c", LOAD, "{killed}"),
    "start of its resume": ("-c", REOPEN, "{killed}"),
    "its end without ranks": ("-c", FINISH, "{killed}"),
    "report": ("-m", "report", "{run}", "--out", "{out}.html"),
    "gate": ("-m", "bench.gate", "{run}", "{out}"),
    "zip": ("-m", "bench.export", "{run}", "--format", "zip", "--out", "{out}.zip"),
}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("num_caps", "num_rounds"), [(10, 21)])
def test_a_run_of_many_rows_is_written_and_read(benchmark, tmp_path, num_caps, num_rounds):
    """Write 48 cases a cap, on 64 ranks, and run each command that reads them."""
    run = tmp_path / "run"
    found = benchmark.pedantic(lambda: play("log_of", run, num_caps, num_rounds, 64), rounds=1)
    share = found["waiting_s"] / found["measuring_s"]
    print(
        f"{found['cases']} cases, {found['rows']:,} rows: ranks wait {share:.2%} of the time for the log "
        f"and for looks at it; all tables take {found['tables_s']:.1f} s at the end"
    )
    for file in (run / JOURNAL, run / "blocks.csv"):
        print(f"  {file.name}: {file.stat().st_size / 1e6:.0f} MB")
    shutil.copytree(run, tmp_path / "gate")
    small = shutil.copytree(ROOT / "results" / "samples" / "h200-calibrated", tmp_path / "small")
    shutil.copytree(small, f"{small}-killed")
    for name, command in COMMANDS.items():
        for folder in (small, run):
            names = {"run": folder, "killed": f"{folder}-killed", "out": tmp_path / name}
            parts = (part.format(**names) for part in command)
            code, seconds, peak_mib = spent(*parts, compiled=tmp_path / "compiled")
        print(f"  {name}: {seconds:.1f} s, {peak_mib:.0f} MiB, exit code {code}")


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*json.loads(sys.argv[2]))))
