"""Any text where a log of nccl-tests, a calibration or predictions should be: read, or refused in a line."""

from __future__ import annotations

import json
from typing import Any

from fuzzing import HOSTILE_TEXT, bounded, read_or_refused
from hypothesis import example, given
from hypothesis import strategies as st

from ddp_bench.bench.predict.allreduce import AllReduceTimes, measured_curve
from ddp_bench.bench.predict.calibration import Calibration, Identity, Parameter
from ddp_bench.bench.predict.networks import parse_nccl_log
from ddp_bench.bench.predict.output import Predictions
from ddp_bench.bench.predict.prediction import predict
from ddp_bench.bench.predict.scenario import Scenario

JSON_LOG: dict[str, Any] = {
    "version": 3,
    "nccl_version": 22803,
    "config": {"nthreads": 1, "ngpus": 8, "devices": [{"rank": 0}]},
    "results": [
        {
            "size": 1048576,
            "redop": "sum",
            "out_of_place": None,
            "in_place": {"time": 24.4, "alg_bw": 42.8, "bus_bw": 74.9},
        }
    ],
    "average_bus_bandwidth": {"bandwidth": 74.9},
}
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | HOSTILE_TEXT | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(HOSTILE_TEXT, inner, max_size=3),
    max_leaves=6,
)
CALIBRATION = Calibration(
    identity=Identity(
        arch="x", image_size=None, batch_per_device=8, precision="fp32", device_type="cuda",
        device_name="GPU", torch="2", host="h",
    ),
    num_ranks=2,
    num_nodes=1,
    parameters=tuple(Parameter(name="p", num_bytes=8, ready_ms=at) for at in (1.0, 2.0)),
    forward_ms=(1.0, 1.1),
    backward_ms=(2.0, 2.1),
    optimizer_ms=(0.5,),
    allreduce=(AllReduceTimes(num_ranks=2, backend="nccl", points=((4, (0.1, 0.2)), (64, (0.3,)))),),
    rank_spread=(0.9, 1.1),
)  # fmt: skip
WHOLE: dict[str, Any] = json.loads(CALIBRATION.to_json())
POSITIVE = st.floats(min_value=0, allow_nan=False) | st.integers(min_value=0)


def read_log(text: str) -> bool:
    def use() -> None:
        log = parse_nccl_log(text)
        assert log.num_ranks > 1
        curve = measured_curve(log.points)
        assert 0 < curve(1.0) <= curve(2.0**20) <= curve(2.0**30) * (1 + 1e-9)

    return read_or_refused(use)


def read_calibration(text: str) -> bool:
    def use() -> None:
        found = predict(Calibration.from_json(text), Scenario(num_devices=4), resamples=3)
        if found.step_ms is not None:
            assert 0 <= found.step_ms.low <= found.step_ms.estimate <= found.step_ms.high

    return read_or_refused(use)


@bounded(100)
@given(text=HOSTILE_TEXT | st.text(max_size=60))
def test_any_text_is_no_log(text: str) -> None:
    assert not read_log(text)


@bounded(300)
@given(data=st.data())
def test_a_log_in_json_with_anything_in_a_field(data: st.DataObject) -> None:
    log = json.loads(json.dumps(JSON_LOG))
    inside = data.draw(
        st.sampled_from([log, log["config"], log["results"][0], log["results"][0]["in_place"]])
    )
    inside[data.draw(st.sampled_from(sorted(inside)))] = data.draw(ANYTHING)
    read_log(json.dumps(log))


@bounded(400)
@given(data=st.data())
def test_a_calibration_with_anything_in_a_field(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(WHOLE)))
    inside = WHOLE[name]
    value = data.draw(ANYTHING | st.lists(POSITIVE, max_size=4))
    if isinstance(inside, dict):
        value = {**inside, data.draw(st.sampled_from(sorted(inside))): value}
    elif name == "parameters":
        value = [{**inside[0], data.draw(st.sampled_from(sorted(inside[0]))): value}, inside[1]]
    elif name == "allreduce":
        value = [{**inside[0], data.draw(st.sampled_from(sorted(inside[0]))): value}]
    read_calibration(json.dumps({**WHOLE, name: value}))


@bounded(100)
@given(text=st.builds(json.dumps, ANYTHING) | HOSTILE_TEXT)
@example(text="[" * 100_000)
def test_any_json_is_no_calibration_and_no_predictions(text: str) -> None:
    assert not read_calibration(text)
    assert not read_log(text)
    assert not read_or_refused(lambda: Predictions.from_json(text))


def test_what_is_spoilt_above_is_read_whole() -> None:
    assert read_calibration(CALIBRATION.to_json())
    assert read_log(json.dumps(JSON_LOG))
