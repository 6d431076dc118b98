"""Files of a results folder, which may be anyone's: nothing in it leads elsewhere, hangs or takes memory.

The journal tells what a killed process can no longer tell, from any prefix of its bytes. And text of others
is text alone, in files as on a terminal.
"""

import csv
import io
import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made import block, case_of, new_run, write_blocks
from report_runs import case

from ddp_bench.bench.common.errors import UsageError
from ddp_bench.bench.common.text import decode_csv_cell, escape_controls, escape_csv_cell, escape_markdown
from ddp_bench.bench.plan.buckets import BucketLayout
from ddp_bench.bench.plan.resolve import read_toml
from ddp_bench.bench.plan.sweep import Planned
from ddp_bench.bench.results import disk, journal, run_folder
from ddp_bench.bench.results.case_columns import CASES
from ddp_bench.bench.results.columns import BLOCKS, make_frame
from ddp_bench.bench.results.disk import LOCK, FolderLock
from ddp_bench.bench.results.recorder import Recorder
from ddp_bench.bench.results.run_folder import RUN_FILES
from ddp_bench.bench.results.store import load_run
from ddp_bench.bench.results.tables import read_table
from ddp_bench.bench.run.close import close_broken_run


@pytest.fixture
def outside(tmp_path):
    """A file that is not the run's."""
    path = tmp_path / "mine.txt"
    path.write_text("mine\n")
    return path


WRITES = {
    "the lock": (LOCK, FolderLock),
    "blocks": ("blocks.csv", lambda folder: run_folder.write_blocks(folder, [])),
    "a table": (
        "cases.csv",
        lambda folder: run_folder.write_table(folder, "cases.csv", make_frame([], CASES)),
    ),
    "the journal": (journal.JOURNAL, lambda folder: journal.Journal(folder).write(journal.Plan(cases=()))),
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
    folder = new_run(tmp_path / "run")
    (folder / "traces").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="link"):
        run_folder.write_trace(folder, "x.json.gz", b"trace")
    with pytest.raises(FileExistsError):
        disk.make_folder(tmp_path / "run" / "manifest.json")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def _socket(path):
    with socket.socket(socket.AF_UNIX) as one:
        before = Path.cwd()
        os.chdir(path.parent)  # a socket's name is short
        one.bind(path.name)
        os.chdir(before)


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, _socket, Path.mkdir, lambda path: path.symlink_to("/dev/zero")],
    ids=["pipe", "socket", "folder", "device"],
)
def test_what_is_no_regular_file_is_refused_at_once(make, tmp_path):
    path = tmp_path / "x.csv"
    make(path)
    for follow in (False, True):
        with pytest.raises(UsageError, match="cannot be read"):
            disk.read_bytes(path, most_bytes=100, follow=follow)
    with pytest.raises(UsageError, match="cannot be read"):
        disk.open_binary(path, most_bytes=100)
    with pytest.raises(OSError, match=r"."):
        disk.open_regular(path, os.O_WRONLY)


@pytest.mark.timeout(20)
def test_settings_come_from_no_pipe(tmp_path):
    os.mkfifo(tmp_path / "x.toml")
    with pytest.raises(UsageError, match="is no regular file"):
        read_toml(tmp_path / "x.toml")


def test_a_link_that_the_user_names_is_followed(outside, tmp_path):
    (tmp_path / "link").symlink_to(outside)
    assert disk.read_text(tmp_path / "link", most_bytes=100, follow=True) == "mine\n"
    with pytest.raises(UsageError, match="it is a link"):
        disk.read_text(tmp_path / "link", most_bytes=100)


def test_sizes_are_not_believed(tmp_path):
    path = tmp_path / "blocks.csv"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(UsageError, match="too large"):
        read_table(path, BLOCKS)
    with path.open("wb") as file:
        file.truncate(2**25)
    with pytest.raises(UsageError, match="a line is longer"):
        read_table(path, BLOCKS)


def test_a_log_of_long_lines_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr("ddp_bench.bench.results.journal.MAX_LINE_BYTES", 100)
    line = '{"event": "end", "because": "x"}\n'
    (tmp_path / journal.JOURNAL).write_text(line + '"' + "x" * 100 + '"\n')
    with pytest.raises(UsageError, match="line 2 is damaged \\(longer than any"):
        journal.read(tmp_path)


