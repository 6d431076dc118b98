"""A rank that is killed, and faults of every kind: in one start for .ci/run, and then resumed."""

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


@pytest.mark.campaign
@pytest.mark.parametrize("resumed", [pytest.param(False, marks=pytest.mark.smoke), True])
def test_faults_of_every_kind(resumed, tmp_path):
    first = {"ranks": [0, 1], "nth": 1}
    raised = deed("raised", "before_first_block", "raise", cases=OF_TWO[:1], **first)
    diverged = deed("diverged", "in_no_sync_block", "not a number", cases=OF_TWO[1:], **first)
    out_of_memory = deed("out_of_memory", "in_anatomy_block", "out of memory", cases=OF_ONE)
    killed = deed("rank0_killed", "between_rounds", "signal", signal.SIGKILL)
    launcher = deed("launcher_killed", "in_timed_block", "signal parent", signal.SIGKILL, after=raised.name)
    campaign = Campaign(tmp_path, SHORT)
    campaign.ended["end"] = campaign.start(raised, diverged, out_of_memory, killed)
    if resumed:
        campaign.start(launcher)
        forget(campaign, damage(campaign.out, "smoke"))
        campaign.start()
    said = {
        raised.name: ("failed", "ValueError: no such sample"),
        diverged.name: ("failed", "loss is nan after"),
        out_of_memory.name: ("oom", "out of GPU memory"),
    }
    for name, (expected, sentence) in said.items():
        ended = campaign.kept(name)
        assert ended.code == 0, ended.error
        status, reason = campaign.outcome(name)
        assert status == expected
        assert sentence in reason
    assert ended.cases["status"].ne("ok").sum() == len(said), campaign.reasons(raised.name)
    assert campaign.kept(killed.name).manifest.restarts == 1, "it died between rounds, which costs nothing"
    if resumed:
        assert campaign.kept(launcher.name).code == -signal.SIGKILL
        cases = campaign.ended["end"].cases
        assert cases["status"].eq("ok").all(), cases["reason"].tolist()
        assert cases["num_rounds"].eq(3).all()
