from pathlib import Path

import pytest

from bench.errors import UsageError
from bench.settings import PRESETS, Settings, resolve, with_device_defaults


def test_later_layers_win(tmp_path: Path) -> None:
    config = tmp_path / "a.toml"
    config.write_text('arch = "resnet34"\nbatch-size = 4\ngpus = [1, 2]\nmax_time = "2m"\n')
    settings = resolve({"batch_size": "8"}, preset="quick", config=config)
    assert (settings.arch, settings.batch_size, settings.gpus) == ("resnet34", 8, (1, 2))
    assert settings.max_time == 120
    assert settings.bucket_cap_mb == ("default", "0.25"), (
        "the preset's value stands where nothing overrides it"
    )


def test_a_workload_replaces_the_presets_architecture() -> None:
    settings = resolve({"workload": "a.b:c"}, preset="quick")
    assert settings.arch is None
    assert settings.workload == "a.b:c"


def test_toml_values_of_every_kind(tmp_path: Path) -> None:
    config = tmp_path / "a.toml"
    config.write_text(
        "static_graph = [true, false]\nbucket_cap_mb = ['default', 0.5, 25]\nsync-buffers = false\n"
    )
    settings = resolve({}, config=config)
    assert settings.static_graph == (True, False)
    assert settings.bucket_cap_mb == ("default", "0.5", "25")
    assert settings.sync_buffers == (False,)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_resolves(preset: str) -> None:
    assert isinstance(resolve({}, preset=preset), Settings)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"modes": "ddp,fsdp"}, "unknown value 'fsdp'; did you mean 'dp'?"),
        ({"modes": "dp,dp"}, "given twice"),
        ({"gpus": "0"}, "not a whole number of at least 1"),
        ({"gpus": "-1"}, "not a whole number of at least 1"),
        ({"gpus": "a"}, "not a whole number"),
        ({"gpus": ""}, "empty value"),
        ({"gpus": "1,,2"}, "empty value"),
        ({"gpus": "2,2"}, "2 is given twice"),
        ({"gpus": "٣"}, "not a whole number"),
        ({"bucket_cap_mb": "-1"}, "above 0"),
        ({"bucket_cap_mb": "25/x"}, "not a number of MiB"),
        ({"max_time": "soon"}, "not a duration"),
        ({"max_time": "0s"}, "not a duration"),
        ({"precision_target": "200%"}, "between 0 and 1"),
        ({"precision": "fp8"}, "unknown value 'fp8'"),
        ({"arch": "resnet18", "workload": "a:b"}, "exclude each other"),
        ({"name": "../x"}, "may hold only"),
        ({"seed": "1.5"}, "whole number"),
    ],
)
def test_bad_values_are_named_with_the_fix(layer: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(layer)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_preset_and_key_name_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'quick'"):
        resolve({}, preset="quik")
    config = tmp_path / "a.toml"
    config.write_text("batchsize = 3\n")
    with pytest.raises(UsageError, match="did you mean 'batch_size'"):
        resolve({}, config=config)


def test_unreadable_toml(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        resolve({}, config=tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("a = [")
    with pytest.raises(UsageError, match="not valid TOML"):
        resolve({}, config=broken)


def test_device_defaults() -> None:
    on_cpu = with_device_defaults(Settings(), device_type="cpu", num_local_devices=2)
    assert (on_cpu.arch, on_cpu.batch_size, on_cpu.backend, on_cpu.gpus) == ("resnet18", 16, "gloo", (1, 2))
    on_gpu = with_device_defaults(Settings(), device_type="cuda", num_local_devices=6)
    assert (on_gpu.arch, on_gpu.batch_size, on_gpu.backend, on_gpu.gpus) == (
        "resnet50",
        64,
        "nccl",
        (1, 2, 4),
    )
    fixed = with_device_defaults(Settings(rounds=3), device_type="cpu", num_local_devices=1)
    assert fixed.max_time is None, "a number of rounds is not cut short by a time nobody gave"
