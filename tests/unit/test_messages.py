"""What ranks send each other: data of faithful types, and nothing that could run code."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import dataclass
from typing import Any

import pytest

from ddp_bench.bench.cluster.messages import decode, encode, may_be_sent
from ddp_bench.bench.layout import BucketCaps
from ddp_bench.bench.manifest import Cgroup, FirstHost, Gpu
from ddp_bench.bench.recovery.reopen import Completion, Progress, RankHello
from ddp_bench.bench.settings import Settings

may_be_sent(Settings, BucketCaps, FirstHost)


@dataclass(frozen=True)
class Unknown:
    value: int = 0


@pytest.mark.parametrize(
    "value",
    [
        None,
        [True, 1, -(2**70), 0.1, "€\x00\n"],
        {"a": (1, (2, "x")), 3: {"dict": [1]}, (4, 5): b"\x00\xff"},
        {"tuple": [1, 2]},
        frozenset({("case", "timed", 1)}),
        {1, 2},
        (),
        RankHello("node", {0: -9, 1: 75}, None),
        FirstHost(host="node", memory_gib=0.1, gpus=(Gpu(uuid="GPU-1"),), cgroup=Cgroup(cpuset="0-3")),
        Settings(modes=("ddp",), bucket_cap_mb=(BucketCaps(), BucketCaps((1.0, 25.0)))),
        Progress(
            measured=frozenset({("case", "timed", 1)}),
            dropped=frozenset({3}),
            layouts={0: (8, 16)},
            curves=frozenset({(2, "gloo")}),
            elapsed_s=0.1,
            last_round=2,
            sustained_s={"case": 1.5},
            notes=("a note",),
        ),
    ],
    ids=repr,
)
def test_types_arrive_as_they_were_sent(value: Any) -> None:
    message = encode(value)
    json.loads(message)
    found = decode(message)
    assert repr(found) == repr(value)
    assert found == value


def test_what_is_not_finite_and_what_is_an_enum_arrive_too() -> None:
    assert math.isnan(decode(encode(math.nan)))
    assert decode(encode(Completion.TIME)) == Completion.TIME


@pytest.mark.parametrize("value", [object(), Unknown(), print, {"a": Unknown()}, complex(1)])
def test_nothing_else_is_sent(value: Any) -> None:
    with pytest.raises(TypeError, match="ranks cannot send"):
        encode(value)


@pytest.mark.parametrize(
    "message",
    [
        pickle.dumps(print),
        b'{"Unknown":{"value":1}}',
        b'{"RankHello":{"nonsense":1}}',
        b'{"RankHello":{},"tuple":[]}',
        b'{"FirstHost":{"host":5}}',
        b'{"set":[[1]]}',
        b'{"bytes":"?"}',
        b"[" * 100_000,
        b"",
    ],
    ids=lambda message: repr(message[:30]),
)
def test_what_no_rank_sent_is_refused(message: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whatever it is, it is no message
        decode(message)
