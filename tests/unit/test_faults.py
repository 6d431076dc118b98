"""From how ranks ended to what a case's row says."""

import signal

import pytest

from bench.recovery.failures import (
    RESTART_EXIT_CODE,
    TIMEOUT_EXIT_CODE,
    failure_of,
    is_restartable,
    oom_kills,
)

TERM, KILL, SEGV = -signal.SIGTERM, -signal.SIGKILL, -signal.SIGSEGV


@pytest.mark.parametrize(
    ("codes", "oom", "status", "words"),
    [
        ({0: TERM, 1: KILL}, False, "failed", "rank 1 was killed by signal 9 (SIGKILL) in round 3 (timed)"),
        ({0: RESTART_EXIT_CODE, 2: SEGV}, False, "failed", "rank 2 was killed by signal 11 (SIGSEGV)"),
        ({0: TERM, 1: KILL}, True, "oom", "rank 1 was killed by the kernel for want of host memory"),
        ({}, True, "oom", "a rank was killed by the kernel"),
        ({0: TERM, 1: SEGV}, True, "failed", "SIGSEGV"),
        ({0: TERM, 1: TIMEOUT_EXIT_CODE}, False, "timeout", "rank 0 did not answer"),
        ({0: KILL, 1: TIMEOUT_EXIT_CODE}, False, "timeout", "rank 0 did not answer"),
        ({}, False, "failed", "a rank ended unexpectedly in round 3 (timed)"),
    ],
)
def test_the_cause_of_a_failure(codes: dict[int, int], oom: bool, status: str, words: str) -> None:  # noqa: FBT001 - a parameter
    found = failure_of(codes, what="round 3 (timed)", out_of_memory=oom)
    assert found.status == status
    assert words in found.reason


def test_only_deaths_are_worth_a_restart() -> None:
    assert is_restartable({0: TERM, 1: KILL})
    assert is_restartable({0: RESTART_EXIT_CODE})
    assert not is_restartable({0: 2, 1: TERM}), "what a program said of itself stands"
    assert not is_restartable({0: 1})


def test_the_kernel_counts_its_oom_kills() -> None:
    count = oom_kills()
    assert count is None or count >= 0
