"""What the gate reads: a good folder or baseline as it is, and a bad one never as a pass."""

import json
import shutil
from pathlib import Path

import pytest
from gate_runs import STEADY, plan, write_run
from made import made_manifest

from ddp_bench.bench.errors import NotComparableError, UsageError
from ddp_bench.bench.gate import main as gate
from ddp_bench.bench.gate.baseline import find, fingerprint, save
from ddp_bench.bench.gate.command import read_thresholds
from ddp_bench.bench.gate.main import main
from ddp_bench.bench.gate.runs import read_run
from ddp_bench.bench.results.store import load_run


def edit(name, change):
    def apply(folder):
        text = (folder / name).read_text(encoding="utf-8")
        changed = change(text)
        assert changed != text, "the edit hit nothing"
        (folder / name).write_text(changed, encoding="utf-8")

    return apply


def cell(name, column, value, row=0):
    """Overwrite one cell of a CSV."""

    def change(text):
        header, *lines = text.splitlines()
        cells = lines[row].split(",")
        cells[header.split(",").index(column)] = value
        lines[row] = ",".join(cells)
        return "\n".join([header, *lines]) + "\n"

    return edit(name, change)


def without_line(name, index):
    return edit(
        name, lambda text: "".join(x for i, x in enumerate(text.splitlines(keepends=True)) if i != index)
    )


def manifest(**changes):
    return edit("manifest.json", lambda text: json.dumps({**json.loads(text), **changes}))


BAD = {
    "no folder": (shutil.rmtree, "not a results folder"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "not a results folder"),
    "cut manifest": (edit("manifest.json", lambda t: t[:-20]), "not valid JSON"),
    "list for a manifest": (lambda f: (f / "manifest.json").write_text("[]"), "JSON object"),
    "newer schema": (manifest(schema_version=99), "schema 99"),
    "schema as text": (manifest(schema_version="3"), "schema '3'"),
    "no schema": (manifest(schema_version=None), "schema None"),
    "no cases.csv": (lambda f: (f / "cases.csv").unlink(), "cases.csv"),
    "no blocks.csv": (lambda f: (f / "blocks.csv").unlink(), "blocks.csv"),
    "empty cases.csv": (lambda f: (f / "cases.csv").write_text(""), "cases.csv"),
    "header alone": (edit("cases.csv", lambda t: t.splitlines()[0] + "\n"), "no case"),
    "cut inside a line": (edit("blocks.csv", lambda t: t[:-9]), "num_blocks"),
    "cut between lines": (
        edit("blocks.csv", lambda t: "".join(t.splitlines(keepends=True)[:-2])),
        "num_blocks",
    ),
    "a line lost": (without_line("blocks.csv", 2), "num_blocks"),
    "a rank lost": (without_line("blocks.csv", 13), "lacks ranks"),
    "a case lost": (without_line("cases.csv", 3), "does not hold"),
    "a case twice": (edit("cases.csv", lambda t: t + t.splitlines(keepends=True)[1]), "stands twice"),
    "a block twice": (edit("blocks.csv", lambda t: t + t.splitlines(keepends=True)[1]), "stands twice"),
    "binary": (lambda f: (f / "cases.csv").write_bytes(b"\xff\xfe\x00\n"), "cases.csv"),
    "column renamed": (edit("blocks.csv", lambda t: t.replace("block_ms", "ms", 1)), "column block_ms"),
    "rate not a number": (cell("cases.csv", "images_per_s", "nan"), "'nan'"),
    "rate empty": (cell("cases.csv", "images_per_s", ""), "images_per_s is not"),
    "rate zero": (cell("cases.csv", "images_per_s", "0"), "images_per_s is not"),
    "rate infinite": (cell("cases.csv", "images_per_s", "inf"), "images_per_s is not"),
    "rate in words": (cell("cases.csv", "images_per_s", "fast"), "cannot be read"),
    "negative memory": (cell("cases.csv", "peak_mem_mib", "-1"), "peak_mem_mib"),
    "another batch": (cell("cases.csv", "global_batch", "999"), "global_batch is not"),
    "no devices": (cell("cases.csv", "num_devices", ""), "num_devices is not"),
    "status unknown": (cell("cases.csv", "status", "fine"), "status is not"),
    "id with markup": (cell("cases.csv", "case_id", "<b>"), "does not hold"),
    "block nan": (cell("blocks.csv", "block_ms", "nan"), "'nan'"),
    "block empty": (cell("blocks.csv", "block_ms", ""), "block_ms is not"),
    "block zero": (cell("blocks.csv", "block_ms", "0"), "block_ms is not"),
    "block negative": (cell("blocks.csv", "block_ms", "-5"), "block_ms is not"),
    "block infinite": (cell("blocks.csv", "block_ms", "inf"), "block_ms is not"),
    "block without end": (cell("blocks.csv", "block_ms", "1e300"), "block_ms is not"),
    "no steps": (cell("blocks.csv", "num_steps", "0"), "num_steps is not"),
    "no round": (cell("blocks.csv", "round", ""), "round is not"),
    "phase unknown": (cell("blocks.csv", "phase", "tim"), "phase is not"),
    "nothing measured": (
        lambda f: (shutil.rmtree(f), write_run(f, {("ddp", 2): STEADY["ddp", 2]}, planned=plan()[:1])),
        "status ok",
    ),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("good") / "run")


