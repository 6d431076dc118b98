"""From an error to a case's status and row, and to whether its process can go on."""

import signal

import pytest
import torch
import torch.distributed as dist
from stand_ins import stand_in
from torch._utils import ExceptionWrapper

from ddp_bench.bench.common.errors import UsageError, UserCodeError
from ddp_bench.bench.measure import faults
from ddp_bench.bench.measure.faults import classify_error
from ddp_bench.bench.measure.timed import NonFiniteLossError
from ddp_bench.bench.modes import Unsupported
from ddp_bench.bench.modes.base import UnusedParametersError
from ddp_bench.bench.plan.resolve import fill_device_defaults
from ddp_bench.bench.plan.settings import Settings
from ddp_bench.bench.results.block_times import Fault
from ddp_bench.bench.results.journal import Curve, Settled, State
from ddp_bench.bench.run import failures
from ddp_bench.bench.run.failures import (
    MIN_BLOCK_STEPS,
    MIN_BLOCK_TIMEOUT_S,
    TIMEOUT_FACTOR,
    Failure,
    compute_block_limit_s,
    compute_preparing_limit_s,
)
from ddp_bench.bench.worker.messages import Report
from ddp_bench.bench.worker.rank import make_report

KILL, SEGV = -signal.SIGKILL, -signal.SIGSEGV


@pytest.mark.parametrize(
    ("codes", "oom", "status", "words"),
    [
        ({1: KILL}, False, "failed", "rank 1 was killed by signal 9 (SIGKILL) in round 3 (timed)"),
        ({0: None, 2: SEGV}, False, "failed", "rank 2 was killed by signal 11 (SIGSEGV)"),
        ({3: KILL, 1: SEGV}, False, "failed", "rank 3 was killed by signal 9"),
        ({1: None}, False, "failed", "rank 1 ended unexpectedly in round 3 (timed)"),
        ({0: None, 1: 3}, False, "failed", "rank 1 ended with exit code 3 in round 3 (timed)"),
        ({1: KILL}, True, "oom", "rank 1 was killed by the kernel for want of host memory"),
        ({}, True, "oom", "a rank was killed by the kernel"),
        ({1: SEGV}, True, "failed", "SIGSEGV"),
        ({}, False, "failed", "a rank ended unexpectedly in round 3 (timed)"),
    ],
)
def test_the_cause_of_a_failure(codes, oom, status, words):
    found = failures.describe_exit(codes, what="round 3 (timed)", out_of_memory=oom)
    assert found.status == status
    assert words in found.reason


def test_a_crash_under_torchs_debug_level_says_what_to_unset(monkeypatch):
    def reason(code):
        return failures.describe_exit({1: code}, what="its preparation", out_of_memory=False).reason

    monkeypatch.delenv("TORCH_DISTRIBUTED_DEBUG", raising=False)
    assert "unset" not in reason(SEGV)
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    assert reason(SEGV).endswith("some versions of torch crash by themselves: unset it")
    assert "unset" not in reason(KILL)


def test_how_ranks_ended_is_kept_and_the_cause_told_apart():
    codes = {0: None, 1: None, 2: SEGV, 5: 3}
    found = failures.describe_exit(codes, what="round 3 (timed)", out_of_memory=False)
    assert failures.format_failure("now  ddp-n6: failed", found) == (
        "now  ddp-n6: failed\n"
        "rank 2 was killed by signal 11 (SIGSEGV) in round 3 (timed)\n\n"
        "ranks 0-1: ended unexpectedly\n\n"
        "rank 2: was killed by signal 11 (SIGSEGV)\n\n"
        "rank 5: ended with exit code 3\n\n"
    )


def test_what_is_kept_shows_no_control_characters():
    found = Failure("failed", "ValueError: \x1b[31mred", ranks={0: "raised\nTraceback:\n\tx = '\x1b[2J'\n"})
    text = failures.format_failure("title", found)
    assert "\x1b" not in text
    assert "\nrank 0: raised\nTraceback:\n        x = '\\x1b[2J'\n" in text


def state(*statuses, blocks=5, curves=0):
    settled = {index: Settled(index=index, status=status) for index, status in enumerate(statuses)}
    done = {(n, "gloo"): Curve(num_ranks=n, backend="gloo") for n in range(curves)}
    return State(settled=settled, curves=done, num_blocks=blocks)


