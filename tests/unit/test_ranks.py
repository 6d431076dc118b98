import pytest
from made import made_manifest

from ddp_bench.bench.conditions import Question, needed
from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.manifest import RankPlace
from ddp_bench.bench.run.described import check_alike
from ddp_bench.bench.worker import rank as module
from ddp_bench.bench.worker.messages import Begun

PLACE = RankPlace(rank=0)


def host(name, *, torch="2.15.0", seed=0):
    told = made_manifest(
        environment={"host": name, "gpus": [{"name": "H200", "driver": "570"}]},
        versions={"torch": torch, "cuda": "13.0", "python": "3.11.7"},
        git={"commit": "abc", "dirty": False},
        settings={"seed": seed, "batch_size": 64},
    )
    conditions = needed(told, Question.HOSTS)
    return Begun(place=PLACE, fingerprint="", machine=told.environment, conditions=conditions)


def test_hosts_that_are_alike_pass():
    silent = Begun(place=PLACE, fingerprint="")
    check_alike([host("a"), silent, host("b"), silent])


def test_every_difference_is_listed():
    with pytest.raises(UsageError) as caught:
        check_alike([host("a"), *(host(name, torch="2.11.0", seed=1) for name in "bc")])
    text = str(caught.value)
    assert "a: torch 2.15.0 (CUDA 13.0), b and 1 more: torch 2.11.0 (CUDA 13.0)" in text
    assert "a: --seed 0, b and 1 more: --seed 1" in text
    assert "batch" not in text
    assert "\n" not in text


def test_ranks_that_cannot_meet_for_no_reason_given_are_told_so(monkeypatch):
    def fails(*_, **__):
        raise RuntimeError

    monkeypatch.setattr(module, "rendezvous", fails)
    with pytest.raises(UsageError, match=r"cannot meet at .*: RuntimeError"):
        module.joined_store()
