"""What a user's model can do: raise on every rank, diverge, run out of memory; each costs its case alone."""

from __future__ import annotations

import pandas as pd
import pytest
from fault_campaign import ONE_DEVICE, TWO_DEVICES, Campaign, Deed, deed

pytestmark = pytest.mark.campaign
MOMENTS = ("before_first_block", "in_timed_block", "in_no_sync_block")


def both_ranks(kind: str, act: str) -> list[Deed]:
    return [deed(kind, moment, act, ranks=[0, 1], cases=TWO_DEVICES) for moment in MOMENTS]


EVERYWHERE = both_ranks("exception_on_every_rank", "raise")
DIVERGED = both_ranks("loss_is_nan", "not a number")
OUT_OF_MEMORY = [
    deed("allocator_out_of_memory", moment, "out of memory", cases=ONE_DEVICE)
    for moment in ("before_first_block", "in_timed_block", "in_anatomy_block")
]
STARTS = (EVERYWHERE + OUT_OF_MEMORY, DIVERGED)
SAID = {
    "exception_on_every_rank": ("failed", "ValueError: no such sample"),
    "loss_is_nan": ("failed", "loss is nan after"),
    "allocator_out_of_memory": ("oom", "out of GPU memory; use a smaller --batch-size or smaller inputs"),
}


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    made = Campaign(tmp_path_factory.mktemp("failing"))
    for faults in STARTS:
        made.start(*faults)
    made.start()
    return made


@pytest.mark.parametrize(
    "fault", [fault for start in STARTS for fault in start], ids=lambda fault: fault.name
)
def test_survives(campaign: Campaign, undisturbed: pd.DataFrame, fault: Deed) -> None:
    ended = campaign.check(fault.name, undisturbed)
    assert ended.code == 0, ended.error
    assert ended.manifest.restarts == 0, "an error on every rank needs no restart"
    status, reason = campaign.outcome(fault.name)
    expected, sentence = SAID[fault.name.split("-")[0]]
    assert status == expected
    assert sentence in reason
    faults = next(start for start in STARTS if fault in start)
    assert ended.cases["status"].ne("ok").sum() == len(faults), campaign.reasons(fault.name)
