"""How often the gate in turns calls a known slow-down a regression.

`python tests/benchmarks/gate_power.py 20` runs 20 trials of each slow-down, about a minute each: a whole
`ddp-bench gate --interleave` of a small project, whose step waits in the working tree for a share of the time
that it took. Without a wait (A/A), any alarm is false.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from scipy.stats import binomtest

sys.path.insert(0, str(Path(__file__).parents[1]))

from made_project import commit

from ddp_bench.bench.package import own_command

SLOW_DOWNS = (0.0, 0.01, 0.02, 0.03, 0.05, 0.07, 0.10)

NET = """
import time
import torch
from ddp_bench import Workload
from ddp_bench.models.resnet import resnet20

SLOW_DOWN = {slow_down}
begun_s = 0.0


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = resnet20()

    def forward(self, images):
        global begun_s
        begun_s = time.perf_counter()
        return self.net(images)


class SGD(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        until_s = begun_s + (time.perf_counter() - begun_s) * (1 + SLOW_DOWN)
        while time.perf_counter() < until_s:
            pass


workload = Workload(
    name="net",
    module=Net,
    batch=lambda size, generator: (
        torch.rand(size, 3, 32, 32, generator=generator), torch.randint(10, (size,), generator=generator)
    ),
    optimizer=lambda parameters: SGD(parameters, lr=0.01),
)
"""

RUN = "--workload net:workload --modes single --gpus 1 --batch-size 4 --steps 1 --rounds 40 --passes none"


def is_alarm(project, slow_down):
    """Gate the project, slowed down, against its commit."""
    (project / "net.py").write_text(NET.format(slow_down=slow_down))
    gate = own_command("gate", "--interleave", "HEAD", "--quiet", "--", *RUN.split())
    code = subprocess.run(gate, cwd=project, check=False).returncode
    if code not in (0, 1, 3):
        sys.exit(f"a gate ended with {code}")
    return code == 1


def main():
    """Run so many trials of each slow-down, and print a row of Markdown for each."""
    num_trials = int(sys.argv[1])
    print("| injected slow-down | called a regression | trials | rate [95%] |\n|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder)
        commit(project, {"net.py": NET.format(slow_down=0.0)})
        for slow_down in SLOW_DOWNS:
            alarms = sum(is_alarm(project, slow_down) for _ in range(num_trials))
            low, high = binomtest(alarms, num_trials).proportion_ci(method="exact")
            rate = f"{alarms / num_trials:.0%} [{100 * low:.0f}, {100 * high:.0f}]"
            print(f"| {slow_down:.0%} | {alarms} | {num_trials} | {rate} |", flush=True)


if __name__ == "__main__":
    main()
