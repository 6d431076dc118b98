"""Fixtures of the fault campaign: the run that nothing befell, and campaigns in folders of their own."""

from __future__ import annotations

import pandas as pd
import pytest
from fault_campaign import SAME, TWO_DEVICES, Campaign


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    campaign = Campaign(tmp_path_factory.mktemp("undisturbed"))
    ended = campaign.start()
    assert ended.code == 0, ended.error
    assert ended.cases["status"].eq("ok").all()
    assert [i for i, n in enumerate(ended.cases["num_devices"]) if n == 2] == list(TWO_DEVICES)
    return ended.cases[SAME]
