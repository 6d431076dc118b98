"""`ddp-bench`: one entry for all commands, which answers a typing mistake without torch."""

import sys

import pytest
from commands import ROOT, finished

from ddp_bench.bench.commands import COMMANDS
from ddp_bench.bench.package import own_command

SCRIPT = "import sys; from ddp_bench.__main__ import console; sys.argv[0] = 'ddp-bench'; console()"
"""What the console script of an installed package does."""


@pytest.fixture
def without_torch(tmp_path):
    """An environment in which whatever imports torch fails."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')\n")
    return {"PYTHONPATH": f"{tmp_path}:{ROOT}"}


def entered(*arguments, env, script=True):
    command = [sys.executable, "-c", SCRIPT] if script else [sys.executable, "-m", "ddp_bench"]
    return finished([*command, *arguments], env=env)


def test_help_names_every_command_on_a_line_of_its_own(without_torch):
    done = entered("--help", env=without_torch)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ddp-bench COMMAND")
    lines = done.stdout.splitlines()
    assert all(
        any(line.split() == [name, *what.split()] for line in lines) for name, what in COMMANDS.items()
    )


MISTAKES = {
    "rum": "ddp-bench: error: unknown command 'rum'; did you mean 'run'? known: run, tune, ",
    "": "ddp-bench: error: name a command: run, tune, ",
    "--verson": "ddp-bench: error: unrecognized arguments: --verson; did you mean --version?",
    "run --gpu x": "ddp-bench run: error: ",
    "tune --gpuz 2": "ddp-bench tune: error: unrecognized arguments",
    "report nowhere": "ddp-bench report: error: nowhere",
}

EACH = """
import sys
from ddp_bench.__main__ import console
for line in sys.argv[1:]:
    sys.argv = ["ddp-bench", *line.split()]
    try:
        console()
    except SystemExit as end:
        print(end.code)
"""


def test_a_mistake_is_one_line_before_torch_is_imported(without_torch):
    command = [sys.executable, "-c", EACH, *MISTAKES]
    done = finished(command, env=without_torch)
    assert done.stdout == "2\n" * len(MISTAKES)
    for line, said in zip(done.stderr.splitlines(), MISTAKES.values(), strict=True):
        assert line.startswith(said)


def test_help_of_a_command_names_it_in_the_form_that_was_typed(without_torch):
    for name in ("run", "report"):
        done = entered(name, "--help", env=without_torch)
        assert done.stdout.startswith(f"usage: ddp-bench {name} "), done.stderr
        assert "python -m bench." not in done.stdout
    as_module = entered("run", "--help", env=without_torch, script=False)
    assert as_module.stdout.startswith("usage: python -m ddp_bench run ")


def test_versions_come_from_what_is_installed(without_torch):
    done = entered("--version", env=without_torch)
    assert done.returncode == 0
    assert done.stdout.startswith("ddp-bench ")
    assert ", torch " in done.stdout


def test_our_own_processes_start_in_any_folder(tmp_path):
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench/__init__.py").write_text("raise SystemExit('theirs')\n")
    for safe in ("", "1"):
        env = {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": safe}
        done = finished(own_command("report", "nowhere"), tmp_path, env)
        assert done.stderr.startswith("report: error: nowhere"), done.stderr
