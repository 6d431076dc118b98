"""What a process that runs as a rank is, and how it ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import NoReturn

MALLOC_PAGES = "glibc.malloc.hugetlb"


def huge_pages_env(environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to `environment` for a process on CPU cores whose speed is compared with another's.

    Memory in huge pages, where the kernel lends them (madvise or always) and malloc is glibc 2.35's or later:
    with pages of 4 KiB the caches serve a process well or badly by the pages it happens to get, for as long
    as it lives. Two launches of one program then differ: by 3.6% (standard deviation; resnet20, batch 4, 2
    shared cores) where huge pages leave 1.5%, most of that the noise of their blocks. The virtual layout
    is not it: forking both from one process left 3.6%, no address randomisation 2.4 and 3.7% (16 launches).

    A setting of the user's own stays.
    """
    tunables = environment.get("GLIBC_TUNABLES", "")
    if MALLOC_PAGES in tunables:
        return {}
    return {"GLIBC_TUNABLES": ":".join(filter(None, [tunables, f"{MALLOC_PAGES}=1"]))}


def is_rank() -> bool:
    """Whether this process was started as a rank: by bench.run itself, torchrun or srun."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def is_first() -> bool:
    """Whether this is the first rank, or no rank at all: the process that speaks to the user."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def leave(code: int) -> NoReturn:
    """End this process; a rank without the interpreter's shutdown.

    Gloo's threads may hold tensors of the last all-reduce until then, and letting go of them in an
    interpreter that shuts down aborts the process: a finished run would end as a rank that died
    (https://github.com/pytorch/pytorch/pull/179291).
    """
    if not is_rank():
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


__all__ = ["MALLOC_PAGES", "huge_pages_env", "is_first", "is_rank", "leave"]
