"""Ranks that leave the others waiting: stopped ones, and ones that raise alone."""

from __future__ import annotations

import re
import signal
from concurrent.futures import ThreadPoolExecutor

import pandas as pd
import pytest
from fault_campaign import TWO_DEVICES, Campaign, Deed, deed

from ddp_bench.bench.cluster.process import host_name

pytestmark = pytest.mark.campaign
TIMEOUT_S = 30
"""Enough for a preparation on a busy machine; the ranks sit idle through most of it."""

STOPPED = [
    deed("rank_stopped", "before_first_block", "signal", signal.SIGSTOP, ranks=[1], cases=TWO_DEVICES),
    deed("rank_stopped", "in_timed_block", "signal", signal.SIGSTOP, ranks=[1], cases=TWO_DEVICES),
    deed("rank_stopped", "in_no_sync_block", "signal", signal.SIGSTOP, ranks=[0], cases=TWO_DEVICES),
]
ALONE = [
    deed("exception_on_one_rank", moment, "raise", ranks=[1], cases=TWO_DEVICES, nth=1)
    for moment in ("before_first_block", "in_timed_block", "in_no_sync_block")
]


@pytest.fixture(scope="module")
def campaigns(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Campaign]:
    """Both at once: ranks that are stopped cost time, but no core."""
    made = {name: Campaign(tmp_path_factory.mktemp(name)) for name in ("stopped", "alone")}

    def run(name: str, deeds: list[Deed], timeout_s: int) -> None:
        made[name].start(*deeds, more=("--case-timeout", f"{timeout_s}s"))
        made[name].start()

    with ThreadPoolExecutor() as pool:
        futures = pool.submit(run, "stopped", STOPPED, TIMEOUT_S), pool.submit(run, "alone", ALONE, 120)
        for future in futures:
            future.result()
    return made


@pytest.mark.parametrize("fault", STOPPED, ids=lambda fault: fault.name)
def test_a_stopped_rank_is_ended(
    campaigns: dict[str, Campaign], undisturbed: pd.DataFrame, fault: Deed
) -> None:
    campaign = campaigns["stopped"]
    ended = campaign.check(fault.name, undisturbed)
    assert ended.code == 0, ended.error
    status, reason = campaign.outcome(fault.name)
    assert status == "timeout", reason
    (rank,) = fault.ranks
    assert f"within {TIMEOUT_S} s: rank {rank} on {host_name()} gave no answer; stacks are in logs/" in reason
    assert "Thread" in (campaign.out / "logs" / f"rank{1 - rank}.txt").read_text()


@pytest.mark.parametrize("fault", ALONE, ids=lambda fault: fault.name)
def test_an_exception_on_one_rank(
    campaigns: dict[str, Campaign], undisturbed: pd.DataFrame, fault: Deed
) -> None:
    campaign = campaigns["alone"]
    ended = campaign.check(fault.name, undisturbed)
    assert ended.code == 0, ended.error
    status, reason = campaign.outcome(fault.name)
    # In a block without communication the other rank comes to its end and hears of it there.
    waited = "no_sync" not in fault.name
    assert status == "failed", reason
    where = r"tests/deeds\.py:\d+, in raise_error"
    assert re.search(rf"ValueError: no such sample \({where}{'; rank 1' if waited else ''}\)", reason), reason
