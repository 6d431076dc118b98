"""`bench.predict` as a command: what it says, what it writes, and what it refuses."""

import csv
import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pandas as pd
import pytest
from commands import ROOT

from ddp_bench.bench.predict import main as command
from ddp_bench.bench.predict.calibration import save_calibration
from ddp_bench.bench.predict.from_pass import read_source
from ddp_bench.bench.predict.networks import NETWORKS, network
from ddp_bench.bench.predict.output import Predictions

pytestmark = pytest.mark.usefixtures("few_resamples")

UNCALIBRATED = ROOT / "results" / "samples" / "cpu-lab-1gbit-2hosts"
PREDICTIONS = ROOT / "results" / "samples" / "predictions"
SAMPLE = PREDICTIONS / "resnet18-2hosts" / "1gbit"


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(SAMPLE, folder)
    return folder


def refused(arguments, capsys):
    assert command.main(arguments) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"host": "a machine of 64 cores"}, "host 'a machine of 64 cores' is not"),
        ({"torch": "2.11.0"}, "torch '2.11.0' is not '2.15.0'"),
        ({"batch_per_device": 7}, "batch_per_device 7 is not 16"),
        ({"precision": "bf16"}, "precision 'bf16' is not 'fp32'"),
    ],
)
def test_a_calibration_of_something_else_is_refused_until_accepted(run, change, difference, capsys):
    own = read_source(run).calibration
    save_calibration(run, replace(own, identity=replace(own.identity, **change)))
    asked = [str(run), "--gpus", "2"]
    said = refused(asked, capsys)
    assert difference in said
    assert said.count(" is not ") == 1
    assert "--accept" in said
    assert command.main([*asked, "--accept"]) == 0


def test_a_calibration_that_is_broken_off_is_refused(run, capsys):
    path = run / "calibration.json"
    path.write_text(path.read_text()[:-9])
    assert "calibration.json is not valid JSON" in refused([str(run), "--gpus", "2"], capsys)


def test_the_all_reduces_of_another_run_are_a_network(capsys):
    """Its own are no other network, those of another model over a link of that rate hardly one."""

    def step_ms(run, *network):
        assert command.main([str(run), "--gpus", "2", *network, "--json"]) == 0
        return float(json.loads(capsys.readouterr().out)["lines"][0]["predictions"][1]["step_ms"]["estimate"])

    slow = PREDICTIONS / "resnet34-2hosts-slow" / "1gbit"
    assert step_ms(SAMPLE, "--network", str(SAMPLE)) == pytest.approx(step_ms(SAMPLE))
    for other in (slow, UNCALIBRATED):
        assert step_ms(SAMPLE, "--network", str(other)) == pytest.approx(step_ms(SAMPLE), rel=0.05)
    assert command.main([str(SAMPLE), "--gpus", "2", "--network", str(slow)]) == 0
    said = capsys.readouterr().out
    assert f"Network: run 1gbit: the all-reduces of {slow};" in said
    assert "On run 1gbit, bucket cap default, scaling breaks" in said


def test_the_text_says_where_it_breaks_what_is_assumed_and_how_far_off(tmp_path, capsys):
    table, document = tmp_path / "p.csv", tmp_path / "p.json"
    given = [str(SAMPLE), "--gpus", "2,8", "--network", "link:350mbit,ib-100g", "--validate"]
    assert command.main([*given, "--csv", str(table), "--out", str(document)]) == 0
    said = capsys.readouterr().out
    for name in ("link:350mbit", "ib-100g"):
        verdicts = [text for text in said.splitlines() if text.startswith(f"- On {name}, ")]
        assert len(verdicts) == 1
        assert "breaks at 2 CPU cores" in verdicts[0]
        assert "what breaks it: " in verdicts[0]
        assert f"Network: {name}: {network(name).source}." in said
    assert "at the median" in said
    assert "None has more than 2 devices: beyond, the error was not measured." in said
    with table.open() as file:
        header, *rows = csv.reader(file)
    assert header[:6] == [
        "num_devices", "bucket_cap_mb", "step_ms_p50", "step_ms_low", "step_ms_high", "images_per_s",
    ]  # fmt: skip
    assert len(rows) == 4
    found = Predictions.from_json(document.read_text())
    assert [line.first.network for line in found.lines] == ["link:350mbit", "ib-100g"]
    assert [p.num_devices for p in found.lines[0].predictions if p.asked] == [2, 8]
    assert [p.num_devices for p in found.lines[0].predictions] == [1, 2, 4, 8]
    assert found.validation is not None
    assert len(found.validation) == 6
    # The CSV and the document give the same figures, and efficiency is a quotient with its own interval.
    first, mark = dict(zip(header, rows[0], strict=True)), found.lines[0].predictions[1]
    for name, figure in {"images_per_s": mark.images_per_s, "efficiency": mark.efficiency}.items():
        given = [float(first[f"{name}{end}"]) for end in ("", "_low", "_high")]
        assert given == pytest.approx([figure.estimate, figure.low, figure.high])
    assert float(first["step_ms_p50"]) == pytest.approx(mark.step_ms.estimate)
    assert float(first["exposed_comm_ms_low"]) < float(first["exposed_comm_ms"])


@pytest.mark.parametrize("name", [*NETWORKS, "link:1gbit"])
def test_every_network_says_what_is_assumed(name):
    assert "assumed" in network(name).source


@pytest.mark.campaign
def test_a_reader_that_stops_early_is_no_error():
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.predict", str(SAMPLE), "--gpus", "2"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() in {0, 1}  # 1 where rich noticed first


def test_a_machine_that_changed_since_is_named_beside_the_errors(run, tmp_path, capsys):
    """The same blocks, of one device a quarter longer; then as they were."""
    later = tmp_path / "later"
    shutil.copytree(run, later)
    cases = pd.read_csv(later / "cases.csv")
    single = cases.loc[cases["mode"] == "single", "case_id"].iloc[0]
    blocks = pd.read_csv(later / "blocks.csv")
    blocks.loc[(blocks["case_id"] == single) & (blocks["phase"] == "timed"), "block_ms"] *= 1.25
    blocks.to_csv(later / "blocks.csv", index=False)
    assert command.main([str(run), "--validate", str(later)]) == 0
    said = capsys.readouterr().out
    assert "The machine changed: one device alone took 1.25" in said
    shutil.copy(run / "blocks.csv", later)
    assert command.main([str(run), "--validate", str(later)]) == 0
    assert "The machine changed" not in capsys.readouterr().out
