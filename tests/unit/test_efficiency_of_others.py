"""The efficiency of a run beside what others published, or measured, on the same GPUs."""

import csv
import re

import pytest
from commands import ROOT
from finding_cases import NAN, SINGLE, concluded, made_run
from renewed import KEPT
from report_runs import case

from ddp_bench.bench.export.main import main as export
from ddp_bench.bench.findings.verdicts import PUBLISHED, RESOLVED
from ddp_bench.bench.page import terminal
from ddp_bench.bench.page.render import render_html
from ddp_bench.bench.results.published import ROWS, list_scalings, name_gpu_model, read_published
from ddp_bench.bench.results.store import load_run
from ddp_bench.models.registry import ARCHS
from ddp_bench.report.main import main as report
from ddp_bench.report.page import make_page

H200, CALIBRATED = (ROOT / "results" / "samples" / name for name in ("h200.zip", "h200-calibrated"))
RTX_3090 = {"device_name": "NVIDIA GeForce RTX 3090", "precision": "bf16", "batch_per_device": 448}
V100 = {"device_name": "Tesla V100-SXM2-16GB", "precision": "fp32", "batch_per_device": 60}
AS, BELOW, ABOVE = "as published", "below what is published", "above what is published"
RTX = case("ddp", 2, 184.0, **RTX_3090)


def said(*cases, **settings):
    """The answers to whether a run of these cases is normal."""
    made = concluded(SINGLE, *cases, **{"margin": 0.01, **settings})
    return [one for one in made.verdicts if one.question == PUBLISHED]


def answer(*cases, **settings):
    (verdict,) = said(*cases, **settings)
    return verdict


def test_it_names_both_efficiencies_and_the_source_on_terminal_and_page(capsys):
    """Lambda: 905 images/s on one RTX 3090, 1751 on two."""
    verdict = answer(RTX)
    assert verdict.answer == RESOLVED
    assert verdict.sentence.replace("\N{EN DASH}", "-") == (
        "DDP reaches an efficiency of 92% (91-93) on 2 \N{MULTIPLICATION SIGN} RTX 3090, "
        "below what is published: 97% (Lambda, ResNet-50, fp16)."
    )
    made = make_page(made_run([SINGLE, RTX], manifest={"settings": {"margin": 0.01}}))
    terminal.print_page(made, piped_width=200)
    for shown in (capsys.readouterr().out, render_html(made)):
        assert verdict.sentence in re.sub(r"\s+", " ", shown).replace("\N{WORD JOINER}", "")


@pytest.mark.parametrize(
    ("rate", "label"), [(188.0, BELOW), (192.0, AS), (195.0, AS), (197.0, ABOVE), (150.0, BELOW)]
)
def test_it_is_below_or_above_by_its_whole_interval_and_the_margin(rate, label):
    """Lambda's 1751 of twice 905 are 96.7%, which is 193.5 of twice 100; intervals are of 1% either way."""
    verdict = answer(case("ddp", 2, rate, **RTX_3090), margin=0.001)
    assert (verdict.label, bool(verdict.notes)) == (label, label.startswith("below"))
    assert answer(case("ddp", 2, rate, **RTX_3090), margin=0.3).label == AS


def test_several_sources_make_a_range():
    """Eight V100: of 329 each 307 now and 296 in torch 1.4, and of NVIDIA's 367 images/s 2855 in all."""
    text = answer(case("ddp", 8, 760.0, **V100)).text
    assert text.endswith(
        "published: 90% to 97% (PyTorch, PyTorch 1.4, NVIDIA with data loading, ResNet-50, fp32)"
    )


def test_the_largest_number_of_gpus_that_somebody_measured_is_compared():
    cases = [case("ddp", n, 95.0 * n, **V100) for n in (2, 4, 8, 12)]
    assert " on 8 \N{MULTIPLICATION SIGN} V100, as published: 9" in answer(*cases).text
    assert " on 4 \N{MULTIPLICATION SIGN} V100, as published: 9" in answer(*cases[:2]).text
    two_hosts = case("ddp", 16, 1500.0, num_nodes=2, **V100)
    assert (
        " on 16 \N{MULTIPLICATION SIGN} V100 of 2 hosts, as published: 89%" in answer(*cases, two_hosts).text
    )


@pytest.mark.parametrize("batch", [224, 896])
def test_batches_within_a_factor_of_2_compare(batch):
    assert answer(RTX | {"batch_per_device": batch})


@pytest.mark.parametrize(
    "other",
    [
        {"batch_per_device": 223},
        {"batch_per_device": 897},
        {"device_name": "NVIDIA GeForce RTX 3090 Ti"},
        {"device_name": ""},
        {"num_devices": 3},
        {"num_nodes": 2},
        {"arch": "resnet101"},
        {"image_size": 192},
        {"precision": "fp32"},
        {"precision": "tf32"},
        {"compile": "default"},
        {"scaling": "strong"},
        {"device_type": "cpu"},
        {"oversubscribed": True},
        {"comm_hook": "bf16"},
        {"mode": "fsdp"},
        {"status": "failed"},
        {"efficiency": None},
        {"efficiency_low": NAN, "efficiency_high": NAN},
    ],
    ids=str,
)
def test_nothing_is_said_where_nothing_fits(other):
    assert said(RTX | other) == []


def test_nothing_is_said_of_a_users_own_model():
    assert said(RTX, workload="net:make") == []
    made = made_run([SINGLE, RTX], manifest={"watched": {}})
    assert list_scalings(made) == []


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe"),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIE"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("Quadro RTX 6000", "Quadro RTX 6000"),
        ("H100 (Dell)", "H100"),
    ],
)
def test_the_model_of_a_gpu_in_its_drivers_name(name, model):
    assert name_gpu_model(name) == model


def test_every_row_can_be_compared_and_has_its_source_in_the_documentation():
    with ROWS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    readme = (ROOT / "results" / "README.md").read_text(encoding="utf-8").partition("## Published rows")[2]
    table = [cells for cells in readme.splitlines() if cells.startswith("| ")]
    assert all(
        any(re.search(rf"^\| [^|]*\b{re.escape(row['source'])}\b", line) for line in table) for row in rows
    )
    assert all(f"`{name}`" in readme for name in rows[0])
    assert {row["model"] for row in rows} - {*ARCHS} == {"bert-base"}
    assert all(0.8 < one.efficiency.estimate < 1.01 for one in read_published())
    assert (ROOT / "results" / "published.csv").samefile(ROWS)


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.name)
def test_no_sample_is_like_a_published_row(path):
    """The H200 of the samples was measured alone, and Lambda's are eight."""
    run = load_run(path)
    assert not any(one.can_compare(two) for one in list_scalings(run) for two in run.published)


def test_a_run_is_compared_with_an_archive(tmp_path, capsys):
    archive = tmp_path / "theirs.zip"
    assert export([str(CALIBRATED), "--format", "zip", "--out", str(archive)]) == 0
    assert report([str(CALIBRATED), "--compare-with", str(archive), "--markdown"]) == 0
    efficiency = load_run(archive).cases.set_index("mode").loc["ddp", "efficiency"]
    assert f"as published: {100 * efficiency:.0f}% (theirs.zip, ResNet-50, bf16)" in capsys.readouterr().out


def test_an_archive_that_does_not_compare_is_refused(tmp_path, capsys):
    """Batches of 64 and 256 per GPU."""
    assert report([str(CALIBRATED), "--compare-with", str(H200), "--out", str(tmp_path / "a.html")]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"report: error: --compare-with {H200}: its efficiency does not compare")
    assert (told.count("\n"), list(tmp_path.iterdir())) == (1, [])
