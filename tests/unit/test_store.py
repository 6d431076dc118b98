"""Folders of runs: claimed, locked, written and read; what `--resume` accepts: the same run, nothing else."""

import contextlib
import fcntl
import itertools
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from commands import ROOT
from gate_runs import write_run
from made import block, made_manifest, new_run, planned, resolved, write_blocks
from selection import in_campaign

from ddp_bench.bench.common.errors import NotComparableError, NotMeasuredError, UsageError
from ddp_bench.bench.machine.manifest import SCHEMA_VERSION
from ddp_bench.bench.plan.settings import Settings
from ddp_bench.bench.plan.sweep import hash_plan
from ddp_bench.bench.results import run_folder, store
from ddp_bench.bench.results.block_times import BlockTimes
from ddp_bench.bench.results.case_columns import CASES, FILES
from ddp_bench.bench.results.columns import make_frame
from ddp_bench.bench.results.commands import write_resume_command
from ddp_bench.bench.results.disk import FolderLock
from ddp_bench.bench.results.journal import VERSION, Curve, Journal, Plan, read
from ddp_bench.bench.results.recorder import Recorder
from ddp_bench.bench.run.failures import IDLE_PLACE, Failure, describe_exit
from ddp_bench.bench.run.open_folder import (
    assign_fault,
    begin_attempt,
    check_same,
    fail_case,
    open_run,
    read_settings,
)
from ddp_bench.report.build import write_page

BLOCK = block("single-n1", 1, 10.125, steps=2, host='a,"b"\nc', started_s=1.5)


def test_what_is_written_comes_back_with_its_types(tmp_path):
    folder = new_run(tmp_path / "run", run_id="0123456789ab")
    write_blocks(folder, [BLOCK, {**BLOCK, "round": 2}])
    case = {"case_id": "single-n1", "status": "ok", "mode": "single", "num_devices": 1, "global_batch": 16}
    case |= {"unit": "images", "units_per_sample": 1, "oversubscribed": False, "images_per_s": 1 / 3}
    run_folder.write_table(folder, "cases.csv", make_frame([case], CASES))
    run = store.load_run(folder)
    assert run.manifest.run_id == "0123456789ab"
    assert run.blocks["host"].tolist() == [BLOCK["host"]] * 2
    assert run.blocks["round"].tolist() == [1, 2]
    assert run.cases["images_per_s"].iloc[0] == pytest.approx(1 / 3)
    assert run.cases["oversubscribed"].iloc[0] is False or not run.cases["oversubscribed"].iloc[0]
    assert pd.isna(run.cases["comm_ms"].iloc[0]), "missing is empty, never 0"
    assert list(run.buckets.columns) == [c.name for c in FILES["buckets.csv"]]


def test_a_folder_with_other_files_or_a_file_is_refused(tmp_path):
    run_folder.check_claimable(tmp_path / "x" / "y")
    assert list(tmp_path.iterdir()) == [], "checking leaves no trace"
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="already holds"):
        run_folder.check_claimable(tmp_path)
    with pytest.raises(UsageError, match="cannot be written"):
        run_folder.check_claimable(tmp_path / "notes.txt" / "run")
    with pytest.raises(UsageError):
        run_folder.check_claimable(tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", sorted(run_folder.RUN_FILES))
def test_no_output_takes_the_place_of_what_was_measured(name, tmp_path):
    (tmp_path / name).write_text("measured")
    with pytest.raises(UsageError, match="is a file of a run's results"):
        run_folder.write_output(tmp_path / name, lambda part: part.write_text("x"), option="--out")
    assert (tmp_path / name).read_text() == "measured"


def written_as(content):
    return lambda part: part.write_text(content)


def test_an_output_is_whole_or_not_written(tmp_path):
    page = tmp_path / "page.html"
    run_folder.write_output(page, written_as("new"), option="--out")

    def breaks(part):
        part.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_folder.write_output(page, breaks, option="--out")
    assert page.read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize("target", ["theirs.txt", "nowhere"])
def test_a_link_is_neither_replaced_nor_followed(target, tmp_path):
    (tmp_path / "theirs.txt").write_text("theirs")
    link = tmp_path / "link.csv"
    link.symlink_to(tmp_path / target)
    with pytest.raises(UsageError, match="it is a link"):
        run_folder.write_output(link, written_as("new"), option="--out")
    assert link.readlink() == tmp_path / target
    assert (tmp_path / "theirs.txt").read_text() == "theirs"


def test_a_pipe_and_a_device_are_written_into_and_stay(tmp_path):
    pipe, null, page = tmp_path / "pipe", tmp_path / "null", tmp_path / "page"
    os.mkfifo(pipe)
    null.symlink_to(os.devnull)
    with pytest.raises(UsageError, match="a pipe that nobody reads"):
        run_folder.write_output(pipe, written_as("new"), option="--out")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for place in (pipe, null, Path(os.devnull)):
        before = place.stat()
        run_folder.write_output(place, written_as("new"), option="--out")
        assert (place.stat().st_ino, place.stat().st_mode) == (before.st_ino, before.st_mode)
    assert os.read(reader, 100) == b"new"
    os.close(reader)
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(page))
        with pytest.raises(UsageError, match="no regular file"):
            run_folder.write_output(page, written_as("new"), option="--out")
        assert page.is_socket()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes device nodes")
