"""The fault that every test run meets: a rank is killed, then the run is asked to end; nothing is lost."""

from __future__ import annotations

import signal

import pytest
from fault_campaign import SWEEP, Campaign, deed

SMALL_SWEEP = SWEEP[:-2]
TWO_DEVICES = (3, 4)
"""Indices of the cases of SMALL_SWEEP that both ranks train."""

KILLED = deed("rank1_killed", "in_timed_block", "signal", signal.SIGKILL, ranks=[1], cases=TWO_DEVICES)
ASKED = deed("sigterm", "between_rounds", "signal parent", signal.SIGTERM, after=KILLED.name)


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    made = Campaign(tmp_path_factory.mktemp("one"), SMALL_SWEEP)
    made.start(KILLED, ASKED)
    made.start()
    return made


def test_a_killed_rank_costs_its_case_alone(campaign: Campaign) -> None:
    ended = campaign.kept(KILLED.name)
    status, reason = campaign.blamed(KILLED.name)
    assert status == "failed"
    assert "rank 1 was killed by signal 9 (SIGKILL) in " in reason
    assert ended.cases["status"].eq("failed").sum() == 1, campaign.reasons(KILLED.name)
    assert ended.manifest["restarts"] == 1


def test_a_run_that_is_asked_to_end_says_how_to_go_on(campaign: Campaign) -> None:
    ended = campaign.kept(ASKED.name)
    assert ended.code == 130
    assert ended.manifest["timing"]["stopped_because"] == "interrupted"
    assert ended.error.splitlines()[-1].endswith(f"python -m bench.run --resume {campaign.out}")
    assert "Traceback" not in ended.error


def test_the_resumed_run_is_whole(campaign: Campaign) -> None:
    cases = campaign.ended["end"].cases
    assert [i for i, n in enumerate(cases["num_devices"]) if n == 2] == list(TWO_DEVICES)
    assert cases["status"].eq("ok").all(), cases["reason"].tolist()
    assert cases["num_rounds"].eq(3).all()
    assert cases.loc[list(TWO_DEVICES), "num_buckets"].notna().all()
