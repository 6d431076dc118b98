"""Caps as text, and what is worth measuring: against DDP's rule, against `predict`, against every layout."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from fuzzing import bounded
from hypothesis import given
from hypothesis import strategies as st

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.layout import PYTORCH_CAPS, BucketCaps
from ddp_bench.bench.predict.allreduce import CostCurve
from ddp_bench.bench.predict.buckets import MIB, Layout, assign_cap
from ddp_bench.bench.predict.calibration import AllReduceTimes, Calibration, Identity, Parameter
from ddp_bench.bench.predict.prediction import predict
from ddp_bench.bench.predict.scenario import Scenario
from ddp_bench.bench.predict.timeline import Compute, Slowdown
from ddp_bench.bench.tune.candidates import Axes, Candidate, StepModel, choose, uniform_caps

SIZES_MIB = (1, 4, 2, 8, 1, 6, 3)

SLOW_LINK = Calibration(
    identity=Identity(
        arch="net", image_size=32, batch_per_device=8, precision="fp32", device_type="cpu",
        device_name="CPU core", torch="2.15", host="here",
    ),
    num_ranks=2,
    num_nodes=1,
    parameters=tuple(
        Parameter(name=f"p{i}", num_bytes=size * MIB, ready_ms=10.0 * (i + 1))
        for i, size in enumerate(SIZES_MIB)
    ),
    forward_ms=(30.0, 31.0, 32.0),
    backward_ms=(70.0, 71.0, 72.0),
    optimizer_ms=(4.0, 5.0, 6.0),
    allreduce=(
        AllReduceTimes(num_ranks=2, backend="gloo", points=((4096, (0.5,)), (MIB, (3.0,)), (2**25, (80.0,)))),
    ),
    compute_slowdown=(1.2,),
    comm_slowdown=(1.1,),
    copy_ms=(3.0,),
    residual_ms=(3.0,),
    rank_spread=(0.98, 1.0, 1.0, 1.03),
)  # fmt: skip
FREE = replace(
    SLOW_LINK,
    allreduce=(AllReduceTimes(num_ranks=2, backend="gloo", points=((4096, (1e-9,)), (2**25, (1e-9,)))),),
    compute_slowdown=(1.0,),
)


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


def tuned(calibration: Calibration, *, axes: Axes | None = None) -> list[Candidate]:
    return choose(calibration, num_ranks=2, axes=axes or Axes())


def every_layout(count: int) -> list[Layout]:
    found = []
    for cuts in itertools.product((0, 1), repeat=count - 1):
        ends = [*(i + 1 for i, cut in enumerate(cuts) if cut), count]
        found.append(tuple(tuple(range(a, b)) for a, b in zip([0, *ends], ends, strict=False)))
    return found


@pytest.mark.parametrize("total_bytes", [300_000, 1_080_424, 46_758_048, 100_000_000])
def test_uniform_caps_cover_models_of_any_size(total_bytes: int) -> None:
    caps = uniform_caps(total_bytes)
    assert caps[0] == PYTORCH_CAPS
    assert len(set(caps)) == len(caps)
    assert [BucketCaps.parse(str(cap)) for cap in caps] == caps
    inside = [cap.mib[0] for cap in caps[1:] if 0 < cap.mib[0] * MIB < total_bytes]
    assert min(inside) * MIB < total_bytes / 100
    assert max(inside) * MIB > total_bytes / 2


@pytest.mark.parametrize(("hook", "accumulate"), [("none", 1), ("fp16", 1), ("none", 4)])
@pytest.mark.parametrize("cap", [PYTORCH_CAPS, *(BucketCaps.parse(c) for c in ("0", "4", "1/9"))], ids=str)
def test_the_model_reads_a_calibration_as_predict_does(cap: BucketCaps, hook: str, accumulate: int) -> None:
    model = StepModel.of(SLOW_LINK, num_ranks=2, comm_hook=hook, accumulate=accumulate)
    layout = assign_cap(model.num_bytes, cap)
    scenario = Scenario(num_devices=2, bucket_cap_mb=cap, comm_hook=hook, accumulate=accumulate)
    predicted = predict(SLOW_LINK, scenario, resamples=2).step_ms.estimate
    assert model.step_ms(layout) == pytest.approx(predicted, rel=1e-9)


def test_the_best_uniform_cap_is_among_them_and_no_layout_beats_the_bound() -> None:
    found = tuned(SLOW_LINK)
    model = StepModel.of(SLOW_LINK, num_ranks=2, comm_hook="none", accumulate=1)
    caps = uniform_caps(sum(model.num_bytes))
    uniform = [model.step_ms(assign_cap(model.num_bytes, cap)) for cap in caps]
    assert min(c.predicted_ms for c in found) == pytest.approx(min(uniform))
    steps = [model.step_ms(layout) for layout in every_layout(len(SIZES_MIB))]
    assert all(c.bound_ms <= step for c in found for step in steps)


@bounded(600)
@given(PARAMETERS, CURVES, SLOWDOWNS, st.sampled_from([0.0, 0.3, 4.0]))
def test_no_layout_of_any_model_beats_the_bound(
    parameters: list[tuple[int, float]], curve: CostCurve, slow: Slowdown, copy_ms: float
) -> None:
    sizes, ready = zip(*parameters, strict=True)
    model = StepModel(
        num_bytes=sizes, ready_ms=ready, comm_ms=curve, compute=COMPUTE, slowdown=slow, copy_ms=copy_ms
    )
    steps = [model.step_ms(layout) for layout in every_layout(len(sizes))]
    assert model.bound_ms() <= min(steps) + 1e-9


def test_the_bound_exposes_the_last_gradient() -> None:
    curve = CostCurve(((4.0, 2.0), (8.0, 2.5)))
    model = StepModel(num_bytes=(4, 4), ready_ms=(5.0, 10.0), comm_ms=curve, compute=COMPUTE)
    assert model.bound_ms() == pytest.approx(5 + 10 + 2 + 1)


def test_the_default_comes_first_and_no_layout_twice() -> None:
    found = tuned(SLOW_LINK)
    assert found[0].bucket_cap_mb == PYTORCH_CAPS
    assert 2 <= len(found) <= 4
    sizes = [p.num_bytes for p in SLOW_LINK.parameters]
    assert len({assign_cap(sizes, c.bucket_cap_mb) for c in found}) == len(found)


def test_without_communication_no_layout_is_promised_more_than_the_default() -> None:
    found = tuned(FREE)
    assert found[0].predicted_ms == pytest.approx(min(c.predicted_ms for c in found), rel=1e-6)
    assert found[0].predicted_ms == pytest.approx(found[0].bound_ms, rel=1e-6)


def test_further_axes_are_added_on_request() -> None:
    plain = tuned(SLOW_LINK)
    axes = Axes(gradient_as_bucket_view=(False, True), comm_hook=("none", "fp16"), accumulate=(1, 2))
    found = tuned(SLOW_LINK, axes=axes)
    assert found[: len(plain)] == plain
    assert {c.point[1:] for c in found} == {
        (False, "none", 1), (False, "none", 2), (False, "fp16", 1), (False, "fp16", 2), (True, "none", 1),
    }  # fmt: skip
    least = {(c.comm_hook, c.accumulate): c.bound_ms for c in found}
    assert least["fp16", 1] < least["none", 1], "half the bytes"
    assert least["none", 2] > least["none", 1], "a second micro-batch"
    fixed = tuned(SLOW_LINK, axes=Axes(gradient_as_bucket_view=(True,), comm_hook=("fp16",)))
    assert {c.point[1:] for c in fixed} == {(True, "fp16", 1)}


def test_parameters_of_several_kinds_are_laid_out_as_ddp_does() -> None:
    kinds = [replace(p, kind="a" if i % 2 else "b") for i, p in enumerate(SLOW_LINK.parameters)]
    found = tuned(replace(SLOW_LINK, parameters=tuple(kinds)))
    sizes, of = [p.num_bytes for p in kinds], [p.kind for p in kinds]
    assert [c.num_buckets for c in found] == [
        len(assign_cap(sizes, c.bucket_cap_mb, kinds=of)) for c in found
    ]


def test_a_hook_without_buckets_is_refused() -> None:
    with pytest.raises(UsageError, match="powersgd"):
        Axes(comm_hook=("none", "powersgd"))
