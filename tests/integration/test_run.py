"""The command as a user types it: real runs, their files, and that they go on where they were."""

import itertools
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest
from commands import SMALL, TINY, finished, python
from PIL import Image
from stand_ins import stand_in
from warm_workers import measure

from ddp_bench import load_run
from ddp_bench.bench.common.process import make_package_command
from ddp_bench.bench.plan.settings import list_options
from ddp_bench.bench.run.close import close_broken_run
from ddp_bench.bench.run.main import GROUPS, main
from ddp_bench.bench.worker import devices


def test_every_planned_case_has_exactly_one_row(real_run):
    cases = real_run.data.cases.astype(object)
    status = [
        (c.mode, c.num_devices, c.bucket_cap_mb, c.status, c.global_batch)
        for c in cases.where(cases.notna(), "").itertuples()
    ]
    assert status == [
        ("single", 1, "", "ok", 4),
        ("dp", 1, "", "skipped", 4),
        ("dp", 2, "", "ok", 8),
        ("ddp", 1, "default", "ok", 8),
        ("ddp", 2, "default", "ok", 16),
        ("ddp", 2, "0.01", "ok", 16),
        ("ddp", 2, "100", "skipped", 16),
        ("fsdp", 1, "", "ok", 4),
        ("fsdp", 2, "", "ok", 8),
        ("pipeline", 1, "", "skipped", 4),
        ("pipeline", 2, "", "skipped", 8),
    ]


def test_a_users_folders_in_the_temporary_folder_stay(real_run):
    left = sorted(path.name for path in real_run.data.path.parent.glob("*ddp-bench*"))
    assert left == [".ddp-bench-notes", "ddp-bench-main", "ddp-bench-r1"]
    assert (real_run.data.path.parent / "ddp-bench-main" / "thesis.txt").read_text() == "mine"


def test_equal_layouts_are_measured_once(real_run):
    run = real_run.data
    caps = run.cases[run.cases["num_devices"] == 2].set_index("bucket_cap_mb")
    assert caps.loc["default", "num_buckets"] == 1
    gradients_mib = f"{run.manifest.model.gradient_bytes / 2**20:.3g} MiB"
    assert caps.loc["100", "reason"] == f"same buckets as cap default: the gradients are {gradients_mib}"
    assert caps.loc["0.01", "num_buckets"] > 1
    sizes = [int(size) for size in str(caps.loc["0.01", "bucket_bytes"]).split("/")]
    assert sum(sizes) == run.manifest.model.gradient_bytes


def test_a_batch_of_names_and_a_mask_is_proven_in_every_mode_and_pass(real_run):
    cases = real_run.data.cases
    split = cases[(cases["mode"] == "pipeline") & (cases["num_devices"] == 2)]
    assert split["reason"].item().startswith("the workload has batch_loss, which calls the whole model")
    ok = cases[cases["status"] == "ok"]
    assert (ok["gradient_error"] < 1e-9).all()
    assert (ok["update_error"] < 1e-3).all()
    assert (ok.loc[ok["mode"] == "dp", ["dp_scatter_ms", "dp_gather_ms"]] > 0).all(axis=None)


def test_the_numbers_hang_together_and_are_of_the_workloads_unit(real_run):
    run = real_run.data
    ok = run.cases[run.cases["status"] == "ok"]
    tokens = 12 * ok["global_batch"]
    assert (ok["images_per_s"] * ok["step_ms"] / 1000 / tokens).tolist() == pytest.approx(
        [1] * len(ok), rel=1e-9
    )
    single = ok.loc[ok["mode"] == "single", "images_per_s"].iloc[0]
    assert (ok["images_per_s"] / single).tolist() == pytest.approx(ok["speedup"].tolist(), rel=1e-9)
    assert ok["images_per_s_low"].isna().all(), "three rounds give no interval"
    assert (run.comparisons["answer"] == "too few rounds").all()
    assert ok["num_rounds"].tolist() == [3] * len(ok)
    assert set(ok["unit"]) == {"tokens"}
    assert "tokens/s" in real_run.said
    assert "4 samples of 12 tokens per device" in real_run.said
    assert "image" not in real_run.said
    assert "a user's" not in real_run.said, "standard output is the command's, or --json would be no JSON"
    assert "what a user's module prints" in real_run.warned
    assert "what a user's model prints" in real_run.warned


def test_its_packages_are_trained_and_our_page_is_written_anew(real_run, tmp_path):
    """Where Python leaves out the current folder, as it may, ours are found too."""
    assert "<html" in (real_run.data.path / "report.html").read_text()
    page = tmp_path / "page.html"
    again = make_package_command("report", str(real_run.data.path), "--out", str(page))
    assert finished(again, real_run.project, {"PYTHONSAFEPATH": "1"}).returncode == 0
    assert page.exists()


