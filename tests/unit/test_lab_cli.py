"""The lab's command line: whatever cannot be done is one line on stderr and exit code 2."""

import os
import sys

import pytest

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.lab import main as lab
from ddp_bench.bench.lab import namespaces, rates
from ddp_bench.bench.lab.link import ShapedLink, parse_rate
from ddp_bench.bench.package import own_command

COMMAND = ["--", "python", "-m", "bench.run", "--rate", "x"]


def test_options_end_at_the_dashes():
    options = lab.parse(["--hosts", "3", "--rate", "200mbit", "--ranks-per-host", "2", "--quiet", *COMMAND])
    assert options == lab.LabOptions(
        num_hosts=3,
        links=(ShapedLink(200_000_000),),
        ranks_per_host=2,
        command=own_command("run", "--rate", "x"),
        quiet=True,
    )


def test_each_rate_gets_a_lab_of_its_own():
    given = ["--hosts", "3", "--rate", "200mbit,2500mbit", "--delay", "1ms", "--ranks-per-host", "2"]
    options = lab.parse([*given, "--", "python", "-m", "bench.run", "--out", "x-{rate}"])
    commands = rates.commands(options.links, given, options.command)
    assert list(commands) == ["200mbit", "2.5gbit"]
    for rate, command in commands.items():
        assert command[:3] == own_command("lab")
        assert lab.parse(command[3:]) == lab.LabOptions(
            num_hosts=3,
            links=(ShapedLink(parse_rate(rate), 0.001),),
            ranks_per_host=2,
            command=own_command("run", "--out", f"x-{rate}"),
            quiet=False,
        )


def test_help_explains_the_link(capsys):
    with pytest.raises(SystemExit) as ended:
        lab.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "-- COMMAND" in text
    assert "95.6%" in text
    assert "--ranks-per-host" in text


@pytest.mark.parametrize("missing", ["ip", "tc", "nsenter", "setpriv", "unshare"])
def test_a_missing_tool_is_named_with_its_package(missing, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    for tool in {"ip", "tc", "nsenter", "setpriv", "unshare"} - {missing}:
        (tmp_path / tool).write_text("#!/bin/sh\n")
        (tmp_path / tool).chmod(0o755)
    with pytest.raises(UsageError, match=rf"'{missing}'.*install (iproute2|util-linux)"):
        namespaces.require_support(os.fspath(tmp_path))


def test_other_systems_are_told_so(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UsageError, match="needs Linux"):
        namespaces.require_support()
