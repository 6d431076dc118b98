"""What runs tests: the stages on a GPU, and the campaign, which runs where it is named and nowhere else."""

import json
import os
import shutil
import sys
import tarfile
import time

import on_gpu
import psutil
import pytest
import selection
from on_gpu import PYTHON, STAGES, Item, main, results

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.run.main import settings_of

RUNS = [item for items in STAGES.values() for item in items if "bench.run" in item.command]


def item(code, limit_s=60, name="one"):
    return Item(name, limit_s, (sys.executable, "-c", code))


def test_what_fails_hangs_or_is_not_there_costs_itself_alone(tmp_path):
    hang = "import subprocess, sys, time; subprocess.Popen(['sleep', '987']); print('up'); time.sleep(99)"
    items = (
        item("raise SystemExit('bad')"),
        item(hang, limit_s=1),
        Item("absent", 60, ("/no/such/program",)),
        item("print('fine')"),
    )
    found = list(results(items, tmp_path, rehearse=False, stage_s=300))
    assert [row["rc"] for row in found] == [1, 124, 127, 0]
    assert found[0]["last"] == ["bad"]
    assert found[1]["last"][0] == "up"
    assert found[3]["last"] == ["fine"]
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "987"]]


def test_what_no_longer_fits_is_skipped_and_said(tmp_path):
    two = [item("", limit_s=29), item("", limit_s=31)]
    found = list(results(two, tmp_path, rehearse=False, stage_s=30))
    assert [row["rc"] for row in found] == [0, None]
    assert found[1]["last"][0].startswith("skipped: ")


def test_each_command_leaves_a_line_and_the_archive(tmp_path, monkeypatch):
    write = "open('{work}/%s/cases.csv', 'w').write('case_id,status\\na,ok\\nb,failed\\n')"
    make = "import os; os.makedirs('{work}/%s', exist_ok=True); "
    items = tuple(item((make + write) % (name, name), name=name) for name in ("first", "second"))
    monkeypatch.setitem(STAGES, 1, (*items, Item("nvidia-smi", 20, ("nvidia-smi",), None)))
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    assert main(["1", "--rehearse"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "stage1.jsonl").read_text().splitlines()]
    assert [(row["item"], row["rc"]) for row in rows] == [("first", 0), ("second", 0), ("nvidia-smi", None)]
    assert rows[0]["cases"] == {"ok": 1, "failed": 1}
    with tarfile.open(tmp_path / "out" / "stage1.tar.gz") as tar:
        assert {"first/cases.csv", "second/cases.csv", "01-first.log"} <= set(tar.getnames())


def test_an_archive_that_is_too_large_leaves_traces_out_first(tmp_path, monkeypatch):
    monkeypatch.setattr(on_gpu, "ARCHIVE_BYTES", 20_000)
    for name, size in (("traces/a", 30_000), ("large", 25_000), ("small", 10)):
        (tmp_path / "work" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "work" / name).write_bytes(os.urandom(size))
    on_gpu.archive(tmp_path / "work", tmp_path / "out.tar.gz")
    with tarfile.open(tmp_path / "out.tar.gz") as tar:
        assert tar.getnames() == ["small"]


