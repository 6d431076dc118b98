"""Measure single, DataParallel and DistributedDataParallel training and report how each scales."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..axes import DDP_AXES, PIPELINE_AXES, STEP_DEFAULTS
from ..cli import Parser, command, guarded, say, speaker, switch
from ..cluster.launch import Launch, launch, ranks_environment
from ..errors import ExitCode, UsageError
from ..resolve import PRESETS, resolve
from ..settings import Settings, options_of
from .workers import running_workers

NOT_SETTINGS = ("preset", "config", "resume", "dry_run", "quiet", "json")
"""Options that say how to run, not what."""

GROUPS = {
    "what to measure": (
        *("modes", "gpus", "share_gpus", "device", "scaling", "sweep", "passes", "trace", "telemetry"),
        *("allreduce_curve", "calibrate"),
    ),
    "model and data": (
        *("arch", "workload", "batch_size", "image_size", "data", "data_workers", "prefetch", "seed"),
    ),
    "how a step is computed": ("precision", *STEP_DEFAULTS, "numa_bind"),
    "DDP settings": (*DDP_AXES, "backend"),
    "pipeline settings": PIPELINE_AXES,
    "how long": (*("margin", "max_time", "rounds", "precision_target", "race", "steps", "case_timeout"),),
    "where to and how shown": ("out", "name"),
}
"""Settings by the title of their group in `--help`, in the order of reading."""


def parser(name: str = "run", description: str | None = __doc__) -> Parser:
    """The command line: one option per setting, plus how to invoke."""
    made = Parser(
        prog=command(name),
        usage="%(prog)s [options]",
        description=description,
        epilog="Settings come from defaults, then --preset, then --config, then these options.",
    )
    settings = {setting.name: setting for setting in options_of()}
    for title, names in GROUPS.items():
        group = made.add_argument_group(title)
        for setting in map(settings.__getitem__, names):
            may_stand_alone: dict[str, Any] = {}
            if setting.metadata["parse"] is switch:
                may_stand_alone = {"nargs": "?", "const": "on"}
            group.add_argument(
                f"--{setting.name.replace('_', '-')}",
                **may_stand_alone,
                metavar=setting.metadata["metavar"],
                help=setting.metadata["help"],
                default=argparse.SUPPRESS,
            )
    # What concerns no measurement goes to the last group, and to the first, which is argparse's own.
    group.add_argument(
        "--resume",
        type=Path,
        metavar="DIR",
        help="finish what is missing in a run's folder; name its --workload again",
    )
    group.add_argument("--quiet", action="store_true", help="no progress, no table; only errors")
    group.add_argument("--json", action="store_true", help="the summary as JSON on stdout")
    made.add_argument("--preset", metavar="NAME", help=f"a named bundle of settings: {', '.join(PRESETS)}")
    made.add_argument("--config", type=Path, metavar="FILE.toml", help="settings from a TOML file")
    made.add_argument(
        "--dry-run", action="store_true", help="print the plan and its expected time; run nothing"
    )
    return made


def settings_of(arguments: Sequence[str], *, decided: Sequence[str] = ()) -> Settings:
    """The settings that a command line asks for.

    Raises UsageError for what cannot be, and for an option of `decided`, which the caller decides itself.
    """
    options = vars(parser().parse_args(list(arguments)))
    for name in decided:
        if options.get(name):
            option = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"remove {option} from the arguments of {speaker('run')}: this command decides on it"
            )
    how = _how(options)
    return resolve(options, preset=how["preset"], config=how["config"])


def _how(options: dict[str, Any]) -> dict[str, Any]:
    """What says how to run, taken out of `options`."""
    return {name: options.pop(name) for name in NOT_SETTINGS}


def main(argv: Sequence[str] | None = None, *, name: str = "run", description: str | None = __doc__) -> int:
    """Entry point of the command, and of every process that torchrun or srun starts; the exit code.

    `name` and `description` are of the command that was typed, where that is a run with a preset of its own.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)

    def run() -> int:
        os.environ.update(ranks_environment(os.environ))
        there = launch(os.environ)
        try:
            options = vars(parser(name, description).parse_args(arguments))
            if name != "run" and (options["resume"] is not None or options["preset"] != name):
                whose = f"are options of {command('run')}, not of {command(name)}"
                raise UsageError(f"--preset and --resume {whose}")
            return _main(options, arguments, there)
        except UsageError as error:
            if there is None or there.rank == 0:
                raise
            return error.exit_code  # all of a launcher's processes refuse alike, and the first one speaks

    return guarded(name, run)


def _main(options: dict[str, Any], arguments: list[str], there: Launch | None) -> int:
    began_s = time.monotonic()
    how = _how(options)
    resume: Path | None = how["resume"]
    if resume is not None and (how["preset"] or how["config"] or how["dry_run"]):
        raise UsageError(
            f"--resume takes its settings from {resume}: leave out --preset, --config and --dry-run"
        )
    settings = resolve(options, preset=how["preset"], config=how["config"])
    # Kineto, inside torch.profiler, would write of its own starts and stops to stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    if there is not None and there.rank > 0:
        from ..worker.main import join  # torch takes seconds

        join(there)
    is_complete = False
    if resume is not None:
        settings, is_complete = _resumed(
            resume, {name: getattr(settings, name) for name in options}, is_launched=there is not None
        )
    if is_complete:
        say(f"{resume} is complete: nothing is left to do")
        if there is not None:  # the other ranks wait to be told
            with running_workers(settings) as workers:
                workers.open()
                workers.end()
        return ExitCode.OK
    if settings.out and there is None:
        from ..results.store import check_claimable

        check_claimable(Path(settings.out))
    with running_workers(settings) as workers:
        # Pandas and scipy take a second, in which the workers import torch.
        from .begin import have_resolved, show_plan
        from .close import How
        from .conductor import Conductor

        if how["dry_run"]:
            show_plan(workers, have_resolved(workers, settings))
            workers.end()
            return ExitCode.OK
        done = How(arguments=arguments, resume=resume, quiet=how["quiet"], as_json=how["json"])
        return Conductor(settings, done, workers, began_s=began_s).run()


def _resumed(folder: Path, changes: Mapping[str, Any], *, is_launched: bool) -> tuple[Settings, bool]:
    """The settings to go on with in a folder, and whether nothing is left to do there."""
    from ..results.journal import read
    from ..results.store import FolderLock
    from . import reopen

    settings = reopen.settings_of(folder, changes)
    complete = not set(changes) & set(reopen.MAY_CHANGE) and reopen.has_nothing_left(read(folder))
    if not complete and not is_launched:
        FolderLock(folder).release()  # in use: said before anything starts
    return settings, complete
