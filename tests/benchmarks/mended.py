"""Whether mending what a run names as slow gains what it said.

`python tests/benchmarks/mended.py [NAME …]` runs DDP on two CPU cores with one thing slow on purpose and with
that thing mended, some 40 s a run, and prints a row of Markdown for each: what the slow run said of its first
cause, less what the mended one still says of it, and by how much its step got shorter. With fewer parameters
one device is faster too: there it is DDP's step less that of one device. A link takes root.
"""

import math
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from commands import python
from slow_workloads import pictures

from ddp_bench.bench.findings.answers import ddp_reference, headline
from ddp_bench.bench.findings.causes import causes, slow_ranks
from ddp_bench.bench.findings.numbers import with_interval
from ddp_bench.bench.results.case_result import case_results
from ddp_bench.bench.results.store import load_run
from ddp_bench.bench.stats.interval import Interval

SMALL = "--image-size 8 --batch-size 2 --steps 4 --gpus 1,2 --workload slow_workloads:"
PICTURES = "--arch resnet20 --image-size 16 --batch-size 4 --steps 4 --gpus 2 --data"
LAB = "-m bench.lab --hosts 2 --rate {} --"

KINDS = {
    "buffers": (("", f"{SMALL}Buffers"), ("", f"{SMALL}Buffers --sync-buffers off")),
    "late rank": (("", f"{SMALL}LateRank"), ("", f"{SMALL}Small")),
    "many parameters": (("", f"{SMALL}ManyParameters"), ("", f"{SMALL}FewParameters")),
    "slow data": (("", f"{PICTURES} {{folder}} --data-workers 1"), ("", f"{PICTURES} device")),
    "1 Gbit/s link": ((LAB.format("1gbit"), "--gpus 2"), (LAB.format("10gbit"), "--gpus 2")),
}


def measured(lab, options, out):
    """DDP's case without settings, or with the one asked for, and its causes by name."""
    command = [*lab.split(), *(["python"] if lab else []), "-m", "bench.run", *options.split()]
    common = "--modes ddp --bucket-cap-mb default --rounds 20 --max-time 3m --device cpu --quiet"
    done = python(*command, *common.split(), "--out", str(out), env={"PYTHONPATH": "tests"}, timeout_s=600)
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    run = load_run(out)
    cases = case_results(run.cases)
    named = causes(cases, slow_ranks(run.manifest, cases, run.times))
    single = next(c for c in cases if c.mode == "single")
    ddp = ddp_reference(headline(cases)) or next(c for c in cases if c.mode == "ddp" and c.num_devices == 2)
    return less(ddp.step_ms, single.step_ms) if "Parameters" in options else ddp.step_ms, named


def less(whole, part):
    """The difference of two independent intervals."""
    middle = whole.estimate - part.estimate
    below = math.hypot(whole.estimate - whole.low, part.high - part.estimate)
    return Interval(
        middle, middle - below, middle + math.hypot(whole.high - whole.estimate, part.estimate - part.low)
    )


def main():
    """Run what is asked for, and tell."""
    print("| slow | first cause | said (ms) | gained (ms) | both intervals meet |\n|---|---|---:|---:|---|")
    with tempfile.TemporaryDirectory() as scratch:
        folder = pictures(Path(scratch))
        for name in sys.argv[1:] or KINDS:
            (slow, named), (quick, left) = (
                measured(lab, options.format(folder=folder), Path(scratch, f"{name}{i}"))
                for i, (lab, options) in enumerate(KINDS[name])
            )
            first = next(iter(named))
            still = left.get(first, Interval(0.0, 0.0, 0.0))
            said, gained = less(named[first], still), less(slow, quick)
            meet = said.low <= gained.high and gained.low <= said.high
            row = (name, first, with_interval(said), with_interval(gained), "yes" if meet else "no")
            print("|", " | ".join(row), "|", flush=True)


if __name__ == "__main__":
    main()