def test_the_folder_to_spoil_is_good(good, tmp_path):
    assert main([str(good), str(shutil.copytree(good, tmp_path / "copy"))]) == 0


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_never_a_pass(name, side, good, tmp_path, capsys):
    folders = [shutil.copytree(good, tmp_path / label) for label in ("base", "new")]
    spoil, message = BAD[name]
    spoil(folders[side])
    if name == "nothing measured" and side == 1:
        assert main([str(f) for f in folders]) == 1, "a candidate that measured nothing lacks every case"
        return
    assert main([str(f) for f in folders]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert shown.err.startswith("bench.gate: error: ")


def test_a_good_folder_comes_as_it_is(tmp_path):
    run = read_run(write_run(tmp_path / "run", peak_mem_mib=512.0))
    assert [c.row["mode"] for c in run.cases] == ["single", "dp", "ddp"]
    ddp = run.cases[2]
    assert ddp.rounds["images_per_s"][1] == pytest.approx(2 * 16 * 1000 / 125.0)
    assert ddp.rounds["speedup"][1] == pytest.approx(2 * 100 / 125)
    assert ddp.rounds["exposed_comm_ms"][1] == pytest.approx(25.0)
    assert ddp.rounds["peak_mem_mib"] == {0: 512.0}
    assert run.cases[0].rounds["speedup"] == {}


def test_figures_come_from_the_blocks_alone(tmp_path):
    run = write_run(tmp_path / "run")
    before = read_run(run).cases
    for column, value in (("images_per_s", "170"), ("speedup", "1.9"), ("exposed_comm_ms", "")):
        cell("cases.csv", column, value, 2)(run)
    assert read_run(run).cases == before


def test_a_baseline_of_an_earlier_version_without_later_columns_is_read(tmp_path):
    base, new = write_run(tmp_path / "base"), write_run(tmp_path / "new")
    for name, column in (("cases.csv", "link"), ("blocks.csv", "detail")):
        path = base / name
        rows = [line.split(",") for line in path.read_text(encoding="utf-8").splitlines()]
        at = rows[0].index(column)
        path.write_text("".join(",".join(r[:at] + r[at + 1 :]) + "\n" for r in rows), encoding="utf-8")
    assert main([str(base), str(new)]) == 0


BAD_CONFIGS = [
    ("[thresholds", "not valid TOML"),
    ("thresholds = 5", "no table"),
    ("[threshold]\nimages_per_s = '5%'", "unknown key 'threshold'"),
    ("[thresholds]\nimages_per_sec = '5%'", "did you mean 'images_per_s'"),
    ("[thresholds]\nimages_per_s = 5", "not a share"),
]


@pytest.mark.parametrize(("text", "message"), BAD_CONFIGS)
def test_bad_thresholds(text, message, good, tmp_path, capsys):
    config = tmp_path / "gate.toml"
    config.write_text(text, encoding="utf-8")
    assert main([str(good), str(good), "--config", str(config)]) == 2
    assert message in capsys.readouterr().err


def test_thresholds_of_the_file_win(tmp_path):
    config = tmp_path / "gate.toml"
    config.write_text("[thresholds]\nimages_per_s = '3%'\npeak_mem_mib = 0.01\n", encoding="utf-8")
    found = read_thresholds("8%", config)
    assert (found["images_per_s"], found["peak_mem_mib"], found["speedup"]) == (0.03, 0.01, 0.08)


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