@pytest.mark.parametrize(("kind", "says"), [(stat.S_IFCHR, None), (stat.S_IFBLK, "no regular file")])
def test_a_device_node_is_never_replaced_by_root(kind, says, tmp_path):
    node = tmp_path / "node"
    null, disk = Path(os.devnull).stat().st_rdev, os.makedev(7, 250)
    os.mknod(node, 0o600 | kind, null if kind == stat.S_IFCHR else disk)
    with contextlib.nullcontext() if says is None else pytest.raises(UsageError, match=says):
        run_folder.write_output(node, written_as("new"), option="--out")
    assert stat.S_IFMT(node.stat().st_mode) == kind


@pytest.mark.parametrize("mask", [0o077, 0o022, 0o002])
def test_the_umask_holds_for_new_files_and_a_files_mode_stays(mask, tmp_path):
    new, old = tmp_path / "new.html", tmp_path / "old.html"
    old.touch(mode=0o640)
    old.chmod(0o640)
    before = os.umask(mask)
    try:
        for page in (new, old):
            run_folder.write_output(page, written_as("new"), option="--out")
    finally:
        os.umask(before)
    assert [stat.S_IMODE(page.stat().st_mode) for page in (new, old)] == [0o666 & ~mask, 0o640]


def test_a_run_does_not_begin_inside_another(tmp_path):
    for name in ("manifest.json", "cases.csv"):
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match="is inside the results of"):
        run_folder.check_claimable(tmp_path / "a" / "b")


def test_failures_of_a_case_are_added_to_its_file(tmp_path):
    path = run_folder.append_failure(tmp_path, "ddp-n2-cap1_25", "first\n")
    assert path == tmp_path / "failures" / "ddp-n2-cap1_25.txt"
    run_folder.append_failure(tmp_path, "ddp-n2-cap1_25", "second \ud800\n")
    assert path.read_text() == "first\nsecond \\ud800\n"
    run_folder.append_failure(tmp_path, "ddp-n2-cap1_25", "x" * run_folder.MAX_FAILURE_BYTES)
    assert set(path.read_text()) == {"x"}, "it begins anew where it would become too long"
    run_folder.append_failure(tmp_path, "ddp-n2-cap1_25", "last\n")
    assert path.read_text() == "last\n"


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "..", "", "a b\n", "x" * 300, "\u706b", "a/b", "a-b"]
)
def test_any_name_of_a_case_gives_a_file_of_its_own(name):
    path = Path(run_folder.name_failure_file(name))
    assert path.parent == Path("failures")
    assert path.name.isprintable()
    assert path.name.isascii()
    assert len(path.name) < 200
    assert run_folder.name_failure_file(name) != run_folder.name_failure_file(f"{name}?")
    assert (path.name == f"{name}.txt") == (name == "a-b")


def test_a_run_without_its_cases_or_with_half_a_block_is_refused(tmp_path):
    run = write_run(tmp_path / "run")
    whole = (run / "blocks.csv").read_bytes()
    for content in (whole[:-5], whole[: whole.rindex(b"\n", 0, -1) + 1]):
        (run / "blocks.csv").write_bytes(content)
        with pytest.raises(UsageError, match=r"blocks\.csv .*cut"):
            store.load_run(run)
    (run / "blocks.csv").write_bytes(whole)
    (run / "cases.csv").unlink()
    with pytest.raises(UsageError, match=r"cases\.csv is missing"):
        store.load_run(run)


def test_another_users_lock_is_not_put_down_to_a_dead_process(tmp_path):
    FolderLock(tmp_path).release()
    assert stat.S_IMODE((tmp_path / run_folder.LOCK).stat().st_mode) == 0o600, (
        "who cannot open it cannot lock it"
    )
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / run_folder.LOCK).write_text(f"process {gone.pid} on {socket.gethostname()}\n")
    with (tmp_path / run_folder.LOCK).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="locked, though not by the run that wrote into it"):
            FolderLock(tmp_path)


