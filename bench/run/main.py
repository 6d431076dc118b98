"""Time training on one device, under DataParallel and under DistributedDataParallel; say how each scales."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..common.cli import Parser, format_command, get_message_prefix, print_message, run_command
from ..common.errors import ExitCode, NotMeasuredError, UsageError
from ..common.process import raise_on_signals
from ..common.scratch import remove_abandoned
from ..machine.host import raise_open_file_limit
from ..machine.launch import Launch, make_ranks_environment, read_launch
from ..plan.case_settings import DDP_DEFAULTS, MODE_DEFAULTS, STEP_DEFAULTS
from ..plan.resolve import PRESETS, RACE_DEFAULTS, resolve
from ..plan.settings import Settings, format_value, list_options
from .failures import RestartError
from .processes import Processes, guess_device, list_modules, make_worker_variables
from .workers import Workers

RUN_OPTION_NAMES = ("preset", "config", "resume", "dry_run", "quiet", "json")
"""Options that say how to run, not what."""

GROUPS = {
    "what to measure": (
        *("modes", "gpus", "share_gpus", "device", "scaling", "sweep", "passes", "trace", "telemetry"),
        *("allreduce_curve", "calibrate"),
    ),
    "model and data": (
        *("arch", "workload", "batch_size", "precision", "image_size", "data", "data_workers", "seed"),
    ),
    "how a step is computed": (*STEP_DEFAULTS, "numa_bind"),
    "DDP settings": (*DDP_DEFAULTS, "backend"),
    "settings of replicate, FSDP2 and pipelines": tuple(MODE_DEFAULTS)[len(DDP_DEFAULTS) :],
    "how long": (*("margin", "max_time", "rounds", "precision_target", "race", "steps", "case_timeout"),),
    "where to and how shown": ("out", "name"),
}
"""Settings by the title of their group in `--help`, in the order of reading."""


COMMON = ("modes", "gpus", "workload", "batch_size", "precision", "bucket_cap_mb", "max_time", "dry_run")
"""Options that `--help` shows; `--help-all` shows all."""


@dataclass(frozen=True)
class CommandHelp:
    """The texts in which the help of a command that runs differs from that of another."""

    name: str
    """Name of the command; one other than `run` has the preset of its name, and refuses another."""
    description: str
    examples: Sequence[tuple[str, str]]
    meanings: Mapping[str, str] = field(default_factory=dict)
    """Help of options by their names, where it is another than in `run`."""

    @property
    def refused(self) -> tuple[str, ...]:
        """Options of `run` that the command does not take."""
        return () if self.name == "run" else ("preset", "resume")


EXAMPLES = (
    ("--gpus 1,2,4 --dry-run", "the plan and its time"),
    ("--workload net:make", "your model: make() in net.py"),
    ("--preset ddp-paper", "the experiments of the DDP paper"),
)

EXIT_CODES = "0 done, 2 your input or setup, 4 a mode could not be measured."

RUN = CommandHelp("run", __doc__, EXAMPLES)


def make_parser(command: CommandHelp = RUN) -> Parser:
    """Make the parser: an option per setting, plus how to invoke."""
    preset = f"the preset {command.name}" if command.refused else "--preset"
    made = Parser(
        command.name,
        command.description,
        usage="%(prog)s [options]",
        common=COMMON,
        examples=command.examples,
        exit_codes=EXIT_CODES,
        details="An option on|off without a value means on. Every value of a list (,…) is measured. Settings "
        f"come from defaults, then {preset}, then --config, then these options.",
    )

    def add(group: Any, name: str, meaning: str, **how: Any) -> None:
        shown = argparse.SUPPRESS if name in command.refused else command.meanings.get(name, meaning)
        group.add_argument(f"--{name.replace('_', '-')}", help=shown, **how)

    options = {option.name: option for option in list_options()}
    of_preset = PRESETS.get(command.name, {})
    of_preset = {**RACE_DEFAULTS, **of_preset} if of_preset.get("race") else of_preset
    for title, names in GROUPS.items():
        group = made.add_argument_group(title)
        for option in map(options.__getitem__, names):
            metavar, meaning = option.metadata["metavar"], option.metadata["help"]
            default = of_preset.get(option.name, option.metadata["usual"])
            if default is not None:
                usual = format_value(default).replace("%", "%%")
                meaning = f"{meaning.partition(' (default:')[0]} (default: {usual})"
            alone = {"nargs": "?", "const": "on"} if metavar.startswith("on|off") else {}
            add(group, option.name, meaning, metavar=metavar, default=argparse.SUPPRESS, **alone)
    # What concerns no measurement goes to the last group, and to the first, which is argparse's own.
    finish = "finish the run in this folder, with its options; repeat only --workload"
    add(group, "resume", finish, type=Path, metavar="DIR")
    add(group, "quiet", "no progress, no table; only errors and failed cases", action="store_true")
    add(group, "json", "the summary, or the plan of --dry-run, as JSON on stdout", action="store_true")
    add(made, "preset", f"settings by name: {', '.join(PRESETS)}", metavar="NAME")
    add(made, "config", "settings from a TOML file", type=Path, metavar="FILE.toml")
    add(made, "dry_run", "print the plan and its expected time; run nothing", action="store_true")
    return made


def parse_settings(arguments: Sequence[str], *, decided: Sequence[str] = ()) -> Settings:
    """Parse the settings that a command line asks for.

    Raises UsageError for what cannot be, and for an option of `decided`, which the caller decides itself.
    """
    options = vars(make_parser().parse_args(list(arguments)))
    for name in decided:
        if options.get(name):
            option = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"remove {option} from the arguments of {get_message_prefix('run')}: this command "
                f"decides on it"
            )
    how = _split_how(options)
    return resolve(options, preset=how["preset"], config=how["config"])


def _split_how(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options.pop(name) for name in RUN_OPTION_NAMES}


def main(argv: Sequence[str] | None = None, command: CommandHelp = RUN) -> int:
    """Entry point of the command, and of every process that torchrun or srun starts.

    Returns the exit code, which `close.py` decides, or `conductor.py` for a run that broke off.
    `command` is the one that was typed, where that is a run with a preset of its own.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)

    def run() -> int:
        os.environ.update(make_ranks_environment(os.environ))
        there = read_launch(os.environ)
        try:
            options = vars(make_parser(command).parse_args(arguments))
            if command.refused and (options["resume"] is not None or options["preset"] != command.name):
                whose = f"are options of {format_command('run')}, not of {format_command(command.name)}"
                raise UsageError(f"--preset and --resume {whose}")
            return _run_command(options, arguments, there)
        except UsageError as error:
            if there is None or there.rank == 0:
                raise
            return error.exit_code  # all of a launcher's processes refuse alike, and the first one speaks

    return run_command(command.name, run)


