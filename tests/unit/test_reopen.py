"""What `--resume` accepts: the same run, nothing else."""

import json
from pathlib import Path

import pytest

from bench.errors import NotComparableError, UsageError
from bench.recovery.reopen import check_same, settings_of
from bench.results.journal import Journal
from bench.settings import Settings

MACHINE = {"cpu_model": "x", "num_cores": 2, "gpus": []}
THEN = {"plan_hash": "p", "versions": {"torch": "2.15.0", "cuda": "13"}, "environment": MACHINE}


def folder(tmp_path: Path) -> Path:
    settings = Settings(arch="resnet20", rounds=3, out="elsewhere")
    (tmp_path / "manifest.json").write_text(json.dumps({**THEN, "settings": settings.stored()}))
    Journal(tmp_path).begin([])
    return tmp_path


def test_settings_come_back_as_they_were(tmp_path: Path) -> None:
    found = settings_of(folder(tmp_path), {"rounds": 5})
    assert found == Settings(arch="resnet20", rounds=5)


def test_what_is_measured_may_not_change(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="leave out --batch-size"):
        settings_of(folder(tmp_path), {"batch_size": 8, "rounds": 5})


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"manifest\.json"):
        settings_of(tmp_path, {})


def test_every_difference_is_named(tmp_path: Path) -> None:
    check_same(tmp_path, THEN, THEN)
    now = {"plan_hash": "q", "versions": {"torch": "2.11.0"}, "environment": {**MACHINE, "num_cores": 4}}
    with pytest.raises(NotComparableError) as caught:
        check_same(tmp_path, THEN, now)
    for words in ("plan: then p, now q", "torch: then 2.15.0 (CUDA 13), now 2.11.0"):
        assert words in str(caught.value)
    assert "CPU cores: then 2, now 4" in str(caught.value)
    assert caught.value.exit_code == 3
