"""A stranger's folders, files and options against every command; the scheduled run takes other ones."""

import random
import shutil
from pathlib import Path

import attacks
import pytest
from commands import ROOT
from hypothesis import settings

SAMPLE = ROOT / "results" / "samples" / "predictions" / "resnet18-2hosts" / "1gbit"
THOROUGH = not settings.default.derandomize


def test_no_attack_on_a_recorded_run_falls(tmp_path):
    """No traceback, hang, wrong exit code, memory, or byte outside what was asked."""
    good = attacks.completed(Path(shutil.copytree(SAMPLE, tmp_path / "good")))
    wrong, played = attacks.campaign(40, 1, good)
    assert wrong == []
    assert len(played) == 19, "of every command"


@pytest.mark.campaign
@pytest.mark.timeout(3600 if THOROUGH else 300)
def test_no_attack_on_a_real_run_falls(tmp_path):
    """That one is resumed and finished too; it prints its seed."""
    number, seed = (1000, random.SystemRandom().randrange(2**32)) if THOROUGH else (60, 1)
    print("seed", seed)
    wrong, played = attacks.campaign(number, seed, attacks.good_run(tmp_path / "good"))
    assert wrong == []
    assert {"resume", "finish"} <= set(played)
