"""The search against trying every layout there is."""

from __future__ import annotations

import itertools

import pytest
from fuzzing import bounded
from hypothesis import given
from hypothesis import strategies as st

from bench.scaling.buckets import Layout, assign_cap, caps_for
from bench.scaling.cost import CostCurve
from bench.scaling.search import best_layout, best_uniform_cap, lower_bound_ms
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
def test_equal_to_brute_force_and_no_layout_beats_the_bound(
    parameters: list[tuple[int, float]], curve: CostCurve, slow: Slowdown, copy_ms: float
) -> None:
    sizes, ready = [p[0] for p in parameters], [p[1] for p in parameters]
    steps = [
        simulate(make_work(sizes, ready, layout, curve), COMPUTE, slowdown=slow, copy_ms=copy_ms).step_ms
        for layout in every_layout(len(sizes))
    ]
    found = best_layout(sizes, ready, curve, COMPUTE, slowdown=slow, copy_ms=copy_ms)
    assert found.step.step_ms == pytest.approx(min(steps), rel=1e-9)
    work = make_work(sizes, ready, found.layout, curve)
    assert simulate(work, COMPUTE, slowdown=slow, copy_ms=copy_ms) == found.step
    assert lower_bound_ms(sizes, ready, curve, COMPUTE, copy_ms=copy_ms) <= min(steps) + 1e-9


@pytest.mark.parametrize("copy_ms", [0.0, 2.5])
@pytest.mark.parametrize("slow", [Slowdown(compute=1.3, comm=1.4), Slowdown(compute=3.0, comm=2.5)])
def test_twelve_parameters(slow: Slowdown, copy_ms: float) -> None:
    """Both regimes: overlap that gets more done than taking turns, and overlap that gets less done."""
    sizes = [2**22, 512, 2**20, 4096, 2**20, 2**18, 512, 2**21, 4096, 2**19, 2**20, 2**18]
    ready = [0.5, 0.6, 1.5, 2.0, 2.4, 4.0, 4.1, 5.5, 6.0, 7.7, 9.0, 10.0]
    curve = CostCurve(((512.0, 0.3), (2.0**22, 3.0)))
    steps = [
        simulate(make_work(sizes, ready, layout, curve), COMPUTE, slowdown=slow, copy_ms=copy_ms).step_ms
        for layout in every_layout(12)
    ]
    found = best_layout(sizes, ready, curve, COMPUTE, slowdown=slow, copy_ms=copy_ms)
    assert found.step.step_ms == pytest.approx(min(steps), rel=1e-9)
    uniform = best_uniform_cap(sizes, ready, curve, COMPUTE, slowdown=slow, copy_ms=copy_ms)
    assert found.step.step_ms <= uniform.step.step_ms


def test_the_bound_exposes_the_last_gradient() -> None:
    curve = CostCurve(((4.0, 2.0), (8.0, 2.5)))
    assert lower_bound_ms([4, 4], [5.0, 10.0], curve, COMPUTE) == pytest.approx(5 + 10 + 2 + 1)


def test_found_layout_can_be_asked_of_ddp() -> None:
    sizes = [2**20, 512, 2**21, 4096]
    found = best_layout(sizes, [1.0, 3.0, 6.0, 10.0], CostCurve(((512.0, 0.1), (2.0**22, 4.0))), COMPUTE)
    caps = "/".join(repr(cap) for cap in caps_for(sizes, found.layout))
    assert assign_cap(sizes, caps) == found.layout
