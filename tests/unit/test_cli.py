"""What all commands share: how they refuse, and what their exit codes are."""

import io
import json
import os
import re
import subprocess
import sys
import threading
import time

import pytest
from commands import ROOT, finished, python
from rich.console import Console as RichConsole
from rich.table import Table

from ddp_bench.__main__ import load_main
from ddp_bench.bench.common import cli
from ddp_bench.bench.common.cli import TYPED_ENV
from ddp_bench.bench.common.console import Console
from ddp_bench.bench.common.errors import (
    ExitCode,
    NotComparableError,
    NotMeasuredError,
    UsageError,
    UserCodeError,
)
from ddp_bench.bench.common.values import parse_switch
from ddp_bench.bench.machine.host import ENV_PREFIXES
from ddp_bench.bench.plan.settings import SWITCHES, list_options
from ddp_bench.bench.run.main import make_parser as run_parser
from ddp_bench.bench.run.main import parse_settings

EACH_COMMAND = """
import contextlib, io, json, runpy, sys
modules, argument, *commands = sys.argv[1:]
sys.modules.update(dict.fromkeys(modules.split(",")))  # an import of them fails
found = {}
for command in commands:
    sys.argv = [command, argument]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_module(command, run_name="__main__")
        except SystemExit as end:
            found[command] = [end.code, out.getvalue(), err.getvalue()]
print(json.dumps(found))
"""


def each_command(argument, *, without):
    """Exit code and outputs of every command, run in a process that cannot import some modules."""
    found = json.loads(python("-c", EACH_COMMAND, without, argument, *COMMANDS).stdout)
    assert set(found) == set(COMMANDS)
    return found


NAMES = ("run", "gate", "doctor", "lab", "predict", "tune", "export")
COMMANDS = (*(f"bench.{name}" for name in NAMES), "report")


def test_a_typing_mistake_is_one_harmless_line_before_torch_is_imported():
    for command, (code, out, err) in each_command("--nonsense\x1b[31m", without="torch").items():
        assert code == ExitCode.USAGE == 2
        assert out == ""
        (line,) = err.splitlines()
        assert line.startswith(f"{command}: error: ")
        assert line.endswith(f"; see python -m {command} --help")
        assert line.isprintable()


def test_help_takes_no_second_of_imports():
    for command, (code, out, err) in each_command("--help", without="torch,pandas,scipy").items():
        assert (code or 0, err) == (0, "")
        assert out.startswith(f"usage: python -m {command}")


