"""A results folder may be anyone's: nothing in it leads elsewhere, hangs a reader or takes its memory."""

import os
import socket
from pathlib import Path

import pytest

from ddp_bench.bench.cli import read_toml
from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.results import disk
from ddp_bench.bench.results.disk import (
    make_folder,
    open_regular,
    open_text,
    read_bytes,
    read_text,
    remove_unfinished,
    replace_file,
)
from ddp_bench.bench.results.journal import JOURNAL, Journal, read
from ddp_bench.bench.results.store import LOCK, MEASURED, FolderLock, RunWriter, claim
from ddp_bench.bench.results.tables import read_blocks, repair_allreduce, repair_blocks


@pytest.fixture
def outside(tmp_path):
    """A file that is not the run's."""
    path = tmp_path / "mine.txt"
    path.write_text("mine\n")
    return path


def _lock(folder):
    return FolderLock(folder)


def _append(folder):
    return Journal(folder).begin([])


WRITES = {
    "the lock": (LOCK, _lock),
    "blocks": ("blocks.csv", RunWriter),
    "curves": ("allreduce.csv", RunWriter),
    "the journal": (JOURNAL, _append),
    "a repair of blocks": ("blocks.csv", lambda folder: repair_blocks(folder / "blocks.csv", {})),
    "a repair of curves": ("allreduce.csv", lambda folder: repair_allreduce(folder / "allreduce.csv", set())),
}


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
@pytest.mark.parametrize("name", WRITES)
def test_a_run_writes_through_no_link(name, link, outside, tmp_path):
    file, write = WRITES[name]
    folder = tmp_path / "run"
    folder.mkdir()
    link(folder / file, outside)
    said = ""
    try:
        write(folder)
    except (UsageError, OSError) as error:
        said = str(error)
    assert outside.read_text() == "mine\n"
    assert "link" in said or not (folder / file).samefile(outside), "refused, or put in its place"


def test_a_link_to_nothing_makes_no_file(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for file, _ in WRITES.values():
        (folder / file).unlink(missing_ok=True)
        (folder / file).symlink_to(tmp_path / "new.txt")
    for _, write in WRITES.values():
        with pytest.raises((UsageError, OSError)):
            write(folder)
    assert not (tmp_path / "new.txt").exists()


def test_traces_go_into_no_other_folder(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    folder = claim(tmp_path / "run")
    (folder / "traces").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="link"):
        RunWriter(folder).write_trace("x.json.gz", b"trace")
    with pytest.raises(FileExistsError):
        make_folder(tmp_path / "run" / "manifest.json")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def _pipe(path):
    os.mkfifo(path)


def _socket(path):
    with socket.socket(socket.AF_UNIX) as one:
        before = Path.cwd()
        os.chdir(path.parent)  # a socket's name is short
        one.bind(path.name)
        os.chdir(before)


@pytest.mark.parametrize(
    "make",
    [_pipe, _socket, Path.mkdir, lambda path: path.symlink_to("/dev/zero")],
    ids=["pipe", "socket", "folder", "device"],
)
def test_what_is_no_regular_file_is_refused_at_once(make, tmp_path):
    path = tmp_path / "x.csv"
    make(path)
    for follow in (False, True):
        with pytest.raises(UsageError, match="cannot be read"):
            read_bytes(path, most_bytes=100, follow=follow)
    with pytest.raises(UsageError, match="cannot be read"):
        open_text(path, most_bytes=100)
    with pytest.raises(OSError, match=r"."):
        open_regular(path, os.O_WRONLY)


@pytest.mark.timeout(20)
def test_settings_come_from_no_pipe(tmp_path):
    os.mkfifo(tmp_path / "x.toml")
    with pytest.raises(UsageError, match="is no regular file"):
        read_toml(tmp_path / "x.toml")


def test_a_link_that_the_user_names_is_followed(outside, tmp_path):
    (tmp_path / "link").symlink_to(outside)
    assert read_text(tmp_path / "link", most_bytes=100, follow=True) == "mine\n"
    with pytest.raises(UsageError, match="it is a link"):
        read_text(tmp_path / "link", most_bytes=100)


def test_sizes_are_not_believed(tmp_path):
    path = tmp_path / "blocks.csv"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(UsageError, match="too large"):
        next(read_blocks(path))
    with path.open("wb") as file:
        file.truncate(2**25)
    with pytest.raises(UsageError, match="a line is longer"):
        next(read_blocks(path))


def test_a_line_of_a_journal_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("ddp_bench.bench.results.journal.MOST_JSON_BYTES", 100)
    (tmp_path / JOURNAL).write_text('{"event": "end", "because": "x"}\n"' + "x" * 100 + '"\n')
    with pytest.raises(UsageError, match="line 2 is longer"):
        read(tmp_path)


def test_what_is_no_journal_is_not_read_to_its_end(tmp_path):
    (tmp_path / JOURNAL).write_text("{\n" * 101)
    with pytest.raises(UsageError, match="101 lines are damaged"):
        read(tmp_path)


def test_what_a_killed_writer_began_goes_at_the_next_start(tmp_path):
    for name in (".cases.csv-abcd_123", ".manifest.json-00000000", ".notes.txt-abcdefgh", "cases.csv"):
        (tmp_path / name).touch()
    remove_unfinished(tmp_path, MEASURED)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".notes.txt-abcdefgh", "cases.csv"]


def test_the_name_of_an_unfinished_file_is_known(tmp_path, monkeypatch):
    """As a kill inside `replace_file` leaves it."""
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        replace_file(tmp_path / "cases.csv", lambda path: path.write_text("x"))
    (left,) = tmp_path.iterdir()
    assert disk._UNFINISHED.fullmatch(left.name)
