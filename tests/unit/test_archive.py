"""One checked file of a run: what is refused, what is left out, what comes back."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import schemas
from commands import ROOT
from fuzzing import mutated
from gate_runs import MANIFEST, STEADY, write_run

from ddp_bench import compare, load_run
from ddp_bench.bench.archive import main as archive
from ddp_bench.bench.archive.anonymous import cleaner, without_paths
from ddp_bench.bench.cluster.scratch import remove_abandoned
from ddp_bench.bench.errors import ExitCode, UsageError
from ddp_bench.bench.export.main import main as export
from ddp_bench.bench.gate.baseline import save
from ddp_bench.bench.gate.main import main as gate
from ddp_bench.bench.results.archive import MEMBERS, opened, packed, unpacked
from ddp_bench.report.main import main as report

PUBLISHED = ROOT / "results" / "baselines"
SAMPLE = ROOT / "results" / "samples" / "tune" / "resnet18-2hosts-1gbit" / "sweep"

TEN = {key: [*series, *(1.001 * ms for ms in series[:4])] for key, series in STEADY.items()}
SECRET = ("gpu-node-17", "gpu-node-17.cluster.example", "alice", "/home", "hunter", "10.1.2.3")

PRIVATE: dict[str, Any] = {
    "name": "alice on gpu-node-17",
    "run_id": "0123456789ab",
    "argv": ["--out", "/home/alice/run"],
    "command": "python -m bench.run --out /home/alice/run",
    "settings": {**MANIFEST["settings"], "out": "/home/alice/run", "data": "/home/alice/my images"},
    "git": {"commit": "a" * 40, "dirty": False},
    "environment": {
        **MANIFEST["environment"],
        "host": "gpu-node-17.cluster.example",
        "env": {
            "LD_PRELOAD": "/usr/lib/x.so:/home/alice/y.so",
            "NCCL_COMM_ID": "10.1.2.3:29500",
            "NCCL_HOSTID": "gpu-node-17.cluster.example",
            "OMP_NUM_THREADS": "1",
        },
    },
    "hosts": {"gpu-node-17.cluster.example": {"num_cores": 2}, "other-node": {"num_cores": 2}},
    "ranks": [
        {"rank": 0, "host": "gpu-node-17.cluster.example", "device": "core 0", "pid": 4711},
        {"rank": 1, "host": "other-node", "device": "core 1", "pid": 4712},
    ],
    "timing": {"rounds": 10, "stopped_because": "gpu-node-17 was lost"},
    "resumed": [{"host": "gpu-node-17", "command": "python -m bench.run --resume /home/alice/run"}],
    "workload": {"spec": "/home/alice/net.py:model", "commit": "b" * 40, "dirty": False, "origin": "hunter"},
}


def run_of(folder: Path, steps: Any = TEN, **manifest: Any) -> Path:
    return write_run(folder, steps, **{**PRIVATE, **manifest})


def archived(run: Path, out: Path, *options: str) -> Path:
    assert archive.main([str(run), "--out", str(out), *(options or ("--without-doctor",))]) == 0
    return out


@pytest.fixture
def private_run(tmp_path: Path) -> Path:
    """A run that names hosts, a user and folders wherever a run can."""
    run = run_of(tmp_path / "run")
    cases = (run / "cases.csv").read_text(encoding="utf-8").splitlines()
    reason = "lost rank 1 on gpu-node-17: see /home/alice/run/logs (alice)"
    head = cases[0].split(",").index("reason")
    cells = cases[1].split(",")
    cells[head] = reason
    (run / "cases.csv").write_text("\n".join([cases[0], ",".join(cells), *cases[2:]]) + "\n")
    blocks = pd.read_csv(run / "blocks.csv", dtype="string")
    blocks["host"] = ["gpu-node-17.cluster.example", "other-node"] * (len(blocks) // 2)
    blocks.to_csv(run / "blocks.csv", index=False)
    return run


def test_nothing_in_it_tells_of_people_and_places(
    private_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", "alice")  # what getpass takes first
    members = unpacked(archived(private_run, tmp_path / "a.zip"))
    for name, content in members.items():
        text = content.decode()
        assert not [word for word in (*SECRET, "other-node") if word in text], name
    manifest = json.loads(members["manifest.json"])
    assert manifest["environment"]["host"] == "host0"
    assert manifest["environment"]["env"]["NCCL_HOSTID"] == "host0"
    assert manifest["environment"]["env"]["LD_PRELOAD"] == "(path):(path)"
    assert manifest["environment"]["env"]["OMP_NUM_THREADS"] == "1"
    assert list(manifest["hosts"]) == [rank["host"] for rank in manifest["ranks"]] == ["host0", "host1"]
    assert not {"argv", "command", "resumed"} & set(manifest)
    assert manifest["workload"] == {"spec": "(path):model", "commit": "b" * 40, "dirty": False}
    assert manifest["name"] == "(user) on host0"
    run = load_run(tmp_path / "a.zip")
    assert run.cases["reason"].iloc[0] == "lost rank 1 on host0: see (path) ((user))"
    assert set(run.blocks["host"]) == {"host0", "host1"}


def test_another_command_that_tidies_up_leaves_it_alone(tmp_path: Path) -> None:
    run = archived(run_of(tmp_path / "run"), tmp_path / "a.zip")
    with opened(run) as folder:
        remove_abandoned()
        assert {path.name for path in folder.iterdir()} == set(unpacked(run))
    assert not folder.exists()


def test_host_names_stay_where_they_are_asked_for(private_run: Path, tmp_path: Path) -> None:
    run = load_run(archived(private_run, tmp_path / "a.zip", "--host-names", "--without-doctor"))
    assert run.manifest["environment"]["host"] == "gpu-node-17.cluster.example"
    assert set(run.blocks["host"]) == {"gpu-node-17.cluster.example", "other-node"}
    assert "/home" not in json.dumps(run.manifest)


def test_a_host_whose_name_is_a_word_of_the_tables_is_not_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path / "run", environment={**MANIFEST["environment"], "host": "single"})
    assert archive.main([str(run), "--without-doctor", "--out", str(tmp_path / "a.zip")]) == 2
    assert "still hold the host name 'single'" in capsys.readouterr().err
    assert not (tmp_path / "a.zip").exists()


def test_the_figures_come_back(private_run: Path, tmp_path: Path) -> None:
    before, after = load_run(private_run), load_run(archived(private_run, tmp_path / "a.zip"))
    pd.testing.assert_frame_equal(before.cases.drop(columns="reason"), after.cases.drop(columns="reason"))
    pd.testing.assert_frame_equal(before.blocks.drop(columns="host"), after.blocks.drop(columns="host"))
    assert after.path == tmp_path / "a.zip"
    assert set(compare(private_run, after, ratios_only=True)["verdict"]) == {"unchanged"}
    assert schemas.problems("manifest", after.manifest) == []


def test_equal_runs_make_equal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = archived(run_of(tmp_path / "one"), tmp_path / "1.zip").read_bytes()
    monkeypatch.setattr("time.time", lambda: 2e9)
    assert archived(run_of(tmp_path / "two"), tmp_path / "2.zip").read_bytes() == one


def test_its_name_tells_the_machine_and_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert archive.main([str(run), "--without-doctor"]) == 0
    name = capsys.readouterr().out.strip()
    assert name.startswith("2-cores-some-cpu-torch2.15-")
    assert name.endswith("-0123456789ab.zip")
    assert (tmp_path / name).is_file()


NO_CODE: dict[str, Any] = {"git": {}, "workload": {}}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"steps": STEADY}, "6 rounds, an archive needs at least 10"),
        ({"steps": TEN | {("ddp", 2): TEN["ddp", 2][:4]}}, "has 4 rounds, an interval needs at least 5"),
        ({"steps": {}}, "no case with status ok"),
        ({"git": {"commit": "a" * 40, "dirty": True}}, "ddp-bench had uncommitted changes"),
        ({"workload": {"commit": "b", "dirty": True}}, "the workload had uncommitted changes"),
        (NO_CODE, "neither commit nor version"),
        ({"timing": {}}, "the run has not ended"),
    ],
    ids=[
        "few rounds",
        "a case with few",
        "nothing measured",
        "dirty",
        "dirty workload",
        "no code",
        "under way",
    ],
)
def test_a_run_that_breaks_a_rule_is_refused_in_one_line(
    change: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path / "run", **change)
    assert archive.main([str(run), "--without-doctor", "--out", str(tmp_path / "a.zip")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "a.zip").exists()


def test_a_released_version_is_known_code(tmp_path: Path) -> None:
    archived(run_of(tmp_path / "run", git={}, ddp_bench={"version": "0.1.0"}), tmp_path / "a.zip")


def test_what_is_no_run_and_no_archive_name_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert archive.main([str(tmp_path), "--without-doctor"]) == 2
    run = run_of(tmp_path / "run")
    assert archive.main([str(run), "--without-doctor", "--out", str(tmp_path / "a.tar")]) == 2
    assert archive.main([str(run)]) == 2
    assert archive.main([]) == 2
    (run / "manifest.json").unlink()
    assert archive.main([str(run), "--without-doctor"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 5
    assert "has no manifest.json" in said[-1]


DOCTOR: dict[str, Any] = {
    "status": "caution",
    "findings": [
        {"name": "governor", "status": "caution", "text": "on gpu-node-17"},
        {"name": "load", "status": "ok", "text": ""},
    ],
    "readings": {"cpu": {"present": 2}, "software": {"torch": "2.15.0+cpu"}, "gpus": []},
}


def doctor_with(**change: Any) -> dict[str, Any]:
    return {**DOCTOR, **change}


def test_the_doctors_word_is_kept(tmp_path: Path) -> None:
    (tmp_path / "doctor.json").write_text(json.dumps(DOCTOR))
    run = archived(run_of(tmp_path / "run"), tmp_path / "a.zip", "--doctor", str(tmp_path / "doctor.json"))
    assert load_run(run).manifest["doctor"] == {"status": "caution", "cautions": ["governor"]}


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (doctor_with(status="bad", findings=[{"name": "load", "status": "bad"}]), "says bad: load"),
        (doctor_with(readings={"cpu": {"present": 8}}), "another machine: CPU cores 8, the run's 2"),
        (doctor_with(readings={"software": {"torch": "2.11.0"}}), "another machine: torch 2.11.0"),
        ([], "holds no findings"),
    ],
    ids=["bad", "other cores", "other torch", "no doctor"],
)
def test_a_doctor_who_says_no_or_saw_another_machine(
    told: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "doctor.json").write_text(json.dumps(told))
    run = run_of(tmp_path / "run")
    assert archive.main([str(run), "--doctor", str(tmp_path / "doctor.json")]) == 2
    assert said in capsys.readouterr().err


def test_the_report_and_a_baseline_are_made_of_an_archive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = archived(run_of(tmp_path / "run"), tmp_path / "a.zip")
    capsys.readouterr()
    assert report([str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "cases.csv" in text
    kept = save(run, tmp_path / "baselines")
    assert load_run(kept).cases.equals(load_run(run).cases)


def zipped(change: Callable[[zipfile.ZipFile], object], **without: bytes) -> bytes:
    content = io.BytesIO(packed({"manifest.json": b"{}", **without}))
    with zipfile.ZipFile(content, "a") as file:
        change(file)
    return content.getvalue()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (zipped(lambda file: file.writestr("../outside.csv", "x")), "it holds '../outside.csv'"),
        (zipped(lambda file: file.writestr("/etc/outside.csv", "x")), "it holds '/etc/outside.csv'"),
        (zipped(lambda file: file.writestr("logs/rank0.txt", "x")), "it holds 'logs/rank0.txt'"),
        (packed({"cases.csv": b""}), "it needs manifest.json"),
        (packed({"manifest.json": b"{}" * 200})[:-40], "no archive of a run, or damaged"),
        (b"no zip", "no archive of a run, or damaged"),
        (packed({"manifest.json": b"["}), "a.zip/manifest.json is not valid JSON"),
    ],
    ids=["parent", "absolute", "other file", "no manifest", "cut off", "no zip", "damaged"],
)
def test_what_strangers_made_is_refused(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.zip").write_bytes(content)
    with pytest.raises(UsageError, match=r"a\.zip") as caught:
        load_run(tmp_path / "in" / "a.zip")
    assert said in str(caught.value)
    assert [path.name for path in tmp_path.rglob("*.csv")] == []


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_of_400_mutated_archives_each_is_whole_or_refused_in_one_line(method: int, tmp_path: Path) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", method) as file:
        file.writestr("manifest.json", "{}" * 20)
        file.writestr("cases.csv", "case_id,status\n" * 20)
    path = tmp_path / "a.zip"
    told = []
    for seed in range(400):
        path.write_bytes(mutated(content.getvalue(), seed))
        try:
            unpacked(path)
        except UsageError as error:
            told.append(str(error))
    assert len(told) > 200
    assert all(str(path) in line and "\n" not in line for line in told)
    path.write_bytes(content.getvalue())
    if method == zipfile.ZIP_LZMA:
        commands = [(report, []), (gate, [str(path)]), (export, ["--format", "pytorch"])]
        assert {main([str(path), *more]) for main, more in commands} == {ExitCode.USAGE}


def test_a_file_twice_and_a_bomb_are_refused(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Duplicate"):
        twice = zipped(lambda file: file.writestr("manifest.json", "{}"))
    (tmp_path / "twice.zip").write_bytes(twice)
    with pytest.raises(UsageError, match="each file once"):
        load_run(tmp_path / "twice.zip")
    (tmp_path / "bomb.zip").write_bytes(packed({"manifest.json": b"{}", "blocks.csv": bytes(2**28 + 1)}))
    with pytest.raises(UsageError, match="too large"):
        load_run(tmp_path / "bomb.zip")


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("/home/me/my images", "(path)"),
        ("~/images", "(path)"),
        ("at ~me/x, 12 images/s, 1/25/25", "at (path), 12 images/s, 1/25/25"),
        ("file:///home/me/x", "(path)"),
        ("https://example.org/a/b", "https://example.org/a/b"),
        ("mypackage.train:model", "mypackage.train:model"),
    ],
)
def test_paths_and_nothing_else_are_taken_out(text: str, cleaned: str) -> None:
    assert without_paths(text) == cleaned


def test_names_are_found_as_words() -> None:
    clean = cleaner({"node7.example.org": "host0", "rack": "host1", "3": "host2"}, ["al"])
    assert clean("node7 lost 3 of NODE7.example.org") == "host0 lost 3 of host0"
    assert clean("crack rack-2 rack.") == "crack rack-2 host1."
    assert clean("al 10.0.0.7:29500") == "al (address):29500"


@pytest.mark.parametrize("path", sorted(PUBLISHED.glob("*.zip")), ids=lambda path: path.name)
def test_what_is_published_follows_the_rules(path: Path, tmp_path: Path) -> None:
    again = archived(path, tmp_path / "again.zip", "--without-doctor")
    told = load_run(path).manifest["doctor"]
    assert told is None or told["status"] in ("ok", "unknown", "caution")
    for name in MEMBERS[1:]:
        assert unpacked(again).get(name) == unpacked(path).get(name)


def test_the_first_one_is_the_sample_it_was_made_of() -> None:
    path = PUBLISHED / "2-cores-amd-epyc-torch2.15-d9a5732e-6f163854b9a5.zip"
    pd.testing.assert_frame_equal(load_run(path).cases, load_run(SAMPLE).cases)