def helped(argument, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        run_parser().parse_args([argument])
    return capsys.readouterr().out


def test_the_help_of_a_run_is_one_screen_with_an_example(capsys, monkeypatch):
    lines = helped("--help", capsys, monkeypatch).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert "  python -m bench.run --gpus 1,2,4" in "\n".join(lines)


def test_the_whole_help_has_every_option_with_its_default_and_switches_of_one_style(capsys, monkeypatch):
    entries = re.split(r"^  (?=-)", helped("--help-all", capsys, monkeypatch), flags=re.MULTILINE)
    told = {entry.split()[0]: entry for entry in entries}
    for setting in list_options():
        entry = told[f"--{setting.name.replace('_', '-')}"]
        assert "(default:" in entry or setting.name == "workload"
        assert ("[on|off" in entry) == (
            setting.metadata["parse"] is parse_switch
            or setting.name in SWITCHES
            or "off" in str(entry.split()[1])
        )
    asked = parse_settings(["--static-graph", "--trace"])
    assert (asked.axes["static_graph"], asked.trace) == ((True,), True)


@pytest.mark.parametrize(
    ("error", "code", "label"),
    [
        (UsageError("x"), 2, "error"),
        (NotMeasuredError("x"), 4, "error"),
        (NotComparableError("x"), 3, "not comparable"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_error_becomes_a_line_and_its_exit_code(error, code, label, capsys):
    def work():
        raise error

    assert cli.run_command("x", work) == code
    assert capsys.readouterr().err == (f"bench.x: {label}: x\n" if label else "")


def test_control_characters_of_what_a_line_repeats_do_not_reach_the_terminal(capsys):
    def work():
        cli.print_message("\x1b]0;owned\x07 said")
        try:
            raise ValueError("\x1b[31m\nred\u202e")
        except ValueError as cause:
            raise UserCodeError("your\x9b model") from cause

    assert cli.run_command("x", work) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == r"bench.x: \x1b]0;owned\x07 said"
    assert lines[-3:] == [r"ValueError: \x1b[31m", r"red\u202e", r"bench.x: error: your\x9b model"]


def test_a_value_without_end_is_cut():
    for value in ("x" * 100_000, "x " * 100_000):
        error = UsageError(f"--arch {value} is unknown; choose one of --help")
        assert len(str(error)) < 5000
        assert str(error).startswith("--arch x")
        assert str(error).endswith("is unknown; choose one of --help")


WRITES = """
import os, sys
from ddp_bench.bench.common.cli import run_command
def work():
    if "closes" in sys.argv:
        sys.stderr.close()
        os.closerange(1, 3)
    for _ in range(100_000 if "much" in sys.argv else 1):
        print("line ±1")
    print("progress ±1", file=sys.stderr)
    return 1
sys.exit(run_command("x", work))
"""


@pytest.mark.parametrize(
    ("where", "written", "code"),
    [
        ("> out 2> err", ("line ±1\n", "progress ±1\n"), 1),
        ("closes > out 2> err", ("line ±1\n", "progress ±1\n"), 1),
        ("> out 2> /dev/full", ("line ±1\n", ""), 1),
        ("> out 2>&-", ("line ±1\n", ""), 1),
        (">&- 2> err", ("", "progress ±1\n"), 1),
        (
            "> /dev/full 2> err",
            ("", "progress ±1\nbench.x: error: standard output cannot be written: No space left on device"),
            2,
        ),
    ],
)
def test_an_output_that_takes_nothing_ends_no_work(where, written, code, tmp_path):
    """Nor does one that the work closes."""
    command = f"{sys.executable} -c '{WRITES}' {where}"
    done = finished(["sh", "-c", command], tmp_path, {"PYTHONPATH": str(ROOT)})
    out, err = (file.read_text() if (file := tmp_path / name).exists() else "" for name in ("out", "err"))
    assert (done.returncode, out) == (code, written[0])
    assert err.startswith(written[1])
    assert "Traceback" not in err


def test_an_output_of_ascii_alone_gets_other_characters_replaced():
    done = python("-c", WRITES, env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout, done.stderr) == (1, "line ?1\n", "progress ?1\n")


def test_a_reader_that_has_gone_does_not_change_the_exit_code():
    command, pipe = [sys.executable, "-c", WRITES, "much"], subprocess.PIPE
    writer = subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
    assert writer.stdout.readline() == "line ±1\n"
    writer.stdout.close()
    assert writer.wait() == 1
    assert writer.stderr.read() == "progress ±1\n"
    writer.stderr.close()


@pytest.mark.parametrize("word", ["plain", "a b", "two\nlines", "it's\ta \\x0a\x1b"])
def test_a_command_is_pasted_on_one_line_whatever_its_words_hold(word):
    quoted = cli.quote_word(word)
    assert quoted.isprintable()
    assert finished(["bash", "-c", f"printf %s {quoted}"]).stdout == word


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
@pytest.mark.parametrize(
    "name", ["\xf6ut", "of\N{NO-BREAK SPACE}two\N{RIGHT-TO-LEFT OVERRIDE}", b"\xc3\xb6\xff 1"]
)
def test_a_path_is_pasted_as_its_bytes_whatever_the_locale_decodes(tmp_path, locale, name):
    """Without its UTF-8 mode Python decodes nothing but ASCII under the locale C."""
    folder = tmp_path / os.fsdecode(name)
    folder.mkdir()
    script = "import sys; from ddp_bench.bench.common import cli; print(cli.quote_word(sys.argv[1]))"
    env = {"LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    shown = finished([sys.executable, "-c", script, str(folder)], env=env)
    assert shown.returncode == 0, shown.stderr
    assert finished(["bash", "-c", f"cd {shown.stdout}"], env=env).returncode == 0


def test_the_form_of_a_command_is_no_condition_of_a_run():
    assert not TYPED_ENV.startswith(ENV_PREFIXES)


REFUSED = (
    ("run", "--gpus 1,1"),
    ("gate", "--interleave HEAD --modes ddp"),
    ("gate", "--interleave HEAD -- --resume RUN"),
    ("gate", ""),
    ("predict", "no-such-run --gpus 8"),
    ("tune", "--preset quick"),
    ("doctor", "--repair"),
    ("export", ""),
    ("lab", "--rate 1gbit -- python train.py"),
    ("report", "no-such-run"),
)


@pytest.mark.parametrize("typed", ["", "ddp-bench", "python -m ddp_bench"])
@pytest.mark.parametrize(("name", "arguments"), [*((name, "--help") for name, _ in REFUSED), *REFUSED])
def test_messages_name_commands_in_the_form_typed(name, arguments, typed, monkeypatch, capsys):
    monkeypatch.setenv("_DDP_BENCH_TYPED", typed)
    try:
        code = load_main(name)(arguments.split())
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert code == (0 if arguments == "--help" else 2)
    assert not code or f"{cli.get_message_prefix(name)}: error: " in err
    said = out + err
    ours = f"({'|'.join((*NAMES, 'report'))})"
    as_module, as_script = rf"(?<!ddp_bench\.)\bbench\.{ours}\b|python -m report", rf"ddp[-_]bench {ours}\b"
    assert re.search(as_script if typed else as_module, said) or name == "report"
    assert not re.search(as_module if typed else as_script, said)


def table(text):
    made = Table()
    made.add_column("case")
    made.add_row(text)
    return made


def on_terminal():
    shown, stream = Console(silent=False), io.StringIO()
    shown._rich = RichConsole(file=stream, force_terminal=True, width=100, height=40, legacy_windows=False)
    return shown, stream


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_on_a_terminal_the_table_stands_above_the_live_line():
    shown, stream = on_terminal()
    shown.show_progress("round 1 single", 0.1, "12s of at most 2m 00s")
    shown.show_table(table("known-so-far"))
    shown.show_progress("round 2 ddp", 0.5, "1m 00s of at most 2m 00s")
    last = plain(stream.getvalue()).rsplit("known-so-far", 1)
    assert len(last) == 2, "the table is shown"
    assert "round 2 ddp" in last[1]
    assert "1m 00s of at most 2m 00s" in last[1]
    shown.show_table(table("newer"))
    shown.show_progress("round 3 ddp", 0.6, "")
    newest = plain(stream.getvalue()).rsplit("round 2 ddp", 1)[1]
    assert "newer" in newest
    assert "known-so-far" not in newest
    shown.print_note("it [stays] \x1b[31m")
    below = plain(stream.getvalue()).rsplit("it [stays] \\x1b[31m", 1)[1]
    assert "newer" in below
    shown.hide_progress()
    assert stream.getvalue().endswith(("\x1b[2K", "\x1b[?25h")), "nothing of it is left"


def test_a_terminal_is_drawn_on_between_blocks_alone():
    """Each drawing of a table takes milliseconds of a core, which a timed block would lack."""
    before = threading.active_count()
    shown, stream = on_terminal()
    shown.show_progress("round 1 single", 0.1, "12s")
    assert threading.active_count() == before, "nobody draws by himself"
    assert "round 1 single" in plain(stream.getvalue())
    shown.hide_progress()


def test_elsewhere_plain_lines_come_seldom_and_there_is_no_table(capsys, monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    shown = Console(silent=False)
    shown.show_table(table("known-so-far"))
    for step in range(21):
        now = 100.0 + step
        shown.show_progress(f"round {step}", 0.1, f"{step}s")
    shown.hide_progress()
    lines = [f"{step}s: round {step}\n" for step in (0, 10, 20)]
    assert capsys.readouterr() == ("", "".join(lines))


def test_a_silent_one_shows_nothing(capsys):
    shown, stream = on_terminal()
    shown._silent = True
    shown.print_note("note")
    shown.show_table(table("known"))
    shown.show_progress("round 1", 0.0, "12s")
    shown.hide_progress()
    assert stream.getvalue() == ""
    assert capsys.readouterr() == ("", "")
