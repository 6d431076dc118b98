"""Finds before anything starts what would end a gate: places, rounds, launches, the other interpreter."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ..common.errors import UsageError
from ..machine.launch import REQUIRED_VARIABLES as NEEDED_OF_RANKS
from ..plan.settings import Settings
from ..results.disk import report_write_errors
from ..results.run_folder import check_claimable
from ..run.processes import guess_device
from ..stats.fit import MIN_ROUNDS
from .checkouts import Checkout
from .decide import MIN_LAUNCHES

MIN_FREE_MIB = 100
"""Space for the results of all launches."""

TIMEOUT_S = 60.0
"""Seconds that an interpreter may take to say its versions."""

REQUIRED_PACKAGES = (
    *("torch", "torchvision", "numpy", "pandas", "scipy", "msgspec", "rich", "psutil", "pynvml"),
    *("jinja2", "matplotlib"),  # the first launch writes its page
)
"""Packages without which a run does not come to its end."""

SET_BY_RUNS = {
    **dict.fromkeys(NEEDED_OF_RANKS, "runs set it for each rank"),
    **dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "on one machine runs set it to loopback"),
    "PYTHONPATH": "the gate sets it to what each side imports",
}
"""Variables that a run sets whatever its environment says, with the reason."""

SET_ON_CPU = {
    **dict.fromkeys(
        ("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "each rank on CPU cores has one core and one thread"
    ),
    "CUDA_VISIBLE_DEVICES": "runs on CPU cores hide GPUs",
}
"""And of ranks on CPU cores."""

_ASK = """
import importlib.util, sys
print("missing", *(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))
"""


def check_places(*, out: Path | None, files: Sequence[tuple[str, Path | None]]) -> None:
    """Raise UsageError where a folder or a file that was asked for cannot be written, or the disk is full."""
    for option, file in files:
        if file is not None:
            with report_write_errors(f"{option} {file}", "file"):
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


def read_environment(option: str, given: Sequence[str]) -> dict[str, str]:
    """Read `NAME=VALUE`, each a variable of one side. Raises UsageError for what is none."""
    found = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"{option} {one!r} is not NAME=VALUE")
        found[name] = value
    return found


def check_variables(settings: Settings, environments: Iterable[Mapping[str, str]]) -> None:
    """Raise UsageError where a side is to have a variable that runs set themselves."""
    reasons = SET_BY_RUNS | (SET_ON_CPU if guess_device(settings) == "cpu" else {})
    for name in (name for one in environments for name in one):
        if name in reasons:
            raise UsageError(f"{name}: {reasons[name]}, so both sides would run alike; leave it out")


def check_interpreter(checkout: Checkout) -> None:
    """Raise UsageError where a side's interpreter cannot be started or lacks a package of ddp-bench."""
    if checkout.python == sys.executable:
        return
    if Path(checkout.python).is_dir():
        meant = f"{Path(checkout.python) / 'bin' / 'python'}"
        raise UsageError(f"--python {checkout.python} is a folder; did you mean {meant}?")
    if shutil.which(checkout.python) is None and not Path(checkout.python).exists():
        raise UsageError(f"--python {checkout.python}: no such file; name an interpreter, as old/bin/python")
    fix = "install ddp-bench for it (its packages), or name another with --python"
    try:
        done = subprocess.run(
            [checkout.python, "-c", _ASK, *REQUIRED_PACKAGES],
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