@pytest.mark.parametrize(
    "later",
    [
        state("ok", blocks=6),
        state("ok", "ok"),
        state("failed"),
        state("ok", curves=1),
    ],
    ids=["a block", "a case", "a failed case", "a curve"],
)
def test_what_counts_as_progress(later):
    assert failures.compute_progress(later) != failures.compute_progress(state("ok"))


def test_two_attempts_in_a_row_without_progress_are_the_end():
    """A new run, a resumed one, and one whose second attempt got on; each number is how far one came."""
    assert all(map(failures.is_stuck, ([0, 0, 0], [0, 0, 1, 1, 1])))
    assert not any(map(failures.is_stuck, ([0], [0, 0], [0, 0, 1], [0, 1, 1])))


def test_time_limits_follow_the_settings_and_the_warm_up():
    def asked(**more):
        return fill_device_defaults(Settings.from_values(more), device_type="cuda", num_local_devices=1)

    plain, tuned = asked(), asked(compile=("max-autotune",))
    assert compute_preparing_limit_s(tuned) == 3 * compute_preparing_limit_s(plain)
    assert (
        compute_preparing_limit_s(asked(case_timeout=5.0))
        == compute_block_limit_s(asked(case_timeout=5.0), 60.0, 0.1)
        == 5.0
    )
    assert compute_block_limit_s(plain, 0.2, 0.1) == MIN_BLOCK_TIMEOUT_S, (
        "a second of steps, patience of 20, no sooner than this"
    )
    assert compute_block_limit_s(plain, 0.5, 10.0) == TIMEOUT_FACTOR * 10.0
    assert compute_block_limit_s(plain, 90.0, 0.1) == TIMEOUT_FACTOR * MIN_BLOCK_STEPS * 90.0, (
        "the compiler may run again"
    )


ASYNCHRONOUS = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below "
    "might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
)
NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed."
    "\nLast error:\n"
)
NCCL_2 = "NCCL AllReduce failed: {} \nNCCL Last Error: {}"
"""As torch 2.15's own NCCL backend puts it; NCCL above as the one before does."""
GONE = "remote process exited or there was a network error"
GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4242"
ACCELERATOR, BACKEND = torch.AcceleratorError, dist.DistBackendError


def failed(reason, **more):
    return Fault(status="failed", reason=reason, **more)


def first_line(error):
    return f"{type(error).__name__}: {str(error).splitlines()[0].strip()}"


def full(memory, *, restart=False):
    advice = f"out of {memory} memory; use a smaller --batch-size or smaller inputs"
    return Fault(status="oom", reason=advice, restart=restart)


FULL_GPU = [
    torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 146.00 MiB. GPU 0 has a total capacity of 8.00 GiB of "
        "which 0 bytes is free."
    ),
    RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    ACCELERATOR("CUDA error: out of memory" + ASYNCHRONOUS),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("CUDA ran out of memory outside PyTorch's allocator. If this workload uses many …"),
]
FULL_HOST = [
    MemoryError(),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 400000000000000 bytes. Error code 12 (Cannot allocate memory)"
    ),
    OSError(12, "Cannot allocate memory"),
    RuntimeError("std::bad_alloc"),
]
NCCL_WITHOUT_MEMORY = {
    "Cuda failure 2 'out of memory'": "GPU",
    "Failed to CUDA calloc async 6291456 bytes": "GPU",
    "Failed to CUDA host alloc 4194304 bytes": "GPU",
    "Failed to malloc 4096 bytes": "host",
}
BROKEN = [
    ACCELERATOR("CUDA error: device-side assert triggered" + ASYNCHRONOUS),
    ACCELERATOR("CUDA error: an illegal memory access was encountered" + ASYNCHRONOUS),
    RuntimeError("CUDA error: unspecified launch failure" + ASYNCHRONOUS),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, …"),
    BACKEND(NCCL + "Cuda failure 1 'invalid argument'"),
    RuntimeError(NCCL_2.format("unhandled system error (run with NCCL_DEBUG=INFO for details)", "")),
    RuntimeError("NCCL operation timed out"),
    RuntimeError("Failed to initialize NCCL communicator: invalid usage"),
    dist.DistNetworkError("The client socket has failed"),
]
LOST_A_PEER = [
    NCCL.replace("unhandled cuda error", GONE).replace("ncclUnhandledCudaError", "ncclRemoteError"),
    NCCL_2.format(GONE, "socketProgress: Connection closed by remote peer"),
    "NCCL communicator was aborted on rank 1.",
    "NCCL communicator was aborted after a previous error",
    GLOO,
]
"""A lost rank is the cause, not the one that misses it."""
UNSUPPORTED = "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if …"


