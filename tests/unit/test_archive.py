"""A zip of a run: what is public in it, and anybody's, read as the run is or refused."""

import csv
import io
import json
import zipfile
from typing import get_type_hints

import pandas as pd
import pytest
from commands import ROOT
from fuzzing import mutated
from gate_runs import MANIFEST as OF_A_GATE
from gate_runs import STEADY, write_run

from ddp_bench import compare, load_run
from ddp_bench.bench.common.errors import ExitCode, UsageError
from ddp_bench.bench.common.scratch import remove_abandoned
from ddp_bench.bench.export.main import main as export
from ddp_bench.bench.export.pytest_benchmark import write_pytest_benchmark
from ddp_bench.bench.gate.main import main as gate
from ddp_bench.bench.machine import manifest
from ddp_bench.bench.machine.records import Record
from ddp_bench.bench.plan.settings import Settings
from ddp_bench.bench.results.archive import LEFT_OUT, PUBLIC, encode_archive, open_run_folder, read_archive
from ddp_bench.bench.results.case_columns import FILES
from ddp_bench.report.main import main as report

PUBLISHED = ROOT / "results" / "baselines" / "2-cores-amd-epyc-torch2.15-d9a5732e-6f163854b9a5.zip"
SAMPLE = ROOT / "results" / "samples" / "cpu-lab-1gbit-2hosts"


TELLING = ("gpu-node-17", "other-node", "alice", "home", "hunter")
TELLING += ("10.1.2.3", "fe80", "tmp", "wlan7", "net.py")
"""Parts of the names of hosts, a user, folders, addresses, an interface and a workload's file."""
NODE, OTHER = "gpu-node-17.cluster.example", "other-node"
TOLD = (
    f"Traceback: /home/alice/net.py on {NODE} (10.1.2.3, fe80::1) by alice: see /tmp/alice/x, wlan7, hunter"
)
TEN = {key: [*series, *(1.001 * ms for ms in series[:4])] for key, series in STEADY.items()}
SECRETIVE = {
    "name": TOLD,
    "run_id": "0123456789ab",
    "argv": ["--out", "/home/alice/run"],
    "command": "python -m bench.run --out /home/alice/run",
    "settings": {
        **OF_A_GATE["settings"], "out": "/home/alice/run", "data": "/home/alice/my images",
        "workload": "/home/alice/net.py:model", "name": "gpu-node-17",
    },
    "git": {"commit": "a" * 40, "dirty": False, "origin": TOLD},
    "environment": {
        **OF_A_GATE["environment"], "host": NODE,
        "env": {
            "LD_PRELOAD": "/usr/lib/x.so:/home/alice/y.so", "NCCL_COMM_ID": "10.1.2.3:29500",
            "NCCL_HOSTID": NODE, "NCCL_SOCKET_IFNAME": "wlan7", "TORCHINDUCTOR_CACHE_DIR": TOLD,
            "OMP_NUM_THREADS": "1",
        },
    },
    "hosts": {name: {"num_cores": 2} for name in (NODE, OTHER)},
    "ranks": [
        {"rank": 0, "host": NODE, "device": "core 0"},
        {"rank": 1, "host": OTHER, "device": "core 1"},
    ],
    "timing": {"rounds": 10, "stopped_because": "all rounds done"},
    "resumed": [{"utc": "2026-01-02T03:04:05+00:00", "host": NODE, "command": TOLD}],
    "workload": {"spec": TOLD, "file": "net.py", "commit": "b" * 40, "dirty": False, "origin": "hunter"},
    "of later": {"host": TOLD},
}  # fmt: skip


