"""The campaign runs where it is named and nowhere else, and the last line says what did not run."""

import shutil

import pytest
import selection

pytest_plugins = ["pytester"]

QUICK = "import pytest\ndef test_quick(): pass\ndef test_left(): pytest.skip('no GPU here.')\n"
LONG = "import pytest\npytestmark = pytest.mark.campaign\ndef test_long(): pass\ndef test_longer(): pass\n"
LEFT_OUT = "Not run: 2 of the campaign (all: -m 'campaign or not campaign'); 1 skipped: no GPU here."


@pytest.mark.parametrize(
    ("arguments", "passed", "last"),
    [
        ([], 1, LEFT_OUT),
        (["-n", "2"], 1, LEFT_OUT),
        (["faults"], 2, "Not run: nothing."),
        (["faults/test_long.py"], 2, "Not run: nothing."),
        (["faults/test_long.py::test_long"], 1, "Not run: nothing."),
        (["-m", "campaign"], 2, "Not run: nothing."),
        (["-m", "campaign or not campaign"], 3, "Not run: 1 skipped: no GPU here."),
        (["."], 1, LEFT_OUT),
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


@pytest.mark.parametrize(("most", "code"), [(3, pytest.ExitCode.OK), (2, pytest.ExitCode.TESTS_FAILED)])
@pytest.mark.parametrize("workers", ["0", "2"])
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
