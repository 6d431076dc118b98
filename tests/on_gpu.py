"""Uses a GPU that is lent for minutes: `python tests/on_gpu.py STAGE`, where STAGE is 1, 2, 4, or several.

Stage 1 asks whether the suite works there, stage 2 whether its numbers are right, stage 4 whether several
ranks on one GPU train, prove and survive faults. Stage `several` is for a machine of 2 to 8 GPUs, and its
archive for whoever develops the suite. A quarter of an hour runs 4 and 2.

The suite's packages must be there: an image with torch often lacks msgspec alone. Where nothing installs,
`pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 msgspec` on
another machine brings its wheel, `python3 -m zipfile -e msgspec-*.whl .` unpacks it beside this checkout's
folders. A stage is a list of commands, one after another, each with a time limit and in a process group of
its own. What fails or hangs costs itself alone; what no longer fits into the stage's time is skipped. After
every command `$OUT/stageN.jsonl` has one more line and `$OUT/stageN.tar.gz` all logs and results so far.
Standard library only; what is run needs the suite's own packages, and no network.

On a machine without a GPU, `--rehearse` runs the same commands on CPU cores with small models and limits;
those that need CUDA answer "skipped: no GPU".
"""

import argparse
import contextlib
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAGE_S = {4: 7.5 * 60.0}
USUAL_S = 9.5 * 60
"""Of a stage."""
REHEARSED_S = 120.0
"""Limit of one command in a rehearsal; on two loaded cores one took 45."""
GRACE_S = 5.0
"""Between SIGTERM and SIGKILL, and least time that is worth beginning a command."""
LAST_LINES = 12
ARCHIVE_BYTES = 15 * 2**20
"""Of the archive at most; larger ones do not come back. Traces are left out first."""
SMALL = ("--device", "cpu", "--arch", "resnet20", "--image-size", "32", "--batch-size", "4", "--max-time")
PYTHON = sys.executable


@dataclass(frozen=True)
class Item:
    """One command: what it is called, how long it may take, and what a rehearsal puts behind it."""

    name: str
    limit_s: float
    command: tuple[str, ...]
    rehearsal: tuple[str, ...] | None = ()
    """None: it needs CUDA."""


def run(name, limit_s, *arguments, small=(*SMALL, "3s")):
    """`bench.run` into a folder of its own; `{work}` is the stage's."""
    command = (PYTHON, "-m", "bench.run", *arguments, "--out", f"{{work}}/{name}")
    return Item(name, limit_s, command, small)


def probe(name, limit_s):
    """One of `tests/gpu_probes.py`, which knows by itself what a machine without a GPU can show."""
    return Item(name, limit_s, (PYTHON, str(ROOT / "tests" / "gpu_probes.py"), name))


DDP_ALONE = ("--modes", "ddp", "--gpus", "1", "--max-time", "30s")
SHARED = ("--share-gpus", "on", "--batch-size", "64")
LIGHT = (*SHARED, "--arch", "resnet18", "--image-size", "64", "--passes", "none", "--rounds", "2")
TINY = ("--device", "cpu", "--arch", "resnet20", "--image-size", "32", "--batch-size", "4")


def fault(name, rehearsal_s):
    """A rank of two fails while rounds are measured; the cases it takes no part in go on."""
    more = ("--max-time", "14s", "--precision-target", "0.001%", "--case-timeout", "15s", "--passes", "none")
    workload = ("--workload", f"gpu_probes:{name}", "--modes", "ddp", "--gpus", "1,2", *SHARED)
    small = ("--device", "cpu", "--max-time", rehearsal_s)
    return run(name, 75, *workload, "--bucket-cap-mb", "default", *more, small=small)


STAGES = {
    1: (
        Item("nvidia-smi", 20, ("nvidia-smi",), None),
        Item("doctor", 100, (PYTHON, "-m", "bench.doctor", "--json"), ()),
        run("first", 120, "--modes", "dp,ddp,fsdp", "--gpus", "1", "--max-time", "30s", "--trace", "on"),
        probe("events", 60),
        run("oom", 80, "--modes", "ddp", "--gpus", "1", "--batch-size", "4096", "--max-time", "15s"),
    ),
    2: (
        probe("bare", 60),
        run("aa1", 80, *DDP_ALONE),
        run("aa2", 80, *DDP_ALONE),
        run("batch128", 60, *DDP_ALONE[:4], "--batch-size", "128", "--max-time", "20s"),
        run("batch64", 60, *DDP_ALONE[:4], "--batch-size", "64", "--max-time", "20s"),
        Item("gate", 30, (PYTHON, "-m", "bench.gate", "{work}/aa1", "{work}/aa2")),
        run(
            "gloo",
            150,
            *("--backend", "gloo", "--modes", "ddp", "--gpus", "1,2", "--allreduce-curve"),
            *("--trace", "on", "--max-time", "75s"),
        ),
    ),
    4: (
        run(
            "shared",
            110,
            *("--modes", "dp,ddp", "--gpus", "1,2", "--bucket-cap-mb", "default,1,100", "--trace", "on"),
            *(*SHARED, "--max-time", "60s"),
        ),
        *(fault(name, "8s") for name in ("killed", "stopped", "full", "asserting")),
        run(
            "ranks",
            90,
            *(*LIGHT, "--modes", "dp,ddp,fsdp,pipeline", "--gpus", "4", "--precision", "fp32"),
            small=TINY,
        ),
        run(
            "settings",
            60,
            *(*LIGHT, "--modes", "ddp", "--gpus", "2", "--sweep", "star", "--accumulate", "1,2"),
            *("--comm-hook", "none,bf16", "--sync-batchnorm", "off,on", "--static-graph", "off,on"),
            small=TINY,
        ),
        run(
            "compiled",
            80,
            *(*LIGHT, "--modes", "ddp", "--gpus", "2", "--compile", "off,on"),
            small=(*TINY, "--dry-run"),  # on a CPU it takes a minute
        ),
    ),
    "several": (
        Item("nvidia-smi", 20, ("nvidia-smi", "topo", "-m"), None),
        run(
            "scaling",
            330,
            *("--modes", "dp,ddp", "--bucket-cap-mb", "default,1,100", "--allreduce-curve", "on"),
            *("--trace", "on", "--max-time", "150s"),
            small=(*SMALL, "6s", "--gpus", "1,2"),
        ),
        run("accumulated", 90, "--modes", "ddp,fsdp", "--accumulate", "1,2", "--max-time", "40s"),
        run(
            "killed",
            100,
            *("--workload", "gpu_probes:killed", "--modes", "ddp", "--batch-size", "32", "--max-time", "20s"),
            *("--precision-target", "0.001%", "--case-timeout", "20s"),
            small=("--device", "cpu", "--gpus", "1,2", "--max-time", "8s"),
        ),
    ),
}


