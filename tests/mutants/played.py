"""Runs tests in forks of one process that has imported torch, for the copy of our tree in the current folder.

Each line read is a test's id; the answer is pytest's exit status, once what it said is in `said.txt`. Nothing
of ours is imported before the fork, for it may have been changed since.
"""

import os
import sys

import pytest
import torch._dynamo
import torchvision.models

OPTIONS = ("-vv", "-x", "--showlocals", "-n", "0", "-p", "no:cacheprovider", "--no-cov", "--timeout", "200")


def _play(test: str) -> int:
    with open("said.txt", "w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    sys.path[:0] = [os.getcwd(), os.path.join(os.getcwd(), "tests")]
    import rank_pool

    rank_pool.START_METHOD = "fork"
    return int(pytest.main([*OPTIONS, *test.split("\t")]))


