"""The least step that any layout can reach, against every layout of small models."""

import itertools
from dataclasses import replace

import pytest
from fuzzing import bounded
from hypothesis import given
from hypothesis import strategies as st
from test_scaling_predict import MACHINE, SMALL

from ddp_bench.bench.predict.allreduce import AllReduceTimes, measured_curve
from ddp_bench.bench.predict.bound import bound, bound_ms
from ddp_bench.bench.predict.calibration import Calibration, Parameter
from ddp_bench.bench.predict.timeline import make_work, simulate

PARAMETERS = st.lists(
    st.tuples(st.sampled_from([512, 4096, 2**18, 2**20, 2**22]), st.floats(0, 10)), min_size=1, max_size=9
)


def model(parameters, points, **more):
    found = Calibration(
        identity=MACHINE,
        num_ranks=2,
        num_nodes=1,
        parameters=tuple(Parameter(name="p", num_bytes=size, ready_ms=ready) for size, ready in parameters),
        forward_ms=(5.0,),
        backward_ms=(10.0,),
        optimizer_ms=(1.0,),
        allreduce=(
            AllReduceTimes(
                num_ranks=2, backend="gloo", points=tuple((size, (ms,)) for size, ms in points.items())
            ),
        ),
    )
    return replace(found, **more)


def every_layout(count):
    found = []
    for cuts in itertools.product((0, 1), repeat=count - 1):
        ends = [*(i + 1 for i, cut in enumerate(cuts) if cut), count]
        found.append(tuple(tuple(range(a, b)) for a, b in zip([0, *ends], ends, strict=False)))
    return found


@bounded(600)
@given(
    PARAMETERS, st.floats(0.001, 2), st.floats(1e-8, 5e-6), st.floats(1, 4), st.floats(1, 4),
    st.sampled_from([0.0, 0.3, 4.0]),
)  # fmt: skip
def test_no_layout_of_any_model_beats_the_bound(parameters, latency, rate, compute, comm, copy):
    points = {size: latency + size * rate for size in (512, 2**16, 2**22)}
    c = model(parameters, points, compute_slowdown=(compute,), comm_slowdown=(comm,), copy_ms=(copy,))
    sizes, ready = zip(*parameters, strict=True)
    curve = measured_curve(c.allreduce[0].points)
    steps = [
        simulate(
            make_work(sizes, ready, layout, curve), c.compute(), slowdown=c.slowdown(), copy_ms=copy
        ).step_ms
        for layout in every_layout(len(sizes))
    ]
    assert bound_ms(c) <= min(steps) + 1e-9


def test_the_bound_exposes_the_last_gradient():
    found = model([(4, 5.0), (4, 10.0)], {4: 2.0, 8: 2.5})
    assert bound_ms(found) == pytest.approx(5 + 10 + 2 + 1)


def test_without_communication_the_default_is_at_the_bound():
    free = model([(2**20, 5.0), (2**22, 10.0)], {4096: 1e-9, 2**25: 1e-9})
    assert bound(free).sentence == (
        "Bound: by simulation no bucket layout has a step below 16 ms; that of DDP's default is 0% above it."
    )


def test_the_slowest_rank_and_what_is_missing_to_the_simulation_count():
    assert bound_ms(replace(SMALL, residual_ms=(7.0,))) == pytest.approx(bound_ms(SMALL) + 7)
    assert bound_ms(replace(SMALL, rank_spread=(1.1,))) > bound_ms(replace(SMALL, rank_spread=()))
