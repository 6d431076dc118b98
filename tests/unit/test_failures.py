"""From how ranks ended to what a case's row says."""

import signal

import pytest

from ddp_bench.bench.resolve import with_device_defaults
from ddp_bench.bench.results.journal import Settled, State, UnderWay
from ddp_bench.bench.run.failures import (
    LEAST_S,
    LEAST_STEPS,
    PATIENCE,
    Failure,
    block_s,
    failure_of,
    is_stuck,
    preparing_s,
    progress_of,
    written,
)
from ddp_bench.bench.settings import Settings
from ddp_bench.bench.sysfs import oom_kills

KILL, SEGV = -signal.SIGKILL, -signal.SIGSEGV


@pytest.mark.parametrize(
    ("codes", "oom", "status", "words"),
    [
        ({1: KILL}, False, "failed", "rank 1 was killed by signal 9 (SIGKILL) in round 3 (timed)"),
        ({0: None, 2: SEGV}, False, "failed", "rank 2 was killed by signal 11 (SIGSEGV)"),
        ({1: None}, False, "failed", "rank 1 ended unexpectedly in round 3 (timed)"),
        ({1: KILL}, True, "oom", "rank 1 was killed by the kernel for want of host memory"),
        ({}, True, "oom", "a rank was killed by the kernel"),
        ({1: SEGV}, True, "failed", "SIGSEGV"),
        ({}, False, "failed", "a rank ended unexpectedly in round 3 (timed)"),
    ],
)
def test_the_cause_of_a_failure(codes, oom, status, words):
    found = failure_of(codes, what="round 3 (timed)", out_of_memory=oom)
    assert found.status == status
    assert words in found.reason


def test_how_ranks_ended_is_kept_and_the_cause_told_apart():
    codes = {0: None, 1: None, 2: SEGV, 5: 3}
    found = failure_of(codes, what="round 3 (timed)", out_of_memory=False)
    assert written("now  ddp-n6: failed", found) == (
        "now  ddp-n6: failed\n"
        "rank 2 was killed by signal 11 (SIGSEGV) in round 3 (timed)\n"
        "\n"
        "ranks 0-1: ended unexpectedly\n"
        "\n"
        "rank 2: was killed by signal 11 (SIGSEGV)\n"
        "\n"
        "rank 5: ended with exit code 3\n"
        "\n"
    )


def test_what_is_kept_shows_no_control_characters():
    found = Failure("failed", "ValueError: \x1b[31mred", {0: "raised\nTraceback:\n\tx = '\x1b[2J'\n"})
    text = written("title", found)
    assert "\x1b" not in text
    assert "\nrank 0: raised\nTraceback:\n        x = '\\x1b[2J'\n" in text


def test_the_kernel_counts_its_oom_kills():
    count = oom_kills()
    assert count is None or count >= 0


def state(*statuses, curves=0, on=None):
    settled = {index: Settled(index=index, status=status) for index, status in enumerate(statuses)}
    return State(settled=settled, curves={(n, "gloo") for n in range(curves)}, under_way=on)


@pytest.mark.parametrize(
    ("later", "table_bytes"),
    [
        (state("ok"), 101),
        (state("ok", "ok"), 100),
        (state("failed"), 100),
        (state("ok", curves=1), 100),
        (state("ok", on=UnderWay(index=0, what="round 1 (timed)")), 100),
        (state("ok", on=UnderWay(index=1, what="its preparation")), 100),
        (state("ok", on=UnderWay(what="a curve", curve=(2, "gloo"))), 100),
    ],
    ids=["a block", "a case", "a failed case", "a curve", "ends a case", "ends a new case", "ends a curve"],
)
def test_what_counts_as_progress(later, table_bytes):
    assert progress_of(later, table_bytes) != progress_of(state("ok"), 100)


def test_the_case_that_an_attempt_died_in_counts_once():
    """Before the next attempt has given it up and after."""
    died = state("ok", "ok", on=UnderWay(index=1, what="round 1 (timed)"))
    assert progress_of(died, 100) == progress_of(state("ok", "failed"), 100)
    curve = UnderWay(what="a curve", curve=(0, "gloo"))
    assert progress_of(state(on=curve), 0) == progress_of(state(curves=1, on=curve), 0)
    between = state("ok", on=UnderWay(what="between rounds"))
    assert progress_of(between, 100) == progress_of(state("ok"), 100)


def test_two_attempts_in_a_row_without_progress_are_the_end():
    """A new run, a resumed one, and one whose second attempt got on; each number is how far one came."""
    assert not is_stuck([0])
    assert not is_stuck([0, 0])
    assert is_stuck([0, 0, 0])
    assert not is_stuck([0, 0, 1])
    assert not is_stuck([0, 1, 1])
    assert is_stuck([0, 0, 1, 1, 1])


def test_time_limits_follow_the_settings_and_the_warm_up():
    def asked(**more):
        return with_device_defaults(Settings(**more), device_type="cuda", num_local_devices=1)

    plain, tuned = asked(), asked(compile="max-autotune")
    assert preparing_s(tuned) == 3 * preparing_s(plain)
    assert preparing_s(asked(case_timeout=5.0)) == block_s(asked(case_timeout=5.0), 60.0, 0.1) == 5.0
    assert block_s(plain, 0.2, 0.1) == LEAST_S, "a second of steps, patience of 20, no sooner than this"
    assert block_s(plain, 0.5, 10.0) == PATIENCE * 10.0
    assert block_s(plain, 90.0, 0.1) == PATIENCE * LEAST_STEPS * 90.0, "the compiler may run again"