def test_a_run_whose_log_is_removed_ends(tmp_path):
    recorder = Recorder.begin(planned(resolved()), new_run(tmp_path / "run"))
    begin_attempt(recorder, {})
    recorder.journal.path.unlink()
    with pytest.raises(UsageError, match="has been removed or renamed during the run"):
        recorder.update_manifest(restarts=1)


def test_the_lock_of_a_killed_process_holds_nobody_up(tmp_path):
    code = (
        "import sys, pathlib; from ddp_bench.bench.results.disk import FolderLock;"
        "x = FolderLock(pathlib.Path(sys.argv[1]));"
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match=f"process {other.pid}"):
            FolderLock(tmp_path)
        other.kill()
        other.wait()
    FolderLock(tmp_path).release()


MACHINE = {"cpu_model": "x", "num_cores": 2, "gpus": []}
THEN = {"plan_hash": "p", "versions": {"torch": "2.15.0", "cuda": "13"}, "environment": MACHINE}
THEN |= {"ranks": [{"rank": 0, "device_name": "A"}]}


def telling(folder, settings):
    """A folder that tells of a run with these settings."""
    told = {"schema_version": SCHEMA_VERSION, **THEN, "settings": settings}
    (folder / "manifest.json").write_text(json.dumps(told))
    Journal(folder).write(Plan(cases=(), version=VERSION))
    return folder


def folder(tmp_path):
    return telling(tmp_path, Settings(arch="resnet20", rounds=3, out="elsewhere").stored())


def test_settings_come_back_as_they_were_and_what_is_measured_may_not_change(tmp_path):
    assert read_settings(folder(tmp_path), {"rounds": 5}) == Settings(arch="resnet20", rounds=5)
    with pytest.raises(UsageError, match="leave out --batch-size"):
        read_settings(tmp_path, {"batch_size": 8, "rounds": 5})


def test_nothing_that_a_folder_names_is_imported(tmp_path):
    (tmp_path / "evil.py").write_text("raise SystemExit(99)\n")
    settings = Settings(workload="evil:model", rounds=3)
    telling(tmp_path, settings.stored())
    with pytest.raises(UsageError, match="name it again if you trust it: --workload evil:model"):
        read_settings(tmp_path, {"rounds": 5})
    with pytest.raises(NotComparableError, match="workload: then evil:model, now train:model"):
        read_settings(tmp_path, {"workload": "train:model"})
    assert read_settings(tmp_path, {"workload": "evil:model"}) == settings
    resume = write_resume_command(store.read_manifest(tmp_path), tmp_path)
    assert resume == f"python -m bench.run --resume {tmp_path} --workload evil:model"


@pytest.mark.parametrize(
    "wrong", [{"gpus": "x"}, {"rounds": []}, {"rounds": 1e308}, {"bucket_cap_mb": [[]]}, {"name": "../x"}]
)
def test_stored_settings_are_read_as_options_are(wrong, tmp_path):
    telling(tmp_path, {**Settings(arch="resnet20").stored(), **wrong})
    with pytest.raises(UsageError, match=r"manifest\.json: settings: --"):
        read_settings(tmp_path, {})


def test_a_setting_of_another_version_is_refused(tmp_path):
    telling(tmp_path, Settings().stored() | {"sustain": 300.0})
    with pytest.raises(UsageError, match="another version of ddp-bench has set sustain; use that one"):
        read_settings(tmp_path, {})


def test_another_run_is_not_gone_on_with_and_each_difference_is_named(tmp_path):
    then = made_manifest(**THEN)
    check_same(tmp_path, then, then)
    other = {"plan_hash": "q", "versions": {"torch": "2.11.0"}}
    with pytest.raises(NotComparableError, match=r"same run: .*plan: then p, now q; torch: then 2\.15"):
        check_same(tmp_path, then, made_manifest(**THEN | other))


def begun(*, cores=1, out=None, **manifest):
    """What a run of one round has that was begun in the folder `out`: recorder, lock and notes."""
    settings = replace(resolved(devices=cores, arch="resnet20", rounds=1), out=out and str(out))
    plan = planned(settings, devices=cores, arch="resnet20", image_size=32)
    told = made_manifest(**THEN | {"plan_hash": hash_plan(plan), **manifest})
    return open_run(settings, plan, told, {}, resume=None)


def opened(run_id, monkeypatch, *, restarts=0, cores=1, gpus="ab"):
    """The folder that ranks under torchrun open, which name none."""
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
    ranks = [{"rank": rank, "gpu": gpu, "device_name": f"GPU {gpu}"} for rank, gpu in enumerate(gpus)]
    recorder, lock, _ = begun(cores=cores, ranks=ranks)
    lock.release()
    return recorder.folder.absolute()


