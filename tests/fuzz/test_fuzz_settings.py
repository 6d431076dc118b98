"""Any TOML text, any value, any command line: settings, a refusal in one line, and nothing written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fuzzing import (
    HOSTILE_TEXT,
    Reached,
    bounded,
    empty_folder,
    reached,
    read_or_refused,
    refused_or_reached,
)
from hypothesis import example, given
from hypothesis import strategies as st
from in_process import first_worker

from ddp_bench.bench.doctor import main as doctor
from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.gate import interleave
from ddp_bench.bench.gate import main as gate
from ddp_bench.bench.gate.command import read_thresholds
from ddp_bench.bench.lab import main as lab
from ddp_bench.bench.lab import namespaces
from ddp_bench.bench.resolve import resolve
from ddp_bench.bench.run import conductor
from ddp_bench.bench.run import main as run
from ddp_bench.bench.settings import options_of
from ddp_bench.report import main as report_command

NAMES = [setting.name for setting in options_of()]
VALUES = st.one_of(
    HOSTILE_TEXT,
    st.sampled_from(["1", "1,2", "on", "default,25", "resnet18", "ddp", "90s", "2%", "weak", "cpu", "1/25"]),
)
TOML_VALUES = st.recursive(
    st.one_of(VALUES, st.booleans(), st.integers(), st.floats(), st.dates(), st.times()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(VALUES, inner, max_size=2),
    max_leaves=5,
)


def written(value: Any) -> str:
    """A TOML value."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for characters that cannot stand alone.
        return json.dumps(value.encode("utf-8", "replace").decode())
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{written(k)} = {written(v)}' for k, v in value.items())}}}"
    return str(value)


def settings_or_refusal(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    read_or_refused(lambda: resolve({}, config=path))
    read_or_refused(lambda: read_thresholds("5%", path))


@bounded(150)
@given(pairs=st.dictionaries(st.sampled_from(NAMES) | VALUES, TOML_VALUES, max_size=4))
@example(pairs={"out": "a\x00b", "name": "x"})
def test_any_value(tmp_path: Path, pairs: dict[str, Any]) -> None:
    lines = [f"{written(key)} = {written(value)}" for key, value in pairs.items()]
    for head in ("", "[thresholds]\n"):
        settings_or_refusal(tmp_path / "x.toml", (head + "\n".join(lines)).encode("utf-8", "replace"))


@bounded(150)
@given(content=st.binary(max_size=60) | st.text("[]{}=.\"'#\n,abseed 0123", max_size=60).map(str.encode))
@example(content=b"a = " + b"[" * 100_000)
@example(content=b"a = 1" + b"1" * 5000)
@example(content=b"#" * (2**20 + 1))
def test_any_text(tmp_path: Path, content: bytes) -> None:
    settings_or_refusal(tmp_path / "x.toml", content)


@pytest.mark.parametrize("path", ["\x00", "x" * 5000, ".", "/dev/null/x", "\udcff"])
def test_a_config_that_is_no_file(path: str) -> None:
    with pytest.raises(UsageError):
        resolve({}, config=Path(path))


def lines_of(parser: Any) -> st.SearchStrategy[list[str]]:
    options = [name for action in parser._actions for name in action.option_strings]
    known = st.sampled_from(options)
    pair = st.tuples(known, VALUES).map(list)
    equal = st.tuples(known, VALUES).map(lambda both: ["=".join(both)])
    loose = st.one_of(VALUES, st.sampled_from(["--", "-", "---"])).map(lambda word: [word])
    return st.lists(pair | equal | loose, max_size=6).map(
        lambda parts: [word for part in parts for word in part]
    )


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (conductor, "show_plan"),
        (interleave, "measure_in_turns"),
        (doctor, "examine"),
        (lab, "run"),
        (report_command, "_write"),
    ):
        monkeypatch.setattr(module, name, reached)
    monkeypatch.setattr(run, "running_workers", first_worker(reached))
    monkeypatch.setattr(namespaces, "require_support", lambda: None)
    monkeypatch.setattr(namespaces, "become_root", lambda _command: None)
    monkeypatch.setattr(lab.signal, "signal", lambda *_: None)


@pytest.mark.usefixtures("nothing_starts")
@bounded(250)
@given(arguments=lines_of(run.parser()), dry=st.sampled_from(["", "--dry-run"]))
@example(arguments=["--max-time", "9" * 400], dry="--dry-run")
@example(arguments=["--out", "a\x00b"], dry="")
@example(arguments=["--data", "a\x00b"], dry="")
@example(arguments=["--workload", "os.path:no such"], dry="")
@example(arguments=["--arch", "\x1b[31m"], dry="")
@example(arguments=["\x1b[31m"], dry="")
@example(arguments=["--name", "a\nb"], dry="")
def test_any_command_line_of_run(tmp_path: Path, arguments: list[str], dry: str) -> None:
    with empty_folder(tmp_path / "here"):
        refused_or_reached(run.main, [*arguments, *dry.split()])


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("command", "parser"), [(gate, gate.parser), (doctor, doctor.parser)], ids=["gate", "doctor"]
)
def test_any_command_line(tmp_path: Path, command: Any, parser: Any) -> None:
    @bounded(100)
    @given(arguments=lines_of(parser()))
    @example(arguments=["\x1b[31m"])
    @example(arguments=["a\x00b", "c"])
    def play(arguments: list[str]) -> None:
        with empty_folder(tmp_path / "here"):
            refused_or_reached(command.main, arguments)

    play()


@pytest.mark.usefixtures("nothing_starts")
@bounded(100)
@given(
    arguments=st.lists(
        VALUES | st.sampled_from(["--hosts", "--rate", "--delay", "--", "2", "1gbit"]), max_size=8
    )
)
@example(arguments=["--hosts", "2", "--rate", "9" * 400 + "gbit", "--", "python", "-m", "bench.run"])
@example(arguments=["--hosts", "2", "--rate", "1gbit", "--delay", "1" * 400 + "s", "--", "python", "-m", "x"])
def test_any_command_line_of_lab(tmp_path: Path, arguments: list[str]) -> None:
    with empty_folder(tmp_path / "here"):
        refused_or_reached(lab.main, arguments)


@pytest.mark.usefixtures("nothing_starts")
@bounded(100)
@given(arguments=lines_of(report_command._parser()))
def test_any_command_line_of_report(tmp_path: Path, arguments: list[str]) -> None:
    with empty_folder(tmp_path / "here"):
        refused_or_reached(report_command.main, arguments)


def test_the_guard_lets_nothing_else_through(tmp_path: Path) -> None:
    def breaks(_arguments: Any) -> int:
        raise KeyError

    with pytest.raises(KeyError):
        refused_or_reached(breaks, [])
    with pytest.raises(AssertionError):
        refused_or_reached(lambda _: 1, [])
    with pytest.raises(AssertionError), empty_folder(tmp_path / "here") as folder:
        (folder / "left").touch()
    with pytest.raises(Reached):
        reached()
