"""What an error of a rank means for its case, and where it came from."""

from __future__ import annotations

import contextlib
import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from traceback import FrameSummary, TracebackException

import torch
import torch.distributed as dist
from msgspec.structs import replace

from ..errors import UsageError, UserCodeError
from ..measure.timed import NonFiniteLossError
from ..modes import Unsupported
from ..modes.base import UnusedParametersError
from ..provenance import INSTALLED, OWN_FOLDERS
from ..results.columns import UNUSED_PARAMETERS
from .messages import Report

MOST_CHARACTERS = 32_768
"""Of one rank's traceback: some 300 frames. Rank 0 receives as much from each that failed."""

_QUOTED = re.compile(r'^\s*File "([^"\n]+)", line (\d+), in (\S+)', re.MULTILINE)
"""A frame in an error's message: of a replica's thread, a loader's process, or what the compiler traced."""

_NOT_THE_USERS = (
    *(str(folder) + os.sep for folder in OWN_FOLDERS),
    *(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib")),
)


def formatted(error: BaseException) -> str:
    """The traceback of an error and of its causes; of more than `MOST_CHARACTERS` the middle is left out."""
    try:
        text = "".join(traceback.format_exception(error))
    except Exception as broken:  # noqa: BLE001 - an error class of the user may do anything
        text = f"{type(error).__name__}, whose traceback cannot be written ({type(broken).__name__})\n"
    return bounded(text)


def bounded(text: str) -> str:
    """A traceback, or stacks, without its middle where it is longer than `MOST_CHARACTERS`."""
    if len(text) <= MOST_CHARACTERS:
        return text
    head = MOST_CHARACTERS // 4  # what raised stands at the end
    tail = MOST_CHARACTERS - head
    return f"{text[:head]}\n… {len(text) - head - tail:,d} characters are left out …\n{text[-tail:]}"


def place_of(error: BaseException) -> str:
    """`file:line, in function` of the innermost frame of the user's code, else of its causes; empty without.

    The user's is what is neither installed nor Python's, this suite's or generated.
    """
    for one in _chain(TracebackException.from_exception(error, lookup_lines=False)):
        quoted = [FrameSummary(path, int(line), name) for path, line, name in _QUOTED.findall(str(one))]
        if found := [frame for frame in (*one.stack, *quoted) if is_users(frame.filename)]:
            return f"{shown_path(found[-1].filename)}:{found[-1].lineno}, in {found[-1].name}"
    return ""


def _chain(one: TracebackException | None) -> Iterator[TracebackException]:
    """An error, the first of those that it groups, then what it was raised from, and so on."""
    while one is not None:
        if one.exceptions:
            yield from _chain(one.exceptions[0])
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def text_of(error: BaseException) -> str:
    """The message of an error, whose class may be the user's."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - whatever __str__ raises
        return ""


def is_users(path: str) -> bool:
    """Whether the code of a file is the user's."""
    real = os.path.realpath(path)
    installed = not INSTALLED.isdisjoint(Path(real).parts) or "torchinductor" in real
    return not (path.startswith("<") or installed or real.startswith(_NOT_THE_USERS))


def shown_path(path: str) -> str:
    """A path relative to the current folder, or else its last two parts: no folder of a user's home."""
    real, here = Path(os.path.realpath(path)), Path(os.path.realpath("."))
    return str(real.relative_to(here)) if real.is_relative_to(here) else str(Path(*real.parts[-2:]))


LOST = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting"),
    *("remote process exited or there was a network error", "NCCL communicator was aborted"),
)
"""Words of gloo's and NCCL's errors on ranks whose peer has died; that peer has the reason."""

HOST_MEMORY = re.compile(r"CPUAllocator: |[Cc]an(no|')t allocate memory|std::bad_alloc|Failed to malloc")
"""Errors of PyTorch's CPU allocator, of the system, of C++ and of NCCL where they find no memory."""

GPU_MEMORY = re.compile(
    r"out of memory|_ALLOC(ATION)?_FAILED|Failed to CUDA (host )?[mc]?alloc", re.IGNORECASE
)
"""Errors of PyTorch's CUDA allocator, the driver, cuBLAS, cuDNN and NCCL, by the texts in their libraries."""

PERHAPS_GPU_MEMORY = re.compile(r"CUBLAS_STATUS_NOT_INITIALIZED|unable to find an engine")
"""What cuBLAS and cuDNN say where they find no memory for what they need, and of other faults."""

LITTLE_FREE = 0.05
"""A GPU with less than this share free is full: a handle of cuBLAS and cuDNN's workspaces take as much."""

BROKEN_GROUP = re.compile(r"(?i)\bNCCL (communicator|unique|[\w ]*(error|fail|time))|nccl[a-z]+Error|/gloo/")
"""A communicator that has failed once fails from then on. torch 2.15's NCCL backend says what failed, the
one before it `NCCL error`; gloo names the file that raised."""