@pytest.mark.parametrize(
    ("error", "report"),
    [
        *((error, full("GPU")) for error in FULL_GPU),
        *((error, full("host")) for error in FULL_HOST),
        *(
            (error, full(memory, restart=True))
            for last, memory in NCCL_WITHOUT_MEMORY.items()
            for error in (BACKEND(NCCL + last), RuntimeError(NCCL_2.format("unhandled cuda error", last)))
        ),
        *((error, failed(first_line(error), restart=True)) for error in BROKEN),
        *(
            (error, failed(first_line(error), restart=True, is_cause=False))
            for error in (RuntimeError(text) for text in LOST_A_PEER)
        ),
        (ValueError("no such sample\nin folder x"), failed("ValueError: no such sample")),
        (KeyError(), failed("KeyError")),
        (SystemExit(0), failed("SystemExit: 0")),
        (RuntimeError(UNSUPPORTED), failed(f"RuntimeError: {UNSUPPORTED}")),
        (NonFiniteLossError("loss is nan after 3 steps"), failed("loss is nan after 3 steps")),
        (
            UnusedParametersError("give …"),
            Fault(status="failed", reason="give …", reason_code="unused_parameters"),
        ),
        (Unsupported("torch 2.14 has none"), Fault(status="skipped", reason="torch 2.14 has none")),
    ],
    ids=lambda part: repr(part)[:50],
)
def test_what_an_error_costs(error, report):
    """The case alone, but where the device or the communicator is broken: then the ranks start again."""
    assert classify_error(error) == report


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("FIND was unable to find an engine to execute this computation"),
    ],
    ids=str,
)
def test_what_may_be_a_full_gpu_is_one_where_little_is_free(error, monkeypatch):
    def tells_nothing(_):
        raise RuntimeError("CUDA error: unspecified launch failure")

    assert classify_error(error).status == "failed", "no GPU is in use"
    calls = {
        "torch.cuda.device_count": lambda: 3,
        "torch.cuda.memory_reserved": lambda index: 2**30 * (index != 1),
    }
    stand_in(monkeypatch, faults, calls)
    for free_mib, status in ((9000, "failed"), (100, "oom")):
        by_device = {0: (40000, 80000), 2: (free_mib, 80000)}
        stand_in(monkeypatch, faults, {"torch.cuda.mem_get_info": by_device.__getitem__})
        assert classify_error(error).status == status
    stand_in(monkeypatch, faults, {"torch.cuda.mem_get_info": tells_nothing})
    assert classify_error(error).status == "failed"


def test_the_texts_of_the_installed_allocator():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert classify_error(caught.value) == full("host")


def test_what_a_replica_raised_is_named_by_its_own_line():
    """As nn.DataParallel hands it on: the type stays, the text becomes a traceback."""
    for kind, text in ((RuntimeError, "CUDA error: unspecified launch failure"), (ValueError, "no luck")):
        try:
            raise kind(text)  # as a replica does
        except kind:
            wrapped = ExceptionWrapper(where="in replica 1 on device 1")
        with pytest.raises(kind, match="Caught") as caught:
            wrapped.reraise()
        assert classify_error(caught.value).reason == f"{kind.__name__}: {text}"
        assert classify_error(caught.value).restart == (kind is RuntimeError)


def test_a_mistake_of_the_user_is_not_a_cases():
    assert make_report(UsageError("no such folder")) == Report(
        fault=Fault("usage", "no such folder"), exit_code=2, label="error"
    )
    assert make_report(UserCodeError("it raised")).fault.status == "failed"
    assert make_report(UserCodeError("it raised"), is_of_a_case=False).fault.status == "usage"
