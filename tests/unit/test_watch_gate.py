"""Two watched folders in a gate, and commands that refuse a watched folder."""

import json
import re
from dataclasses import replace

import pytest
from commands import ROOT
from gate_runs import changed
from watched_folders import lengthen, list_rows, trained, training, watched_run, write_rows

from ddp_bench.bench.gate.compare import compare
from ddp_bench.bench.gate.decide import Policy
from ddp_bench.bench.gate.main import main as gate
from ddp_bench.bench.gate.runs import read_run
from ddp_bench.bench.predict.main import main as predict
from ddp_bench.bench.results.store import load_run
from ddp_bench.report.main import main as report


def gated(capsys, *arguments):
    """The gate's exit code, and what it says."""
    code = gate([*map(str, arguments)])
    return code, " ".join(capsys.readouterr().out.split())


def test_two_watched_folders_are_compared_like_two_runs(tmp_path, capsys):
    """A script that became slower is a regression, though ddp-bench is of one commit."""
    for name, seed in (("one", 1), ("two", 2)):
        trained(tmp_path / name, noise=0.001, seed=seed)
    slower = write_rows(tmp_path / "slower", training(noise=0.001, late_s=0.03))
    watched_run(slower)
    for name in ("one", "slower"):
        file = tmp_path / name / "manifest.json"
        manifest = json.loads(file.read_text()) | {"git": {"commit": "a" * 40, "dirty": False}}
        file.write_text(json.dumps(manifest))
    code, said = gated(capsys, tmp_path / "one", tmp_path / "two")
    assert (code, "steps/s" in said) == (0, True), said
    assert "The runs were not interleaved" in said
    assert "Intervals are of these launches" in said
    code, said = gated(capsys, tmp_path / "one", slower)
    assert code == 1, said
    again = "watch --steps 80 --out again -- torchrun train.py && python -m bench.gate again"
    assert f"{again} {slower}" in said
    assert f"Baseline train.py in {tmp_path / 'one'}, torch 2.14.1 → candidate train.py in {slower}, " in said
    assert "--interleave" not in said, "a gate cannot start the user's training"
    noisy = [tmp_path / f"noisy{seed}" for seed in (3, 4)]
    for seed, folder in enumerate(noisy):
        trained(folder, noise=0.4, seed=seed)
    code, said = gated(capsys, *noisy)
    assert code == 3, said
    assert "Undecided: steps/s of DDP on 2 CPU cores changed by " in said
    assert "Watch the baseline again: this tells the script from the machine python -m " in said
    assert f"{again} {noisy[1]}" in said
    assert re.search(r"in the baseline: between \d+ ms less and \d+ ms more\.", said)


def test_two_watches_of_a_script_are_compared_whatever_its_settings_and_raced_caps(tmp_path, capsys):
    """As where the first watch said which setting costs time, and the user changed it."""
    for name, told in (
        ("before", {"find_unused_parameters": True, "bucket_cap_mb": "100"}),
        ("after", {"broadcast_buffers": False}),
        ("four", {}),
    ):
        made = training(noise=0.001, num_ranks=4 if name == "four" else 2)
        watched_run(write_rows(tmp_path / name, made, model=told))
    sides = [read_run(tmp_path / name) for name in ("before", "after")]
    (own,) = sides[0].cases
    sides[0] = replace(sides[0], cases=(own, changed(own, case_id="raced", bucket_cap_mb="1")))
    found = compare(*sides, policy=Policy())
    assert found.decision.verdict == "pass"
    assert [c.name for c in found.comparisons if c.metric == "images_per_s"] == ["DDP on 2 CPU cores"]
    assert {(d.name, d.then, d.now, d.blocking) for d in found.differences} == {
        ("find_unused_parameters", "True", "False", False),
        ("bucket_cap_mb", "100", "default", False),
        ("sync_buffers", "True", "False", False),
    }
    code, said = gated(capsys, tmp_path / "before", tmp_path / "after")
    assert (code, "What differs between the sides" in said) == (0, True), said
    assert gate([str(tmp_path / "before"), str(tmp_path / "four")]) == 3
    assert "watch the same training on as many ranks" in capsys.readouterr().err


def with_loader(folder, wait_s, workers, **more):
    """A watched folder whose ranks wait so long for batches of a loader with so many workers."""
    made = training(**more)
    for row in list_rows(made):
        lengthen(row, data=wait_s)
    loader = {"kind": "loader", "loader": 1, "workers": workers, "passes": 1, "line": "train.py:42"}
    return watched_run(write_rows(folder, made, loader)).path


