"""Processes: what launchers tell a rank, the memory it gets, signals, and how processes end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil

from .. import parent_death
from ..errors import UsageError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""What Ctrl-C and a scheduler send to end a job."""

MALLOC_PAGES = "glibc.malloc.hugetlb"
"""Glibc's name for the kind of pages that malloc asks for; 1 is madvise, which needs no reserved pages.

To keep memory too (`arena_max=1`, `mmap_max=0`, no trimming) would spare a step thousands of page faults, but
torch 2.15's profiler then reads memory that it has not set, and crashes.
"""


def process_name(pid: int) -> str:
    """A name for a process that no other process has, also on other machines; empty where there is none.

    A number alone is used again, and means another process in another container. So the name also holds the
    machine's start, the container, and when the process started: in ticks since then, which no clock changes.
    """
    try:
        after_command = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2]
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}/{pid}/{after_command.split()[19]}"
    except (OSError, IndexError):
        pass
    try:
        return f"{pid}/{psutil.Process(pid).create_time()}"  # no /proc: macOS
    except psutil.Error:
        return ""


def huge_pages_env(environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to `environment` for a process on CPU cores whose speed is compared with another's.

    Memory in huge pages, where kernel and malloc (glibc 2.35) offer them: with pages of 4 KiB two launches of
    one program differ by 3.6% (standard deviation), with huge ones by 1.5%. The user's own setting stays.
    """
    tunables = environment.get("GLIBC_TUNABLES", "")
    if MALLOC_PAGES in tunables:
        return {}
    return {"GLIBC_TUNABLES": ":".join(filter(None, [tunables, f"{MALLOC_PAGES}=1"]))}


def rank_variables(environment: Mapping[str, str], device_type: str) -> dict[str, str]:
    """What the environment of a rank on this machine needs when its interpreter starts."""
    found = {
        "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", "1"),
        # A store whose other end has gone would tell of it in forty lines of C++.
        "TORCH_CPP_LOG_LEVEL": environment.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }
    if device_type == "cpu":
        # Otherwise DataParallel would find the GPUs of this machine.
        found |= {"CUDA_VISIBLE_DEVICES": "", **huge_pages_env(environment)}
    return found


def host_name() -> str:
    """This host's name; BENCH_HOST overrides it where several hosts share one machine."""
    return os.environ.get("BENCH_HOST") or socket.gethostname()


def allowed_cores() -> tuple[int, ...]:
    """The CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def is_rank() -> bool:
    """Whether torchrun or srun has started this process as one of many."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def is_first() -> bool:
    """Whether this is the first rank, or no rank at all: the process that speaks to the user."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def leave(code: int) -> NoReturn:
    """End this process; a rank without the interpreter's shutdown.

    Gloo's threads may hold tensors of the last all-reduce until then, and letting go of them in an
    interpreter that shuts down aborts the process: a finished run would end as a rank that died
    (https://github.com/pytorch/pytorch/pull/179291).
    """
    if not is_rank():
        sys.exit(code)
    sys.stdout.flush()
    os._exit(code)


def ended_with_us(command: Sequence[str]) -> list[str]:
    """`command` so that it gets SIGTERM at the end of this process, whatever ends it; only on Linux."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid()), *command]


class _Interruption:
    """Whether a signal may interrupt now, and whether one came while it might not."""

    held = 0
    came = False


@contextlib.contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt within, as Ctrl-C does; what cleans up then is not disturbed again."""

    def _interrupt(_number: int, _frame: FrameType | None) -> None:
        ignore_signals()
        _Interruption.came = bool(_Interruption.held)
        if not _Interruption.held:
            raise KeyboardInterrupt

    _Interruption.came = False
    before = {number: signal.signal(number, _interrupt) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Put off what `interrupted_by_signals` raises until the end of a block that must not be half-done."""
    _Interruption.held += 1
    try:
        yield
    finally:
        _Interruption.held -= 1
    if _Interruption.came and not _Interruption.held:
        _Interruption.came = False
        raise KeyboardInterrupt


def die_at_once() -> None:
    """Leave on a signal without a word: another process brings the files up to date."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def ignore_signals() -> None:
    """Go on whatever signal comes, for what has to be finished."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end_all(processes: Sequence[subprocess.Popen[str]], *, within_s: float) -> None:
    """Ask processes that have not ended to do so, and kill those that take longer than `within_s` seconds."""
    for process in processes:
        process.terminate()
    deadline_s = time.monotonic() + within_s
    for process in processes:
        try:
            process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


FIRST_PORT, NUM_PORTS = 20_000, 10_000
"""Where ranks of srun meet unless MASTER_PORT says so: a port by job id, below those given out at random."""


def ranks_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What torchrun would have set for this task of `srun`; empty outside one, or under torchrun.

    Raises UsageError for nodes with different numbers of tasks.
    """
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "1")
    # A batch script has a SLURM_PROCID too, but is no step of srun.
    in_step = "SLURM_PROCID" in environment and "SLURM_STEP_NODELIST" in environment
    if "RANK" in environment or not in_step or int(tasks) < 2:
        return {}
    per_node = set(tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE") or tasks))
    if len(per_node) > 1:
        counts = " and ".join(str(n) for n in sorted(per_node))
        raise UsageError(f"srun started {counts} tasks on different nodes; give every node the same number")
    job = environment.get("SLURM_JOB_ID", "0")
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(per_node.pop()),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(environment["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(FIRST_PORT + int(job) % NUM_PORTS),
        "TORCHELASTIC_RUN_ID": f"slurm-{job}.{environment.get('SLURM_STEP_ID', '0')}",
    }


def tasks_per_node(text: str) -> list[int]:
    """Slurm's `4(x2),1` as [4, 4, 1]."""
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part.strip())
        if not match:
            raise UsageError(f"SLURM_STEP_TASKS_PER_NODE {text!r} is not understood; expected e.g. 8(x4)")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(text: str) -> str:
    """The first host of Slurm's `node[01-04,7],other`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", text)
    if first is None:
        raise UsageError(f"SLURM_STEP_NODELIST {text!r} names no host")
    name = re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])
    if "[" in name:
        raise UsageError(f"SLURM_STEP_NODELIST {text!r} is not understood; expected e.g. node[01-04]")
    return name
