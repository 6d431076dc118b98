"""What the commands say of recorded runs, held against what they said before: exit codes, verdicts, figures.

Nothing here knows how a command works, so that it may be written anew. `python tests/unit/test_recorded.py`
records again: look at the difference before you commit it.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
from pathlib import Path

import pytest
from commands import ROOT

RECORDED = ROOT / "tests" / "recorded"
SAMPLES = "results/samples"
LAB = f"{SAMPLES}/cpu-lab-1gbit-2hosts"
CALIBRATED = f"{SAMPLES}/predictions/resnet18-2hosts/1gbit"
SLOW, FAST = (f"{SAMPLES}/tune/resnet18-2hosts-{rate}/sweep" for rate in ("1gbit", "2gbit"))
COMMANDS: dict[str, tuple[str, ...]] = {
    "report.md": ("report", LAB, "--markdown"),
    "report-of-two.md": ("report", SLOW, FAST, "--markdown"),
    "gate-ratios.json": ("bench.gate", SLOW, FAST, "--ratios-only", "--json"),
    "gate-of-two-rates.txt": ("bench.gate", SLOW, FAST),
    "gate-of-one.txt": ("bench.gate", SLOW, SLOW),
    "predict.txt": ("bench.predict", CALIBRATED, "--gpus", "2,8,64", "--bucket-cap-mb", "default,1"),
    "predict-validate.txt": ("bench.predict", CALIBRATED, "--validate"),
    "predict-network.txt": ("bench.predict", CALIBRATED, "--gpus", "16", "--network", "link:10gbit"),
    "predict-uncalibrated.txt": ("bench.predict", LAB, "--gpus", "2"),
    **{
        f"export-{name}.txt": ("bench.export", LAB, "--format", name)
        for name in ("bencher", "github-action", "pytest-benchmark", "prometheus")
    },
    "export-nccl-tests.txt": ("bench.export", CALIBRATED, "--format", "nccl-tests"),
}
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def said(command: tuple[str, ...]) -> str:
    """Exit code, standard output and standard error of a command in the repository's root."""
    module, *arguments = command
    out, err = io.StringIO(), io.StringIO()
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = importlib.import_module(f"ddp_bench.{module}.main").main(arguments)
    finally:
        os.chdir(before)
    return f"exit code {int(code)}\n{out.getvalue()}\n--- stderr\n{err.getvalue()}"


@pytest.mark.parametrize("name", COMMANDS)
def test_it_says_what_it_said(name: str) -> None:
    wanted = (RECORDED / name).read_text(encoding="utf-8")
    found = said(COMMANDS[name])
    assert NUMBER.sub("#", found) == NUMBER.sub("#", wanted)
    numbers = [[float(number) for number in NUMBER.findall(text)] for text in (found, wanted)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-6)


def test_nothing_else_is_recorded() -> None:
    assert {path.name for path in RECORDED.iterdir()} == set(COMMANDS)


if __name__ == "__main__":
    for name, command in COMMANDS.items():
        (RECORDED / name).write_text(said(command), encoding="utf-8")
