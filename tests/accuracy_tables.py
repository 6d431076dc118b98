"""The tables in results/samples/accuracy/, on which rests what docs/accuracy.md and docs/gate.md say of runs.

`python tests/accuracy_tables.py FOLDER` makes them of the groups of runs in FOLDER: of each case its figures,
of each round its step times, and the calibrations by which others are predicted; with `launches` before
FOLDER the rounds of repeated launches, on which docs/measuring.md rests.
"""

import csv
import json
import sys
from dataclasses import asdict
from functools import cache
from pathlib import Path
from statistics import median

from commands import ROOT

from ddp_bench.bench.plan.buckets import parse_bucket_caps
from ddp_bench.bench.predict.calibration import VERSION, Calibration, load_calibration
from ddp_bench.bench.predict.networks import find_network
from ddp_bench.bench.predict.prediction import Scenario, compute_cost_band, fill_scenario, simulate_scenario
from ddp_bench.bench.predict.runs import predict_held_out
from ddp_bench.bench.results.aggregate import compute_images_per_s, estimate_cases
from ddp_bench.bench.results.store import load_run
from ddp_bench.bench.stats.interval import Interval, compute_median_interval

TABLES = ROOT / "results" / "samples" / "accuracy"
FIGURES, ROUNDS = TABLES / "figures.csv", TABLES / "rounds.csv"
CALIBRATIONS = TABLES / "calibrations.jsonl"
LAUNCHES = TABLES / "launches.csv"

CALIBRATED = "1gbit"
"""The rate at which each model was calibrated, with the default cap."""

SINGLE = "single"
PERFECT, CONSTANT, LONGER = "perfect_ms", "constant_ms", "longer_ms"
"""Rules of thumb: no communication; the calibrated step everywhere; the longer of compute and all-reduce."""

FITTED = "fitted_images_per_s"
"""Throughput of one fit over all rounds and passes, by its rounds alone: without what a launch adds."""

ENDS = "", "_low", "_high"


def key_of(row):
    """What a case of these runs is told by: its bucket cap, or its mode."""
    return str(row["bucket_cap_mb"]) if row["mode"] == "ddp" else str(row["mode"])


def rounds_of(name, run):
    """A row for each round: ms per step of the longest rank, by case."""
    keys = {str(row["case_id"]): key_of(row) for row in run.cases.to_dict("records")}
    steps = {keys[case_id]: by_round for case_id, by_round in run.times.collect_step_ms("timed").items()}
    return [
        {"run": name, "round": r} | {key: f"{ms[r]:.7g}" for key, ms in steps.items() if r in ms}
        for r in sorted({r for by_round in steps.values() for r in by_round})
    ]


def rounds_of_launches(name, run):
    """The same, with the launch of each round."""
    launches = run.blocks.groupby("round")["launch"].min()
    return [row | {"launch": int(launches[row["round"]])} for row in rounds_of(name, run)]


def figures_of(name, run, source):
    """A row for each case; where `source` is a calibration that was not fitted to it, with its prediction."""
    environment = run.manifest.environment
    held = {case.case_id: case for case in predicted(run, source)} if source else {}
    fitted = estimate_cases(run.results, run.times.fit_steps())
    rates = compute_images_per_s(run.times, run.results)
    for row in run.cases.to_dict("records"):
        case_id = str(row["case_id"])
        found = {
            "run": name,
            "cpu": f"{environment.num_cores} x {environment.cpu_model}",
            "case_id": case_id,
            "case": key_of(row),
            **{column: row[column] for column in ("arch", "link", "num_devices", "global_batch")},
        }
        formed = compute_median_interval([*rates[case_id].values()]).to_columns("images_per_s")
        formed |= fitted[case_id]["images_per_s"].compute_interval().exponentiate().to_columns(FITTED)
        formed["measured_ms"] = 1000 * float(row["global_batch"]) / formed["images_per_s"]
        if (case := held.get(case_id)) is not None:
            formed |= case.predicted_ms.to_columns("predicted_ms")
            formed |= by_rules(source, scenario_of(found))
        yield found | {name: f"{figure:.10g}" for name, figure in formed.items()}


def interval_of(row, name):
    return Interval(*(float(row[f"{name}{end}"]) for end in ENDS))


def predicted(run, source):
    same = run.manifest.link == CALIBRATED
    return predict_held_out(
        source,
        run,
        fitted=source.fitted if same else "",
        network=None if same else find_network(f"link:{run.manifest.link}"),
    )


def scenario_of(row):
    """What a row of the figures is predicted for."""
    num_devices = int(row["num_devices"])
    return Scenario(
        num_devices=num_devices,
        network=None if row["link"] == CALIBRATED else find_network(f"link:{row['link']}"),
        bucket_cap_mb=parse_bucket_caps(str(row["case"])),
        batch_size=int(row["global_batch"]) // num_devices,
    )


def by_rules(calibration, scenario):
    """Step times by the three rules of thumb, ms."""
    compute_ms = sum(
        median(part) for part in (calibration.forward_ms, calibration.backward_ms, calibration.optimizer_ms)
    )
    calibrated = simulate_scenario(calibration, Scenario(num_devices=calibration.num_ranks))
    cost = compute_cost_band(fill_scenario(calibration, scenario)).estimate
    return {
        PERFECT: median(calibration.single_step_ms),
        CONSTANT: calibrated.step_ms,
        LONGER: max(compute_ms, cost(sum(p.num_bytes for p in calibration.parameters))),
    }


@cache
def figures():
    with FIGURES.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@cache
def rounds(table=ROUNDS):
    """By run and case the step of each round, ms."""
    found = {}
    with table.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            steps, r = found.setdefault(row.pop("run"), {}), int(row.pop("round"))
            for key, ms in row.items():
                if ms:
                    steps.setdefault(key, {})[r] = float(ms)
    return found


@cache
def calibrations():
    """By the folder of the runs that were measured in turns: what each of them is predicted from."""
    lines = map(json.loads, CALIBRATIONS.read_text(encoding="utf-8").splitlines())
    return {line["runs"]: Calibration.from_json(json.dumps(line["calibration"])) for line in lines}


def main(folder):
    """Write the tables."""
    rows, by_round, kept = [], [], []
    for path in sorted((found.parent for found in folder.glob("*/*/*/manifest.json")), key=str):
        name, run, calibrated = str(path.relative_to(folder)), load_run(path), path.parent / CALIBRATED
        source = load_calibration(calibrated) if (calibrated / "calibration.json").exists() else None
        if source and path == calibrated:
            calibration = {"schema_version": VERSION, **asdict(source)}
            kept.append({"runs": str(Path(name).parent), "calibration": calibration})
        rows += figures_of(name, run, source)
        by_round += rounds_of(name, run)
    write(FIGURES, rows)
    write(ROUNDS, by_round)
    lines = (json.dumps(line, separators=(",", ":")) for line in kept)
    CALIBRATIONS.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def main_launches(folder):
    """Write the rounds of launches, which lie in FOLDER/SERIES/LAUNCH."""
    paths = sorted(path.parent for path in folder.glob("*/*/manifest.json"))
    runs = {str(path.relative_to(folder)): load_run(path) for path in paths}
    write(LAUNCHES, [row for name, run in runs.items() for row in rounds_of_launches(name, run)])


def write(path, table):
    """Bucket caps stand by size, behind the other columns."""
    columns = dict.fromkeys(column for row in table for column in row)
    ordered = sorted(columns, key=lambda column: float(column) if column[0].isdigit() else 0.0)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ordered, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    (main_launches if sys.argv[1] == "launches" else main)(Path(sys.argv[-1]))