def test_what_a_killed_writer_began_goes_at_the_next_start(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:  # as a kill inside `replace_file` leaves it
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        patch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            disk.replace_file(tmp_path / "cases.csv", lambda path: path.write_text("x"))
    assert len([*tmp_path.iterdir()]) == 1
    for name in (".cases.csv-abcd_123", ".manifest.json-00000000", ".notes.txt-abcdefgh", "cases.csv"):
        (tmp_path / name).touch()
    disk.remove_unfinished(tmp_path, RUN_FILES)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".notes.txt-abcdefgh", "cases.csv"]


CASE = case_of(arch="resnet20", image_size=32, backend="gloo", bucket_cap_mb="1/25")
PLAN = [Planned(case=CASE, num_nodes=1, oversubscribed=True, skip_reason=None)]


def written(folder):
    made = journal.Journal(folder)
    made.write(journal.Plan(cases=tuple(PLAN), version=journal.VERSION))
    made.write(journal.Attempt(run_id="a"))
    made.write(journal.UnderWay(what="its preparation", index=0))
    made.write(journal.Settled(index=0, status="ok", facts={"num_buckets": 2}))
    made.write(journal.Layout(case_id=CASE.case_id, num_bytes=(8, 4), parameters=((0,), (1, 2))))
    made.write(journal.UnderWay(what="round 1 (timed)", index=0))
    return made


def test_what_is_written_comes_back(tmp_path):
    assert written(tmp_path).state == journal.read(tmp_path)
    state = journal.read(tmp_path)
    assert state.plan == PLAN
    assert state.settled[0].facts == {"num_buckets": 2}
    assert state.layouts[CASE.case_id] == BucketLayout((8, 4), ((0,), (1, 2)))
    assert state.under_way == journal.UnderWay(index=0, what="round 1 (timed)")
    assert not state.ended


def test_every_prefix_is_a_journal(tmp_path):
    written(tmp_path)
    path = tmp_path / journal.JOURNAL
    whole = path.read_bytes()
    for length in range(whole.index(b"\n") + 1, len(whole)):
        path.write_bytes(whole[:length])
        known = journal.read(tmp_path)
        journal.Journal(tmp_path).write(journal.End(because="interrupted"))
        again = journal.read(tmp_path)
        assert again.ended == "interrupted"
        assert path.read_bytes().startswith(whole[: whole.rfind(b"\n", 0, length) + 1] + b'{"event": "end"')
        assert (again.plan, again.settled, again.layouts) == (known.plan, known.settled, known.layouts)


def test_a_reason_may_name_a_file_whose_name_is_no_text(tmp_path):
    written(tmp_path).write(journal.Settled(index=0, status="failed", reason="no file \udcff"))
    assert journal.read(tmp_path).settled[0].reason == "no file \udcff"


def test_a_case_that_failed_is_no_longer_under_way_and_can_be_tried_again(tmp_path):
    made = written(tmp_path)
    made.write(journal.Settled(index=0, status="failed", reason="ValueError"))
    assert journal.read(tmp_path).under_way is None
    made.write(journal.Retry(indices=(0,)))
    assert journal.read(tmp_path).settled == {}


def test_a_folder_without_one_is_no_run(tmp_path):
    with pytest.raises(UsageError, match=r"journal\.jsonl"):
        journal.read(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        '{"event":"plan","cases":[1]}',
        '{"event":"settled","index":-1,"status":"ok"}',
        '{"event":"settled","index":0,"status":"fine"}',
        '{"event":"settled","index":0,"status":"ok","facts":{"num_buckets":"x"}}',
        '{"event":"settled","index":0,"status":"ok","facts":{"unheard_of":1}}',
        '{"event":"layout","case_id":"x","num_bytes":["a"],"parameters":[]}',
        '{"event":"underway","index":9,"what":"x"}',
        '{"event":"underway","what":"x","curve":[[],2]}',
        '{"event":"unheard of"}',
        "5",
    ],
)
def test_a_line_that_holds_something_else_is_named(line, tmp_path):
    written(tmp_path)
    with (tmp_path / journal.JOURNAL).open("a") as file:
        file.write(f"{line}\n")
    for take in (journal.read, journal.Journal):
        with pytest.raises(UsageError, match="line 7 is damaged"):
            take(tmp_path)


