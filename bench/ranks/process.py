"""What a process that runs as a rank is, and how it ends."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def is_rank() -> bool:
    """Whether this process was started as a rank: by bench.run itself, torchrun or srun."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


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


__all__ = ["is_rank", "leave"]
