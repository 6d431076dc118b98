"""A rank that is killed, and faults of every kind: in one start, for .ci/run, and resumed."""

import signal

import pytest
from fault_campaign import SWEEP, Campaign, damage, deed, forget

SHORT = SWEEP[:-2]
OF_ONE, OF_TWO = (1, 2), (3, 4)
"""Indices of its DDP cases of one device and of two."""


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
    assert ended.cases["status"].ne("ok").sum() == len(said), ended.cases["reason"].tolist()
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
