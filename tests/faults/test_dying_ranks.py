"""Ranks that are killed: their case is lost, the launcher starts all ranks again, the others go on."""

from __future__ import annotations

import json
import signal

import pandas as pd
import pytest
from fault_campaign import TWO_DEVICES, Campaign, Deed, deed

pytestmark = pytest.mark.campaign
RANK_1 = [
    deed("rank1_killed", moment, "signal", signal.SIGKILL, ranks=[1], cases=TWO_DEVICES)
    for moment in ("before_first_block", "in_timed_block")
] + [deed("rank1_killed", "between_rounds", "signal", signal.SIGKILL, ranks=[1])]
RANK_0 = [
    deed("rank0_killed", moment, "signal", signal.SIGKILL)
    for moment in ("before_first_block", "in_timed_block")
] + [deed("rank0_killed", "between_rounds", "signal", signal.SIGKILL, after=RANK_1[-1].name)]


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    made = Campaign(tmp_path_factory.mktemp("dying"))
    made.start(*RANK_1, *RANK_0)
    made.start()
    return made


@pytest.mark.parametrize("fault", RANK_1 + RANK_0, ids=lambda fault: fault.name)
def test_survives(campaign: Campaign, undisturbed: pd.DataFrame, fault: Deed) -> None:
    ended = campaign.check(fault.name, undisturbed)
    assert ended.code == 0, ended.error
    assert ended.manifest.restarts == len(RANK_1 + RANK_0)
    if "between" not in fault.name:
        status, reason = campaign.outcome(fault.name)
        assert status == "failed"
        assert f"rank {fault.ranks[0]} was killed by signal 9 (SIGKILL) in " in reason
    marker = next(campaign.markers.glob(f"{fault.name}.*.json"))
    assert fault.what in json.loads(marker.read_text())["now"].get("what", fault.what)
