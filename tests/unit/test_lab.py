"""The lab: its command line, rate, shares, commands and exit codes."""

import os
import sys
import unittest.mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.run import get_args_parser

from ddp_bench.bench.common.cli import resolve_command
from ddp_bench.bench.common.errors import UsageError
from ddp_bench.bench.common.process import make_package_command
from ddp_bench.bench.lab import job, network
from ddp_bench.bench.lab import main as lab
from ddp_bench.bench.lab.job import is_bench_run, is_torchrun
from ddp_bench.bench.lab.main import summarize_lab


@pytest.mark.parametrize("missing", ["ip", "tc", "nsenter", "setpriv", "unshare"])
def test_a_missing_tool_is_named_with_its_package(missing, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    for tool in {"ip", "tc", "nsenter", "setpriv", "unshare"} - {missing}:
        (tmp_path / tool).write_text("#!/bin/sh\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setattr(network, "get_environment", lambda: {"PATH": os.fspath(tmp_path)})
    with pytest.raises(UsageError, match=rf"'{missing}'.*install (iproute2|util-linux)"):
        network.require_support()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UsageError, match="needs Linux"):
        network.require_support()


@pytest.mark.parametrize(
    ("rate", "bit_per_s", "label"),
    [
        ("200mbit", 200_000_000, "200mbit"),
        ("1000mbit", 1_000_000_000, "1gbit"),
        ("2.5gbit", 2_500_000_000, "2.5gbit"),
        ("1mbit", 1_000_000, "1mbit"),
        ("100gbit", 100_000_000_000, "100gbit"),
        ("1234.567891mbit", 1_234_567_891, "1.234567891gbit"),
    ],
)
def test_a_rate_is_decimal_and_has_one_label(rate, bit_per_s, label):
    options = lab.parse(["--hosts", "3", "--rate", rate, "--", "python", "-m", "bench.run", "--rate", "x"])
    assert options.command == make_package_command("run", "--rate", "x")
    assert options.link == network.ShapedLink(bit_per_s)
    assert options.link.label == label
    assert network.parse_rate(label) == bit_per_s


NO_RATES = ("", "1", "gbit", "1 gbit", "1Gbit", "1gbps", "1gbits", "-1gbit", "0gbit", "1e3mbit", "1kbit")


@pytest.mark.parametrize("text", [*NO_RATES, "101gbit", "1gbit\n", "1gbit,2gbit"])
def test_anything_else_is_no_rate(text):
    with pytest.raises(UsageError, match="rate"):
        network.parse_rate(text)


@given(st.integers(0, 200), st.integers(2, 64))
def test_hosts_get_equal_contiguous_shares_and_share_only_when_there_are_too_few(items, hosts):
    found = lab.split_shares(range(items), hosts)
    if not items:
        assert found == [[]] * hosts
        return
    assert [len(share) for share in found] == [max(1, items // hosts)] * hosts
    assert all(share == list(range(share[0], share[0] + len(share))) for share in found)
    given_out = [item for share in found for item in share]
    assert max(given_out) < items
    if items >= hosts:
        assert len(set(given_out)) == len(given_out)
    else:
        assert set(given_out) == set(range(items))


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        *(([0, 0], 0), ([2, 2], 2), ([0, 3], 3), ([1, 3], 3), ([3, 1], 3), ([1, 1], 1)),
        *(([-9, 1], 137), ([143, 4], 4), ([-15, 5, 6], 5)),
    ],
)
def test_the_code_a_program_chose_beats_those_of_its_victims(codes, expected):
    assert job.choose_exit_code(codes) == expected


PYTHON = "/opt/env/bin/python3.12"
RUN = make_package_command("run", python=PYTHON)
TORCHRUN = [PYTHON, "-m", "torch.distributed.run"]
MEANT = {
    **{f"{python} -m bench.run": RUN for python in ("python", "python3", PYTHON, "python3.12")},
    **dict.fromkeys(("python -m bench run", "ddp-bench run", "/opt/bin/ddp-bench run", "bench.run"), RUN),
    **dict.fromkeys(("torchrun", "/usr/bin/torchrun", "python -m torch.distributed.run"), TORCHRUN),
    "python train.py": [PYTHON, "train.py"],
    "python -m mine.train": [PYTHON, "-m", "mine.train"],
    "sh -c": ["sh", "-c"],
}


@pytest.mark.parametrize("words", MEANT)
def test_a_command_is_known_in_every_form_and_runs_under_the_interpreter_of_the_lab(words):
    command = resolve_command([*words.split(), "--gpus", "1,2"], PYTHON)
    assert command == [*MEANT[words], "--gpus", "1,2"]
    assert is_bench_run(command) == (MEANT[words] == RUN)
    assert is_torchrun(command) == (MEANT[words] == TORCHRUN), "that starts the ranks of a host itself"
    assert resolve_command(command, PYTHON) == command, "without root a lab starts itself anew"


@pytest.mark.parametrize("words", [[], ["python"], ["python3.12"], ["no-such-program", "x"]])
def test_what_is_no_command_is_refused_with_an_example(words):
    with pytest.raises(UsageError, match=r"as in -- python\S* train.py"):
        resolve_command(words, PYTHON)


def test_torchrun_is_told_where_it_is_by_the_variables_that_it_reads():
    second = job.HostJob(host=1, num_hosts=3, ranks_per_host=2, run_id="x", command=[])
    with unittest.mock.patch.dict(os.environ, job.make_torchrun_environment(second)):
        options = get_args_parser().parse_args(["train.py"])
    assert (options.nnodes, options.nproc_per_node, options.node_rank) == ("3", "2", 1)
    assert (options.master_addr, options.master_port) == (network.get_address(0), job.TORCHRUN_PORT)
    assert options.local_addr == network.get_address(1)


@given(st.integers(network.MIN_RATE_BIT_PER_S, network.MAX_RATE_BIT_PER_S))
def test_the_bucket_outlasts_a_late_kernel_and_the_queue_drops_no_tail_of_a_message(rate):
    link = network.ShapedLink(rate)
    assert link.burst_bytes > 65536 + 1514, "or the kernel cuts every large segment in software"
    assert link.burst_bytes * 8 / rate >= 0.00199
    if rate >= 100_000_000:
        assert link.queue_bytes > 4_194_304, "what tcp_wmem lets a connection have in flight"
        assert link.queue_bytes * 8 / rate < 0.6


def test_both_ends_of_a_link_are_shaped_alike():
    host, switch = (
        network.make_shaping_commands(name, network.ShapedLink(10**9)) for name in ("eth0", "host0")
    )
    assert [line.replace("eth0", "host0") for line in host] == switch
    assert "rate 1000000000bit" in host[0]


def test_the_summary_says_when_hosts_share_cores():
    shaped = network.ShapedLink(10**9)
    assert "shared" not in summarize_lab(2, 1, shaped, [[0, 1], [2, 3]])
    assert "1 CPU core per host, shared between hosts" in summarize_lab(3, 1, shaped, [[0], [1], [0]])
