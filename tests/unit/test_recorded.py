"""What the commands say of recorded runs, held against what they said before: exit codes, verdicts, figures.

Nothing here knows how a command works, so that it may be written anew. `PYTHONPATH=tests:. python
tests/unit/test_recorded.py` records again: look at the difference before you commit it.
"""

import contextlib
import importlib
import io
import os
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import doctor_machines
import pytest
from commands import ROOT
from finding_cases import said_of_each
from recorded_pages import PAGES, text_of_page

from ddp_bench.bench.findings.findings import conclude_run
from ddp_bench.bench.page import terminal
from ddp_bench.bench.results.store import load_run
from ddp_bench.report.page import make_page

RECORDED = ROOT / "tests" / "recorded"
SAMPLES = "results/samples"
LAB = f"{SAMPLES}/cpu-lab-1gbit-2hosts"
CALIBRATED = f"{SAMPLES}/predictions/resnet18-2hosts/1gbit"
SLOW, FAST = (f"{SAMPLES}/tune/resnet18-2hosts-{rate}.zip" for rate in ("1gbit", "2gbit"))
COMMANDS = {
    "report.md": ("report", LAB, "--markdown"),
    "gate-of-two-rates.txt": ("bench.gate", SLOW, FAST),
    "predict.txt": ("bench.predict", CALIBRATED, "--gpus", "2,8,64", "--bucket-cap-mb", "default,1"),
}
SHOWN = {"page-cores.txt": "cores", "page-gate.txt": "gate"}
TOLD = ("findings.txt", "doctor.txt", "terminal.txt", *SHOWN)
"""What is said of runs made by hand, one of each kind; the end of a run on the terminal; and pages."""

NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def said(command):
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


def told(name, folder):
    """What `name` records, made in `folder` where it needs one."""
    if name in SHOWN:
        return text_of_page(SHOWN[name], folder)
    if name == "doctor.txt":
        return "".join(f"{line}\n" for line in doctor_machines.said_of_each(folder))
    if name == "findings.txt":
        return "".join(f"{line}\n" for line in said_of_each())
    if name == "terminal.txt":
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            for place in (LAB, CALIBRATED, SLOW):
                found = replace(load_run(ROOT / place), path=Path(place))
                terminal.print_page(make_page(found), place=f"{place}/report.html", piped_width=100)
                print()
        return "\n".join(line.rstrip() for line in out.getvalue().split("\n"))
    return said(COMMANDS[name])


@pytest.mark.parametrize("name", [*COMMANDS, *TOLD])
def test_it_says_what_it_said(name, tmp_path):
    wanted = (RECORDED / name).read_text(encoding="utf-8")
    found = told(name, tmp_path)
    assert NUMBER.sub("#", found) == NUMBER.sub("#", wanted)
    numbers = [[float(number) for number in NUMBER.findall(text)] for text in (found, wanted)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-6)


@pytest.mark.parametrize("length", [10, 23, 24, 60])
def test_a_label_does_not_touch_the_text_behind_it(length, capsys):
    found = load_run(ROOT / LAB)
    made = conclude_run(found)
    first, *others = made.verdicts
    named = replace(first, scope="x" * (length - len(f"{first.title}, ")))
    terminal.print_page(make_page(found, conclusion=replace(made, verdicts=(named, *others))))
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith(named.title)]
    assert line.removeprefix(named.title).startswith(" ")
    assert line.removeprefix(named.title).strip()


@pytest.mark.parametrize("name", sorted({*PAGES} - {*SHOWN.values()}))
def test_a_page_of_another_kind_holds_no_number_that_is_none(name, tmp_path):
    found = text_of_page(name, tmp_path)
    assert len(found.splitlines()) > 10
    assert not re.search(r"\b(nan|inf|None|NaT|<NA>)\b", found)


def test_nothing_else_is_recorded():
    assert {path.name for path in RECORDED.iterdir()} == {*COMMANDS, *TOLD}


if __name__ == "__main__":
    for name in (*COMMANDS, *TOLD):
        with tempfile.TemporaryDirectory() as made:
            (RECORDED / name).write_text(told(name, Path(made)), encoding="utf-8")
