"""A command of the user's that comes after `--`, as `lab` and `watch` take it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import PurePath

from .errors import UsageError
from .process import own_command

TORCHRUN = ["-m", "torch.distributed.run"]


def resolve_command(words: Sequence[str], executable: str) -> list[str]:
    """Return the command that the words after `--` mean; `executable` is what `python` stands for.

    The interpreter is named, because under sudo PATH may know another one or no torchrun. Commands
    of ours are ours in any folder. Raises UsageError where there is no command, or no such program.
    """
    first, *rest = words or [""]
    name = PurePath(first).name
    if first in {"python", "python3", executable, PurePath(executable).name} and rest:
        module = rest[1] if rest[0] == "-m" and len(rest) > 1 else ""
        if own := re.fullmatch(r"bench(?:\.(\w+))?|(report)", module):
            return own_command(*filter(None, own.groups()), *rest[2:], python=executable)
        return [executable, *rest]
    if name == "torchrun":
        return [executable, *TORCHRUN, *rest]
    if name == "ddp-bench" or re.fullmatch(r"bench\.\w+", first):
        own_words = rest if name == "ddp-bench" else [first.removeprefix("bench."), *rest]
        return own_command(*own_words, python=executable)
    if not rest and name.startswith("python"):
        raise UsageError(f"after -- comes what {name} is to run too, as in -- {name} train.py")
    if not first or shutil.which(first) is None:
        given = f"no program {first!r} is found" if first else "nothing is there"
        raise UsageError(f"after -- comes a command, as in -- python train.py, but {given}")
    return [first, *rest]
