"""Processes: the memory that a rank gets, signals, what they wait for, and how they end.

As a script this becomes a command that ends with its parent; it then runs without this project's packages.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Protocol

PACKAGE = Path(__file__).parents[2].resolve()

PACKAGE_FOLDERS = frozenset(path.resolve() for path in (PACKAGE, *PACKAGE.iterdir()) if path.is_dir())
"""Folders of this code; in a checkout the package has links to some."""

INSTALL_FOLDERS = {"site-packages", "dist-packages"}
"""Folders of installed packages; a virtual environment often lies within the repository that uses it."""

KILL_TIMEOUT_S = 10.0
"""Seconds to wait after SIGKILL."""

POLL_INTERVAL_S = 0.01

PR_SET_PDEATHSIG = 1
"""Number of Linux's prctl that names the signal for the end of the parent's thread that started a process."""

RUN_POLL_INTERVAL_S = 0.2
"""Seconds between two looks whether a run has ended: seldom, for it is measuring."""

MALLOC_PAGES = "glibc.malloc.hugetlb"
"""Glibc's name for the kind of pages that malloc asks for; 1 is madvise, which needs no reserved pages.

To keep memory too (`arena_max=1`, `mmap_max=0`, no trimming) would spare a step thousands of page faults, but
torch 2.15's profiler then reads memory that it has not set, and crashes.
"""


def choose_huge_pages_env(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add for a process on CPU cores whose speed is compared with another's.

    Memory in huge pages, where kernel and malloc (glibc 2.35) offer them: with pages of 4 KiB two launches of
    one program differ by 3.6% (standard deviation), with huge ones by 1.5%. The user's own setting stays.
    """
    tunables = environment.get("GLIBC_TUNABLES", "")
    if MALLOC_PAGES in tunables:
        return {}
    return {"GLIBC_TUNABLES": ":".join(filter(None, [tunables, f"{MALLOC_PAGES}=1"]))}


def make_rank_variables(environment: Mapping[str, str], device_type: str) -> dict[str, str]:
    """Return the variables that a rank on this machine needs when its interpreter starts."""
    found = {
        "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", "1"),
        # A store whose other end has gone would tell of it in forty lines of C++.
        "TORCH_CPP_LOG_LEVEL": environment.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }
    if device_type == "cpu":
        # Otherwise DataParallel would find the GPUs of this machine.
        found |= {"CUDA_VISIBLE_DEVICES": "", **choose_huge_pages_env(environment)}
    return found


def get_host_name() -> str:
    """Return this host's name; BENCH_HOST overrides it where several hosts share one machine."""
    return os.environ.get("BENCH_HOST") or socket.gethostname()


def get_allowed_cores() -> tuple[int, ...]:
    """Return the CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def make_package_command(*arguments: str, python: str = sys.executable) -> list[str]:
    """Make the command line of `ddp-bench arguments` that finds this package, in any folder.

    With `-m` and one of our modules as first arguments it runs that module.
    """
    return [python, str(PACKAGE / "__main__.py"), *arguments]


def tie_to_parent(command: Sequence[str]) -> list[str]:
    """`command` so that it gets SIGTERM at the end of this process, whatever ends it; only on Linux."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def end_with(parent: int, *, by: signal.Signals = signal.SIGKILL) -> None:
    """Get the signal `by`, on Linux, when the process `parent` ends, even killed; end at once if it has."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:
        os._exit(1)


class _Interruption:
    """State of signals: whether one may interrupt now, and whether one came while it might not."""

    held = 0
    came = False


def _stop_signals() -> list[signal.Signals]:
    """Return the signals of Ctrl-C, a scheduler and a terminal that closes; `nohup` ignores the last."""
    asked = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    return [one for one in asked if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN]


@contextlib.contextmanager
def raise_on_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt within at SIGTERM and SIGHUP, as at Ctrl-C; what cleans up is not disturbed.

    Its argument is the signal's number.
    """

    def _interrupt(number: int, _frame: FrameType | None) -> None:
        ignore_signals()
        _Interruption.came = bool(_Interruption.held)
        if not _Interruption.held:
            raise KeyboardInterrupt(number)

    _Interruption.came = False
    before = {number: signal.signal(number, _interrupt) for number in _stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def hold_signals() -> Iterator[None]:
    """Put off what `raise_on_signals` raises until the end of a block that must not be half-done."""
    _Interruption.held += 1
    try:
        yield
    finally:
        _Interruption.held -= 1
    if _Interruption.came and not _Interruption.held:
        _Interruption.came = False
        raise KeyboardInterrupt


def set_default_signals() -> None:
    """Leave on a signal without a word: another process brings the files up to date."""
    for number in _stop_signals():
        signal.signal(number, signal.SIG_DFL)


def ignore_signals() -> None:
    """Go on whatever signal comes, for what has to be finished."""
    for number in _stop_signals():
        signal.signal(number, signal.SIG_IGN)


_waits_for: list[str] = []
"""Things that the main thread waits for, for the thread that answers the conductor meanwhile."""


@contextlib.contextmanager
def note_waiting(what: str) -> Iterator[None]:
    """Within, this rank has done its part and waits: who is late is somebody else."""
    _waits_for.append(what)
    try:
        yield
    finally:
        _waits_for.pop()


def get_waiting() -> str:
    """Tell what this rank waits for; empty while it works."""
    return _waits_for[-1] if _waits_for else ""


class Child(Protocol):
    """A process whose end can be asked for, such as a `Popen`."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Its exit code, or minus its signal; None while it lives."""


def yield_exit_codes(runs: Sequence[Child]) -> Iterator[int]:
    """Yield the exit code of each run as it ends, however long that takes: runs have limits of their own.

    A signal interrupts it; what a run has left behind, with its pipes open, does not hold it up.
    """
    left = list(runs)
    while left:
        for run in list(left):
            code = run.poll()
            if code is not None:
                left.remove(run)
                yield code
        if left:
            time.sleep(RUN_POLL_INTERVAL_S)


def wait_or_kill(children: Sequence[Child], *, within_s: float) -> list[int | None]:
    """Return the exit codes of processes; kill those that live after `within_s` seconds, with their groups.

    The one place that ends processes. None for one that does not end within KILL_TIMEOUT_S of that: the
    kernel holds it, as for a file server or a driver that does not answer.
    """
    _await(children, within_s)
    for child in children:
        with contextlib.suppress(OSError):
            if child.poll() is None:
                os.kill(child.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)  # what it has started
    _await(children, KILL_TIMEOUT_S)
    return [child.poll() for child in children]


def _await(children: Sequence[Child], within_s: float) -> None:
    deadline_s = time.monotonic() + within_s
    while any(child.poll() is None for child in children) and time.monotonic() < deadline_s:
        time.sleep(POLL_INTERVAL_S)


def end_all(processes: Sequence[subprocess.Popen[str]], *, within_s: float) -> None:
    """Ask processes that have not ended to do so, and kill those that take longer than `within_s` seconds."""
    for process in processes:
        process.terminate()
    wait_or_kill(processes, within_s=within_s)


if __name__ == "__main__":
    number, *command = sys.argv[1:]
    end_with(int(number), by=signal.SIGTERM)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be started: {error.strerror}")
