"""Which tests run and where: the campaign only where named, real processes of a folder one after another.

What every change has to wait for is counted: processes that tests start, and seconds.
"""

import os
import platform
import sys
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling

FOLDERS_OF_PROCESSES = ("faults", "integration", "lab", "mutants")
"""Their tests start ranks, which need the cores, and share runs: all of a folder go to one worker.

So do those of all these folders with `-m`: many of the campaign measure.
"""

LONGEST_FILES = ("test_published.py", "test_recorded.py", "test_gate_verdicts.py", "test_stats.py")
"""Begun first beside those, so that at the end no worker waits for one of them."""

MOST_WORKERS = 4
LEFT_OUT, BEFORE, OF_WORKERS = (pytest.StashKey[int]() for _ in range(3))

MOST_PROCESSES = 1200
"""Limit of the processes that the tests of a change start, ranks and git included; 370 try what we print."""

LAST_RECORDED_S = 354
"""What they took on two cores, in a fresh environment."""

STARTS_A_PROCESS = frozenset({"subprocess.Popen", "os.fork", "tests.rank"})
"""Audit events; os.posix_spawn is none of them, as Python 3.13 raises it beside subprocess.Popen."""

_STARTED = []
_BEGAN_S = time.monotonic()


def in_campaign(*sets):
    """Values of a parametrisation, or tuples of them, that the campaign alone tries."""
    as_tuples = (values if isinstance(values, tuple) else (values,) for values in sets)
    return [pytest.param(*values, marks=pytest.mark.campaign) for values in as_tuples]


def _count_processes(event, _arguments):
    if event in STARTS_A_PROCESS:
        _STARTED.append(event)


sys.addaudithook(_count_processes)


def pytest_xdist_auto_num_workers(config):
    """Workers for `-n auto`: none for benchmarks, nor for named files, which start sooner without."""
    files_alone = bool(config.args) and all(".py" in argument for argument in config.args)
    if files_alone or config.getoption("benchmark_only") or not hasattr(os, "sched_getaffinity"):
        return 0
    cores = len(os.sched_getaffinity(0))
    return min(cores, MOST_WORKERS) if cores > 1 else 0


class Scheduler(LoadFileScheduling):
    """Whole files to workers in the order of collection, and whole folders of those that start processes."""

    def _split_scope(self, nodeid):
        file = super()._split_scope(nodeid)
        folder = Path(file).parent.name
        if folder not in FOLDERS_OF_PROCESSES:
            return file
        return "processes" if self.config.option.markexpr else folder


def pytest_xdist_make_scheduler(config, log):
    """Pytest-xdist's own groups need a test's id to change, which pytest 9.2 no longer allows.

    With `--dist` it is pytest-xdist that schedules.
    """
    if config.option.dist != "load":
        return None
    config.option.loadscopereorder = False
    return Scheduler(config, log)


def pytest_collection_modifyitems(config, items):
    """Put first what takes longest; leave the campaign out, unless `-m` or its file or folder is named."""
    items.sort(key=lambda item: item.path.name not in LONGEST_FILES)
    items.sort(key=lambda item: item.path.parent.name not in FOLDERS_OF_PROCESSES)
    left_out = set() if config.option.markexpr else {item for item in items if _is_left_out(config, item)}
    config.stash[LEFT_OUT] = len(left_out)
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def _is_left_out(config, item):
    named = {config.invocation_params.dir / argument.split("::")[0] for argument in config.args}
    return item.get_closest_marker("campaign") is not None and not named & {item.path, item.path.parent}


def pytest_testnodedown(node):
    """Take over what a worker left out, of which all collect the same, and what it started."""
    found = getattr(node, "workeroutput", {})
    node.config.stash[LEFT_OUT] = found.get("left_out", 0)
    node.config.stash[OF_WORKERS] = node.config.stash.get(OF_WORKERS, 0) + found.get("started", 0)


def versions():
    """Name the versions that decide most often whether a test passes."""
    return f"torch {version('torch')}, Python {platform.python_version()}, NumPy {version('numpy')}"


def pytest_report_header():
    return versions()


def pytest_sessionstart(session):
    """What pytest and its plugins have started does not count."""
    session.config.stash[BEFORE] = len(_STARTED)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session):
    """Say last with what the tests ran and which did not, so that green never means untried.

    Fails where too much was started.
    """
    config = session.config
    started = len(_STARTED) - config.stash.get(BEFORE, 0)
    if hasattr(config, "workeroutput"):
        config.workeroutput |= {"left_out": config.stash.get(LEFT_OUT, 0), "started": started}
    yield
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is None or hasattr(config, "workeroutput"):
        return
    if config.args == config.getini("testpaths") and not config.option.markexpr:
        started = config.stash.get(OF_WORKERS, started)  # of this process they are its workers
        terminal.write_line(
            f"Processes started: {started}, at most {MOST_PROCESSES}. "
            f"Took {time.monotonic() - _BEGAN_S:.0f} s, last recorded {LAST_RECORDED_S} s."
        )
        if started > MOST_PROCESSES:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
    skipped = [report.longrepr[2] for report in terminal.stats.get("skipped", [])]
    terminal.write_line(f"Tested with {versions()}. " + not_run(config.stash.get(LEFT_OUT, 0), skipped))


def not_run(num_left_out, skip_reasons):
    """One line: tests of the campaign that were left out, and skipped tests by their reason."""
    parts = []
    if num_left_out:
        parts.append(f"{num_left_out} of the campaign (all: -m 'campaign or not campaign')")
    for reason, number in Counter(skip_reasons).most_common():
        parts.append(f"{number} skipped: {reason.removeprefix('Skipped: ').rstrip('.')}")
    return f"Not run: {'; '.join(parts) or 'nothing'}."
