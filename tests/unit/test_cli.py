"""What all commands share: how they refuse, and what their exit codes are."""

from __future__ import annotations

import subprocess
import sys

import pytest
from commands import ROOT

from bench import cli
from bench.errors import AgreedError, ExitCode, GaveUpError, NotComparableError, UsageError, UserCodeError
from bench.machine import ENV_PREFIXES
from ddp_bench import TYPED_ENV

WITHOUT_TORCH = """
import runpy, sys
sys.modules["torch"] = None  # an import of it fails
sys.argv = [sys.argv[1], "--nonsense\\x1b[31m"]
runpy.run_module(sys.argv[0], run_name="__main__")
"""

COMMANDS = (*(f"bench.{name}" for name in ("run", "gate", "doctor", "lab", "predict", "tune")), "report")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_typing_mistake_is_one_harmless_line_before_torch_is_imported(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == ExitCode.USAGE == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{command}: error: ")
    assert line.endswith(f"; see python -m {command} --help")
    assert line.isprintable()


@pytest.mark.parametrize(
    ("error", "code", "label"),
    [
        (UsageError("x"), 2, "error"),
        (AgreedError("x"), 2, "error"),
        (GaveUpError("x"), 4, "error"),
        (NotComparableError("x"), 3, "not comparable"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_error_becomes_a_line_and_its_exit_code(
    error: BaseException, code: int, label: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> int:
        raise error

    assert cli.guarded("x", work) == code
    assert capsys.readouterr().err == (f"bench.x: {label}: x\n" if label else "")
    assert cli.guarded("x", work, silent=UsageError) == code
    assert capsys.readouterr().err == ""


def test_a_mistake_in_the_users_code_shows_where(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        try:
            return 1 // 0
        except ZeroDivisionError as cause:
            raise UserCodeError("your model raised") from cause

    assert cli.guarded("x", work) == 2
    said = capsys.readouterr().err.splitlines()
    assert any("ZeroDivisionError" in line for line in said)
    assert said[-1] == "bench.x: error: your model raised"


def test_a_reader_that_has_gone_does_not_change_the_exit_code() -> None:
    script = """
import sys
from bench.cli import guarded, to_reader
def work():
    with to_reader():
        for _ in range(100_000):
            print("line")
    return 1
sys.exit(guarded("x", work))
"""
    writer = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert writer.stderr is not None
    assert writer.stdout.readline() == "line\n"
    writer.stdout.close()
    assert writer.wait() == 1
    assert writer.stderr.read() == ""
    writer.stderr.close()


@pytest.mark.parametrize(
    ("typed", "run", "report", "said"),
    [
        (None, "python -m bench.run --out 'a b'", "python -m report", "bench.tune"),
        ("ddp-bench", "ddp-bench run --out 'a b'", "ddp-bench report", "ddp-bench tune"),
        ("python -m bench", "python -m bench run --out 'a b'", "python -m bench report", "bench tune"),
    ],
)
def test_commands_are_named_in_the_form_that_the_user_typed(
    typed: str | None, run: str, report: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TYPED_ENV, raising=False)
    if typed is not None:
        monkeypatch.setenv(TYPED_ENV, typed)
    assert cli.command("run", "--out", "a b") == run
    assert cli.command("report") == report
    seen: list[str] = []
    before = cli.speaker()
    cli.guarded("tune", lambda: seen.append(cli.speaker()) or 0)  # type: ignore[func-returns-value]
    assert seen == [said], "whatever says something while tune runs says it as tune"
    assert cli.speaker() == before


def test_the_form_of_a_command_is_no_condition_of_a_run() -> None:
    assert not TYPED_ENV.startswith(ENV_PREFIXES)