def test_blocks_tell_rounds_order_ranks_and_warm_up(real_run):
    run = real_run.data
    timed = run.blocks[run.blocks["phase"] == "timed"]
    assert set(timed["round"]) == {1, 2, 3}
    for _, one_round in timed.groupby("round"):
        by_case = one_round.groupby("case_id")
        assert sorted(by_case["position"].first()) == list(range(by_case.ngroups))
        assert by_case["rank"].apply(sorted).map(len).max() == 2
    orders = {tuple(r.drop_duplicates("case_id")["case_id"]) for _, r in timed.groupby("round")}
    assert len(orders) > 1, "a fresh random order each round"
    warmup = run.blocks[run.blocks["phase"] == "warmup"]
    assert set(warmup["case_id"]) >= set(timed["case_id"])
    assert (warmup["num_steps"] >= 3).all()
    for block in run.blocks.itertuples():
        steps = [float(part) for part in block.steps_ms.split()]
        assert len(steps) == block.num_steps
        assert sum(steps) == pytest.approx(block.block_ms, rel=0.02)


def test_the_manifest_says_under_what_conditions(real_run):
    run = real_run.data
    manifest = run.manifest
    assert manifest.settings.workload == "tokens:transformer"
    assert manifest.settings.device == "cpu"
    assert manifest.versions["torch"]
    assert [r.rank for r in manifest.ranks] == [0, 1]
    assert manifest.timing.rounds == 3
    assert manifest.timing.stopped_because == "all rounds done"
    assert 0 < manifest.timing.timed_share_pct < 100


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """A run of two batch sizes by the user's own torchrun: what was typed, its summary, and its folder."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    sweep = ("--modes", "ddp", "--gpus", "2", "--bucket-cap-mb", "default", "--rounds", "2")
    how = ("--json", "--quiet", "--out", str(tmp_path_factory.mktemp("out") / "run"))
    arguments = ("-m", "bench.run", *TINY, "--batch-size", "8,2", *sweep, *how)
    done = python(*launcher, *arguments, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stderr == ""
    return ("torchrun", *launcher[2:], *arguments), json.loads(done.stdout), load_run(how[-1])


@pytest.mark.smoke
def test_under_the_users_own_torchrun(launched):
    """The ranks are the user's here: they measure in the processes that torchrun started."""
    typed, summary, run = launched
    assert (run.cases["status"] == "ok").all(), run.cases["reason"].tolist()
    assert summary["answers"]
    assert [c["mode"] for c in summary["cases"]] == ["single", "ddp"] * 2
    assert run.cases["num_rounds"].tolist() == [2] * 4
    assert [(rank.rank, rank.local_rank) for rank in run.manifest.ranks] == [(0, 0), (1, 1)]
    assert shlex.split(run.manifest.command) == [*typed]
    assert summary["next"]["command"].startswith("torchrun --standalone --nproc-per-node 2 -m bench.run ")


def test_two_sizes_on_two_ranks_have_a_single_each_and_an_answer(launched):
    _, summary, run = launched
    cases = run.cases
    assert [*zip(cases["mode"], cases["batch_per_device"], cases["global_batch"], strict=True)] == [
        ("single", 2, 2),
        ("ddp", 2, 4),
        ("single", 8, 8),
        ("ddp", 8, 16),
    ]
    rate, speedup = cases["images_per_s"], cases["speedup"]
    for single, ddp in ((0, 1), (2, 3)):
        assert rate[ddp] / rate[single] == pytest.approx(speedup[ddp], rel=1e-9)
    assert "batch size" in [one["question"] for one in summary["answers"]]
    assert "Throughput over batch size" in (run.path / "report.html").read_text()


def test_every_setting_is_in_one_group_of_the_whole_help():
    assert sorted(itertools.chain(*GROUPS.values())) == sorted(setting.name for setting in list_options())


@pytest.mark.usefixtures("in_process")
def test_cuda_where_there_is_none(capsys, monkeypatch):
    stand_in(monkeypatch, devices, {"torch.cuda.is_available": lambda: False})
    assert main(["--device", "cuda"]) == 2
    assert "finds no CUDA device" in capsys.readouterr().err