def test_a_gate_says_in_ms_what_a_step_takes_what_was_expected_and_which_setting_differs(tmp_path, capsys):
    """200 ms, of which 54 ms wait for batches and 30 ms for rank 1; then 123 ms, of which 7 ms wait."""
    before = with_loader(tmp_path / "before", 0.05, 0, late_s=0.03)
    after = with_loader(tmp_path / "after", 0.003, 2)
    code, said = gated(capsys, before, after, "--html", tmp_path / "gate.html")
    assert code == 0, said
    page = " ".join((tmp_path / "gate.html").read_text().split())
    for text in (said, page):
        assert "A step takes 123 ms in the candidate and 200 ms in the baseline: 77" in text
        expected = (
            "expected 146 ms with num_workers=2 in DataLoader (train.py:42) alone; the candidate takes "
        )
        assert f"{expected}123 ms." in text
        assert re.search(
            r"expected 170\W+16\d\W+17\d\) ms with equal ranks alone; the candidate takes ", text
        )
    assert re.search(r"num_workers 0 2\b", said)
    assert "rank 0: step 200 123 -77 rank 0: data 54.0 7.00 -47.0 rank 0: forward 30.0 30.0 +0.0 " in said
    assert "rank 0: communication and waiting 50.0 20.0 -30.0" in said
    assert gate([str(before), str(after), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["steps"]
    assert found["difference_ms"]["estimate"] == pytest.approx(-77)
    assert [one["title"] for one in found["promises"]] == ["Loader", "Straggler"]
    code, said = gated(capsys, after, before)
    assert (code, "200 ms in the candidate and 123 ms in the baseline: 77" in said) == (1, True), said
    assert "expected" not in said, "a loader with fewer workers was no advice"
    assert "What is left Waiting for a DataLoader with 0 workers on each rank takes 5" in said, "the largest"


@pytest.mark.parametrize(("left_s", "words"), [(-0.004, "as expected"), (0.04, "44.0 ms more than expected")])
def test_a_gate_says_whether_a_step_takes_as_long_as_expected_and_what_is_left(
    tmp_path, capsys, left_s, words
):
    """Nothing of the wait of 54 ms is left, or 44 ms; communication adds 20 ms."""
    before = with_loader(tmp_path / "before", 0.05, 0, noise=0.001)
    after = with_loader(tmp_path / "after", left_s, 2, noise=0.001)
    _, said = gated(capsys, before, after)
    assert re.search(rf"; the candidate takes [^;]+ ms, {words}\.", said), said
    left = "Waiting for a DataLoader with 2 workers" if left_s > 0 else "Communication adds 2"
    assert f"What is left {left}" in said


def test_exposed_communication_of_another_estimator_is_not_compared_while_the_rate_decides(tmp_path, capsys):
    """As of a run whose workload is the script."""
    one, other = (tmp_path / name for name in ("one", "other"))
    for folder in (one, other):
        trained(folder, noise=0.001)
    cases = (other / "cases.csv").read_text()
    assert cases.count("probes") == 1
    (other / "cases.csv").write_text(cases.replace("probes", "no_sync"))
    code, said = gated(capsys, one, other, "--junit", tmp_path / "gate.xml")
    assert code == 0, said
    assert "<skipped" not in (tmp_path / "gate.xml").read_text(), "its case has passed"
    reason = "exposed communication is estimated by probes in the baseline, by no_sync in the candidate"
    assert said.count(reason) == 1
    code, said = gated(capsys, one, other, "--strict")
    assert (code, said.count("Not comparable: " + reason)) == (3, 1), said
    before = load_run(ROOT / "results" / "samples" / "cpu-lab-1gbit-2hosts").results
    assert {case.exposed_by for case in before if case.exposed_comm_ms} == {"no_sync"}


def test_a_run_and_a_watched_folder_are_not_compared_and_say_why_in_a_line(tmp_path, capsys):
    watched = trained(tmp_path / "watched").path
    recorded = ROOT / "results" / "samples" / "tune" / "resnet18-2hosts-1gbit.zip"
    for sides in ((recorded, watched), (watched, recorded)):
        assert gate([*map(str, sides)]) == 3
        said = capsys.readouterr().out
        assert "Not comparable" in said.splitlines()[0]
        assert re.search(r"^unit +.*blocks the comparison", said, re.MULTILINE)
        assert "--interleave" not in said


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ((predict, "WATCHED", "--gpus", "8"), "no probe tells how much"),
        ((predict, "CALIBRATED", "--gpus", "8", "--network", "WATCHED"), "not an all-reduce by its size"),
        ((predict, "CALIBRATED", "--validate", "WATCHED", "--accept"), "whose batch is not known"),
        ((report, "WATCHED", "--predictions", "PREDICTIONS"), "its page draws no predictions"),
    ],
)
def test_what_a_watched_folder_cannot_tell_is_refused_in_a_line(tmp_path, capsys, command, reason):
    calibrated = ROOT / "results" / "samples" / "predictions" / "resnet18-2hosts" / "1gbit"
    assert predict([str(calibrated), "--gpus", "8", "--json"]) == 0
    (tmp_path / "predictions.json").write_text(capsys.readouterr().out)
    watched = trained(tmp_path / "watched").path
    places = {"WATCHED": watched, "CALIBRATED": calibrated, "PREDICTIONS": tmp_path / "predictions.json"}
    run, *words = command
    assert run([str(places.get(word, word)) for word in words]) == 2
    said = capsys.readouterr().err
    assert (said.count("\n"), reason in said) == (1, True), said