@pytest.fixture
def secretive(tmp_path):
    """A run that names hosts, a user, folders and addresses wherever a run can."""
    folder = tmp_path / f"20260102T030405Z-{NODE}-run"
    write_run(folder, TEN, **SECRETIVE)
    changes = {
        "cases.csv": {"reason": TOLD, "data": "/home/alice/my images", "of_later": TOLD},
        "blocks.csv": {"host": [NODE, OTHER], "of_later": TOLD},
    }
    for name, changed in changes.items():
        table = pd.read_csv(folder / name, dtype="string", keep_default_na=False)
        for column, value in changed.items():
            table[column] = value * (len(table) // 2) if isinstance(value, list) else value
        table.to_csv(folder / name, index=False)
    for name in ("journal.jsonl", "tune.json", "calibration.json", "report.html"):
        (folder / name).write_text(TOLD)
    return folder


def zip_of(folder, out):
    assert export([str(folder), "--format", "zip", "--out", str(out)]) == 0
    return out


def test_no_member_of_the_zip_tells_of_people_and_places(secretive, tmp_path):
    path = zip_of(secretive, tmp_path / "a.zip")
    members = read_archive(path)
    assert set(members) == {"manifest.json", *FILES}
    for name, content in members.items():
        assert not [word for word in TELLING if word in content.decode().lower()], name
    manifest = json.loads(members["manifest.json"])
    assert manifest["environment"]["host"] == "host0"
    assert manifest["environment"]["env"] == {}
    assert list(manifest["hosts"]) == [rank["host"] for rank in manifest["ranks"]] == ["host0", "host1"]
    assert (manifest["settings"]["data"], manifest["settings"]["workload"]) == ("folder", "WORKLOAD")
    assert manifest["workload"] == {"commit": "b" * 40, "dirty": False}
    found = load_run(path)
    assert set(found.cases["reason"]) == {LEFT_OUT}
    assert set(found.blocks["host"]) == {"host0", "host1"}


def test_commands_read_the_zip_as_they_read_the_run(secretive, tmp_path):
    before, after = load_run(secretive), load_run(zip_of(secretive, tmp_path / "a.zip"))
    for frame, private in (("cases", ["reason", "data"]), ("blocks", ["host"])):
        tables = [getattr(found, frame).drop(columns=private) for found in (before, after)]
        pd.testing.assert_frame_equal(*tables)
    same = compare(secretive, after, ratios_only=True)
    assert (same["ratio"] == 1).all()
    assert not same["verdict"].isin(["not comparable", "missing"]).any()
    benchmarks = [json.loads(write_pytest_benchmark(found))["benchmarks"] for found in (before, after)]
    assert benchmarks[0] == benchmarks[1]
    whole = load_run(zip_of(SAMPLE, tmp_path / "sample.zip"))
    assert not compare(SAMPLE, whole)["verdict"].isin(["not comparable", "missing"]).any()


@pytest.mark.parametrize(
    ("code", "reason", "public"),
    [
        *(("plan", "SyncBatchNorm needs GPUs", True), ("", "", True)),
        *((code, TOLD, False) for code in ("unused_parameters", "")),
    ],
)
def test_a_reason_is_public_where_its_text_is_ours(code, reason, public, tmp_path):
    folder = write_run(tmp_path / "run", TEN)
    table = pd.read_csv(folder / "cases.csv", dtype="string", keep_default_na=False)
    table["reason"], table["reason_code"] = reason, code
    table.to_csv(folder / "cases.csv", index=False)
    content = read_archive(zip_of(folder, tmp_path / "a.zip"))["cases.csv"].decode()
    found = [(row["reason"], row["reason_code"]) for row in csv.DictReader(io.StringIO(content))]
    assert set(found) == {(reason if public else LEFT_OUT, code)}


def test_every_name_that_is_kept_exists():
    """One that is spelt otherwise would be lost; what stays private is what the test above looks for."""
    records = [one for one in vars(manifest).values() if isinstance(one, type) and issubclass(one, Record)]
    texts = {column.name for of_file in FILES.values() for column in of_file if column.kind == "text"}
    assert {
        *texts,
        *Settings().stored(),
        *(name for kind in records for name in get_type_hints(kind)),
    } >= PUBLIC
    assert texts - PUBLIC == {"host", "data", "reason"}, "kept in part"


def test_equal_runs_make_equal_bytes(tmp_path, monkeypatch):
    one = zip_of(write_run(tmp_path / "one"), tmp_path / "1.zip").read_bytes()
    monkeypatch.setattr("time.time", lambda: 2e9)
    assert zip_of(write_run(tmp_path / "two"), tmp_path / "2.zip").read_bytes() == one


def test_an_archive_is_named_by_the_user(secretive, tmp_path, capsys):
    for out in ((), ("--out", str(tmp_path / "a.tar"))):
        assert export([str(secretive), "--format", "zip", *out]) == 2
        assert "needs --out FILE.zip" in capsys.readouterr().err


@pytest.fixture
def archive(tmp_path):
    return zip_of(write_run(tmp_path / "run"), tmp_path / "a.zip")


def test_another_command_that_tidies_up_leaves_it_alone(archive):
    with open_run_folder(archive) as folder:
        remove_abandoned()
        assert {path.name for path in folder.iterdir()} == set(read_archive(archive))
    assert not folder.exists()


def test_the_report_is_made_of_an_archive(archive, tmp_path, capsys):
    capsys.readouterr()
    assert report([str(archive)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "a.html")
    shown = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "cases.csv" in shown
    assert 'href="./' not in shown, "what it was unpacked to is gone"


def test_the_published_one_is_the_sample_it_was_made_of():
    sample = ROOT / "results" / "samples" / "tune" / "resnet18-2hosts-1gbit.zip"
    assert load_run(PUBLISHED).cases.equals(load_run(sample).cases)


def zipped(change, **without):
    content = io.BytesIO(encode_archive({"manifest.json": b"{}", **without}))
    with zipfile.ZipFile(content, "a") as file:
        change(file)
    return content.getvalue()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (zipped(lambda file: file.writestr("../outside.csv", "x")), "it holds '../outside.csv'"),
        (zipped(lambda file: file.writestr("/etc/outside.csv", "x")), "it holds '/etc/outside.csv'"),
        (zipped(lambda file: file.writestr("logs/rank0.txt", "x")), "it holds 'logs/rank0.txt'"),
        (encode_archive({"cases.csv": b""}), "has no manifest.json"),
        (encode_archive({"manifest.json": b"{}" * 200})[:-40], "no archive of a run, or damaged"),
        (b"no zip", "no archive of a run, or damaged"),
        (encode_archive({"manifest.json": b"["}), "a.zip/manifest.json is not valid JSON"),
    ],
    ids=["parent", "absolute", "other file", "no manifest", "cut off", "no zip", "damaged"],
)
def test_what_strangers_made_is_refused(content, said, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.zip").write_bytes(content)
    with pytest.raises(UsageError, match=r"a\.zip") as caught:
        load_run(tmp_path / "in" / "a.zip")
    assert said in str(caught.value)
    assert [path.name for path in tmp_path.rglob("*.csv")] == []


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_of_400_mutated_archives_each_is_whole_or_refused_in_one_line(method, tmp_path):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", method) as file:
        file.writestr("manifest.json", "{}" * 20)
        file.writestr("cases.csv", "case_id,status\n" * 20)
    path = tmp_path / "a.zip"
    told = []
    for seed in range(400):
        path.write_bytes(mutated(content.getvalue(), seed))
        try:
            read_archive(path)
        except UsageError as error:
            told.append(str(error))
    assert len(told) > 200
    assert all(str(path) in line and "\n" not in line for line in told)
    path.write_bytes(content.getvalue())
    if method == zipfile.ZIP_LZMA:
        commands = [(report, []), (gate, [str(path)]), (export, ["--format", "pytest-benchmark"])]
        assert {main([str(path), *more]) for main, more in commands} == {ExitCode.USAGE}


def test_a_bomb_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("ddp_bench.bench.results.archive.MAX_UNPACKED_BYTES", 2**20)
    (tmp_path / "bomb.zip").write_bytes(
        encode_archive({"manifest.json": b"{}", "blocks.csv": bytes(2**20 + 1)})
    )
    with pytest.raises(UsageError, match="bytes unpacked are more than 1048576"):
        load_run(tmp_path / "bomb.zip")
    monkeypatch.setattr("ddp_bench.bench.results.archive.MAX_UNPACKED_BYTES", 2**10)
    assert export([str(SAMPLE), "--format", "zip", "--out", str(tmp_path / "a.zip")]) == 2
    assert "too large for an archive" in capsys.readouterr().err
