"""Faults of every kind in three starts of one run: what .ci/run takes of the campaign."""

from __future__ import annotations

import signal

import pytest
from fault_campaign import ONE_DEVICE, TWO_DEVICES, Campaign, damage, deed, forget

pytestmark = [pytest.mark.campaign, pytest.mark.smoke]

BOTH = {"ranks": [0, 1], "cases": TWO_DEVICES}
RAISED = deed("raised", "before_first_block", "raise", **BOTH)
DIVERGED = deed("diverged", "in_no_sync_block", "not a number", **BOTH)
OUT_OF_MEMORY = deed("out_of_memory", "in_anatomy_block", "out of memory", cases=ONE_DEVICE)
KILLED = deed("rank0_killed", "between_rounds", "signal", signal.SIGKILL)
LAUNCHER = deed("launcher_killed", "in_timed_block", "signal parent", signal.SIGKILL, after=RAISED.name)
CASES = (
    (RAISED, "failed", "ValueError: no such sample"),
    (DIVERGED, "failed", "loss is nan after"),
    (OUT_OF_MEMORY, "oom", "out of GPU memory"),
)


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    made = Campaign(tmp_path_factory.mktemp("smoke"))
    made.start(RAISED, DIVERGED, OUT_OF_MEMORY, KILLED)
    made.start(LAUNCHER)
    forget(made, damage(made.out, "smoke"))
    made.start()
    return made


def test_a_model_that_fails_costs_its_case_alone(campaign: Campaign) -> None:
    for fault, expected, sentence in CASES:
        ended = campaign.kept(fault.name)
        assert ended.code == 0, ended.error
        status, reason = campaign.outcome(fault.name)
        assert status == expected
        assert sentence in reason
    assert ended.cases["status"].ne("ok").sum() == len(CASES), campaign.reasons(RAISED.name)


def test_a_rank_that_died_between_rounds_costs_nothing(campaign: Campaign) -> None:
    assert campaign.kept(KILLED.name).manifest.restarts == 1


def test_a_killed_launcher_and_damaged_files_cost_the_last_block_alone(campaign: Campaign) -> None:
    assert campaign.kept(LAUNCHER.name).code == -signal.SIGKILL
    cases = campaign.ended["end"].cases
    assert cases["status"].eq("ok").all(), cases["reason"].tolist()
    assert cases["num_rounds"].eq(3).all()
