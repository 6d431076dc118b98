import ast
import json

import pytest

from ddp_bench.bench.common.errors import UsageError
from ddp_bench.bench.plan.buckets import BucketLayout, make_cap_arguments, parse_bucket_caps, write_cap_code
from ddp_bench.bench.plan.case_settings import SETTINGS_OF, STEP_DEFAULTS
from ddp_bench.bench.plan.resolve import PRESETS, GpuKind, fill_device_defaults, resolve, write_options
from ddp_bench.bench.plan.settings import Settings, list_options


def test_later_layers_win(tmp_path):
    config = tmp_path / "a.toml"
    config.write_text('arch = "resnet34"\nbatch-size = 4\ngpus = [1, 2]\nmax_time = "2m"\n')
    settings = resolve({"batch_size": "8"}, preset="quick", config=config)
    assert (settings.arch, settings.batch_size, settings.gpus) == ("resnet34", (8,), (1, 2))
    assert settings.max_time == 120
    assert settings.stored()["bucket_cap_mb"] == ("default", "0.25"), "nothing overrides the preset's"
    with_own = resolve({"workload": "a.b:c"}, preset="quick")
    assert (with_own.arch, with_own.workload) == (None, "a.b:c"), "it replaces the preset's architecture"


def test_toml_values_of_every_kind(tmp_path):
    config = tmp_path / "a.toml"
    told = ("static_graph = [true, false]", "bucket_cap_mb = ['default', 0.5, 25]", "sync-buffers = false")
    config.write_text("\n".join(told))
    settings = resolve({}, config=config)
    assert settings.axes["static_graph"] == (True, False)
    assert settings.stored()["bucket_cap_mb"] == ("default", "0.5", "25")
    assert settings.axes["sync_buffers"] == (False,)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_resolves(preset):
    assert isinstance(resolve({}, preset=preset), Settings)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"modes": "dp,dp"}, "given twice"),
        *(({"gpus": number}, "not a whole number of at least 1") for number in ("0", "-1")),
        *(({"gpus": number}, "not a whole number") for number in ("a", "٣")),
        *(({"gpus": text}, "empty value") for text in ("", "1,,2")),
        ({"gpus": "2,2"}, "2 is given twice"),
        ({"bucket_cap_mb": "-1"}, "above 0"),
        ({"bucket_cap_mb": "25/x"}, "not a number of MiB"),
        *(({"max_time": time}, "not a duration") for time in ("soon", "0s")),
        *(({"max_time": "10"}, "10s or 10m"), ({"case_timeout": 10}, "10s or 10m")),
        ({"case_timeout": "1.5"}, "1.5s or 1.5m"),
        ({"case_timeout": "0.000000001s"}, "of 0.1s or more"),
        ({"gpus": "2,999999999"}, "more than 4096 devices"),
        ({"passes": "none,comm"}, "none stands alone"),
        *(({"workload": ""}, "--workload is empty"), ({"out": ""}, "--out is empty")),
        ({"precision_target": "200%"}, "above 0% and below 100%"),
        ({"precision": "fp8"}, "unknown value 'fp8'"),
        ({"arch": "resnet18", "workload": "a:b"}, "exclude each other"),
        ({"name": "../x"}, "may hold only"),
        ({"seed": "1.5"}, "whole number"),
    ],
)
def test_bad_values_are_named_with_the_fix(layer, message):
    with pytest.raises(UsageError) as caught:
        resolve(layer)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_preset_and_key_name_the_nearest(tmp_path):
    with pytest.raises(UsageError, match="did you mean 'quick'"):
        resolve({}, preset="quik")
    config = tmp_path / "a.toml"
    config.write_text("batchsize = 3\n")
    with pytest.raises(UsageError, match="did you mean 'batch_size'"):
        resolve({}, config=config)


