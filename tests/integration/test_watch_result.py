"""A training that was watched, from the command to the folder; the script itself measures its sleeps."""

import json
import subprocess
import sys
from statistics import median

import pytest

from ddp_bench.bench.common.process import make_package_command
from ddp_bench.bench.results.store import load_run

pytest.importorskip("ddp_bench.bench.watch.launch")

SCRIPT = """
import json, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
torch.set_num_threads(1)
model = DDP(nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
late, slept_s, counts = dist.get_rank() == 1, [], [torch.tensor(0) for _ in range(2)]
for _ in range(70):
    optimizer.zero_grad()
    if late:
        begin = time.perf_counter()
        time.sleep(0.03)
        slept_s.append(time.perf_counter() - begin)
    if sys.argv[2] == "gathers":
        dist.all_gather(counts, torch.tensor(8))
    model(torch.randn(8, 256)).square().mean().backward()
    optimizer.step()
if late:
    Path(sys.argv[1]).write_text(json.dumps(slept_s))
"""


@pytest.mark.parametrize("script_does", ["trains", "gathers"])
def test_a_sleep_of_one_rank_comes_out_as_long_as_the_script_saw_it(tmp_path, script_does):
    """A Trainer gathers before each forward: there the other rank waits, which is no work of its own."""
    script, slept, folder = (tmp_path / name for name in ("train.py", "slept.json", "watched"))
    script.write_text(SCRIPT)
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
        str(slept),
        script_does,
    ]
    ended = subprocess.run(
        make_package_command("watch", "--out", str(folder), "--", *launcher),
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    run = load_run(folder)
    late = run.manifest.watched.late
    slept_ms = 1000 * median(json.loads(slept.read_text()))
    assert (late.rank, late.part) == (1, "other")
    assert late.parts["other"].estimate == pytest.approx(slept_ms, rel=0.2)
    assert "Rank 1 is a straggler" in ended.stderr
    calls = ("optimizer.step()", "dist.all_gather" if script_does == "gathers" else "model(torch")
    numbers = [next(n for n, line in enumerate(SCRIPT.split("\n"), 1) if call in line) for call in calls]
    assert late.lines == tuple(f"train.py:{number}" for number in numbers), "the sleep is between them"
    where = "Look at what rank 1 alone does between train.py:{} and train.py:{} (".format(*numbers)
    assert where in " ".join(ended.stderr.split())
    waited = run.manifest.watched.ranks[0].parts["collectives"].estimate
    assert waited == (pytest.approx(slept_ms, rel=0.2) if script_does == "gathers" else 0)
    assert ("Collectives that the script calls itself" in ended.stderr) == (script_does == "gathers")
    case = run.results[0]
    assert (case.get_number("slowest_rank"), case.rank_skew_ms.estimate) == (
        1,
        pytest.approx(slept_ms, rel=0.2),
    )
    assert case.step_ms.estimate > slept_ms
    assert case.exposed_comm_ms is not None, "the wait for a late rank is no communication"
    assert case.exposed_comm_ms.estimate < slept_ms
    assert (folder / "report.html").is_file()
