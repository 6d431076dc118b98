"""Starts a user's command so that each of its processes that imports torch is watched."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from ..common.cli import TYPED_ENV, print_message
from ..common.errors import UsageError
from ..common.process import get_host_name, raise_on_signals
from ..common.values import make_csv_parser, parse_option
from ..plan.buckets import make_cap_arguments, parse_bucket_caps
from ..results.disk import report_write_errors
from ..results.run_folder import format_path, name_default_folder
from . import STEPS
from .result import ROWS, write_result
from .site import sitecustomize as site

PROGRESS_INTERVAL_S = 60.0
POLL_INTERVAL_S = 0.1
STOP_GRACE_S = 30.0
"""Seconds that the command has to end after SIGTERM, with --stop."""

MIN_HOOK_AT, MAX_HOOK_AT = 8, 30
"""Synchronised backwards without the hook, from which the step's own time comes."""

MAX_END_S = 10.0
"""Seconds to wait for the last rows of other hosts or ranks before the report."""

BLOCK, SKIPPED = 8, 3
"""Synchronised backwards of a turn with a raced bucket cap, and the first ones of it that do not count."""

MIN_RACE_ROUNDS = 6
"""Turns of each bucket cap, where fewer steps are watched."""


def make_config(
    folder: Path, steps: int, *, probes: bool = True, seed: int = 0, bucket_cap_mb: str = ""
) -> dict[str, Any]:
    """Return what the processes of the command need to know; what begins when is fixed before training.

    `bucket_cap_mb` are caps to race, as `default,1,25`. Raises UsageError where they are none.
    """
    hook_at = min(max(steps // 10, MIN_HOOK_AT), MAX_HOOK_AT)
    folder = folder.absolute()
    race = plan_race(bucket_cap_mb, steps, hook_at) if bucket_cap_mb else None
    known = {"folder": str(folder), "steps": steps, "hook_at": hook_at, "probes": probes, "seed": seed}
    return known | {"race": race, "launch": secrets.token_hex(4)}


def plan_race(bucket_cap_mb: str, steps: int, hook_at: int) -> dict[str, Any]:
    """Plan a race of bucket caps, which takes about as many steps as are watched before it."""
    caps = parse_option("bucket_cap_mb", make_csv_parser(parse_bucket_caps), bucket_cap_mb)
    rounds = max(steps // (BLOCK * len(caps)), MIN_RACE_ROUNDS)
    at = max(-(-steps // BLOCK) * BLOCK, hook_at + BLOCK)
    return {
        "caps": {cap: make_cap_arguments(cap) for cap in caps},
        "at": at,
        "block": BLOCK,
        "skipped": SKIPPED,
        "rounds": rounds,
        "note": f"After {at} synchronized backwards DDP's reducer is built anew with bucket caps "
        f"{', '.join(caps)}, {rounds} times each for {BLOCK} backwards. Training stays bit-equal on 2 ranks, "
        "and equal within rounding on more, because a new reducer begins with one bucket.",
    }


def make_environment(config: Mapping[str, Any], given: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which every Python process that imports torch is watched."""
    paths = [site.SITE, *filter(None, [given.get("PYTHONPATH")])]
    changes = {"PYTHONPATH": os.pathsep.join(paths), site.CONFIG_ENV: json.dumps(config)}
    return {name: value for name, value in given.items() if name != TYPED_ENV} | changes


def make_folder(folder: Path) -> None:
    """Make the folder of the rows. Raises UsageError where it cannot be written."""
    with report_write_errors(f"--out {format_path(folder)}"):
        (folder / ROWS).mkdir(parents=True, exist_ok=True)


def start(command: Sequence[str], config: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    """Start the command, with our standard streams. Raises UsageError where there is none."""
    if shutil.which(command[0]) is None:
        raise UsageError(f"after -- comes a command, but no program {command[0]!r} is found")
    make_folder(Path(config["folder"]))
    return subprocess.Popen(command, env=make_environment(config, os.environ))


def run(command: Sequence[str], config: Mapping[str, Any], *, stop: bool, quiet: bool) -> int:
    """Run the command to its end and return its exit code, 128 + N after signal N.

    With `stop`, end it once all of its ranks have been watched to the last step, and return 0.
    """
    folder, process = Path(config["folder"]), start(command, config)
    said_s, stopped_s, started = time.monotonic(), 0.0, list[psutil.Process]()
    with forward_signals(process):
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_INTERVAL_S)
            now_s = time.monotonic()
            if stop and not stopped_s and has_ended(folder):
                stopped_s = now_s
                started = psutil.Process(process.pid).children(recursive=True)
                process.terminate()
            if stopped_s and now_s - stopped_s > STOP_GRACE_S:
                process.kill()
            if now_s - said_s > PROGRESS_INTERVAL_S and not quiet:
                said_s = now_s
                print_message(describe_progress(folder, config["steps"]))
    for child in started:  # those of mp.spawn outlive its SIGTERM
        with contextlib.suppress(psutil.Error):
            child.kill()
    code = process.returncode
    return 0 if stopped_s else 128 - code if code < 0 else code


@contextlib.contextmanager
def forward_signals(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass signals on to the command; Ctrl-C of a terminal reaches it without us."""

    def forward(number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGINT or not is_in_foreground():
            process.send_signal(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_in_foreground() -> bool:
    """Tell whether a terminal sends its signals to this process and the command."""
    try:
        with open("/dev/tty") as terminal:  # noqa: PTH123
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def read_outer_rows(folder: Path, launch: str = "") -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the first and the last row of each process, of all launches or one, where both are whole."""
    rows = []
    for file in (folder / ROWS).glob(f"*-{launch}*.jsonl"):
        with contextlib.suppress(OSError, ValueError, IndexError), file.open("rb") as lines:
            first = json.loads(lines.readline())
            lines.seek(max(0, file.stat().st_size - 65536))
            rows.append((first, json.loads(lines.read().splitlines()[-1])))
    return rows


def has_ended(folder: Path, ended: Collection[int] = ()) -> bool:
    """Tell whether every rank has been watched to its end; processes of ranks `ended` are gone anyhow."""
    rows = read_outer_rows(folder)
    ends = {last["rank"] for _, last in rows if last["kind"] == "end"}.union(ended)
    return bool(ends) and len(ends) >= max(first.get("world_size", 1) for first, _ in rows)


def describe_progress(folder: Path, steps: int) -> str:
    """Say how far the watch is."""
    seen = [last.get("n", steps if last["kind"] == "end" else 0) for _, last in read_outer_rows(folder)]
    if not seen:
        return "waiting for the first step of a training"
    if min(seen) < steps:
        return f"{min(seen)} of {steps} steps seen"
    return (
        "the watch has seen its steps; the command goes on"
        if has_ended(folder)
        else f"all {steps} steps seen; bucket caps are raced"
    )


def list_ranks(config: Mapping[str, Any]) -> set[int]:
    """Return the ranks that trained under this launch of the watch."""
    return {first["rank"] for first, _ in read_outer_rows(Path(config["folder"]), config["launch"])}


def is_joined(folder: Path) -> bool:
    """Tell whether the watch of another host has made the folder, where no rank has begun yet."""
    return [*folder.glob("*"), *folder.glob("*/*")] == [folder / ROWS]


def await_rows(folder: Path, ended: Collection[int] = ()) -> None:
    """Wait for the last rows of other ranks than `ended`, whose processes are gone."""
    deadline_s = time.monotonic() + MAX_END_S
    while read_outer_rows(folder) and not has_ended(folder, ended) and time.monotonic() < deadline_s:
        time.sleep(POLL_INTERVAL_S)


def report(folder: Path, ended: Collection[int], code: int, quiet: bool, *told: Any) -> int:
    """Report what was watched, and return the exit code; a signal meanwhile leaves the page out.

    `told` are the command and the load, as `write_result` takes them.
    """
    with raise_on_signals():
        try:
            await_rows(folder, ended)
            write_result(folder, code, quiet, *told)
        except KeyboardInterrupt as stopped:
            write_result(folder, code, quiet, *told, with_page=False)
            return 128 + int(*stopped.args)
    return code


def install(config: Mapping[str, Any]) -> None:
    """Watch this process, and those that it starts."""
    os.environ.update(make_environment(config, os.environ))
    site.begin()


def end_here() -> None:
    """End the watch of this process."""
    package = sys.modules.get(site.PACKAGE)
    if package is not None and package.watch is not None:
        package.watch.end()


def run_here(words: Sequence[str], config: Mapping[str, Any]) -> int:
    """Run a script, or with `-m` a module, in this process as Python would, and return its exit code."""
    ours = sys.stdout, sys.stderr
    make_folder(Path(config["folder"]))
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    is_module = words[0] == "-m"
    sys.argv = [*words[is_module:]]
    sys.path[0] = "" if is_module else str(Path(words[0]).resolve().parent)
    try:
        install(config)
        if is_module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # noqa: BLE001 - as Python ends
        sys.excepthook(type(error), error, error.__traceback__)
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    finally:
        sys.stdout, sys.stderr = ours
    end_here()
    return code


def watch(
    out: str | Path | None = None,
    *,
    steps: int = STEPS,
    probes: bool = True,
    seed: int = 0,
    bucket_cap_mb: str = "",
) -> Path:
    """Watch the training of this process and of those that it starts; rank 0 reports at its end.

    Call it before the model is wrapped in DDP. `out` is a new folder, the same for all ranks; by default one
    in `results`. `bucket_cap_mb` are caps to race after the steps, as "default,1,25". Returns the folder.
    """
    if out is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("several ranks watch into one folder: name it, as in watch(out='watched')")
    folder = Path(out) if out is not None else name_default_folder(host=get_host_name(), name="watch")
    make_folder(folder)
    install(make_config(folder, steps, probes=probes, seed=seed, bucket_cap_mb=bucket_cap_mb))
    if os.environ.get("RANK", "0") == "0":
        atexit.register(_report_watch, folder.absolute(), os.getpid())
    return folder


def _report_watch(folder: Path, process: int) -> None:
    if os.getpid() == process:  # no fork of it
        end_here()
        await_rows(folder)
        write_result(folder, 0, quiet=False)