def test_unreadable_toml(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        resolve({}, config=tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("a = [")
    with pytest.raises(UsageError, match="not valid TOML"):
        resolve({}, config=broken)


def defaults(*, gpu=None, gpus=6, **asked):
    device = "cpu" if gpu is None else "cuda"
    return fill_device_defaults(
        Settings.from_values(asked), device_type=device, num_local_devices=gpus, gpu=gpu
    )


H200, V100, GTX = (
    GpuKind(capability=capability, memory_gib=gib)
    for capability, gib in (((9, 0), 139.8), ((7, 0), 15.8), ((6, 1), 7.9))
)


def switched(*axes):
    return {name: (value,) for name, value in zip(STEP_DEFAULTS, axes, strict=True)}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        # A CPU core trains as PyTorch does by itself.
        (
            {"gpus": 2},
            {"arch": "resnet18", "batch_size": (16,), "backend": "gloo", "gpus": (1, 2), "precision": "fp32"}
            | {"steps": 1, "margin": 0.05, "least_block_s": 0, **switched(*STEP_DEFAULTS.values())},
        ),
        # A GPU as an engineer does today, on all six, beside the powers of two.
        (
            {"gpu": H200},
            {"arch": "resnet50", "batch_size": (256,), "backend": "nccl", "gpus": (1, 2, 4, 6)}
            | {"precision": "bf16", "margin": 0.01, **switched(True, True, False, "off")},
        ),
        # An older one takes what it has; an overflow of fp16 leaves a fused optimizer's momentum unset.
        ({"gpu": V100}, {"precision": "fp16", "batch_size": (64,), "fused_optimizer": (False,)}),
        ({"gpu": GTX}, {"precision": "fp32", "batch_size": (32,), "fused_optimizer": (True,)}),
        # What the user says goes before the device.
        *(
            ({"gpu": H200, name: value}, {name: value})
            for name, value in {"precision": "fp32", "batch_size": (8,), "channels_last": (False,)}.items()
        ),
        ({"gpu": H200, "fused_optimizer": (False,)}, {"fused_optimizer": (False,)}),
        # The default batch of strong scaling divides over every count: the next multiple of 12 after 256.
        ({"gpu": H200, "scaling": "strong"}, {"batch_size": (264,)}),
        # A number of rounds is not cut short by a time that nobody gave.
        ({"rounds": 3}, {"max_time": None}),
    ],
)
def test_defaults_follow_from_the_device(asked, expected):
    found = defaults(**asked)
    assert {name: found.axes.get(name) or getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("asked", "step_s", "steps"),
    [
        # On a GPU a block takes a second unless steps are given.
        *(({"gpu": H200}, step_s, steps) for step_s, steps in ((0.05, 20), (0.3, 4), (3.0, 1))),
        *(({"gpu": H200, "steps": 7}, step_s, 7) for step_s in (0.05, 3.0)),
        # Each loader process gives as many batches: those of all may come at one moment, then none for long.
        ({"data": "images", "data_workers": 3}, 0.1, 3),
        ({"data": "images", "data_workers": 3, "steps": 4}, 0.1, 6),
        ({"data": "images", "data_workers": 0}, 0.1, 1),
        ({"data": "host", "data_workers": 3}, 0.1, 1),
    ],
)
def test_the_length_of_a_block(asked, step_s, steps):
    assert defaults(**asked).count_steps_per_block(step_s) == steps


def test_the_length_of_blocks_comes_back_for_a_resume():
    for found in (defaults(gpu=H200), defaults(gpu=H200, steps=3), defaults()):
        again = Settings.from_stored(json.loads(json.dumps(found.stored())))
        kind = {"device_type": found.device, "num_local_devices": 6}
        assert fill_device_defaults(again, **kind) == found


@pytest.mark.parametrize("setting", SETTINGS_OF["ddp"], ids=lambda setting: setting.name)
def test_every_ddp_setting_is_an_option_with_values_to_measure(setting):
    assert setting in list_options()
    values = Settings().axes[setting.name]
    assert setting.default in values
    switches = {"True": "on", "False": "off"}
    text = ",".join(switches.get(str(value), str(value)) for value in values)
    assert setting.metadata["parse"](text) == values


@pytest.mark.parametrize(
    ("layer", "preset", "given"),
    [
        ({}, None, False),
        ({"gpus": "1,2"}, None, False),
        ({"bucket_cap_mb": "default,1,25,100"}, None, True),
        ({}, "quick", True),
    ],
)
def test_caps_are_given_by_whoever_names_them(layer, preset, *, given):
    assert resolve(layer, preset=preset).caps_given is given


def test_stored_settings_become_options_again():
    stored = resolve({"arch": "resnet34", "batch_size": "8", "bucket_cap_mb": "1,25/50"})
    options = write_options(stored, ("gpus", "margin"))
    assert options == ["--arch", "resnet34", "--batch-size", "8", "--bucket-cap-mb", "1,25/50"]
    assert write_options(Settings(rounds=5), ("rounds", "no_setting")) == []


@pytest.mark.parametrize(
    ("text", "shown", "arguments"),
    [
        ("default", "default", {}),
        ("25", "25", {"bucket_cap_mb": 25.0}),
        ("25.0", "25", {"bucket_cap_mb": 25.0}),
        ("0", "0", {"bucket_cap_mb": 1e-6}),
        ("0.000001", "1e-06", {"bucket_cap_mb": 1e-6}),
        ("1/25/25", "1/25/25", {"bucket_cap_mb_list": [1.0, 25.0, 25.0]}),
        ("01/2.50", "1/2.5", {"bucket_cap_mb_list": [1.0, 2.5]}),
    ],
)
def test_caps_know_their_text_and_what_ddp_is_given(text, shown, arguments):
    assert parse_bucket_caps(text) == parse_bucket_caps(shown) == shown
    assert make_cap_arguments(shown) == arguments
    call = ast.parse(f"DDP({write_cap_code(shown)})", mode="eval").body
    assert {given.arg: ast.literal_eval(given.value) for given in call.keywords} == arguments, "when pasted"


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "1//2", "nan", "inf", "0/25", "00", "1e-3", "default/1", "٣", "1 "]
)
def test_other_text_is_no_cap(text):
    with pytest.raises(UsageError, match="write default, 25, 0 for a bucket per parameter, or a list"):
        parse_bucket_caps(text)


def test_a_layout_is_read_from_and_written_to_a_cell():
    layout = BucketLayout((8196000, 27260928))
    assert str(layout) == "8196000/27260928"
    assert BucketLayout.parse(str(layout)) == layout
    assert BucketLayout.from_cell("46758048") == BucketLayout((46758048,))


@pytest.mark.parametrize("cell", ["", None, float("nan"), "1//2", "/", "1/x", "-1", "٣"])
def test_a_broken_or_empty_cell_holds_no_layout(cell):
    assert BucketLayout.from_cell(cell) is None
    with pytest.raises(UsageError, match="bucket_bytes"):
        BucketLayout.parse(str(cell))
