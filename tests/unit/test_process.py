"""How ranks on CPU cores get their memory; the notation of GLIBC_TUNABLES is the glibc manual's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.cluster.process import huge_pages_env

ALLOCATE = """
import re, sys
held = [bytearray(2**22) for _ in range(8)]
maps = open("/proc/self/smaps").read()
flags = re.findall(r"^Size: +([0-9]+) kB(?:(?!^Size:).)*?^VmFlags:([ a-z]*)$", maps, re.M | re.S)
print(sum(int(size) for size, given in flags if " hg" in given))
"""
"""Prints the KiB of memory that this process has advised the kernel to keep in huge pages."""


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ({}, {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}),
        (
            {"GLIBC_TUNABLES": "glibc.malloc.check=3"},
            {"GLIBC_TUNABLES": "glibc.malloc.check=3:glibc.malloc.hugetlb=1"},
        ),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, {}),
    ],
)
def test_settings_of_the_users_own_stay(given: dict[str, str], added: dict[str, str]) -> None:
    assert huge_pages_env(given) == added


def test_malloc_asks_the_kernel_for_huge_pages() -> None:
    """What it asks for, not what it gets: that depends on how scattered free memory is."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    lends = setting.exists() and "[never]" not in setting.read_text()
    if not lends or tuple(map(int, os.confstr("CS_GNU_LIBC_VERSION").split()[1].split("."))) < (2, 35):
        pytest.skip("this kernel lends no huge pages, or malloc cannot ask for them")
    plain = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    asked_kib = [
        int(
            subprocess.run(
                [sys.executable, "-c", ALLOCATE],
                env=plain | more,
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        for more in ({}, huge_pages_env({}))
    ]
    assert asked_kib[0] == 0
    assert asked_kib[1] >= 32 * 1024, "8 times 4 MiB"


def test_a_rank_starts_without_what_only_the_first_needs_later() -> None:
    code = "import sys, bench.run.job, bench.run.rank; sys.exit('scipy.stats' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
