"""Fixtures of the lab's tests: they need root or user namespaces, and say so where there is neither."""

import pytest
from real_lab import Lab

from ddp_bench.bench.common.errors import UsageError
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
