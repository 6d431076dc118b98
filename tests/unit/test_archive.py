"""A zip of a run, anybody's: read as the run is, or refused. `test_export` says what is public of a run."""

import io
import zipfile

import pytest
from commands import ROOT
from fuzzing import mutated
from gate_runs import write_run

from ddp_bench import load_run
from ddp_bench.bench.cluster.scratch import remove_abandoned
from ddp_bench.bench.errors import ExitCode, UsageError
from ddp_bench.bench.export.main import main as export
from ddp_bench.bench.gate.baseline import save
from ddp_bench.bench.gate.main import main as gate
from ddp_bench.bench.results.archive import opened, packed, unpacked
from ddp_bench.report.main import main as report

PUBLISHED = ROOT / "results" / "baselines" / "2-cores-amd-epyc-torch2.15-d9a5732e-6f163854b9a5.zip"
SAMPLE = ROOT / "results" / "samples" / "tune" / "resnet18-2hosts-1gbit" / "sweep"


@pytest.fixture
def archive(tmp_path):
    path = tmp_path / "a.zip"
    assert export([str(write_run(tmp_path / "run")), "--format", "zip", "--out", str(path)]) == 0
    return path


def test_another_command_that_tidies_up_leaves_it_alone(archive):
    with opened(archive) as folder:
        remove_abandoned()
        assert {path.name for path in folder.iterdir()} == set(unpacked(archive))
    assert not folder.exists()


def test_the_report_and_a_baseline_are_made_of_an_archive(archive, tmp_path, capsys):
    capsys.readouterr()
    assert report([str(archive)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "a.html")
    assert "cases.csv" in (tmp_path / "a.html").read_text(encoding="utf-8")
    kept = save(archive, tmp_path / "baselines")
    assert load_run(kept).cases.equals(load_run(archive).cases)


def test_the_published_one_is_the_sample_it_was_made_of():
    assert load_run(PUBLISHED).cases.equals(load_run(SAMPLE).cases)


def zipped(change, **without):
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
            unpacked(path)
        except UsageError as error:
            told.append(str(error))
    assert len(told) > 200
    assert all(str(path) in line and "\n" not in line for line in told)
    path.write_bytes(content.getvalue())
    if method == zipfile.ZIP_LZMA:
        commands = [(report, []), (gate, [str(path)]), (export, ["--format", "pytorch"])]
        assert {main([str(path), *more]) for main, more in commands} == {ExitCode.USAGE}


def test_a_file_twice_and_a_bomb_are_refused(tmp_path):
    with pytest.warns(UserWarning, match="Duplicate"):
        twice = zipped(lambda file: file.writestr("manifest.json", "{}"))
    (tmp_path / "twice.zip").write_bytes(twice)
    with pytest.raises(UsageError, match="each file once"):
        load_run(tmp_path / "twice.zip")
    large = bytes(2**28 + 1)
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("manifest.json", "{}")
        file.writestr("blocks.csv", large)
    with pytest.raises(UsageError, match="too large"):
        load_run(tmp_path / "bomb.zip")
    with pytest.raises(UsageError, match="too many for an archive"):
        packed({"manifest.json": b"{}", "blocks.csv": large})
