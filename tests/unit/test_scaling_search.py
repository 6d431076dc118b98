"""The bound against trying every layout there is."""

from __future__ import annotations

import itertools

import pytest
from fuzzing import bounded
from hypothesis import given
from hypothesis import strategies as st

from bench.scaling.buckets import Layout
from bench.scaling.cost import CostCurve
from bench.scaling.search import lower_bound_ms
from bench.scaling.timeline import Compute, Slowdown, make_work, simulate

COMPUTE = Compute(before_ms=5.0, backward_ms=10.0, after_ms=1.0)

PARAMETERS = st.lists(
    st.tuples(st.sampled_from([512, 4096, 2**18, 2**20, 2**22]), st.floats(0, 10)), min_size=1, max_size=9
)
CURVES = st.builds(
    lambda latency, rate: CostCurve(tuple((float(s), latency + s * rate) for s in (512, 2**16, 2**22))),
    st.floats(0.001, 2),
    st.floats(1e-8, 5e-6),
)
SLOWDOWNS = st.builds(lambda a, b: Slowdown(compute=a, comm=b), st.floats(1, 4), st.floats(1, 4))


def every_layout(count: int) -> list[Layout]:
    found = []
    for cuts in itertools.product((False, True), repeat=count - 1):
        buckets = [[0]]
        for index, cut in enumerate(cuts, 1):
            if cut:
                buckets.append([index])
            else:
                buckets[-1].append(index)
        found.append(tuple(tuple(b) for b in buckets))
    return found


@bounded(600)
@given(PARAMETERS, CURVES, SLOWDOWNS, st.sampled_from([0.0, 0.3, 4.0]))
def test_no_layout_beats_the_bound(
    parameters: list[tuple[int, float]], curve: CostCurve, slow: Slowdown, copy_ms: float
) -> None:
    sizes, ready = [p[0] for p in parameters], [p[1] for p in parameters]
    steps = [
        simulate(make_work(sizes, ready, layout, curve), COMPUTE, slowdown=slow, copy_ms=copy_ms).step_ms
        for layout in every_layout(len(sizes))
    ]
    assert lower_bound_ms(sizes, ready, curve, COMPUTE, copy_ms=copy_ms) <= min(steps) + 1e-9


def test_the_bound_exposes_the_last_gradient() -> None:
    curve = CostCurve(((4.0, 2.0), (8.0, 2.5)))
    assert lower_bound_ms([4, 4], [5.0, 10.0], curve, COMPUTE) == pytest.approx(5 + 10 + 2 + 1)
