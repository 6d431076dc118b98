"""A training that was watched, from the command to the folder; the script itself measures its sleeps."""

import json
import sys
from statistics import median

import pytest
from commands import finished
from rank_pool import run_ranks

from ddp_bench.bench.common.process import make_package_command
from ddp_bench.bench.results.store import load_run
from ddp_bench.bench.watch import STEPS, launch
from ddp_bench.bench.watch.result import write_result

TRAINING = """
import json, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

def train(slept, gathers):
    model = DDP(nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    late, slept_s, counts = dist.get_rank() == 1, [], [torch.tensor(0) for _ in range(2)]
    for _ in range(70):
        optimizer.zero_grad()
        if late:
            begin = time.perf_counter()
            time.sleep(0.03)
            slept_s.append(time.perf_counter() - begin)
        if gathers:
            dist.all_gather(counts, torch.tensor(8))
        model(torch.randn(8, 256)).square().mean().backward()
        optimizer.step()
    if late:
        Path(slept).write_text(json.dumps(slept_s))
"""
SCRIPT = f"""{TRAINING}
dist.init_process_group("gloo")
torch.set_num_threads(1)
train(sys.argv[1], gathers=False)
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def watch_by_command(folder, slept):
    (folder.parent / "train.py").write_text(SCRIPT)
    words = ("--out", str(folder), "--", *TORCHRUN, str(folder.parent / "train.py"), str(slept))
    ended = finished(make_package_command("watch", *words))
    assert ended.returncode == 0, ended.stderr
    sys.stderr.write(ended.stderr)


def watch_forks(folder, slept):
    launch.make_folder(folder)
    config = launch.make_config(folder, STEPS)
    script = f"""
from ddp_bench.bench.watch import launch
launch.install({config!r})
{TRAINING}
report(train({str(slept)!r}, gathers=True))
launch.end_here()
"""
    run_ranks(script, 2, folder.parent, meet=True)
    write_result(folder, 0, quiet=False)


@pytest.mark.parametrize("watch", [watch_by_command, watch_forks])
def test_a_sleep_of_one_rank_comes_out_as_long_as_the_script_saw_it(tmp_path, capsys, watch):
    """A Trainer gathers before each forward: there the other rank waits, which is no work of its own."""
    slept, folder, gathers = tmp_path / "slept.json", tmp_path / "watched", watch == watch_forks
    watch(folder, slept)
    said = capsys.readouterr().err
    run = load_run(folder)
    late = run.manifest.watched.late
    slept_ms = 1000 * median(json.loads(slept.read_text()))
    assert (late.rank, late.part) == (1, "other")
    assert late.parts["other"].estimate == pytest.approx(slept_ms, rel=0.2)
    assert "Rank 1 is a straggler" in said
    if not gathers:  # ranks of the pool have no file of a script
        calls = ("optimizer.step()", "model(torch")
        numbers = [next(n for n, line in enumerate(SCRIPT.split("\n"), 1) if call in line) for call in calls]
        after, before = (f"train.py:{number}" for number in numbers)
        lines = (f"{after} (optimizer step)", f"{before} (forward) of the next step")
        assert late.lines == lines, "the sleep is between them"
        where = f"Look at what rank 1 alone does after {lines[0]} and before {lines[1]} ("
        assert where in " ".join(said.split())
    waited = run.manifest.watched.ranks[0].parts["collectives"].estimate
    assert waited == (pytest.approx(slept_ms, rel=0.2) if gathers else 0)
    assert ("Collectives that the script calls itself" in said) == gathers
    case = run.results[0]
    assert (case.get_number("slowest_rank"), case.rank_skew_ms.estimate) == (
        1,
        pytest.approx(slept_ms, rel=0.2),
    )
    assert case.step_ms.estimate > slept_ms
    assert case.exposed_comm_ms is not None, "the wait for a late rank is no communication"
    assert case.exposed_comm_ms.estimate < slept_ms
    assert (folder / "report.html").is_file()
