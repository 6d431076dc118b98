from dataclasses import replace

import pytest

from bench.cluster.hosts import Facts, check_alike
from bench.errors import AgreedError

HOST = Facts(
    host="a",
    device="H200",
    num_ranks="8",
    driver="570",
    torch="2.15.0",
    python="3.11.7",
    cuda="13.0",
    code="abc",
    settings={"seed": "0", "batch_size": "64"},
)


def test_hosts_that_are_alike_pass() -> None:
    check_alike([HOST, None, replace(HOST, host="b"), None])


def test_every_difference_is_listed() -> None:
    other = replace(HOST, host="b", torch="2.11.0", settings={"seed": "1", "batch_size": "64"})
    with pytest.raises(AgreedError) as caught:
        check_alike([HOST, other, replace(other, host="c")])
    text = str(caught.value)
    assert "a: torch 2.15.0, b and 1 more: torch 2.11.0" in text
    assert "a: --seed 0, b and 1 more: --seed 1" in text
    assert "batch" not in text
    assert "\n" not in text
