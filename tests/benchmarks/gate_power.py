"""How often the gate in turns calls a known slow-down a regression.

`python tests/benchmarks/gate_power.py 1000 --of DIR` draws 1,000 gates of each slow-down from real launches
of equal code, with replacement, and makes the candidate's rounds slower by calculation. The launches are
those of `ddp-bench gate --interleave . --launches 60 --out DIR`. Without a slow-down (A/A), any alarm is
false. Intervals are Clopper and Pearson's of 95%; they are of the draws, not of other launches.
"""

import argparse
import random
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from scipy.stats import binomtest

from ddp_bench.bench.common.errors import ExitCode
from ddp_bench.bench.gate.compare import compare
from ddp_bench.bench.gate.decide import Policy
from ddp_bench.bench.gate.main import DEFAULT_LAUNCHES
from ddp_bench.bench.gate.runs import merge_sides, read_run

POLICY = Policy(looks=DEFAULT_LAUNCHES)
SLOW_DOWNS = (0.0, 0.01, 0.02, 0.03, 0.05, 0.07, 0.10)


def slower(run, slow_down):
    """The run, each round's throughput so much lower."""

    def case_of(case):
        rates = {r: rate / (1 + slow_down) for r, rate in case.rounds["images_per_s"].items()}
        return replace(case, rounds={**case.rounds, "images_per_s": rates})

    return replace(run, cases=tuple(map(case_of, run.cases)))


def verdict(changed, seed):
    """A gate of launches drawn from pairs of baseline and candidate: its exit code, and how many it took."""
    launches = random.Random(seed).choices(changed, k=DEFAULT_LAUNCHES[-1])
    for look in DEFAULT_LAUNCHES:
        gate = compare(*merge_sides(launches[:look]), policy=POLICY)
        if not gate.needs_more_launches:
            break
    return gate.exit_code, look


def main():
    """Print a row of Markdown for each slow-down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("trials", type=int)
    parser.add_argument("--of", type=Path, metavar="DIR", required=True)
    parser.add_argument("--slower", type=float, nargs="+", metavar="SHARE", default=SLOW_DOWNS)
    options = parser.parse_args()
    pairs = [
        (read_run(launch / "baseline"), read_run(launch / "candidate"))
        for launch in sorted(options.of.glob("launch*"))
        if (launch / "candidate" / "cases.csv").exists()
    ]
    print(f"{len(pairs)} launches, {options.trials} gates drawn from them for each row\n")
    print("| slower by | pass | regression | undecided | launches, mean |\n|---:|---:|---:|---:|---:|")
    with ProcessPoolExecutor() as pool:
        for slow_down in options.slower:
            changed = [(baseline, slower(candidate, slow_down)) for baseline, candidate in pairs]
            found = [*pool.map(partial(verdict, changed), range(options.trials), chunksize=20)]
            codes = Counter(code for code, _ in found)
            shares = [of_draws(codes[code], len(found)) for code in (0, ExitCode.FAILED, ExitCode.UNDECIDED)]
            taken = sum(look for _, look in found) / len(found)
            print(f"| {slow_down:.0%} |", *(f"{share} |" for share in shares), f"{taken:.1f} |", flush=True)


def of_draws(number, trials):
    """A share of the draws in percent, with its interval."""
    found = binomtest(number, trials).proportion_ci(0.95, "exact")
    return f"{100 * number / trials:.1f}% ({100 * found.low:.1f} to {100 * found.high:.1f})"


if __name__ == "__main__":
    main()
