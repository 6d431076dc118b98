"""Ranks that fail in mid-backward, between two buckets, or whose device can be used no more.

All start again where they fell out of step: in their own run, and under the user's torchrun, which starts
them again by its `--max-restarts`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

import pytest
from fault_campaign import SWEEP, Campaign, Deed

pytestmark = pytest.mark.campaign
DEEP_SWEEP = (
    *("--workload", "faulty_workload:deep", *SWEEP[2:]),
    *("--gpus", "2", "--bucket-cap-mb", "0.01", "--rounds", "2", "--passes", "none"),
)
SINGLE, APART, TOGETHER, ALONE, NONE = range(5)
"""Indices of the cases of DEEP_SWEEP, the last four of two ranks, by who fails in them."""

TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    *("--max-restarts", "3", "--no-python"),
)


def raises(name: str, *, layer: int, ranks: Sequence[int], case: int, act: str = "raise") -> Deed:
    """Raise when the gradient of `layer` is there: those of the layers above it are in their buckets."""
    where = f"backward {layer}"
    return Deed(name=name, act=act, ranks=ranks, where=where, what="(timed)", cases=[case])


DEEDS = (
    raises("first_of_two", layer=3, ranks=[0], case=APART),
    raises("second_of_two", layer=1, ranks=[1], case=APART),
    raises("both", layer=2, ranks=[0, 1], case=TOGETHER),
    raises("only_one", layer=2, ranks=[1], case=ALONE),
    raises("device_assert", layer=2, ranks=[0], case=SINGLE, act="device assert"),
)


@pytest.mark.parametrize("within", [(), TORCHRUN], ids=["own ranks", "torchrun"])
def test_every_failure_costs_its_case_alone(
    within: Sequence[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    campaign = Campaign(tmp_path_factory.mktemp("backwards"), DEEP_SWEEP)
    ended = campaign.start(*DEEDS, within=within)
    assert ended.code == 0, ended.error
    for deed in DEEDS:
        assert [*campaign.markers.glob(f"{deed.name}.*.json")], f"{deed.name} never happened"
    assert ended.cases["status"].tolist() == ["failed"] * 4 + ["ok"], ended.error
    reasons = ended.cases["reason"].fillna("").str.removesuffix("; its finished rounds are kept").tolist()
    where = r"ValueError: no such sample \(tests/deeds.py:\d+, in raise_error"
    assert re.fullmatch(rf"{where}\)", reasons[APART])
    assert reasons[TOGETHER] == reasons[APART]
    assert re.fullmatch(rf"{where}; rank 1\)", reasons[ALONE])
    assert ended.cases["num_rounds"].iloc[NONE] == 2
    lost = "AcceleratorError: CUDA error: device-side assert triggered"
    assert reasons[SINGLE].startswith(f"{lost} (tests/deeds.py:")
    assert ended.manifest.restarts == 3, "who failed at the same bucket need not start again"
