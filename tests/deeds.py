"""Faults that are done to a run: each once, by chosen ranks, at a moment that the journal names.

Workers do them within a user's workload; the conductor where it writes, and between rounds.
"""

import json
import math
import os
import resource
import shutil
import time
from pathlib import Path

import psutil

OUT = Path(os.environ["FAULTS_OUT"])
MARKERS = Path(os.environ["FAULTS_MARKERS"])
DEEDS = json.loads(os.environ["FAULTS_DEEDS"])
CLOCK = MARKERS / "clock_s"
OF_CONDUCTOR = ("between", "write")
"""Where the process strikes that decides and writes."""

born_s = time.time()
"""When this process began, or as a worker loaded the workload."""

ASSERTED = "CUDA error: device-side assert triggered\nCompile with TORCH_USE_CUDA_DSA"

_seen = {deed["name"]: [] for deed in DEEDS}
_write = os.write
_time = time.time


def rank():
    """Of this process, which may be a fork; -1 in a conductor."""
    return int(os.environ.get("RANK", "-1"))


def strike(where, content=b"", descriptor=-1):
    """Do the first deed whose moment has come; the number that it leaves to its caller, if any.

    That is a factor for the model's output, or the bytes of `content` that were written before the deed.
    """
    now = {"what": ""} if where == "between" else under_way()
    for deed in DEEDS:
        fits = deed["where"] == where and (where in OF_CONDUCTOR or rank() in deed["ranks"])
        if not fits or deed["what"] not in now["what"]:
            continue
        if deed["cases"] and now.get("index") not in deed["cases"]:
            continue
        if deed["after"] and not is_past(deed["after"]):
            continue
        seen = _seen[deed["name"]]
        if where == "between" or not seen or seen[-1] != now:
            seen.append(now)
        if len(seen) < deed["nth"] or not mark(deed["name"], now):
            continue
        if where == "write":
            written = _write(descriptor, content[: len(content) // 2])
            act(deed)
            return written
        return act(deed)
    return None


def is_past(name):
    """Whether a deed was done before this process began; for a conductor, which goes on, before now."""
    made = [marker.stat().st_mtime for marker in MARKERS.glob(f"{name}.*.json")]
    return any(at_s < born_s or rank() < 0 for at_s in made)


def under_way():
    """What the journal's last note says; it was written before the workers began."""
    journal = OUT / "journal.jsonl"
    lines = journal.read_text(errors="replace").splitlines() if journal.exists() else []
    noted = [line for line in lines if line.startswith('{"event": "underway"')]
    return json.loads(noted[-1]) if noted else {"what": "opening the folder"}


def mark(name, now):
    """Leave proof of the deed, with the log as it was before it; False if it was done already."""
    try:
        with (MARKERS / f"{name}.{rank()}.json").open("x") as file:
            json.dump({"now": now}, file)
    except FileExistsError:
        return False
    shutil.copyfile(OUT / "journal.jsonl", MARKERS / f"{name}.{rank()}.log")
    return True


def act(deed):
    """Do it. What ends this process, or waits for its end, does not return."""
    argument = deed["argument"]
    acts = {
        "signal": lambda: signal_ranks(argument, deed),
        "signal parent": lambda: signal_conductor(argument),
        "raise": raise_error,
        "out of memory": lambda: raise_of_torch("OutOfMemoryError", "CUDA out of memory"),
        "device assert": lambda: raise_of_torch("AcceleratorError", ASSERTED),
        "not a number": lambda: math.nan,
        "eat memory": eat_memory,
        "fill disk": lambda: fill_disk(OUT.parent / "filler"),
        "remove folder": lambda: shutil.rmtree(OUT),
        "rename folder": lambda: OUT.rename(OUT.with_name(f"{OUT.name}-{argument}")) and None,
        "wait": lambda: wait_for(MARKERS / f"{deed['name']}.go"),
        "turn clock": lambda: CLOCK.write_text(str(argument)) and None,
    }
    return acts[deed["act"]]()


def signal_ranks(number, deed):
    """Signal this rank; the conductor signals those that the deed names."""
    if deed["where"] not in OF_CONDUCTOR:
        os.kill(os.getpid(), number)
        return
    servers = [one for one in psutil.Process().children() if "worker.main" in " ".join(one.cmdline())]
    workers = sorted(servers[0].children(), key=lambda one: one.create_time())
    for rank_killed in deed["ranks"]:
        workers[rank_killed].send_signal(number)
        # Its connection ends with the last of its threads; the first one is a zombie before that.
        while workers[rank_killed].status() != psutil.STATUS_ZOMBIE or workers[rank_killed].num_threads() > 1:
            time.sleep(0.01)


def conductor():
    """The process that decides and writes: of which a worker is a child, or a grandchild."""
    own = psutil.Process()
    if rank() < 0:
        return own.pid
    parent = own.parent()
    return parent.ppid() if "worker.main" in " ".join(parent.cmdline()) else parent.pid


def signal_conductor(number):
    os.kill(conductor(), number)
    wait_for(MARKERS / "never")


def raise_error():
    raise ValueError("no such sample")


def raise_of_torch(kind, text):
    import torch  # the conductor has none

    raise getattr(torch, kind)(text)


def eat_memory():
    eaten = [bytearray(b"x" * 2**24) for _ in range(300)]
    raise AssertionError(f"{len(eaten)} pieces of 16 MiB fitted in")


def fill_disk(filler):
    """Leave no room: on a disk of its own, or else for the conductor alone, by its limit of file sizes."""
    if not filler.parent.is_mount():
        size = (OUT / "journal.jsonl").stat().st_size + 10
        resource.prlimit(conductor(), resource.RLIMIT_FSIZE, (size, size))
        return
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(b"\0" * 1024):
                pass
        except OSError:
            return


def wait_for(path):
    deadline_s = time.monotonic() + 200
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError(path.name)
        time.sleep(0.02)


def _hooked_write(descriptor, content):
    file = Path(f"/proc/self/fd/{descriptor}").readlink()
    if DEEDS and file == OUT / "journal.jsonl" and content.startswith(b'{"event": "block"'):
        done = int(strike("write", content, descriptor) or 0)
        return done + _write(descriptor, content[done:])
    written = _write(descriptor, content)
    if DEEDS and file == OUT / "journal.jsonl" and b'"between rounds"' in content:
        strike("between")
    return written


def _hooked_time():
    return _time() + (float(CLOCK.read_text() or 0) if CLOCK.exists() else 0.0)


def install():
    """Have every write of this process looked at, and its wall clock turned."""
    os.write = _hooked_write
    time.time = _hooked_time