@pytest.mark.parametrize(
    ("precision", "dtype", "shown"),
    [
        *[("fp32", "fp64", "fp64"), ("fp32", "bf16", "pure bf16"), ("fp32", None, "fp32")],
        *[("bf16", "fp32", "bf16"), ("bf16", "fp64", "bf16")],
    ],
)
def test_the_precision_of_a_case_is_that_of_what_it_trains(precision, dtype, shown, tmp_path):
    settings = resolved(devices=1, arch="resnet20", precision=precision)
    plan = planned(settings, devices=1, arch="resnet20", image_size=32)
    folder = new_run(tmp_path / "run", settings={"precision": precision}, model={"dtype": dtype})
    assert set(Recorder.begin(plan, folder).tables.cases["precision"]) == {shown}


SMALL_DISKS_KIB = [(8, 40), *in_campaign(range(4, 64, 4))]


@pytest.fixture
def disk(tmp_path):
    """Mounts a disk of so many KiB."""
    if os.geteuid() != 0:
        pytest.skip("needs the right to mount")
    place = tmp_path / "disk"
    place.mkdir()

    def mount(kib):
        size = ("-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(place))
        if subprocess.run(["mount", *size], capture_output=True, check=False).returncode != 0:
            pytest.skip("needs the right to mount")
        return place

    yield mount
    subprocess.run(["umount", "--lazy", str(place)], capture_output=True, check=False)


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("sizes_kib", SMALL_DISKS_KIB, ids=["few", "all"])
def test_a_run_for_which_there_is_no_room_claims_nothing(sizes_kib, is_there, disk):
    """Begun whole, or one line and no trace."""
    said = []
    for kib in sizes_kib:
        out = disk(kib) / "run"
        if is_there:
            out.mkdir()
        try:
            recorder, lock, _ = begun(out=out)
        except UsageError as error:
            said.append(str(error))
            left = [path.name for path in out.parent.rglob("*")]
            assert left == ["run"] * is_there
        else:
            said.append("")
            recorder.close("test")
            lock.release()
        subprocess.run(["umount", "--lazy", str(out.parent)], check=True)
    refused = f"--out {out} cannot be written: No space left on device; name another folder"
    assert set(said) == {refused, ""}
    assert said == sorted(said, reverse=True)


def test_a_page_for_which_there_is_no_room_costs_no_measurement(disk, capsys):
    run = disk(2048) / "run"
    shutil.copytree(ROOT / "results" / "samples" / "cpu-lab-1gbit-2hosts", run)
    (run / "report.html").unlink(missing_ok=True)
    with (run.parent / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"0" * 1024):
            pass
    before = sorted(path.name for path in run.iterdir())
    assert write_page(run) is None
    said = capsys.readouterr().err
    assert said.splitlines() == [
        f"bench.run: error: {run}/report.html cannot be written: No space left on device; every measurement "
        f"is kept: make room, then python -m report {run} makes the page"
    ]
    assert sorted(path.name for path in run.iterdir()) == before
    (run.parent / "filler").unlink()
    assert write_page(run) == run / "report.html"


def test_nothing_is_written_into_a_folder_that_has_come_to_the_place_of_a_runs(tmp_path):
    out, other = tmp_path / "run", tmp_path / "other"
    recorder, *_ = begun(out=out)
    shutil.copytree(out, other)
    before = {path: path.read_bytes() for path in other.iterdir()}
    out.rename(tmp_path / "renamed")
    out.symlink_to(other)
    writes = (
        recorder.write,
        recorder.update_manifest,
        lambda: recorder.record_start(0, "x"),
        lambda: recorder.add_failure("x", "y"),
    )
    for write in (*writes, lambda: recorder.add_trace("x", 0, b""), lambda: recorder.close("x")):
        with pytest.raises(UsageError, match="removed or renamed during the run"):
            write()
    assert not recorder.journal.is_in_place()
    assert {path: path.read_bytes() for path in other.iterdir()} == before


@pytest.mark.parametrize("run_id", ["none", "job-7"])
def test_a_restart_finds_its_own_run_whatever_else_lies_there(run_id, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = opened(run_id, monkeypatch)
    attempt = json.dumps({"event": "attempt", "run_id": run_id})
    plan, settled = '{"event": "plan", "cases": 5}', f'{{"event": "settled", "index": "{run_id}"}}'
    damaged = (plan, '{"event": "attempt", "run_id": 5}', settled, f'["{run_id}", \xff')
    for number, line in enumerate(damaged):
        neighbour = tmp_path / "results" / f"{9000 + number}Z-neighbour"
        neighbour.mkdir()
        (neighbour / "journal.jsonl").write_bytes(f"{attempt}\n{line}\n".encode("latin-1"))
        if number == 3:
            (neighbour / "journal.jsonl").unlink()
            os.mkfifo(neighbour / "journal.jsonl")
    (tmp_path / "results" / "9999-file").touch()
    assert opened(run_id, monkeypatch, restarts=1) == own


@pytest.mark.parametrize("lost", [{"cores": 2}, {"gpus": "a"}, {"gpus": "ac"}])
def test_ranks_that_start_again_on_other_devices_give_up(lost, tmp_path, monkeypatch):
    """A GPU that fell off the bus: what is left would be measured into rows of what there was."""
    monkeypatch.chdir(tmp_path)
    own = opened("job-7", monkeypatch)
    before = (own / "journal.jsonl").read_text()
    with pytest.raises(NotMeasuredError, match="other devices") as caught:
        opened("job-7", monkeypatch, restarts=1, **lost)
    assert caught.value.exit_code != 0
    assert (own / "journal.jsonl").read_text() == before


def test_ranks_of_a_run_that_ended_without_a_mode_are_not_started_in_vain(tmp_path, monkeypatch):
    """A user's torchrun starts them again, as the run did not end with 0."""
    monkeypatch.chdir(tmp_path)
    own = opened("job-7", monkeypatch)
    recorder = Recorder.reopen(own)
    for index, one in enumerate(recorder.journal.state.plan):
        if one.skip_reason is None:
            bug = Failure("failed", "ValueError: late bug", ranks={0: "raised\nTraceback"})
            fail_case(recorder, index, bug)
    recorder.close("no case is left to measure")
    with pytest.raises(
        NotMeasuredError, match="changes nothing: every case of ddp and single failed: ValueError: late bug"
    ) as caught:
        opened("job-7", monkeypatch, restarts=1)
    assert caught.value.exit_code == 4


def test_a_failed_case_keeps_what_its_ranks_say(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorder = Recorder.reopen(opened("job-7", monkeypatch))
    case_id = recorder.journal.state.plan[0].case.case_id
    recorder.record_start(0, "round 3 (timed)")
    said = fail_case(recorder, 0, Failure("failed", "ValueError: late bug", ranks={1: "raised\nTraceback"}))
    reason, _, path = said.rpartition("; ")
    assert reason == f"{case_id}: failed: ValueError: late bug"
    kept = Path(path).read_text()
    assert (
        f"{case_id}: failed in round 3 (timed)\nValueError: late bug\n\nrank 1: raised\nTraceback\n" in kept
    )
    assert "; " not in fail_case(recorder, 1, Failure("skipped", "no such argument")), "that is no failure"
    fail_case(recorder, 0, Failure("timeout", "no end"))
    assert Path(path).read_text().startswith(kept)
    recorder.close("test")


def test_what_a_run_knows_is_what_a_reader_of_its_files_finds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorder = Recorder.reopen(opened("job-7", monkeypatch))
    case_id = recorder.journal.state.plan[0].case.case_id
    for r, phase in itertools.product(range(1, 7), ("timed", "anatomy")):
        times = BlockTimes(100 / 3 + r, (50 / 3, 50 / 3 + r), {"forward_ms": 1 / 3 + r, "gpus": {}})
        recorder.add_block(case_id, phase, r, 0, r / 3, [("h", 0, times)])
    recorder.append_event(Curve(num_ranks=2, backend="gloo", times_ms=[(4096, [1.0, 2.0])]))
    known = recorder.write()
    recorder.close("test")
    again = Recorder.reopen(recorder.folder)
    pd.testing.assert_frame_equal(again.tables.cases, known, check_exact=True)
    assert store.load_run(recorder.folder).allreduce["num_devices"].tolist() == [2]
    assert known["forward_ms"].notna().any()
    assert vars(again.times) == vars(recorder.times)


def test_a_rank_that_died_before_a_case_had_begun_costs_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorder = Recorder.reopen(opened("job-7", monkeypatch))
    recorder.record_start(0, "round 3 (timed)")
    assert assign_fault(recorder, describe_exit({1: -9}, what=IDLE_PLACE, out_of_memory=False)) == []
    assert assign_fault(recorder, Failure("failed", "seen once more")) == [], "nor by the next attempt"
    assert not read(recorder.folder).settled
    recorder.record_start(0, "round 3 (timed)")
    assert assign_fault(recorder, describe_exit({1: -9}, what="round 3 (timed)", out_of_memory=False))
    assert read(recorder.folder).settled[0].status == "failed"
