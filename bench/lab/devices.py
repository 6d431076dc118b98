"""The machine's cores and GPUs, which a lab's hosts share."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """Processes started meanwhile run on `cores` only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def visible_gpus() -> list[str]:
    """The GPUs that CUDA would see, by the names that CUDA_VISIBLE_DEVICES takes."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [gpu for gpu in named.split(",") if gpu]
    numbers = (re.fullmatch(r"nvidia([0-9]+)", path.name) for path in Path("/dev").glob("nvidia*"))
    return [str(number) for number in sorted(int(match[1]) for match in numbers if match)]