BROKEN_CONTEXT = re.compile(r"(CUDA|HIP)( driver)? error")
"""After an illegal access or a device-side assert, every later call to the device fails in this process."""

TRACED = re.compile(r""": got (\w+)\((['"])(.*)\2\)\.?$""", re.MULTILINE)
"""What the compiler says that an operation of the model raised while it was traced."""

TOO_LARGE = "use a smaller --batch-size or smaller inputs"


class PeerFailedError(RuntimeError):
    """Another rank of the case failed, and has the reason."""


class PeerFullError(PeerFailedError):
    """Another rank of the case has found no memory."""


def answer_to(error: BaseException, *, is_of_a_case: bool = True) -> Report:
    """What a rank answers where its work raised, with where that was.

    A mistake of the user ends the run; what loading the user's code raises is one only before all cases.
    """
    if isinstance(error, UsageError) and not (is_of_a_case and isinstance(error, UserCodeError)):
        cause = error.__cause__ if isinstance(error, UserCodeError) else None
        text = "" if cause is None else formatted(cause)
        return Report(
            status="usage", reason=str(error), exit_code=error.exit_code, label=error.label, traceback=text
        )
    found = report_of(error)
    if not found.is_failure:
        return found
    # Where memory ran out says little, and the reason says what helps.
    place = place_of(error) if found.status == "failed" else ""
    return replace(found, place=place, traceback=formatted(error))


WRAPPED = re.compile(r"'(\w*DataParallel\w*|FSDP\w+|_Gathered)' object has no attribute '(\w+)'")
"""What Python says where a loss asks a wrapper for what only the module inside of it has."""


def hint_of(error: BaseException) -> str:
    """Say what helps with an error that many meet; empty for others."""
    if isinstance(error, AttributeError) and (found := WRAPPED.search(text_of(error))):
        return f"; only forward() goes through the wrapper of the model: call {found[2]} inside of forward()"
    return ""


def report_of(error: BaseException) -> Report:
    """What an error means for its case, and for the process that raised it."""
    text, broken = text_of(error), is_broken_by(error)
    if isinstance(error, Unsupported):
        return Report(status="skipped", reason=text)
    if isinstance(error, NonFiniteLossError | UnusedParametersError | UserCodeError):
        code = UNUSED_PARAMETERS if isinstance(error, UnusedParametersError) else None
        return Report(status="failed", reason=text, reason_code=code, restart=broken)
    if isinstance(error, MemoryError) or HOST_MEMORY.search(text):
        return Report(status="oom", reason=f"out of host memory; {TOO_LARGE}", restart=broken)
    if is_out_of_gpu_memory(error):
        return Report(status="oom", reason=f"out of GPU memory; {TOO_LARGE}", restart=broken)
    reason = f"{_first_line(error)}{hint_of(error)}"
    is_cause = not isinstance(error, PeerFailedError) and not any(sign in reason for sign in LOST)
    return Report(status="failed", reason=reason, restart=broken, is_cause=is_cause)


def is_of_the_model(error: BaseException) -> bool:
    """Whether it is a failure of the model's own: no mistake of the user, and memory and device are well."""
    found = report_of(error)
    return found.status == "failed" and not found.restart and not isinstance(error, UsageError)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it says that memory is full, of this rank's device or host, or of another rank's."""
    return isinstance(error, PeerFullError) or report_of(error).status == "oom"


def is_out_of_gpu_memory(error: BaseException) -> bool:
    """Whether it says that a GPU, or the host memory that its driver locks, is full."""
    text = text_of(error)
    if isinstance(error, torch.OutOfMemoryError) or GPU_MEMORY.search(text):
        return True
    if PERHAPS_GPU_MEMORY.search(text):
        with contextlib.suppress(RuntimeError):  # a broken device tells nothing
            used = [i for i in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(i)]
            free = [torch.cuda.mem_get_info(i) for i in used]
            return any(left < LITTLE_FREE * total for left, total in free)
    return False


def is_broken_by(error: BaseException) -> bool:
    """Whether the process that raised it can use its device, or its process group, no more."""
    text = text_of(error)
    if isinstance(error, dist.DistError) or BROKEN_GROUP.search(text):
        return True
    is_of_device = isinstance(error, torch.AcceleratorError) or bool(BROKEN_CONTEXT.search(text))
    return is_of_device and not is_out_of_gpu_memory(error)


def _first_line(error: BaseException) -> str:
    """`Type: message`, where the message has something to say."""
    name, text = type(error).__name__, text_of(error).strip()
    if text.startswith("Caught "):
        # Raised in a replica's thread or a loader's process: torch puts its traceback before it.
        text = text.rpartition(f"{name}: ")[2]
    if type(error).__module__.startswith("torch._dynamo.") and (traced := TRACED.search(text)):
        return f"{name}: {traced[1]}: {traced[3]}"
    first, *more = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    if first.endswith(":") and more:
        first = f"{first} {more[0]}"  # the compiler's "backend='inductor' raised:"
    return f"{name}: {first}" if first else name
