"""The fault that every test run meets: a rank is killed, and nothing but its block is lost."""

from __future__ import annotations

import signal

import pytest
from fault_campaign import SWEEP, Campaign, deed

from ddp_bench.bench.results.store import failure_file

SMALL_SWEEP = (*SWEEP[:-2], "--passes", "none")
TWO_DEVICES = (3, 4)
"""Indices of the cases of SMALL_SWEEP that both ranks train."""

KILLED = deed("rank1_killed", "in_timed_block", "signal", signal.SIGKILL, ranks=[1], cases=TWO_DEVICES)


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    made = Campaign(tmp_path_factory.mktemp("one"), SMALL_SWEEP)
    made.ended["end"] = made.start(KILLED)
    return made


def test_a_killed_rank_costs_its_case_alone(campaign: Campaign) -> None:
    ended = campaign.kept(KILLED.name)
    status, reason = campaign.outcome(KILLED.name)
    assert status == "failed"
    assert "rank 1 was killed by signal 9 (SIGKILL) in " in reason
    assert ended.cases["status"].eq("failed").sum() == 1, campaign.reasons(KILLED.name)
    assert ended.manifest.restarts == 1
    case_id = ended.cases.loc[ended.cases["status"] == "failed", "case_id"].iloc[0]
    kept = (campaign.out / failure_file(case_id)).read_text()
    assert f"{reason.partition(';')[0]}\n" in kept
    assert "\nrank 1: was killed by signal 9 (SIGKILL)\n" in kept


def test_the_other_cases_are_whole(campaign: Campaign) -> None:
    cases = campaign.ended["end"].cases
    assert [i for i, n in enumerate(cases["num_devices"]) if n == 2] == list(TWO_DEVICES)
    others = cases[cases["status"] != "failed"]
    assert others["status"].eq("ok").all(), others["reason"].tolist()
    assert others["num_rounds"].eq(3).all()
    assert others.loc[others["mode"] == "ddp", "num_buckets"].notna().all()
