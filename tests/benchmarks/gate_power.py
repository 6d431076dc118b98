"""How often the gate in turns calls a known slow-down a regression.

`python tests/benchmarks/gate_power.py 20` runs 20 trials of each slow-down, about a minute each: a whole
`ddp-bench gate --interleave` of a small project, whose step waits in the working tree for a share of the time
that it took. Without a wait (A/A), any alarm is false.

`python tests/benchmarks/gate_power.py 400 --of DIR` draws 400 gates of each slow-down from real launches of
equal code instead, with replacement, and makes the candidate's rounds slower by calculation. The launches are
those of `ddp-bench gate --interleave . --launches 60 --out DIR`.
"""

import argparse
import random
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

from scipy.stats import binomtest

sys.path.insert(0, str(Path(__file__).parents[1]))

from made_project import commit

from ddp_bench.bench.errors import ExitCode
from ddp_bench.bench.gate.compare import compare
from ddp_bench.bench.gate.main import DEFAULT_LAUNCHES, DEFAULT_THRESHOLD
from ddp_bench.bench.gate.runs import both, read_run
from ddp_bench.bench.process import own_command
from ddp_bench.bench.results.schema import GATED

SLOW_DOWNS = (0.0, 0.01, 0.02, 0.03, 0.05, 0.07, 0.10)

NET = """
import time
import torch
from ddp_bench import Workload
from ddp_bench.models.resnet import ResNet20

SLOW_DOWN = {slow_down}
begun_s = 0.0


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = ResNet20()

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


def slower(run, slow_down):
    """The run, each round's throughput so much lower."""

    def case_of(case):
        rates = {r: rate / (1 + slow_down) for r, rate in case.rounds["images_per_s"].items()}
        return replace(case, rounds={**case.rounds, "images_per_s": rates})

    return replace(run, cases=tuple(map(case_of, run.cases)))


def verdict(launches):
    """A gate of these launches, pairs of baseline and candidate: its exit code, and how many it took."""
    for look in DEFAULT_LAUNCHES:
        gate = compare(
            *both(launches[:look]), thresholds=dict.fromkeys(GATED, DEFAULT_THRESHOLD), looks=DEFAULT_LAUNCHES
        )
        if not gate.needs_more_launches:
            break
    return gate.exit_code, look


def resample(folder, num_trials):
    """Print a row of Markdown for each slow-down: verdicts of gates drawn from the launches in `folder`."""
    pairs = [
        (read_run(launch / "baseline"), read_run(launch / "candidate"))
        for launch in sorted(folder.glob("launch*"))
        if (launch / "candidate" / "cases.csv").exists()
    ]
    print(f"{len(pairs)} launches, {num_trials} gates drawn from them for each row\n")
    print("| slower by | pass | regression | undecided | launches, mean |\n|---:|---:|---:|---:|---:|")
    chance = random.Random(1)
    for slow_down in SLOW_DOWNS:
        changed = [(baseline, slower(candidate, slow_down)) for baseline, candidate in pairs]
        found = [verdict(chance.choices(changed, k=DEFAULT_LAUNCHES[-1])) for _ in range(num_trials)]
        codes = Counter(code for code, _ in found)
        of = [codes[code] for code in (ExitCode.OK, ExitCode.FAILED, ExitCode.NOT_COMPARABLE)]
        taken = sum(look for _, look in found) / num_trials
        print(
            f"| {slow_down:.0%} |",
            *(f"{100 * n / num_trials:.1f}% |" for n in of),
            f"{taken:.1f} |",
            flush=True,
        )


def main():
    """Run, or draw, so many trials of each slow-down, and print a row of Markdown for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("trials", type=int)
    parser.add_argument("--of", type=Path, metavar="DIR")
    options = parser.parse_args()
    if options.of is not None:
        resample(options.of, options.trials)
        return
    num_trials = options.trials
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
