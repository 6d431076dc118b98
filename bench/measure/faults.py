"""The meaning of a rank's error for its case: a skipped one, a fault of the model, or a broken process."""

from __future__ import annotations

import contextlib
import re

import torch
import torch.distributed as dist

from ..common.errors import UsageError, UserCodeError
from ..common.tracebacks import get_message
from ..modes import Unsupported
from ..modes.base import UnusedParametersError
from ..results.block_times import Fault
from ..results.columns import UNUSED_PARAMETERS
from .timed import NonFiniteLossError

LOST_PEER = (
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

POSSIBLE_GPU_MEMORY = re.compile(r"CUBLAS_STATUS_NOT_INITIALIZED|unable to find an engine")
"""Messages of cuBLAS and cuDNN where they find no memory for what they need, and of other faults."""

MIN_FREE_SHARE = 0.05
"""A GPU with less than this share free is full: a handle of cuBLAS and cuDNN's workspaces take as much."""

BROKEN_GROUP = re.compile(r"(?i)\bNCCL (communicator|unique|[\w ]*(error|fail|time))|nccl[a-z]+Error|/gloo/")
"""A communicator that has failed once fails from then on. torch 2.15's NCCL backend says what failed, the
one before it `NCCL error`; gloo names the file that raised."""

BROKEN_CONTEXT = re.compile(r"(CUDA|HIP)( driver)? error")
"""After an illegal access or a device-side assert, every later call to the device fails in this process."""

TRACE_FAILURE = re.compile(r""": got (\w+)\((['"])(.*)\2\)\.?$""", re.MULTILINE)
"""The compiler's message that an operation of the model raised while it was traced."""

TOO_LARGE = "use a smaller --batch-size or smaller inputs"


class PeerFailedError(RuntimeError):
    """Another rank of the case failed, and has the reason."""


class PeerFullError(PeerFailedError):
    """Another rank of the case has found no memory."""


WRAPPER_ATTRIBUTE = re.compile(r"'(\w*DataParallel\w*|FSDP\w+|_Gathered)' object has no attribute '(\w+)'")
"""Python's message where a loss asks a wrapper for what only the module inside of it has."""


def find_hint(error: BaseException) -> str:
    """Say what helps with an error that many meet; empty for others."""
    if isinstance(error, AttributeError) and (found := WRAPPER_ATTRIBUTE.search(get_message(error))):
        return f"; only forward() goes through the wrapper of the model: call {found[2]} inside of forward()"
    return ""


def classify_error(error: BaseException) -> Fault:
    """Tell what an error means for its case, and for the process that raised it."""
    text, broken = get_message(error), is_broken_by(error)
    if isinstance(error, Unsupported):
        return Fault(status="skipped", reason=text)
    if isinstance(error, NonFiniteLossError | UnusedParametersError | UserCodeError):
        code = UNUSED_PARAMETERS if isinstance(error, UnusedParametersError) else None
        return Fault(status="failed", reason=text, reason_code=code, restart=broken)
    if isinstance(error, MemoryError) or HOST_MEMORY.search(text):
        return Fault(status="oom", reason=f"out of host memory; {TOO_LARGE}", restart=broken)
    if is_out_of_gpu_memory(error):
        return Fault(status="oom", reason=f"out of GPU memory; {TOO_LARGE}", restart=broken)
    reason = f"{_format_first_line(error)}{find_hint(error)}"
    is_cause = not isinstance(error, PeerFailedError) and not any(sign in reason for sign in LOST_PEER)
    return Fault(status="failed", reason=reason, restart=broken, is_cause=is_cause)


def is_of_the_model(error: BaseException) -> bool:
    """Tell whether an error is the model's own: no mistake of the user, and memory and device are well."""
    found = classify_error(error)
    return found.status == "failed" and not found.restart and not isinstance(error, UsageError)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that memory is full, of this rank's device or host, or of another rank's."""
    return isinstance(error, PeerFullError) or classify_error(error).status == "oom"


def is_out_of_gpu_memory(error: BaseException) -> bool:
    """Tell whether an error says that a GPU, or the host memory that its driver locks, is full."""
    text = get_message(error)
    if isinstance(error, torch.OutOfMemoryError) or GPU_MEMORY.search(text):
        return True
    if POSSIBLE_GPU_MEMORY.search(text):
        with contextlib.suppress(RuntimeError):  # a broken device tells nothing
            used = [i for i in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(i)]
            free = [torch.cuda.mem_get_info(i) for i in used]
            return any(left < MIN_FREE_SHARE * total for left, total in free)
    return False


def is_broken_by(error: BaseException) -> bool:
    """Tell whether the process that raised an error can use its device, or its process group, no more."""
    text = get_message(error)
    if isinstance(error, dist.DistError) or BROKEN_GROUP.search(text):
        return True
    is_of_device = isinstance(error, torch.AcceleratorError) or bool(BROKEN_CONTEXT.search(text))
    return is_of_device and not is_out_of_gpu_memory(error)


def _format_first_line(error: BaseException) -> str:
    """`Type: message`, where the message has something to say."""
    name, text = type(error).__name__, get_message(error).strip()
    if text.startswith("Caught "):
        # Raised in a replica's thread or a loader's process: torch puts its traceback before it.
        text = text.rpartition(f"{name}: ")[2]
    if type(error).__module__.startswith("torch._dynamo.") and (traced := TRACE_FAILURE.search(text)):
        return f"{name}: {traced[1]}: {traced[3]}"
    first, *more = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    if first.endswith(":") and more:
        first = f"{first} {more[0]}"  # the compiler's "backend='inductor' raised:"
    return f"{name}: {first}" if first else name
