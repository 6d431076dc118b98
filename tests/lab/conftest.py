"""Fixtures of the lab's tests: they need root or user namespaces, and say so where there is neither."""

import os
import shutil
import subprocess
import uuid

import pytest
from real_lab import Lab

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.lab import network


@pytest.fixture(autouse=True, scope="session")
def _support():
    try:
        network.require_support()
    except UsageError as missing:
        pytest.skip(str(missing))


@pytest.fixture
def start_lab(tmp_path):
    """Starts labs, each in a folder of its own below `tmp_path`."""
    labs = []

    def start(rate, *arguments, **how):
        labs.append(Lab(tmp_path / f"lab{len(labs)}", rate, *arguments, **how))
        return labs[-1]

    yield start
    for lab in labs:
        lab.kill()


@pytest.fixture
def foreign_namespace():
    """A network namespace that no lab made, with an interface and an address a lab uses too."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and ip to make a named network namespace")
    name = f"foreign-{uuid.uuid4().hex[:8]}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    subprocess.run(["ip", "-n", name, "link", "add", "eth0", "type", "bridge"], check=True)
    subprocess.run(["ip", "-n", name, "address", "add", "10.77.0.1/24", "dev", "eth0"], check=True)
    yield name
    subprocess.run(["ip", "netns", "del", name], check=True)
