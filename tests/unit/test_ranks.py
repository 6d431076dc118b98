from typing import NoReturn

import pytest
from made import made_manifest

from ddp_bench.bench.cluster import meeting
from ddp_bench.bench.cluster.ranks import HostHello, check_alike
from ddp_bench.bench.conditions import Question, needed
from ddp_bench.bench.errors import AgreedError, UsageError


def host(name: str, *, torch: str = "2.15.0", seed: int = 0) -> HostHello:
    told = made_manifest(
        environment={"host": name, "gpus": [{"name": "H200", "driver": "570"}]},
        versions={"torch": torch, "cuda": "13.0", "python": "3.11.7"},
        git={"commit": "abc", "dirty": False},
        settings={"seed": seed, "batch_size": 64},
    )
    return HostHello(told.environment, needed(told, Question.HOSTS))


def test_hosts_that_are_alike_pass() -> None:
    check_alike([host("a"), None, host("b"), None])


def test_every_difference_is_listed() -> None:
    with pytest.raises(AgreedError) as caught:
        check_alike([host("a"), *(host(name, torch="2.11.0", seed=1) for name in "bc")])
    text = str(caught.value)
    assert "a: torch 2.15.0 (CUDA 13.0), b and 1 more: torch 2.11.0 (CUDA 13.0)" in text
    assert "a: --seed 0, b and 1 more: --seed 1" in text
    assert "batch" not in text
    assert "\n" not in text


def test_ranks_that_cannot_meet_for_no_reason_given_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> NoReturn:
        raise RuntimeError

    monkeypatch.setattr(meeting, "rendezvous", fails)
    with pytest.raises(UsageError, match=r"cannot meet at .*: RuntimeError"):
        meeting.meet.__wrapped__()
