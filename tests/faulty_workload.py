"""A user's workload that does deeds: each once, on chosen ranks, at a moment that the journal names."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch
from torch import Tensor

from ddp_bench.bench.recovery.lockstep import Lockstep

OUT = Path(os.environ["FAULTS_OUT"])
MARKERS = Path(os.environ["FAULTS_MARKERS"])
DEEDS: list[dict[str, Any]] = json.loads(os.environ["FAULTS_DEEDS"])
RANK = int(os.environ.get("RANK", "-1"))
BORN_S = time.time()
CLOCK = MARKERS / "clock_s"

_seen: dict[str, list[Any]] = {deed["name"]: [] for deed in DEEDS}
_write = os.write
_time = time.time


class Model(torch.nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        factor = 1.0
        if torch.is_grad_enabled() and x.dtype == torch.float32:
            factor = strike("forward") or 1.0
        return super().forward(x.flatten(1)) * factor


def model() -> Model:
    return Model(3 * 8 * 8, 4)


class StrikeInBackward(torch.autograd.Function):
    """Passes everything on; before the gradients of `layer` it strikes as `backward {layer}`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: int) -> Tensor:
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if gradient.dtype == torch.float32:
            strike(f"backward {ctx.layer}")
        return gradient, None


class Deep(torch.nn.Sequential):
    """Layers of 16 KiB and more."""

    def __init__(self) -> None:
        super().__init__(*(torch.nn.Linear(n, 64, bias=False) for n in (3 * 8 * 8, 64, 64, 64, 64)))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for i, layer in enumerate(self):
            x = StrikeInBackward.apply(layer(x), i)
        return x


def deep() -> Deep:
    return Deep()


def strike(where: str, content: bytes = b"", descriptor: int = -1) -> float | None:
    """Do the first deed whose moment has come; the number that it leaves to its caller, if any.

    That is a factor for the model's output, or the bytes of `content` that were written before the deed.
    """
    now = {"what": ""} if where == "between" else under_way()
    for deed in DEEDS:
        fits = deed["where"] == where and RANK in deed["ranks"]
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


def is_past(name: str) -> bool:
    """Whether a deed was done before this process began."""
    return any(marker.stat().st_mtime < BORN_S for marker in MARKERS.glob(f"{name}.*.json"))


def under_way() -> dict[str, Any]:
    """What the journal's last note says; rank 0 wrote it before the ranks began."""
    journal = OUT / "journal.jsonl"
    if not journal.exists():
        return {"what": "opening the folder"}
    for line in reversed(journal.read_text(errors="replace").splitlines()):
        if line.startswith('{"event": "underway"'):
            found: dict[str, Any] = json.loads(line)
            return found
    return {"what": "opening the folder"}


def mark(name: str, now: dict[str, Any]) -> bool:
    """Leave proof of the deed, with what was on disk before it; False if it was done already."""
    try:
        with (MARKERS / f"{name}.{RANK}.json").open("x") as file:
            json.dump({"now": now, "parent": os.getppid()}, file)
    except FileExistsError:
        return False
    shutil.copyfile(OUT / "blocks.csv", MARKERS / f"{name}.{RANK}.csv")
    return True


def act(deed: dict[str, Any]) -> float | None:
    """Do it. What ends this process, or waits for its end, does not return."""
    argument = deed["argument"]
    acts: dict[str, Callable[[], Any]] = {
        "signal": lambda: os.kill(os.getpid(), argument),
        "signal parent": lambda: signal_parent(argument, die=deed["where"] == "write"),
        "raise": raise_error,
        "out of memory": raise_out_of_memory,
        "device assert": raise_device_assert,
        "not a number": lambda: math.nan,
        "eat memory": eat_memory,
        "fill disk": lambda: fill_disk(OUT.parent / "filler"),
        "remove folder": lambda: shutil.rmtree(OUT),
        "rename folder": lambda: OUT.rename(OUT.with_name(f"{OUT.name}-{argument}")) and None,
        "wait": lambda: wait_for(MARKERS / f"{deed['name']}.go"),
        "turn clock": lambda: CLOCK.write_text(str(argument)) and None,
    }
    result: float | None = acts[deed["act"]]()
    return result


def signal_parent(number: int, *, die: bool) -> None:
    parent = psutil.Process().parent()
    assert parent is not None
    is_fork = any("fork_server" in part for part in parent.cmdline())
    os.kill(parent.ppid() if is_fork else parent.pid, number)
    if die:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for(MARKERS / "never")


def raise_error() -> NoReturn:
    raise ValueError("no such sample")


def raise_out_of_memory() -> NoReturn:
    raise torch.OutOfMemoryError("CUDA out of memory")


def raise_device_assert() -> NoReturn:
    raise torch.AcceleratorError("CUDA error: device-side assert triggered\nCompile with TORCH_USE_CUDA_DSA")


def eat_memory() -> NoReturn:
    eaten = [bytearray(b"x" * 2**24) for _ in range(300)]
    raise AssertionError(f"{len(eaten)} pieces of 16 MiB fitted in")


def fill_disk(filler: Path) -> None:
    """Leave no room: on a disk of its own, or else for this process alone, by its limit of file sizes."""
    if not filler.parent.is_mount():
        size = (OUT / "blocks.csv").stat().st_size + 10
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        return
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(b"\0" * 1024):
                pass
        except OSError:
            return


def wait_for(path: Path) -> None:
    deadline_s = time.monotonic() + 200
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError(path.name)
        time.sleep(0.02)


def _hooked_write(descriptor: int, content: bytes) -> int:
    if DEEDS and RANK == 0 and Path(f"/proc/self/fd/{descriptor}").readlink() == OUT / "blocks.csv":
        written = int(strike("write", content, descriptor) or 0)
        return written + _write(descriptor, content[written:])
    return _write(descriptor, content)


def _hooked_between(self: Lockstep, _between: Any = Lockstep.between) -> None:
    _between(self)
    strike("between")


def _hooked_time() -> float:
    return _time() + (float(CLOCK.read_text() or 0) if CLOCK.exists() else 0.0)


os.write = _hooked_write
time.time = _hooked_time
Lockstep.between = _hooked_between  # type: ignore[method-assign]