def main(arguments=None):
    """Run a stage; 0 when it came to its end, whatever became of its commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("stage", type=lambda name: int(name) if name.isdigit() else name, choices=STAGES)
    parser.add_argument(
        "--only", type=lambda names: names.split(","), help="commands of it, by name: first,oom"
    )
    parser.add_argument("--rehearse", action="store_true", help="on CPU cores, small")
    asked = parser.parse_args(arguments)
    items = [item for item in STAGES[asked.stage] if item.name in (asked.only or [item.name])]
    if asked.only and len(items) < len(asked.only):
        parser.error(f"stage {asked.stage} has {', '.join(item.name for item in STAGES[asked.stage])}")
    out = Path(os.environ.get("OUT", "on-gpu")).resolve()
    work = out.parent / f"{out.name}-work" / f"stage{asked.stage}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    with (out / f"stage{asked.stage}.jsonl").open("w") as log:
        for row in results(items, work, rehearse=asked.rehearse, stage_s=STAGE_S.get(asked.stage, USUAL_S)):
            rows.append(row)
            log.write(json.dumps(row) + "\n")
            log.flush()
            shutil.copyfile(log.name, work / "stage.jsonl")
            archive(work, out / f"stage{asked.stage}.tar.gz")
            print(line_of(row), flush=True)
    print(f"{sum(row['seconds'] or 0 for row in rows):.0f} s in all", flush=True)
    return 0


def results(items, work, *, rehearse, stage_s):
    """What became of each command, in turn."""
    began_s = time.monotonic()
    for number, item in enumerate(items, start=1):
        left_s = stage_s - (time.monotonic() - began_s)
        limit_s = min(item.limit_s, REHEARSED_S) if rehearse else item.limit_s
        row = {"item": item.name, "limit_s": limit_s, "rc": None, "seconds": None}
        if rehearse and item.rehearsal is None:
            yield row | {"last": ["skipped: no GPU"]}
        elif left_s < limit_s:
            yield row | {"last": [f"skipped: {left_s:.0f} s are left"]}
        else:
            more = item.rehearsal if rehearse and item.rehearsal else ()
            command = [part.replace("{work}", str(work)) for part in (*item.command, *more)]
            yield row | done(command, limit_s, work / f"{number:02}-{item.name}.log", work / item.name)


def done(command, limit_s, log, results_folder):
    """Run one command to its end or its limit: return code, seconds, last lines, rows by status."""
    began_s = time.monotonic()
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    log.with_suffix("").mkdir()  # probes leave notes in the current folder
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    with log.open("w", errors="replace") as output:
        try:
            process = subprocess.Popen(
                command,
                cwd=log.with_suffix(""),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return {"rc": 127, "seconds": 0.0, "last": [str(error)]}
        rc = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            rc = process.wait(limit_s)
        _end(process)
    last = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
    if rc is None:
        last.append(f"ended at its limit of {limit_s:.0f} s")
    return {
        "rc": 124 if rc is None else rc,
        "seconds": round(time.monotonic() - began_s, 1),
        "last": last,
        "cases": cases_of(results_folder),
    }


def _end(process):
    """End the command's whole process group, whether or not the command itself has ended."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)


def cases_of(folder):
    """Rows of a run's cases.csv by status; empty for what is no run."""
    try:
        with (folder / "cases.csv").open(newline="") as file:
            return dict(Counter(row["status"] for row in csv.DictReader(file)))
    except (OSError, KeyError):
        return {}


def archive(work, target):
    """Everything in `work`, without traces and then without the largest files where it is too large."""
    files = sorted((p for p in work.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    plain = [p for p in files if "traces" not in p.parts]
    part = target.with_suffix(".part")
    for chosen in (files, plain, *(plain[:-count] for count in (1, 2, 4, 8, 16))):
        with tarfile.open(part, "w:gz") as tar:
            for path in sorted(chosen):
                tar.add(path, path.relative_to(work))
        if part.stat().st_size <= ARCHIVE_BYTES:
            break
    part.replace(target)


def line_of(row):
    """What became of a command: seconds, return code, rows of cases.csv or the last line that was said."""
    cases = ", ".join(f"{count} {status}" for status, count in row.get("cases", {}).items())
    said = cases or next((line.strip() for line in reversed(row["last"]) if line.strip()), "")
    return f"{row['item']:<14} {row['seconds'] or 0:>6.1f} s  rc {row['rc']}  {said[:70]}"


if __name__ == "__main__":
    sys.exit(main())
