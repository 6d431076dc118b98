"""A command written anew from what was typed: its form, launcher, preset and options."""

import shlex

import pytest
from made import made_manifest

from ddp_bench.bench.common.cli import TYPED_ENV, split_command
from ddp_bench.bench.results.commands import rewrite_command, write_command, write_repeat_command
from ddp_bench.bench.run.main import parse_settings


@pytest.fixture(autouse=True)
def typed_now(monkeypatch):
    monkeypatch.setenv(TYPED_ENV, "ddp-bench")


@pytest.mark.parametrize(
    ("typed", "changes", "wanted"),
    [
        ("ddp-bench run", {}, "ddp-bench run"),
        ("ddp-bench run --gpus=1,2 --trace", {"gpus": "4"}, "ddp-bench run --gpus 4 --trace"),
        ("ddp-bench run --out 'a b' --sync-buffers on", {"out": None}, "ddp-bench run --sync-buffers on"),
        ("ddp-bench run --name 'a b'", {"rounds": "9"}, "ddp-bench run --name 'a b' --rounds 9"),
        (
            "python -m bench.run --name ddp-bench --seed 3",
            {"seed": None},
            "ddp-bench run --name ddp-bench",
        ),
        (
            "torchrun --rdzv-id ddp-bench --nproc-per-node 2 -m ddp_bench run --gpus 2",
            {"gpus": None},
            "torchrun --rdzv-id ddp-bench --nproc-per-node 2 -m ddp_bench run",
        ),
        ("ddp-bench gate --interleave bench.x -- --gpus 2", {"launches": "9"}, None),
    ],
)
def test_what_is_not_changed_stays_as_it_was_typed(typed, changes, wanted):
    wanted = wanted or "ddp-bench gate --interleave bench.x --launches 9 -- --gpus 2"
    assert rewrite_command(shlex.split(typed), **changes) == wanted


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("full", {"bucket_cap_mb": None}),
        ("tune", {"race": None, "name": None}),
        ("quick", {"preset": None}),
        ("ddp-paper", {"max_time": None}),
    ],
)
def test_a_preset_that_says_what_is_left_out_is_written_out(preset, changes):
    """Oracle: the settings of the preset itself."""
    words = shlex.split(rewrite_command(["ddp-bench", "run", "--preset", preset], **changes))
    got, wanted = parse_settings(words[2:]).stored(), parse_settings(["--preset", preset]).stored()
    differ = {name for name in wanted if got[name] != wanted[name]}
    assert differ - {"preset", "caps_given"} == changes.keys() - {"preset"}
    with_model = rewrite_command(
        ["ddp-bench", "run", "--preset", preset, "--workload", "net:make"], **changes
    )
    assert parse_settings(shlex.split(with_model)[2:]).workload == "net:make"


def test_what_is_no_command_of_ours_is_written_from_the_settings():
    for typed in (
        "rm -rf everything",
        "python 'unclosed",
        "ddp-bench --version",
        "ddp-bench run --config x.toml",
    ):
        manifest = made_manifest(command=typed, settings={"gpus": [2], "gradient_as_bucket_view": [True]})
        assert write_repeat_command(manifest) == "ddp-bench run --gpus 2 --gradient-as-bucket-view on"
    assert write_repeat_command(made_manifest()) == ""
    assert write_command(made_manifest(), "tune", gpus="2") == "ddp-bench tune --gpus 2"
    assert split_command(["bash", "-c", "true"]) == ([], ["bash", "-c", "true"])
