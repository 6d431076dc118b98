"""A stranger's folders and files against every command; the scheduled run takes other ones each time."""

from __future__ import annotations

import re

import pytest
from commands import ROOT, python
from hypothesis import settings

pytestmark = pytest.mark.campaign
THOROUGH = not settings.default.derandomize
NUMBER, SEED = (1000, ()) if THOROUGH else (60, ("--seed", "1"))


@pytest.mark.timeout(3600 if THOROUGH else 300)
def test_no_attack_falls() -> None:
    """No traceback, hang, wrong exit code, memory, or byte outside what was asked; it prints its seed."""
    played = python(
        "tests/attacks.py",
        *("--number", str(NUMBER), *SEED),
        env={"PYTHONPATH": str(ROOT)},
        timeout_s=3500,
    )
    assert played.returncode == 0, played.stdout + played.stderr[-2000:]
    assert re.search(rf"^0 of {NUMBER} fell; ", played.stdout, re.MULTILINE)
