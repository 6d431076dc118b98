"""The console script `ddp-bench`, `python -m ddp_bench`, and this file by its path, as our processes start.

By its path it finds the package in any folder and puts nothing on `sys.path`: what else is called `bench`,
`models` or `report` there is the user's.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from pathlib import Path
from typing import NoReturn


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


def console(typed: str = "ddp-bench") -> NoReturn:
    """Run the command that the arguments name; `typed` is how messages name commands."""
    from ddp_bench.bench.cli import TYPED_ENV  # the package may just be loaded

    os.environ[TYPED_ENV] = typed
    run(sys.argv[1:])


def run(arguments: list[str]) -> NoReturn:
    """Do what `ddp-bench arguments` does, or with `-m` first what one of our modules does."""
    if arguments[:1] == ["-m"]:
        sys.argv[1:] = arguments[2:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        sys.exit()
    from ddp_bench.bench.commands import main

    sys.exit(main(arguments))


if __name__ == "__main__":
    if __package__:
        console("python -m ddp_bench")
    if not sys.flags.safe_path:
        del sys.path[0]  # the folder of this file
    run(sys.argv[1:])
