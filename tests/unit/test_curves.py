"""Which message sizes an all-reduce curve has, and how often each is measured."""

from __future__ import annotations

from collections import Counter

import pytest

from bench.measure.collectives import CURVE_BYTES, CURVE_REPETITIONS
from bench.ranks.curves import LEAST_REPETITIONS, _curve

MIB = 2**20


def measured(bytes_per_ms: float, largest: int, *, fails: int | None = None) -> dict[int, list[float]]:
    """On a link of that rate, whose time is the clock's."""
    clock = [0.0]

    def once(size: int) -> float | None:
        clock[0] += size / bytes_per_ms / 1000
        return None if size == fails else size / bytes_per_ms

    return _curve(once, largest, lambda: clock[0])


@pytest.mark.parametrize(
    ("bytes_per_ms", "largest", "last"),
    [
        (100e6, 4 * MIB, 256 * MIB),  # NVLink: all of it
        (1e6, 4 * MIB, 64 * MIB),  # 256 MiB would take 0.27 s
        (25e3, 47 * MIB, 64 * MIB),  # 200 Mbit/s: no more than the gradients need
        (25e3, 200 * MIB, 256 * MIB),
    ],
)
def test_a_curve_goes_as_far_as_the_gradients_and_further_where_it_is_quick(
    bytes_per_ms: float, largest: int, last: int
) -> None:
    assert sorted(measured(bytes_per_ms, largest)) == [size for size in CURVE_BYTES if size <= last]


def test_a_slow_link_is_measured_less_often() -> None:
    assert {len(ms) for ms in measured(1e6, 4 * MIB).values()} == {CURVE_REPETITIONS}
    assert {len(ms) for ms in measured(5e3, 47 * MIB).values()} == {LEAST_REPETITIONS}


def test_a_size_that_fails_has_no_time_and_the_others_do() -> None:
    found = measured(1e6, 4 * MIB, fails=MIB)
    assert MIB not in found
    assert Counter(map(len, found.values())) == {CURVE_REPETITIONS: len(found)}
