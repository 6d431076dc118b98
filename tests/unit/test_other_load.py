"""What others used of a run's cores: the arithmetic, the system's own counts, and what is said of it."""

import subprocess
import sys
from dataclasses import replace

import pandas as pd
import pytest
from made import made_manifest
from msgspec import structs
from report_runs import case, run

from ddp_bench.bench.cluster.load import LoadReading, mean_load, other_loads, read_load
from ddp_bench.bench.findings.cautions import other_load, run_cautions
from ddp_bench.bench.manifest import Load
from ddp_bench.report.conditions import groups

BURN = """
import os, sys, time
if sys.argv[1] == "orphan" and os.fork():
    os._exit(0)  # its parent is now init: a descendant of nobody here
began = time.process_time()
while time.process_time() - began < 0.6:
    pass
print("done", flush=True)
"""


def reading(rank, at_s, own_s, busy_s, **more):
    steal = tuple(0.0 for _ in busy_s)
    made = LoadReading("a", (rank,), at_s, own_s, busy_s, steal)
    return replace(made, **more)


def test_what_the_ranks_did_not_use_of_their_cores_others_did():
    """By hand: over 10 s, cores 0 and 1 are busy for 9 and 7 s, of which the two ranks had 8 and 4 s."""
    before = [reading(0, 100.0, 1.0, (50.0, 60.0, 70.0)), reading(1, 100.5, 2.0, (51.0, 61.0, 71.0))]
    after = [
        reading(0, 110.0, 9.0, (59.0, 67.0, 80.0), steal_s=(0.5, 0.0, 9.0)),
        reading(1, 111.0, 6.0, (60.0, 68.0, 81.0)),
    ]
    assert other_loads(before, after) == [Load(cores=2, others=0.4, steal=0.05, seconds=10.0)]
    apart = [[replace(r, machine=name) for r, name in zip(rs, "ab", strict=True)] for rs in (before, after)]
    assert other_loads(*apart) == [
        Load(cores=1, others=0.1, steal=0.05, seconds=10.0),
        Load(cores=1, others=0.286, steal=0.0, seconds=10.5),
    ]


def test_loads_of_two_attempts_are_weighed_by_their_time():
    earlier = Load(cores=2, others=0.1, steal=0.0, seconds=30.0)
    now = Load(cores=2, others=0.5, steal=0.2, seconds=10.0)
    assert mean_load(now, earlier) == Load(cores=2, others=0.2, steal=0.05, seconds=40.0)
    at_once = (structs.replace(load, seconds=0.0) for load in (now, earlier))
    assert mean_load(*at_once).others == 0.5, "of no time at all"


def test_where_a_rank_cannot_tell_nothing_is_told():
    known = reading(0, 0.0, 0.0, (0.0,))
    assert other_loads([known, None], [known, known]) == []
    assert other_loads([known], [None]) == []


@pytest.mark.skipif(sys.platform != "linux", reason="counted by Linux' /proc")
def test_a_program_of_others_is_counted_and_a_child_of_ones_own_is_not():
    """Oracle: the 0.6 s of CPU time that the program itself counts before it ends."""

    def own_and_others(kind):
        before = read_load()
        subprocess.run([sys.executable, "-c", BURN, kind], check=True, stdout=subprocess.PIPE)
        after = read_load()
        (found,) = other_loads([before], [after])
        return after.own_s - before.own_s, found.others * (after.at_s - before.at_s)

    own_s, others_s = own_and_others("orphan")
    assert own_s < 0.4
    assert others_s > 0.4
    own_s, _ = own_and_others("child")
    assert own_s > 0.5


def told(busy, steal):
    return {"load": [{"cores": 2, "others": 0.0, "steal": 0.0}, {"cores": 4, "others": busy, "steal": steal}]}


@pytest.mark.parametrize(
    ("busy", "steal", "said"),
    [
        (0.4, 0.0, "other programs used 10% of the cores during the rounds"),
        (0.0, 0.2, "the hypervisor gave 5% of their time to other guests during the rounds"),
        (0.4, 0.2, "used 10% of the cores and the hypervisor gave 5%"),
        (0.2, 0.08, ""),
    ],
)
def test_a_load_that_could_pass_for_a_regression_is_a_caution(busy, steal, said):
    measured = run([case("single", 1, 100.0, device_type="cpu")], told(busy, steal))
    found = [c for c in run_cautions(measured.manifest, measured.cases, measured.blocks) if "load" in c.kind]
    assert len(found) == bool(said)
    assert all(said in caution.sentence for caution in found)
    (facts,) = (group.facts for group in groups(measured.manifest, measured.cases) if group.title == "Run")
    shown = [fact.value for fact in facts if fact.name == "cores used by others"]
    assert shown == [f"{25 * busy:.0f}%, other guests {25 * steal:.0f}%"]


@pytest.mark.parametrize("load", [[], [{"cores": 0, "others": 1}]])
def test_nothing_is_said_of_what_a_manifest_does_not_tell(load):
    cases = pd.DataFrame({"device_type": ["cpu"]})
    assert other_load(made_manifest(load=load), cases) is None
    assert other_load(made_manifest(**told(4.0, 4.0)), pd.DataFrame({"device_type": ["cuda"]})) is None