@pytest.mark.usefixtures("in_process")
def test_a_folder_that_holds_a_run_is_left_alone(real_run, capsys):
    run = real_run.data
    before = {p.name: p.stat().st_mtime_ns for p in run.path.iterdir()}
    assert main([*SMALL, "--gpus", "1", "--out", str(run.path)]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert {p.name: p.stat().st_mtime_ns for p in run.path.iterdir()} == before


def test_dry_run_prints_the_plan_and_writes_nothing(tmp_path):
    out = tmp_path / "run"
    arguments = [*SMALL, "--gpus", "1,2", "--bucket-cap-mb", "default,1"]
    done = measure([*arguments, "--dry-run", "--out", str(out)], tmp_path)
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert text.startswith("6 cases, 5 to measure")
    assert "; resnet20, 32 " in text.splitlines()[0]
    assert " px, 8 images per device, weak scaling, fp32:" in text.splitlines()[0]
    assert "skipped: DataParallel on one device is the plain module" in text
    (expected,) = re.findall(
        r"Expected time: about .* of rounds, limit .*: about ([\d,]+) to ([\d,]+) rounds", text
    )
    least, most = (int(count.replace(",", "")) for count in expected)
    assert 1 <= least < most, "passes take up to a quarter of the time"
    assert not out.exists()


@pytest.mark.usefixtures("in_process")
def test_dry_run_of_many_cases_prints_a_summary_and_lists_all_as_json(capsys):
    caps = [str(cap) for cap in range(1, 61)]
    arguments = [*SMALL, "--modes", "dp,ddp", "--gpus", "1,2", "--bucket-cap-mb", ",".join(caps), "--dry-run"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("64 cases, 63 to measure")
    named = [line.strip().split("  ")[0] for line in lines if line.startswith("  ")]
    assert len(named) == 11
    assert named[::10] == ["single, 1 CPU core", "DDP, 2 CPU cores, cap 60 MiB"]
    assert named[5].startswith("…")
    assert "  … 54 more cases; --json lists all of them" in lines
    assert "The cases vary --modes (dp, ddp), --gpus (1, 2), --bucket-cap-mb (1, 2, 3 and 57 more)." in lines
    assert "1 case skipped: DataParallel on one device is the plain module; see single" in lines
    assert lines[-1].startswith("Expected time: about")
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 1 <= found["rounds"][0] <= found["rounds"][1]
    assert len(found["cases"]) == 63
    assert [*found["skipped"].values()] == ["DataParallel on one device is the plain module; see single"]


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_more_rounds_than_can_be_read_again_are_refused_before_anything_is_measured(tmp_path, capsys, more):
    out = tmp_path / "run"
    asked = [*SMALL, "--modes", "ddp", "--gpus", "2", "--rounds", "10000000", "--out", str(out)]
    assert main([*asked, *more]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "blocks.csv of " in said[0]
    assert said[0].endswith("measure fewer rounds, ranks or cases in a run")
    assert not out.exists()


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--image-size", "16", "--batch-size", "4"), "6 images, one global batch needs 8 (4 x 2 ranks)"),
        (("--workload", "rows:rows"), "workload rows sets no image_size; set it, or use `device` or `host`"),
        (("--workload", "rows:few"), "has 2 classes, few has 1 outputs; use a model with more outputs"),
        (("--image-size", "16", "--batch-size", "3"), ""),
    ],
)
def test_a_dry_run_refuses_the_folder_that_the_run_would(tmp_path, monkeypatch, capsys, options, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "rows.py").write_text(ROWS)
    for number in range(6):
        file = tmp_path / "images" / "ab"[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 20)).save(file)
    arguments = ["--device", "cpu", "--gpus", "1,2", "--modes", "ddp", "--data", "images", *options]
    arguments += () if "--workload" in options else ("--arch", "resnet20")
    assert main([*arguments, "--dry-run"]) == (2 if said else 0)
    assert said in capsys.readouterr().err
    sys.modules.pop("rows", None)


ROWS = """
import torch
from torch import nn
from ddp_bench import Workload
def images(n, generator):
    return torch.randn(n, 3, 8, 8, generator=generator), torch.randint(1, (n,), generator=generator)
made = {"module": lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 1)), "batch": images}
rows, few = Workload(name="rows", **made), Workload(name="few", image_size=8, **made)
"""


# As a fault leaves it: its files are brought up to date without its ranks; a resume goes on.


@pytest.fixture
def broken_off(real_run, tmp_path):
    """The run, but killed in the middle of its last block: no end, no table of cases, no page."""
    folder = Path(shutil.copytree(real_run.data.path, tmp_path / "run"))
    log = (folder / "journal.jsonl").read_text()
    (folder / "journal.jsonl").write_text(log[: log.rindex('{"event": "block"') + 200])
    for name in ("cases.csv", "blocks.csv", "report.html"):
        (folder / name).unlink()
    return folder


def test_its_files_are_brought_up_to_date_once(broken_off, real_run, capsys):
    close_broken_run(broken_off, "interrupted")
    said = capsys.readouterr().err.splitlines()
    assert f" --resume {broken_off}" in said[-1]
    assert "interrupted; 7 of 11 cases have results in " in said[-2]
    run, whole = load_run(broken_off), real_run.data
    assert run.manifest.timing.stopped_because == "interrupted"
    assert run.cases["status"].tolist() == whole.cases["status"].tolist()
    same = ["case_id", "mode", "num_devices", "bucket_cap_mb", "bucket_bytes"]
    pd.testing.assert_frame_equal(run.cases[same], whole.cases[same])
    assert len(run.blocks) < len(whole.blocks)
    assert "<svg" in (broken_off / "report.html").read_text(encoding="utf-8")
    close_broken_run(broken_off, "interrupted")
    assert capsys.readouterr().err == ""
