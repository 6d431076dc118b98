"""Anything where a file of settings, a log or a calibration should be: read, or refused in a line.

What is read keeps its rules.
"""

import json
from pathlib import Path

import pytest
from fuzzing import DRAWS, VALUES, bounded, edited, mutated, read_or_refused, word
from hypothesis import example, given
from hypothesis import strategies as st

from ddp_bench.bench.common.errors import UsageError
from ddp_bench.bench.plan.resolve import resolve
from ddp_bench.bench.plan.settings import list_options
from ddp_bench.bench.predict.allreduce import AllReduceTimes
from ddp_bench.bench.predict.calibration import Calibration, Identity, Parameter
from ddp_bench.bench.predict.output import Predictions
from ddp_bench.bench.predict.prediction import Scenario, predict

NAMES = [setting.name for setting in list_options()]
TEXTS = DRAWS.map(word) | st.text(max_size=60)


def toml(value):
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{toml(k)} = {toml(v)}' for k, v in value.items())}}}"
    # JSON's escapes are TOML's, but for characters that cannot stand alone.
    return json.dumps(value.encode("utf-8", "replace").decode() if isinstance(value, str) else value)


def settings_or_refusal(path, content):
    path.write_bytes(content)
    read_or_refused(lambda: resolve({}, config=path))


@bounded(150)
@given(draw=DRAWS)
def test_any_value_of_a_setting(tmp_path, draw):
    pairs = {
        draw.choice([*NAMES, *NAMES, word(draw)]): draw.choice(
            [word(draw), edited([1, "on", [2]], draw), *VALUES]
        )
        for _ in range(draw.randrange(5))
    }
    lines = [f"{toml(key)} = {toml(value)}" for key, value in pairs.items()]
    for head in ("", "[thresholds]\n"):
        settings_or_refusal(tmp_path / "x.toml", (head + "\n".join(lines)).encode())


SETTINGS = b"modes = ['dp', 'ddp']\ngpus = [1, 2]\n[thresholds]\nthroughput = '5%'\n# comment\n"


@bounded(150)
@given(content=st.integers(0, 2**32).map(lambda seed: mutated(SETTINGS, seed)) | st.binary(max_size=60))
@example(content=b'out = "a\\u0000b"\nname = "x"')
@example(content=b"day = 2020-01-01\nat = 10:00:00")
@example(content=b"a = " + b"[" * 100_000)
@example(content=b"a = 1" + b"1" * 5000)
@example(content=b"#" * (2**20 + 1))
def test_any_text_of_settings(tmp_path, content):
    settings_or_refusal(tmp_path / "x.toml", content)


@pytest.mark.parametrize("path", ["\x00", "x" * 5000, ".", "/dev/null/x", "\udcff"])
def test_a_config_that_is_no_file(path):
    with pytest.raises(UsageError):
        resolve({}, config=Path(path))


CALIBRATION = Calibration(
    identity=Identity(
        arch="x", image_size=None, batch_per_device=8, precision="fp32", device_type="cuda",
        device_name="GPU", torch="2", host="h",
    ),
    num_ranks=2,
    parameters=tuple(Parameter(name="p", num_bytes=8, ready_ms=at) for at in (1.0, 2.0)),
    forward_ms=(1.0, 1.1),
    backward_ms=(2.0, 2.1),
    optimizer_ms=(0.5,),
    allreduce=(AllReduceTimes(num_ranks=2, backend="nccl", points=((4, (0.1, 0.2)), (64, (0.3,)))),),
)  # fmt: skip
WHOLE = json.loads(CALIBRATION.to_json())


def read_calibration(text):
    def use():
        found = predict(Calibration.from_json(text), Scenario(num_devices=4))
        assert 0 < found.step_ms.low <= found.step_ms.estimate <= found.step_ms.high

    return read_or_refused(use)


def test_what_is_spoilt_below_is_read_whole():
    assert read_calibration(CALIBRATION.to_json())


@bounded(400)
@given(draw=DRAWS)
def test_a_calibration_with_anything_in_a_field(draw):
    read_calibration(json.dumps(edited(WHOLE, draw)))


@bounded(100)
@given(text=TEXTS | DRAWS.map(lambda draw: json.dumps(draw.choice(VALUES))))
@example(text="[" * 100_000)
def test_any_text_is_no_calibration_and_no_predictions(text):
    assert not read_calibration(text)
    assert not read_or_refused(lambda: Predictions.from_json(text))
