"""Predictions of recorded cases, each from the calibration at 1 Gbit/s and the default cap."""

import json
import re
import shutil
from statistics import median

import accuracy_tables as tables
import pandas as pd
import pytest
from commands import ROOT

from ddp_bench.bench.predict import main as command
from ddp_bench.bench.predict.calibration import load_calibration
from ddp_bench.bench.predict.from_pass import calibrate_run
from ddp_bench.bench.predict.prediction import predict
from ddp_bench.bench.results.store import load_run

SAMPLES = ROOT / "results" / "samples"
RUNS, OTHER_MACHINE = "predictions", "predictions-epyc"
KEPT = f"{RUNS}/resnet18-2hosts/{tables.CALIBRATED}"
PAGE = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")


def held_out(runs):
    """The figures of every case that was predicted, of the runs in a folder."""
    return [row for row in tables.figures() if row["run"].startswith(f"{runs}/") and row["predicted_ms"]]


def errors(rows, name="predicted_ms"):
    return [abs(100 * (float(row[name]) / float(row["measured_ms"]) - 1)) for row in rows]


def inside(rows, name="predicted_ms"):
    ends = (tables.interval_of(row, name) for row in rows)
    return sum(one.low <= float(row["measured_ms"]) <= one.high for one, row in zip(ends, rows, strict=True))


def worst(rows, name="predicted_ms", digits=1):
    """The median and the largest error, as the documentation writes them."""
    found = errors(rows, name)
    return f"{median(found):.{digits}f} / {max(found):.{digits}f}%"


def test_no_case_is_off_by_more_than_eight_percent_and_half_are_within_three():
    found = errors(held_out(RUNS))
    assert len(found) == 67
    assert max(found) <= 8
    assert median(found) <= 3
    assert (median(found), max(found)) == pytest.approx((1.75178, 6.83308), abs=5e-5)


def test_a_machine_and_a_rate_that_the_simulation_had_never_seen():
    rows = held_out(OTHER_MACHINE)
    assert {row["link"] for row in rows} == {"1gbit", "2gbit", "4gbit"}
    one, other = ({row["cpu"] for row in held_out(runs)} for runs in (RUNS, OTHER_MACHINE))
    assert len(one) == len(other) == 1
    assert one != other
    assert len(rows) == inside(rows) == 20
    assert (median(errors(rows)), max(errors(rows))) == pytest.approx((2.35164, 5.78114), abs=5e-5)
    assert f"20 cases err by {worst(rows)}, all inside their intervals" in " ".join(PAGE.split())


def test_the_documentation_has_the_errors_of_every_setting():
    """Who changes the simulation changes both."""
    rows = held_out(RUNS)
    for arch, hosts in ((18, 2), (34, 2), (50, 2), (18, 3)):
        of = [[row for row in rows if _is(row, arch, hosts, link)] for link in ("200mbit", "1gbit", "4gbit")]
        told = re.search(rf"^\| ResNet-{arch}, {hosts} hosts[^|]* \| (.*) \|$", PAGE, re.MULTILINE)
        assert [one.strip() for one in told[1].split("|")] == [worst(one) if one else "" for one in of]
    text = " ".join(PAGE.split())
    rules = tables.LONGER, tables.CONSTANT, tables.PERFECT
    longer, constant, perfect = (worst(rows, rule, 0) for rule in rules)
    for said in (
        f"All 67 cases err by {worst(rows)}; of rules of thumb, max(compute, communication) errs by {longer}",
        f"constant efficiency by {constant}, perfect scaling by {perfect}.",
        f"{inside(rows)} of the 67 cases are inside their 95% intervals",
        f"err by {worst(rows, 'uncorrected_ms')}, and {inside(rows, 'uncorrected_ms')} of them are inside",
    ):
        assert said in text


def _is(row, arch, hosts, link):
    return (row["arch"], row["num_devices"], row["link"]) == (f"resnet{arch}", str(hosts), link)


