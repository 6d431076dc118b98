"""A rank that is killed, and faults of every kind: in one start, for .ci/run, and resumed."""

import signal

import pytest
from fault_campaign import SWEEP, Campaign, damage, deed, forget

from ddp_bench.bench.results.store import failure_file

SHORT = SWEEP[:-2]
OF_ONE, OF_TWO = (1, 2), (3, 4)
"""Indices of its DDP cases of one device and of two."""


@pytest.mark.campaign
def test_a_killed_rank_costs_its_case_alone(tmp_path):
    killed = deed("rank1_killed", "in_timed_block", "signal", signal.SIGKILL, ranks=[1], cases=OF_TWO)
    campaign = Campaign(tmp_path, (*SHORT, "--passes", "none"))
    campaign.ended["end"] = campaign.start(killed)
    ended = campaign.kept(killed.name)
    cases = ended.cases
    assert [i for i, n in enumerate(cases["num_devices"]) if n == 2] == list(OF_TWO)
    status, reason = campaign.outcome(killed.name)
    assert status == "failed"
    assert "rank 1 was killed by signal 9 (SIGKILL) in " in reason
    assert ended.manifest.restarts == 1
    (case_id,) = cases.loc[cases["status"] == "failed", "case_id"]
    kept = (campaign.out / failure_file(case_id)).read_text()
    assert f"{reason.partition(';')[0]}\n" in kept
    assert "\nrank 1: was killed by signal 9 (SIGKILL)\n" in kept
    others = cases[cases["status"] != "failed"]
    assert others["status"].eq("ok").all(), others["reason"].tolist()
    assert others["num_rounds"].eq(3).all()
    assert others.loc[others["mode"] == "ddp", "num_buckets"].notna().all()


FIRST = {"ranks": [0, 1], "nth": 1}
RAISED = deed("raised", "before_first_block", "raise", cases=OF_TWO[:1], **FIRST)
DIVERGED = deed("diverged", "in_no_sync_block", "not a number", cases=OF_TWO[1:], **FIRST)
OUT_OF_MEMORY = deed("out_of_memory", "in_anatomy_block", "out of memory", cases=OF_ONE)
KILLED = deed("rank0_killed", "between_rounds", "signal", signal.SIGKILL)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """A run that faults of every kind befell in its one start."""
    campaign = Campaign(tmp_path_factory.mktemp("faulty"), SHORT)
    campaign.ended["end"] = campaign.start(RAISED, DIVERGED, OUT_OF_MEMORY, KILLED)
    return campaign


@pytest.mark.campaign
@pytest.mark.smoke
def test_faults_of_every_kind(faulty):
    said = {
        RAISED.name: ("failed", "ValueError: no such sample"),
        DIVERGED.name: ("failed", "loss is nan after"),
        OUT_OF_MEMORY.name: ("oom", "out of GPU memory"),
    }
    for name, (expected, sentence) in said.items():
        ended = faulty.kept(name)
        assert ended.code == 0, ended.error
        status, reason = faulty.outcome(name)
        assert status == expected
        assert sentence in reason
    assert ended.cases["status"].ne("ok").sum() == len(said), faulty.reasons(RAISED.name)
    assert faulty.kept(KILLED.name).manifest.restarts == 1, "it died between rounds, which costs nothing"


@pytest.mark.campaign
def test_a_resume_mends_what_the_faults_a_killed_launcher_and_damage_left(faulty):
    launcher = deed("launcher_killed", "in_timed_block", "signal parent", signal.SIGKILL, after=RAISED.name)
    faulty.start(launcher)
    forget(faulty, damage(faulty.out, "smoke"))
    faulty.start()
    for fault in (RAISED, DIVERGED, OUT_OF_MEMORY, KILLED):
        faulty.kept(fault.name)
    assert faulty.kept(launcher.name).code == -signal.SIGKILL
    cases = faulty.ended["end"].cases
    assert cases["status"].eq("ok").all(), cases["reason"].tolist()
    assert cases["num_rounds"].eq(3).all()
