"""What `--resume` accepts: the same run, nothing else."""

import json
import os
from pathlib import Path

import pytest
from made import made_manifest, planned, resolved

from ddp_bench.bench.errors import GaveUpError, NotComparableError, UsageError
from ddp_bench.bench.manifest import SCHEMA_VERSION
from ddp_bench.bench.plan import plan_hash
from ddp_bench.bench.results.journal import Journal, read
from ddp_bench.bench.results.recorder import Recorder, resume_command
from ddp_bench.bench.run.failures import IDLE, Failure, failure_of
from ddp_bench.bench.run.reopen import check_same, fail_case, open_run, settings_of, settle_fault
from ddp_bench.bench.settings import Settings

MACHINE = {"cpu_model": "x", "num_cores": 2, "gpus": []}
THEN = {
    "plan_hash": "p",
    "versions": {"torch": "2.15.0", "cuda": "13"},
    "environment": MACHINE,
    "ranks": [{"rank": 0, "device_name": "A"}],
}


def written(folder, settings):
    """A folder that tells of a run with these settings."""
    told = {"schema_version": SCHEMA_VERSION, **THEN, "settings": settings}
    (folder / "manifest.json").write_text(json.dumps(told))
    Journal(folder).begin([])
    return folder


def folder(tmp_path):
    return written(tmp_path, Settings(arch="resnet20", rounds=3, out="elsewhere").stored())


def test_settings_come_back_as_they_were(tmp_path):
    found = settings_of(folder(tmp_path), {"rounds": 5})
    assert found == Settings(arch="resnet20", rounds=5)


def test_nothing_that_a_folder_names_is_imported(tmp_path):
    (tmp_path / "evil.py").write_text("raise SystemExit(99)\n")
    settings = Settings(workload="evil:model", rounds=3)
    written(tmp_path, settings.stored())
    with pytest.raises(UsageError, match="name it again if you trust it: --workload evil:model"):
        settings_of(tmp_path, {"rounds": 5})
    with pytest.raises(NotComparableError, match="workload: then evil:model, now train:model"):
        settings_of(tmp_path, {"workload": "train:model"})
    assert settings_of(tmp_path, {"workload": "evil:model"}) == settings
    assert resume_command(tmp_path) == f"python -m bench.run --resume {tmp_path} --workload evil:model"


def test_a_workload_where_there_was_none_is_another_run(tmp_path):
    with pytest.raises(NotComparableError, match="then none, now train:model"):
        settings_of(folder(tmp_path), {"workload": "train:model"})


@pytest.mark.parametrize(
    "wrong",
    [
        {"gpus": "x"},
        {"arch": {"a": 5}, "seed": -1},
        {"rounds": []},
        {"rounds": 1e308},
        {"modes": 5},
        {"bucket_cap_mb": [[]]},
        {"trace": "perhaps"},
        {"precision_target": "inf"},
        {"name": "../x"},
    ],
)
def test_stored_settings_are_read_as_options_are(wrong, tmp_path):
    written(tmp_path, {**Settings(arch="resnet20").stored(), **wrong})
    with pytest.raises(UsageError, match=r"manifest\.json: settings: --"):
        settings_of(tmp_path, {})


def test_a_setting_of_another_version_is_no_setting_to_go_on_with(tmp_path):
    written(tmp_path, Settings().stored() | {"warp": 9})
    with pytest.raises(UsageError, match="another version of ddp-bench has set warp; use that one"):
        settings_of(tmp_path, {})


def test_what_is_measured_may_not_change(tmp_path):
    with pytest.raises(UsageError, match="leave out --batch-size"):
        settings_of(folder(tmp_path), {"batch_size": 8, "rounds": 5})


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(UsageError, match=r"manifest\.json"):
        settings_of(tmp_path, {})


def test_every_difference_is_named(tmp_path):
    then = made_manifest(**THEN)
    check_same(tmp_path, then, then)
    changed = {"plan_hash": "q", "versions": {"torch": "2.11.0"}, "environment": MACHINE | {"num_cores": 4}}
    now = made_manifest(**THEN | changed)
    with pytest.raises(NotComparableError) as caught:
        check_same(tmp_path, then, now)
    for words in ("plan: then p, now q", "torch: then 2.15.0 (CUDA 13), now 2.11.0"):
        assert words in str(caught.value)
    assert "CPU cores: then 2, now 4" in str(caught.value)
    assert caught.value.exit_code == 3


def opened(run_id, monkeypatch, *, restarts=0, cores=1, gpus="ab"):
    """The folder that ranks under torchrun open, which name none."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
    settings = resolved(devices=cores, arch="resnet20", rounds=1)
    plan = planned(settings, devices=cores, arch="resnet20", image_size=32)
    ranks = [{"rank": rank, "gpu": gpu, "device_name": f"GPU {gpu}"} for rank, gpu in enumerate(gpus)]
    manifest = made_manifest(**THEN | {"plan_hash": plan_hash(plan), "ranks": ranks})
    found = open_run(settings, plan, manifest, {}, resume=None)
    found.lock.release()
    return found.recorder.folder.absolute()


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
    with pytest.raises(GaveUpError, match="other devices") as caught:
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
            fail_case(recorder, index, Failure("failed", "ValueError: late bug", {0: "raised\nTraceback"}))
    recorder.close("no case is left to measure")
    with pytest.raises(
        GaveUpError, match="changes nothing: every case of ddp and single failed: ValueError: late bug"
    ) as caught:
        opened("job-7", monkeypatch, restarts=1)
    assert caught.value.exit_code == 4


def test_a_failed_case_keeps_what_its_ranks_say(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorder = Recorder.reopen(opened("job-7", monkeypatch))
    case_id = recorder.journal.state.plan[0].case.case_id
    recorder.note(0, "round 3 (timed)")
    said = fail_case(recorder, 0, Failure("failed", "ValueError: late bug", {1: "raised\nTraceback"}))
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


def test_a_rank_that_died_before_a_case_had_begun_costs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recorder = Recorder.reopen(opened("job-7", monkeypatch))
    recorder.note(0, "round 3 (timed)")
    assert settle_fault(recorder, failure_of({1: -9}, what=IDLE, out_of_memory=False)) == []
    assert settle_fault(recorder, Failure("failed", "seen once more")) == [], "nor by the next attempt"
    assert not read(recorder.folder).settled
    recorder.note(0, "round 3 (timed)")
    assert settle_fault(recorder, failure_of({1: -9}, what="round 3 (timed)", out_of_memory=False))
    assert read(recorder.folder).settled[0].status == "failed"
