"""Which message sizes an all-reduce curve has, and how often each is measured."""

from collections import Counter

import pytest

from ddp_bench.bench.run.alone import CURVE_BYTES, CURVE_REPETITIONS, LEAST_REPETITIONS, _curve

MIB = 2**20


def measured(bytes_per_ms, largest, *, further_s=10.0, fails=None):
    """On a link of that rate, whose time is the clock's."""
    clock = [0.0]

    def once(size):
        clock[0] += size / bytes_per_ms / 1000
        return None if size == fails else size / bytes_per_ms

    return _curve(once, largest, lambda: clock[0], further_s=further_s)


@pytest.mark.parametrize(
    ("bytes_per_ms", "largest", "further_s", "last"),
    [
        (100e6, 4 * MIB, 10, 256 * MIB),  # NVLink: all of it
        (125e3, 47 * MIB, 10, 256 * MIB),  # 1 Gbit/s: 256 MiB take 2.1 s
        (125e3, 47 * MIB, 4, 64 * MIB),
        (25e3, 47 * MIB, 10, 64 * MIB),  # 200 Mbit/s: no more than the gradients need
        (25e3, 47 * MIB, float("inf"), 256 * MIB),
        (25e3, 200 * MIB, 0, 256 * MIB),
        (1e6, 4 * MIB, 0.2, 64 * MIB),  # what 16 and 64 MiB take is no longer there for 256 MiB
    ],
)
def test_a_curve_goes_as_far_as_the_gradients_and_further_while_there_is_time(
    bytes_per_ms, largest, further_s, last
):
    found = measured(bytes_per_ms, largest, further_s=further_s)
    assert sorted(found) == [size for size in CURVE_BYTES if size <= last]
    further = {size: len(ms) for size, ms in found.items() if size >= 2 * largest}
    assert set(further.values()) <= {LEAST_REPETITIONS}


def test_a_slow_link_is_measured_less_often():
    assert {len(ms) for ms in measured(1e6, 200 * MIB).values()} == {CURVE_REPETITIONS}
    assert {len(ms) for ms in measured(5e3, 47 * MIB).values()} == {LEAST_REPETITIONS}


def test_a_size_that_fails_has_no_time_and_the_others_do():
    found = measured(1e6, 200 * MIB, fails=MIB)
    assert MIB not in found
    assert Counter(map(len, found.values())) == {CURVE_REPETITIONS: len(found)}
