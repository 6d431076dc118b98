"""Measure single, DataParallel and DistributedDataParallel training and report how each scales."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.cli import Parser
from bench.cluster.process import is_rank, leave
from bench.cluster.slurm import ranks_environment
from bench.errors import USAGE_EXIT_CODE, UsageError, UserCodeError
from bench.recovery.failures import INTERRUPTED_EXIT_CODE, AgreedError
from bench.settings import PRESETS, Settings, options_of, resolve

NOT_SETTINGS = ("preset", "config", "resume", "dry_run", "quiet", "json")
"""Options that say how to run, not what."""


def parser() -> Parser:
    """The command line: one option per setting, plus how to invoke."""
    made = Parser(
        prog="python -m bench.run",
        description=__doc__,
        epilog="Settings come from defaults, then --preset, then --config, then these options.",
    )
    for setting in options_of():
        switch: dict[str, Any] = {}
        if isinstance(setting.default, bool):
            switch = {"nargs": "?", "const": "on"}
        made.add_argument(
            f"--{setting.name.replace('_', '-')}",
            **switch,
            metavar=setting.metadata["metavar"],
            help=setting.metadata["help"],
            default=argparse.SUPPRESS,
        )
    made.add_argument("--preset", metavar="NAME", help=f"a named bundle of settings: {', '.join(PRESETS)}")
    made.add_argument("--config", type=Path, metavar="FILE.toml", help="settings from a TOML file")
    made.add_argument("--resume", type=Path, metavar="DIR", help="finish what is missing in a run's folder")
    made.add_argument(
        "--dry-run", action="store_true", help="print the plan and its expected time; run nothing"
    )
    made.add_argument("--quiet", action="store_true", help="no progress, no table; only errors")
    made.add_argument("--json", action="store_true", help="the summary as JSON on stdout")
    return made


def settings_of(arguments: Sequence[str]) -> Settings:
    """The settings that a command line asks for. Raises UsageError for what cannot be."""
    options = vars(parser().parse_args(list(arguments)))
    return _resolved(options, _how(options))


def _how(options: dict[str, Any]) -> dict[str, Any]:
    """What says how to run, taken out of `options`."""
    return {name: options.pop(name) for name in NOT_SETTINGS}


def _resolved(options: Mapping[str, Any], how: Mapping[str, Any]) -> Settings:
    return resolve(options, preset=how["preset"], config=how["config"])


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command and of every rank; the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = vars(parser().parse_args(arguments))
    first = True
    try:
        os.environ.update(ranks_environment(os.environ))
        first = os.environ.get("RANK", "0") == "0"
        return _main(arguments, options, first=first)
    except UserCodeError as error:
        if first:
            traceback.print_exception(error.__cause__)
            print(f"bench.run: error: {error}", file=sys.stderr)
        return USAGE_EXIT_CODE
    except UsageError as error:
        if first:
            print(f"bench.run: error: {error}", file=sys.stderr)
        return int(getattr(error, "exit_code", USAGE_EXIT_CODE))
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE


def _main(arguments: list[str], options: dict[str, Any], *, first: bool) -> int:
    began_s = time.monotonic()
    how = _how(options)
    resume: Path | None = how["resume"]
    if resume is not None and (how["preset"] or how["config"] or how["dry_run"]):
        raise UsageError(
            f"--resume takes its settings from {resume}: leave out --preset, --config and --dry-run"
        )
    settings = _resolved(options, how)
    # Kineto, inside torch.profiler, would write of its own starts and stops to stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    # Torch takes seconds to import: a typing mistake is answered before that.
    from bench.run import job  # noqa: PLC0415

    if resume is not None:
        changes = {name: getattr(settings, name) for name in options}
        settings = job.resumed_settings(resume, changes)
        if not changes and job.is_complete(resume):
            if first:
                print(f"bench.run: {resume} is complete: nothing is left to do", file=sys.stderr)
            return 0
    prepared = job.prepare(settings)
    if how["dry_run"]:
        job.print_plan(prepared)
        return 0
    if not is_rank():
        return job.launch_here(prepared, arguments, resume=resume, began_s=began_s)
    from bench.run.rank import Rank  # noqa: PLC0415

    try:
        return Rank(prepared, arguments, resume=resume, quiet=how["quiet"], as_json=how["json"]).run()
    except AgreedError:
        raise
    except UsageError as error:
        # Unlike the checks before, which fail alike everywhere, this may be news from one rank alone.
        print(f"bench.run: error: {error}", file=sys.stderr)
        return int(getattr(error, "exit_code", USAGE_EXIT_CODE))


if __name__ == "__main__":
    leave(main())