@pytest.mark.parametrize("planned", RUNS, ids=lambda planned: planned.name)
def test_every_run_of_a_stage_is_a_command_line_that_the_suite_takes(planned):
    arguments = planned.command[3:]
    assert planned.command[:3] == (PYTHON, "-m", "bench.run")
    asked = settings_of(arguments)
    assert asked.max_time is not None or asked.rounds is not None
    with pytest.raises(UsageError):
        settings_of([*arguments, "--no-such-option"])


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stage", STAGES)
def test_a_rehearsal_on_cpu_cores_runs_every_command(stage, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    began_s = time.monotonic()
    assert main([str(stage), "--rehearse"]) == 0
    print(capsys.readouterr().out, f"{time.monotonic() - began_s:.0f} s")
    rows = [json.loads(line) for line in (tmp_path / "out" / f"stage{stage}.jsonl").read_text().splitlines()]
    by_name = {row.pop("item"): row for row in rows}
    # Beside load the doctor objects; few rounds decide nothing, or by chance; either case may be hit.
    others = {"doctor": (0, 1), "gate": (0, 1, 3), "assert": (0, 4)}
    others |= dict.fromkeys(("killed", "stopped", "full", "asserting"), (0, 4))
    for one in STAGES[stage]:
        expected = (None,) if one.rehearsal is None else others.get(one.name, (0,))
        assert by_name[one.name]["rc"] in expected, by_name[one.name]
    assert not [row["last"] for row in rows if '"raised"' in " ".join(row["last"])]
    if stage == 1:
        assert by_name["first"]["cases"] == {"ok": 3, "skipped": 1}
        assert by_name["assert"]["cases"] == {"ok": 1, "failed": 1}


pytest_plugins = ["pytester"]

QUICK = "import pytest\ndef test_quick(): pass\ndef test_left(): pytest.skip('no GPU here.')\n"
LONG = "import pytest\npytestmark = pytest.mark.campaign\ndef test_long(): pass\ndef test_longer(): pass\n"
LEFT_OUT = "Not run: 2 of the campaign (all: -m 'campaign or not campaign'); 1 skipped: no GPU here."


@pytest.mark.parametrize(
    ("arguments", "passed", "last"),
    [
        ([], 1, LEFT_OUT),
        (["faults/test_long.py"], 2, "Not run: nothing."),
        (["-m", "campaign or not campaign"], 3, "Not run: 1 skipped: no GPU here."),
        *selection.in_campaign(
            (["-n", "2"], 1, LEFT_OUT),
            (["faults"], 2, "Not run: nothing."),
            (["faults/test_long.py::test_long"], 1, "Not run: nothing."),
            (["-m", "campaign"], 2, "Not run: nothing."),
            (["."], 1, LEFT_OUT),
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_runs(pytester, arguments, passed, last):
    pytester.makeini("[pytest]\nmarkers = campaign: long\npythonpath = .")
    pytester.makepyfile(conftest="pytest_plugins = 'selection'")
    shutil.copy(selection.__file__, pytester.path)
    (pytester.mkdir("unit") / "test_quick.py").write_text(QUICK)
    (pytester.mkdir("faults") / "test_long.py").write_text(LONG)
    done = pytester.runpytest("-p", "no:cacheprovider", *arguments)
    assert done.parseoutcomes()["passed"] == passed
    assert done.outlines[-1] == last


STARTS = "import subprocess, sys\n" + "".join(
    f"def test_{i}(): subprocess.run([sys.executable, '-c', ''], check=True)\n" for i in range(3)
)


@pytest.mark.parametrize(
    ("workers", "most", "code"),
    [
        ("0", 2, pytest.ExitCode.TESTS_FAILED),
        *selection.in_campaign(
            ("0", 3, pytest.ExitCode.OK),
            ("2", 3, pytest.ExitCode.OK),
            ("2", 2, pytest.ExitCode.TESTS_FAILED),
        ),
    ],
)
def test_too_many_processes_are_a_failure(pytester, monkeypatch, workers, most, code):
    pytester.makeini("[pytest]\nmarkers = campaign: long\npythonpath = .\ntestpaths = unit")
    pytester.makepyfile(conftest="pytest_plugins = 'selection'")
    shutil.copy(selection.__file__, pytester.path)
    (pytester.mkdir("unit") / "test_starts.py").write_text(STARTS)
    monkeypatch.setattr(selection, "MOST_PROCESSES", most)
    done = pytester.runpytest("-p", "no:cacheprovider", "-n", workers)
    assert done.parseoutcomes()["passed"] == 3
    assert done.outlines[-2].startswith(f"Processes started: 3, at most {most}. Took ")
    assert done.ret == code


@pytest.mark.parametrize(
    ("arguments", "workers"), [([], 2), (["tests"], 2), (["tests/unit/test_plan.py"], 0), (["a.py::b"], 0)]
)
def test_named_files_start_without_workers(arguments, workers, pytestconfig, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(pytestconfig, "args", arguments)
    assert selection.pytest_xdist_auto_num_workers(pytestconfig) == workers
