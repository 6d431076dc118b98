"""One baseline per kind of machine: saved, found by fingerprint, gated against."""

import json
from pathlib import Path

import pytest
from gate_runs import STEADY, write_run
from made import made_manifest

from ddp_bench.bench.errors import NotComparableError, UsageError
from ddp_bench.bench.gate import main as gate
from ddp_bench.bench.gate.baseline import find, fingerprint, save
from ddp_bench.bench.results.store import load_run

CPU = {
    "versions": {"torch": "2.15.0+cpu"},
    "environment": {"host": "a", "cpu_model": "Intel(R) Xeon(R) @ 2.20GHz", "num_cores": 2, "gpus": []},
    "settings": {"device": "cpu", "data": "device", "out": "/home/someone/run"},
}


def gpus(*names, **more):
    environment = {**CPU["environment"], "gpus": [{"name": name} for name in names], **more}
    return {**CPU, "environment": environment, "settings": {"device": "cuda"}}


def named(told):
    return fingerprint(made_manifest(**told))


def test_a_fingerprint_reads_and_tells_machines_apart():
    assert named(CPU).startswith("2-cores-intel-r-xeon-r-2-20ghz-torch2.15-")
    assert named(gpus("NVIDIA H200", "NVIDIA H200")).startswith("2x-nvidia-h200-torch2.15-")
    made = [
        CPU,
        {**CPU, "versions": {"torch": "2.16.0"}},
        {**CPU, "environment": {**CPU["environment"], "num_cores": 4}},
        {**CPU, "environment": {**CPU["environment"], "cpu_model": "Another"}},
        gpus("NVIDIA H200"),
        gpus("NVIDIA H200", "NVIDIA H200"),
        gpus("NVIDIA H100", "NVIDIA H200"),
        {},
    ]
    assert len({named(manifest) for manifest in made}) == len(made)


def test_a_fingerprint_is_the_same_for_what_the_gate_compares_itself():
    other_host = {**CPU, "environment": {**CPU["environment"], "host": "b", "os": "Linux"}}
    assert named(other_host) == named({**CPU, "versions": {"torch": "2.15.1"}}) == named(CPU)
    assert named(gpus("A", "B")) == named(gpus("B", "A"))


@pytest.mark.parametrize("strange", ["../../x", "", "…", "a" * 300])
def test_any_machine_has_one_that_is_a_folder_name(strange):
    name = named({"environment": {"cpu_model": strange}})
    assert Path(name).name == name
    assert len(name) < 100


def test_a_saved_baseline_is_found_and_gated_against(tmp_path, capsys):
    root, good = tmp_path / "baselines", write_run(tmp_path / "good")
    assert gate.main(["--save-baseline", str(good), "--baselines", str(root)]) == 0
    assert str(find(good, root)) in capsys.readouterr().out
    slower = {key: [1.3 * ms for ms in series] for key, series in STEADY.items()}
    same, slow = write_run(tmp_path / "same"), write_run(tmp_path / "slow", slower)
    codes = [gate.main(["auto", str(run), "--baselines", str(root)]) for run in (same, slow)]
    assert codes == [0, 1]


def test_without_one_the_gate_names_the_command_that_makes_it(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    assert gate.main(["auto", str(run), "--baselines", str(tmp_path / "none")]) == 3
    said = capsys.readouterr().err
    assert "no baseline for this machine" in said
    assert f"python -m bench.gate --save-baseline RUN --baselines {tmp_path / 'none'}" in said
    with pytest.raises(NotComparableError):
        find(run, tmp_path)


def test_a_baseline_keeps_the_tables_and_no_ones_paths(tmp_path):
    run = write_run(
        tmp_path / "run",
        settings={"data": "device", "out": "/home/someone/run"},
        argv=["--out", "/home/someone/run"],
        command="python -m bench.run --out /home/someone/run",
    )
    (run / "report.html").write_text("large", encoding="utf-8")
    kept = save(run, tmp_path / "baselines")
    assert sorted(path.name for path in kept.iterdir()) == [
        "allreduce.csv",
        "blocks.csv",
        "cases.csv",
        "comparisons.csv",
        "manifest.json",
    ]
    assert "someone" not in (kept / "manifest.json").read_text(encoding="utf-8")
    assert json.loads((kept / "manifest.json").read_text())["settings"]["data"] == "device"
    assert load_run(kept).cases.equals(load_run(run).cases)


def test_what_cannot_serve_is_refused(tmp_path):
    root = tmp_path / "baselines"
    good = write_run(tmp_path / "good")
    save(good, root)
    with pytest.raises(UsageError, match="baseline already; remove it first"):
        save(good, root)
    short = write_run(tmp_path / "short", {key: series[:2] for key, series in STEADY.items()})
    with pytest.raises(UsageError, match="2 rounds"):
        save(short, tmp_path / "other")
    with pytest.raises(UsageError, match="no case with status ok"):
        save(write_run(tmp_path / "nothing", {}), tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("more", [["a", "b"], ["--interleave", "main"], ["--", "--rounds", "3"]])
def test_saving_stands_alone(more, capsys):
    assert gate.main(["--save-baseline", "run", *more]) == 2
    assert "stands alone" in capsys.readouterr().err