def test_a_journal_of_another_plan_is_refused(tmp_path):
    written(tmp_path)
    (tmp_path / "manifest.json").write_text('{"schema_version": 3, "plan_hash": "another"}')
    with pytest.raises(UsageError, match=r"another plan than manifest\.json"):
        Recorder.reopen(tmp_path)


def test_a_journal_without_its_plan_makes_no_empty_tables(tmp_path):
    """A damaged first line had made cases.csv a header alone."""
    written(tmp_path)
    (tmp_path / "cases.csv").write_text("mine")
    damaged = "x" + (tmp_path / journal.JOURNAL).read_text()
    (tmp_path / journal.JOURNAL).write_text(damaged)
    with pytest.raises(UsageError, match="line 1 is damaged"):
        Recorder.reopen(tmp_path)
    assert (tmp_path / "cases.csv").read_text() == "mine"
    assert (tmp_path / journal.JOURNAL).read_text() == damaged


@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_a_manifest_that_cannot_be_read_is_not_replaced(content, tmp_path, capsys):
    written(tmp_path)
    (tmp_path / "manifest.json").write_text(content)
    close_broken_run(tmp_path, "the ranks died")
    assert "manifest" in capsys.readouterr().err
    assert (tmp_path / "manifest.json").read_text() == content


HOSTILE = [
    *("=cmd|'/C calc'!A0", "+1+1", "-1+1", "@SUM(A1)", "\t=1", "\r=1", "'=1", "''@x", "\uff1d1+1"),
    *("a\x1b[31mred\x07", "\u202eevil", "C:\\new\\x41", "\\\\x0a", "line\nbreak\r\n", "\x00", "\udcff"),
    *("<script>alert(1)</script>\"'", 'plain, "quoted" text\'s'),
]


@given(st.text(st.characters(codec=None), max_size=30) | st.text("'=+-@\\x0041 \t\r\n1.e", max_size=12))
def test_every_text_comes_back(text):
    cell = escape_csv_cell(text)
    assert cell.isprintable()
    assert decode_csv_cell(cell) == text
    file = io.StringIO()
    csv.writer(file).writerow([cell, "x"])
    assert next(csv.reader([file.getvalue()])) == [cell, "x"]
    assert escape_controls(text).isprintable()
    assert escape_controls(escape_controls(text)) == escape_controls(text)


@given(st.text(max_size=40))
def test_markdown_is_one_line_without_markup(text):
    line = escape_markdown(text)
    assert line.isprintable()
    assert not set("\\`*_<>!|~$@") & set(line)
    assert "://" not in line


def test_numbers_and_what_prints_stay_as_they_are():
    for text in ("-1", "+2.5", "-1e-05", "0.5", "it's 100%"):
        assert escape_csv_cell(text) == text
    assert escape_controls("C:\\runs, 火, naïve [95%]") == "C:\\runs, 火, naïve [95%]"


def test_an_error_message_is_one_harmless_line():
    message = str(UsageError("--name 'a\nb\x1b[31m\u202e' is wrong; name it a"))
    assert message == "--name 'a\\x0ab\\x1b[31m\\u202e' is wrong; name it a"


@pytest.mark.parametrize("text", HOSTILE)
def test_a_run_holds_what_a_host_or_a_model_said_and_opens_harmlessly(text, tmp_path):
    folder = new_run(tmp_path / "run", environment={"host": text})
    failed = case("single", 1, status="failed", reason=text, device_name=text)
    run_folder.write_table(folder, "cases.csv", make_frame([failed], CASES))
    write_blocks(folder, [block(failed["case_id"], 1, 5.0, host=text)])
    for name in ("cases.csv", "blocks.csv"):
        with (tmp_path / "run" / name).open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
        cells = [cell for row in rows for cell in row]
        assert all(cell.isprintable() for cell in cells)
        assert not {cell[:1] for cell in cells} & set("=+-@\uff1d\uff0b\uff0d\uff20")
    run = load_run(tmp_path / "run")
    assert run.cases["reason"].tolist() == [text]
    assert run.cases["device_name"].tolist() == [text]
    assert run.blocks["host"].tolist() == [text]
    assert run.manifest.environment.host == text