def _run_command(options: dict[str, Any], arguments: list[str], there: Launch | None) -> int:
    began_s = time.monotonic()
    how = _split_how(options)
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
        settings, is_complete = _read_resumed(
            resume, {name: settings.stored()[name] for name in options}, is_launched=there is not None
        )
    if is_complete:
        print_message(f"{resume} is complete: nothing is left to do")
        if there is not None:  # the other ranks wait to be told
            with hold_workers(settings) as workers:
                workers.open()
                workers.end()
        return ExitCode.OK
    if settings.out and there is None:
        from ..results.run_folder import check_claimable

        check_claimable(Path(settings.out))
    with raise_on_signals(), hold_workers(settings) as workers:
        # Pandas and scipy take a second, in which the workers import torch.
        from .close import RunOptions
        from .conductor import Conductor
        from .dry_run import show_plan
        from .job import plan_on_workers

        if how["dry_run"]:
            show_plan(workers, plan_on_workers(workers, settings), as_json=how["json"])
            workers.end()
            return ExitCode.OK
        done = RunOptions(arguments=arguments, resume=resume, quiet=how["quiet"], as_json=how["json"])
        return Conductor(settings, done, workers, began_s=began_s).run()


@contextlib.contextmanager
def hold_workers(settings: Settings) -> Iterator[Workers]:
    """Workers for a run of these settings, none of them started; at the end all are gone."""
    there = read_launch(os.environ)
    raise_open_file_limit(there.world_size if there else 0)
    variables = {} if there else make_worker_variables(guess_device(settings))
    remove_abandoned()  # by commands that were killed before; at the end by workers that are killed here
    processes = Processes(variables, list_modules(settings))
    try:
        with contextlib.closing(Workers(processes, there)) as workers:
            yield workers
    except RestartError as lost:  # before a run has begun, which would start them again
        raise NotMeasuredError(str(lost)) from None
    finally:
        remove_abandoned()


def _read_resumed(folder: Path, changes: Mapping[str, Any], *, is_launched: bool) -> tuple[Settings, bool]:
    """Read the settings to go on with in a folder, and whether nothing is left to do there."""
    from ..results.disk import FolderLock
    from ..results.journal import read
    from . import open_folder

    settings = open_folder.read_settings(folder, changes)
    complete = not set(changes) & set(open_folder.RESUME_SETTINGS) and read(folder).is_complete
    if not complete and not is_launched:
        FolderLock(folder).release()  # in use: said before anything starts
    return settings, complete
