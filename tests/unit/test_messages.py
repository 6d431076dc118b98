"""What conductor and workers send each other arrives as it was; nothing else is taken."""

import msgspec
import pytest
from made import case_of

from ddp_bench.bench.layout import BucketCaps, BucketLayout
from ddp_bench.bench.manifest import Cgroup, FirstHost, Gpu, RankPlace
from ddp_bench.bench.results.measured import BlockTimes, DeviceMemory
from ddp_bench.bench.settings import Settings
from ddp_bench.bench.worker import messages as m

SETTINGS = Settings(modes=("ddp",), bucket_cap_mb=(BucketCaps(), BucketCaps((1.0, 25.0))), max_time=0.1)
SEEN = m.SeenGpus(host="node", local_rank=0, uuids=("GPU-1",), facts=(Gpu(uuid="GPU-1"),))


@pytest.mark.parametrize(
    "command",
    [
        m.Tell(),
        m.Quit(),
        m.Prepare(asked=SETTINGS, launched=m.Launched(world_size=4, ranks_per_node=2, seen=(SEEN,))),
        m.Warm(
            index=3, case=case_of(bucket_cap_mb="1/25"), oversubscribed=True, by_device=(1, 2), least_s=0.1
        ),
        m.Settle(index=None, num_ranks=2, backend="gloo"),
    ],
    ids=lambda one: one.name,
)
def test_a_command_arrives_as_it_was_sent(command):
    line = m.encode(command)
    assert line.count(b"\n") == 1
    assert m.decode(line, m.AnyCommand) == command


@pytest.mark.parametrize(
    "value",
    [
        m.Warmed(
            times=BlockTimes(1.5, (1.0, 0.1), {"ready_ms": [0.25]}, b"a trace"),
            memory=(DeviceMemory(1.0, 2.0),),
            layout=BucketLayout((8, 16), ((1,), (0,)), (2, 4)),
        ),
        m.Begun(
            place=RankPlace(rank=1, host="node"),
            fingerprint="f",
            machine=FirstHost(host="node", memory_gib=0.1, cgroup=Cgroup(cpuset="0-3")),
        ),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_result_arrives_as_it_was_sent(value):
    found = m.decode(m.encode(m.Report(value=value)), m.AnyAnswer)
    assert msgspec.convert(found.value, type(value)) == value


def test_what_is_not_finite_arrives_as_nothing():
    found = m.decode(m.encode(m.Report(value=[float("nan"), float("inf"), 1.0])), m.AnyAnswer)
    assert found.value == [None, None, 1.0]


class Unknown:
    def __reduce__(self):
        raise AssertionError("it is pickled")


@pytest.mark.parametrize("value", [object(), Unknown(), print])
def test_nothing_else_is_sent(value):
    with pytest.raises(TypeError):
        m.encode(m.Report(value=value))


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"\x80\x04.", b"{", b"[]", b"1", b"null", b"[" * 100_000, b'{"do": 1}', b'{"do": "leave"}'),
        *(b'{"do": "block"}', b'{"do": "drop", "index": "x"}', b'{"is": "report"}'),
    ],
)
def test_what_no_conductor_sent_is_refused(line):
    with pytest.raises(ValueError, match=r"."):
        m.decode(line, m.AnyCommand)
