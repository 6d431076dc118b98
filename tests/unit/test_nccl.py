"""What NCCL chose, read from its log, in the formats of 2.28 and 2.30, in whose libraries one test looks."""

import re
from importlib import metadata

import pytest
from made import made_manifest

from ddp_bench.bench.machine.conditions import Question, find_differences, format_nccl_choices, parse_nccl_log

# Lines as in NVIDIA/nccl issues #1773 and #1189, with the formats of libnccl.so 2.28.9 and 2.30.7; shortened.
LOG_2_28 = """\
host:97:97 [0] NCCL INFO NCCL version 2.28.9+cuda13.0
host:97:97196 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
host:97:97191 [1] NCCL INFO Channel 01 : 1[1] -> 0[0] via SHM/direct/direct
host:97:97193 [0] NCCL INFO Channel 00/0 : 1[1] -> 3[1] [receive] via NET/IB/2(1)/GDRDMA/Shared
host:97:97193 [0] NCCL INFO Connected all rings, use ring PXN 0 GDR 1
host:97:97 [0] NCCL INFO AllReduce: 4096 Bytes -> Algo TREE proto LL channel{Lo..Hi}={0..0}
host:97:97 [0] NCCL INFO AllReduce: 1048576 Bytes -> Algo RING proto LL128 channel{Lo..Hi}={0..7}
host:97:97 [0] NCCL INFO AllReduce: 26214400 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..23}
host:97:97 [0] NCCL INFO AllReduce: 75497472 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..23}
"""
LOG_2_30 = """\
host:97:97 [0] NCCL INFO NCCL version 2.30.7+cuda13.3
host:97:97196 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
host:97:97191 [1] NCCL INFO Channel 01 : 1[1] -> 0[0] via SHM/direct
host:97:97193 [0] NCCL INFO Channel 00/0 : 1[1] -> 3[1] [send] via NET/Socket/0
host:97:97 [0] NCCL INFO AllReduce: 4096 Bytes -> Algo TREE proto LL channel{Lo..Hi}={0..0}
host:97:97 [0] NCCL INFO AllReduce [Symmetric]: 1048576 Bytes -> Kernel AllReduce_RSxLD_AGxST nchannels 8
host:97:97 [0] NCCL INFO AllReduce: 26214400 Bytes -> Algo NVLS proto SIMPLE channel{Lo..Hi}={0..15}
host:97:97 [0] NCCL INFO AllReduce: 75497472 Bytes -> Algo NVLS proto SIMPLE channel{Lo..Hi}={0..15}
"""


def test_transports_and_choices_by_size_are_read():
    older, newer = (parse_nccl_log([log, log]) for log in (LOG_2_28, LOG_2_30))
    assert older.transports == ("NET/IB/GDRDMA", "P2P/CUMEM", "SHM")
    assert newer.transports == ("NET/Socket", "P2P/CUMEM", "SHM")
    assert format_nccl_choices(older.messages) == (
        "4,096 bytes: TREE/LL, 1,048,576 bytes: RING/LL128, 26,214,400 to 75,497,472 bytes: RING/SIMPLE"
    )
    assert format_nccl_choices(newer.messages).endswith("26,214,400 to 75,497,472 bytes: NVLS/SIMPLE")
    assert "1,048,576 bytes: Symmetric/AllReduce_RSxLD_AGxST" in format_nccl_choices(newer.messages)


def test_a_log_without_a_choice_says_nothing():
    assert parse_nccl_log(["", LOG_2_28.partition("AllReduce")[0]]) is None


def test_the_gate_names_what_an_upgrade_changed():
    then, now = (
        made_manifest(nccl=found)
        for found in (
            {"transports": ["P2P/CUMEM"], "messages": [{"bytes": 8, "algorithm": "RING", "protocol": "LL"}]},
            {"transports": ["SHM"], "messages": [{"bytes": 8, "algorithm": "RING", "protocol": "LL"}]},
        )
    )
    found = {one.name: one for one in find_differences(then, now, Question.GATE)}
    assert (found["NCCL transport"].then, found["NCCL transport"].now) == ("P2P/CUMEM", "SHM")
    assert not found["NCCL transport"].blocking
    assert "NCCL algorithms" not in found
    assert not any("NCCL t" in one.name for one in find_differences(then, made_manifest(), Question.GATE))


def test_the_installed_nccl_writes_in_these_formats():
    files = [f for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12") for f in _files(name)]
    libraries = [file.locate() for file in files if file.name.startswith("libnccl.so")]
    if not libraries:
        pytest.skip("no NCCL is installed")
    formats = set(re.findall(rb"[\x20-\x7e]{8,}", libraries[0].read_bytes()))
    assert b"%s: %ld Bytes -> Algo %s proto %s channel{Lo..Hi}={%d..%d}" in formats
    assert b"%s [Symmetric]: %ld Bytes -> Kernel %s nchannels %d nthreads %d nWorks %d" in formats
    for via in (b"P2P/%s", b"P2P/direct pointer", b"SHM/", b"NET/%s/%d"):
        assert any(b"%d[%d] -> %d[%d]" in one and b" via " + via in one for one in formats), via


def _files(package):
    try:
        return metadata.files(package) or []
    except metadata.PackageNotFoundError:
        return []
