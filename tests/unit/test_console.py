"""What is seen while a run works."""

import io
import re
import time

from rich.console import Console as RichConsole
from rich.table import Table

from ddp_bench.bench import console
from ddp_bench.bench.console import Console


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
    shown.progress("round 1 single", 0, 3, 12.0)
    shown.table(table("known-so-far"))
    shown.progress("round 2 ddp", 1, 3, 8.0)
    shown._live.refresh()
    last = plain(stream.getvalue()).rsplit("known-so-far", 1)
    assert len(last) == 2, "the table is shown"
    assert "round 2 ddp" in last[1]
    assert "at most 8s left" in last[1]
    shown.table(table("newer"))
    shown.progress("round 3 ddp", 2, 3, None)
    shown._live.refresh()
    newest = plain(stream.getvalue()).rsplit("round 2 ddp", 1)[1]
    assert "newer" in newest
    assert "known-so-far" not in newest
    shown.progress_done()
    assert stream.getvalue().endswith(("\x1b[2K", "\x1b[?25h")), "nothing of it is left"


def test_a_note_stays_above_the_table():
    shown, stream = on_terminal()
    shown.table(table("known-so-far"))
    shown.progress("round 1 single", 0, 3, None)
    shown.note("it [stays] \x1b[31m")
    assert "it [stays] \\x1b[31m" in plain(stream.getvalue())
    shown.progress_done()
    assert "known-so-far" in plain(stream.getvalue())


def test_elsewhere_there_is_no_table(capsys, monkeypatch):
    monkeypatch.setattr(console, "PLAIN_EVERY_S", 0.0)
    shown = Console(silent=False)
    assert not shown._rich.is_terminal
    shown.table(table("known-so-far"))
    shown.progress("round 1 single", 0, 3, 12.0)
    shown.progress_done()
    out, err = capsys.readouterr()
    assert (out, err) == ("", "round 1 single (1 of 3), at most 12s left\n")


def test_plain_lines_come_seldom(capsys, monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    shown = Console(silent=False)
    for step in range(21):
        now = 100.0 + step
        shown.progress(f"at {step}", 0, 1, None)
    assert re.findall(r"at \d+", capsys.readouterr().err) == ["at 0", "at 10", "at 20"]


def test_a_silent_one_shows_nothing(capsys):
    shown, stream = on_terminal()
    shown._silent = True
    shown.note("note")
    shown.table(table("known"))
    shown.progress("round 1", 0, 3, 12.0)
    shown.progress_done()
    assert stream.getvalue() == ""
    assert capsys.readouterr() == ("", "")
