"""The console script `ddp-bench`, `python -m ddp_bench`, and this file by its path, as our processes start.

By its path it finds the package in any folder and puts nothing on `sys.path`: what else is called `bench`,
`models` or `report` there is the user's.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, cast


def _load_package() -> None:
    folder = Path(__file__).resolve().parent
    found = importlib.util.spec_from_file_location(
        "ddp_bench", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert found is not None
    assert found.loader is not None
    sys.modules["ddp_bench"] = importlib.util.module_from_spec(found)
    found.loader.exec_module(sys.modules["ddp_bench"])


if not __package__ and "ddp_bench" not in sys.modules:  # also where multiprocessing spawns from this file
    _load_package()


COMMANDS = {
    "run": "measure training in every mode, and how it scales",
    "watch": "say where the time of your own training goes",
    "tune": "find the bucket cap with which DDP trains fastest here",
    "predict": "predict step times on more devices or another network",
    "gate": "compare two runs, or two commits: did it become slower?",
    "doctor": "check whether this machine is fit to measure on",
    "lab": "run a command on several hosts made on this machine",
    "export": "write a run for another tool, or as one file to hand on",
    "report": "write the page of a run again",
}
"""Purpose of each command, in the order of `--help`."""


def console(typed: str = "ddp-bench") -> NoReturn:
    """Run the command that the arguments name; `typed` is how messages name commands."""
    from ddp_bench.bench.common.cli import TYPED_ENV  # the package may just be loaded

    os.environ[TYPED_ENV] = typed
    run(sys.argv[1:])


def run(arguments: list[str]) -> NoReturn:
    """Do what `ddp-bench arguments` does, or with `-m` first what one of our modules does."""
    if arguments[:1] == ["-m"]:
        sys.argv[1:] = arguments[2:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        sys.exit()
    name = arguments[0] if arguments else ""
    if name not in COMMANDS:
        from ddp_bench.bench.common.cli import run_command

        sys.exit(run_command("", lambda: _explain_usage(arguments)))
    sys.argv[1:] = arguments[1:]
    sys.exit(load_main(name)(arguments[1:]))


def load_main(name: str) -> Callable[[list[str]], int]:
    """Return the function that runs command `name` with its arguments: `main` of a module of its own."""
    module = {"report": "report.main", "tune": "bench.run.tune"}.get(name, f"bench.{name}.main")
    return cast("Callable[[list[str]], int]", importlib.import_module(f"ddp_bench.{module}").main)


def _explain_usage(arguments: list[str]) -> int:
    from ddp_bench.bench.common.cli import Parser, format_command, get_version
    from ddp_bench.bench.common.errors import ExitCode, UsageError
    from ddp_bench.bench.common.values import suggest_known

    parser = Parser(
        "",
        "Measure data-parallel training in PyTorch.",
        usage="%(prog)s COMMAND [options]",
        examples=(
            ("run --gpus 1,2", "how DP and DDP scale here"),
            ("watch -- torchrun train.py", "where the time of your training goes"),
            ("gate --interleave main -- --workload net:make", "did it become slower?"),
        ),
        exit_codes="that of the command; 2 without one.",
        details="COMMAND --help lists the options of a command.",
    )
    parser.add_argument("--version", action="store_true", help="print the versions of ddp-bench and torch")
    group = parser.add_argument_group("commands")
    for name, what in COMMANDS.items():
        group.add_argument(name, nargs="?", help=what)
    if arguments and not arguments[0].startswith("-"):
        raise UsageError(f"unknown command {arguments[0]!r}; {suggest_known(arguments[0], COMMANDS)}")
    if not parser.parse_args(arguments).version:
        raise UsageError(f"name a command: {', '.join(COMMANDS)}; see {format_command()} --help")
    found = [f"{package} {get_version(package) or 'not installed'}" for package in ("ddp-bench", "torch")]
    print(", ".join([*found, f"Python {platform.python_version()}"]))
    return ExitCode.OK


if __name__ == "__main__":
    if __package__:
        console("python -m ddp_bench")
    if not sys.flags.safe_path:
        del sys.path[0]  # the folder of this file
    run(sys.argv[1:])
