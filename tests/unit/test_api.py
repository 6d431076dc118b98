"""Runs as frames: `from ddp_bench import load_run, compare`."""

import json

import pandas as pd
import pytest
from commands import ROOT, python
from gate_runs import slowed, write_run

import ddp_bench
from ddp_bench import compare, load_run
from ddp_bench.bench.common.errors import NotComparableError, UsageError
from ddp_bench.bench.gate import main as gate
from ddp_bench.bench.results.case_columns import FILES

SAMPLE = ROOT / "results" / "samples" / "cpu-lab-1gbit-2hosts"

PURE = {
    *("rank", "slowest_rank", "device_allocs", "position", "launch", "round", "bucket"),
    *("speedup", "efficiency", "compute_slowdown", "vs_ddp_default", "ratio", "margin"),
    *("gradient_error", "split_effect", "update_error", "dp_device0_mem_ratio", "units_per_sample"),
}
"""Numbers without a unit: indices and ratios."""


def test_importing_the_package_is_free_and_no_import_needs_torch():
    code = (
        "import json, sys, ddp_bench; first = set(sys.modules); from ddp_bench import load_run, compare; "
        "heavy = {'pandas', 'torch', 'ddp_bench.api'}; "
        "print(json.dumps([sorted(first & heavy), 'torch' in sys.modules]))"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[], False]


def test_the_package_names_what_it_has_and_no_more():
    assert {"load_run", "compare", "Run"} <= set(dir(ddp_bench))
    with pytest.raises(AttributeError, match="has no attribute 'lod_run'"):
        _ = ddp_bench.lod_run


def test_a_run_is_frames_with_types_and_units():
    run = load_run(str(SAMPLE))
    for name, columns in FILES.items():
        frame = getattr(run, name.removesuffix(".csv"))
        assert list(frame) == [column.name for column in columns]
    plain = pd.read_csv(SAMPLE / "cases.csv")
    assert run.cases["images_per_s"].tolist() == pytest.approx(plain["images_per_s"].tolist())
    assert run.cases["num_devices"].dtype == "Int64"
    told = json.loads((SAMPLE / "manifest.json").read_text())
    assert run.manifest.versions == told["versions"]
    assert run.manifest.timing.rounds == told["timing"]["rounds"]
    assert [rank.host for rank in run.manifest.ranks] == [rank["host"] for rank in told["ranks"]]
    assert repr(run) == f"<Run {SAMPLE}: 6 of 6 cases measured>"
    named = {
        "step_ms_p95": "ms",
        "images_per_s_low": "images/s",
        "images_per_s_sustained": "images/s",
        "joules_per_image_high": "J/image",
        "started_s": "s",
        "peak_mem_mib": "MiB",
        "hidden_pct": "%",
        "busbw_gb_per_s": "GB/s",
        "bucket_bytes": "bytes",
        "num_params": "parameters",
        "num_devices": "devices",
        "speedup": "",
        "case_id": "",
    }
    assert {name: run.units[name] for name in named} == named


def test_every_number_has_a_unit_or_is_known_to_have_none():
    numbers = [c for columns in FILES.values() for c in columns if c.kind in ("int", "float")]
    bare = {c.name.removesuffix("_low").removesuffix("_high") for c in numbers if not c.unit}
    assert bare == PURE


def test_the_summary_is_that_of_the_command():
    summary = load_run(SAMPLE).summary
    assert {"answers", "findings", "next", "cautions", "timing", "cases"} <= set(summary)
    assert len(summary["cases"]) == 6
    assert summary["timing"]["rounds"] == 41
    assert {answer["question"] for answer in summary["answers"]} >= {"DDP settings", "communication"}
    json.dumps(summary, allow_nan=False)


def test_a_comparison_is_the_gates(tmp_path, capsys):
    base, slow = write_run(tmp_path / "base"), write_run(tmp_path / "slow", slowed(1.3))
    found = compare(load_run(base), slow)
    assert gate.main([str(base), str(slow), "--json"]) == 1
    whole = json.loads(capsys.readouterr().out)
    assert found["verdict"].tolist() == [one["verdict"] for one in whole["comparisons"]]
    assert found.attrs == {key: value for key, value in whole.items() if key != "comparisons"}
    rate = found[(found["metric"] == "images_per_s") & (found["verdict"] == "regressed")].iloc[0]
    assert rate["ratio"] == pytest.approx(1 / 1.3)
    assert rate["ratio_low"] < rate["ratio"] < rate["ratio_high"]
    assert rate["num_rounds"] == [6, 6]
    assert found["ratio"].dtype == "float64"
    lenient = compare(base, slow, threshold="50%")
    assert set(lenient.loc[lenient["metric"] == "images_per_s", "verdict"]) == {"no regression"}


def test_a_mistake_is_one_line(tmp_path):
    with pytest.raises(UsageError, match="not a results folder") as caught:
        load_run(tmp_path)
    assert "\n" not in str(caught.value)
    run = write_run(tmp_path / "run")
    assert compare(run, run, threshold=1e-5).attrs["exit_code"] in (0, 3), "however it is written"
    with pytest.raises(UsageError, match="threshold: '5' is not a share"):
        compare(run, run, threshold=5)
    other = write_run(tmp_path / "other", {("single", 1): [1.0, 2.0]})
    with pytest.raises(NotComparableError, match="2 rounds"):
        compare(run, other)
