"""Finds before anything starts what would end a gate: places, rounds, launches, the other interpreter."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ..common.errors import UsageError
from ..plan.settings import Settings
from ..results.disk import writable
from ..results.store import check_claimable
from ..stats.fit import MIN_ROUNDS
from .checkouts import Checkout

MIN_LAUNCHES = 3
"""Two launches have one degree of freedom: their interval is some twenty times as wide as their scatter."""

MIN_FREE_MIB = 100
"""Space for the results of all launches."""

TIMEOUT_S = 60.0
"""Seconds that an interpreter may take to say its versions."""

NEEDED = ("torch", "torchvision", "numpy", "pandas", "scipy", "msgspec", "rich")
"""Packages without which no run starts."""

_ASK = """
import importlib.util, sys
print("missing", *(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))
"""


def check_places(*, out: Path | None, files: Sequence[tuple[str, Path | None]]) -> None:
    """Raise UsageError where a folder or a file that was asked for cannot be written, or the disk is full."""
    for option, file in files:
        if file is not None:
            with writable(f"{option} {file}", "file"):
                # Raises what writing would raise; what is there is left as it is.
                place = file if file.exists() else file.parent
                if not place.exists():
                    raise FileNotFoundError(2, "No such file or directory")
                if file.is_dir():
                    raise IsADirectoryError(21, "Is a directory")
    if out is not None:
        check_claimable(out)
        place = next(one for one in (out.absolute(), *out.absolute().parents) if one.exists())
        free_mib = shutil.disk_usage(place).free / 2**20
        if free_mib < MIN_FREE_MIB:
            raise UsageError(
                f"--out {out}: {free_mib:.0f} MiB are free there, a gate needs {MIN_FREE_MIB}; make room"
            )


def check_evidence(settings: Settings, looks: Sequence[int]) -> None:
    """Raise UsageError where so few rounds or launches cannot decide."""
    if settings.rounds is not None and settings.rounds < MIN_ROUNDS:
        raise UsageError(
            f"--rounds {settings.rounds}: a gate needs at least {MIN_ROUNDS} for an interval; take more"
        )
    if 1 < looks[-1] < MIN_LAUNCHES:
        raise UsageError(
            f"--launches {looks[-1]} cannot decide: the interval of two launches is some 20 times as wide as "
            "their scatter; take 1, which judges by the rounds of one launch, or 6"
        )


def check_interpreter(checkout: Checkout) -> None:
    """Raise UsageError where a side's interpreter cannot be started or lacks a package of ddp-bench."""
    if checkout.python == sys.executable:
        return
    fix = "install ddp-bench for it, or name another with --python"
    try:
        done = subprocess.run(
            [checkout.python, "-c", _ASK, *NEEDED],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        raise UsageError(
            f"--python {checkout.python} cannot be started as a Python interpreter; {fix}"
        ) from None
    if missing := done.stdout.split()[1:]:
        raise UsageError(f"--python {checkout.python} has no {', '.join(missing)}; {fix}")