@pytest.mark.campaign
def test_the_simulation_gives_the_figures_that_the_table_has():
    for row in (*held_out(RUNS), *held_out(OTHER_MACHINE)):
        calibration, scenario = tables.calibrations()[row["run"].rpartition("/")[0]], tables.scenario_of(row)
        found = predict(calibration, scenario).step_ms.to_columns("predicted_ms")
        found |= tables.by_rules(calibration, scenario)
        assert found == pytest.approx({name: float(row[name]) for name in found}, rel=1e-6)


@pytest.mark.parametrize(
    "name", [KEPT, *(f"tune/resnet18-2hosts-{rate}/sweep" for rate in ("1gbit", "2gbit"))]
)
def test_the_tables_have_the_figures_of_the_runs_that_are_kept(name):
    run = load_run(SAMPLES / (name if name == KEPT else name.replace("/sweep", ".zip")))
    source = load_calibration(SAMPLES / name) if name == KEPT else None
    if source:
        assert tables.calibrations()[name.rpartition("/")[0]] == source
    told = [row for row in tables.figures() if row["run"] == name]
    for row, found in zip(told, tables.figures_of(name, run, source), strict=True):
        kept = {key: value for key, value in row.items() if value and not key.startswith("uncorrected")}
        assert kept.keys() == found.keys()
        for key, value in found.items():
            is_figure = key.endswith(("_ms", "_low", "_high", "images_per_s"))
            assert (float(kept[key]) if is_figure else kept[key]) == (
                pytest.approx(float(value), rel=1e-8) if is_figure else str(value)
            )
    steps = {}
    for row in tables.rounds_of(name, run):
        for key in row.keys() - {"run", "round"}:
            steps.setdefault(key, {})[row["round"]] = float(row[key])
    assert tables.rounds()[name] == steps


def test_the_case_that_the_residual_was_fitted_to_is_never_held_out(capsys):
    folder = SAMPLES / KEPT
    fitted = load_calibration(folder).fitted
    assert fitted.startswith("ddp-n2-capdefault-")
    assert command.main([str(folder), "--validate"]) == 0
    said = capsys.readouterr().out
    cases = [line.split()[0] for line in said.splitlines() if line]
    assert fitted not in cases
    assert any(case.startswith("ddp-n2-cap100-") for case in cases)
    default = [row for row in tables.figures() if row["case"] == "default" and row["run"].startswith(RUNS)]
    assert all(bool(row["predicted_ms"]) == (row["link"] != tables.CALIBRATED) for row in default)


def test_a_run_of_the_calibrated_case_alone_is_refused_by_itself(tmp_path, capsys):
    alone = shutil.copytree(SAMPLES / KEPT, tmp_path / "alone")
    for name in ("cases.csv", "blocks.csv"):
        table = pd.read_csv(alone / name, dtype="string", keep_default_na=False)
        table[table["case_id"].str.contains("single|capdefault")].to_csv(alone / name, index=False)
    assert command.main([str(alone), "--validate"]) == 2
    assert "no measured DDP case besides the one fitted to" in capsys.readouterr().err


def test_a_forecast_from_one_gpu_is_as_the_documentation_says(capsys):
    folder = SAMPLES / "h200-calibrated"
    assert command.main([str(folder), "--gpus", "2,4,8", "--intra", "nvlink-h200", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "fitted to published clusters" in " ".join(found["notes"])
    text = " ".join(PAGE.split())
    for gpus, p in zip((2, 4, 8), found["predictions"], strict=True):
        ends = (p["images_per_s"][end] for end in ("estimate", "low", "high"))
        rate, low, high = (f"{float(f'{end:.4g}'):,.0f}" for end in ends)
        assert (
            f"{rate} images/s ({low} to {high}) on {gpus}" in text
            or f"{rate} ({low} to {high}) on {gpus}" in text
        )
    run, stored = load_run(folder), load_calibration(folder)
    order = json.loads(run.blocks.loc[run.blocks["phase"] == "calibration", "detail"].iloc[0])["calibration"]
    by_index = dict(zip(order["order"], stored.parameters, strict=True))
    registered = [(p.name, p.num_bytes, p.kind) for _, p in sorted(by_index.items())]
    assert calibrate_run(run, registered) == stored
