"""Commands to be pasted, written anew from the one that started a run, in the form that was typed."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, count
from pathlib import Path

from ..common.cli import NextStep, format_command, quote_word, split_command
from ..common.text import escape_controls
from ..machine.manifest import Manifest
from ..machine.watched import Watched
from ..plan.resolve import PRESETS, write_options
from ..plan.settings import format_value


def rewrite_command(argv: Sequence[str], name: str = "", /, **changes: str | None) -> str:
    """Write a command of ours anew, with the launcher, preset and options that were typed.

    Args:
        argv: the words that were typed; what stands behind `--` stays as it is.
        name: of the command that is written, in place of the one typed.
        changes: values of options by name; None leaves one out, also where a preset gives it.
    """
    head, typed = split_command(argv)
    head = _name_command(head, name) if head else head
    end = typed.index("--") if "--" in typed else len(typed)
    options: dict[str, list[str]] = {}
    values: list[str] = []
    for word in typed[:end]:
        if word.startswith("--"):
            option, is_joined, value = word[2:].partition("=")
            values = options[option.replace("-", "_")] = [value] if is_joined else []
        else:
            values.append(word)
    preset = PRESETS.get("".join(options.get("preset", ())), {})
    left_out = {option for option, value in changes.items() if value is None}
    if left_out & {"preset", *preset}:
        usual = {option: [format_value(value)] for option, value in preset.items()}
        if "workload" in options:
            usual.pop("arch", None)
        options = usual | options
        left_out.add("preset")
    options |= {option: [value] for option, value in changes.items() if value is not None}
    kept = ((option, values) for option, values in options.items() if option not in left_out)
    words = (word for option, values in kept for word in (f"--{option.replace('_', '-')}", *values))
    return escape_controls(" ".join(map(quote_word, (*head, *words, *typed[end:]))))


def _name_command(head: Sequence[str], name: str) -> list[str]:
    """Name a command in the form that the user types now; a launcher keeps the form that it starts.

    `head` is what `split_command` returns, `name` that of another command of ours.
    """
    *launcher, last = head
    package, _, typed = last.rpartition(".")
    name = name or typed
    for form in (["python", "-m"] if package else [], ["python", "-m", "ddp_bench"], ["ddp-bench"]):
        if form and launcher[-len(form) :] == form:
            return [*launcher[: -len(form)], *shlex.split(format_command(name))]
    return [*launcher, f"{package}.{name}" if package else name]


def get_typed_words(manifest: Manifest) -> list[str]:
    """Return the words that started a run; where its manifest does not tell them, its settings as options.

    So too where they name a file of settings, which may have changed.
    """
    try:
        words = shlex.split(manifest.command or "")
    except ValueError:  # nothing that a shell would take
        words = []
    head, options = split_command(words)
    if head and not any(word.partition("=")[0] == "--config" for word in options):
        return words
    # Steps that follow from the least time of a block are no option.
    without = ("steps",) if manifest.settings.least_block_s else ()
    return [*(head or shlex.split(format_command("run"))), *write_options(manifest.settings, without)]


def wrap_in_lab(manifest: Manifest, whole: str) -> str:
    """Write a command within the lab that a run was measured in, where it was."""
    if not manifest.link:
        return whole
    ranks = Counter(rank.host for rank in manifest.ranks)
    each = max(ranks.values(), default=1)
    more = ["--ranks-per-host", str(each)] if each > 1 and "torchrun" not in whole else []
    lab = format_command("lab", "--hosts", str(max(len(ranks), 2)), "--rate", manifest.link, *more)
    return f"{lab} -- {whole}"


def write_command(manifest: Manifest, name: str = "", /, **changes: str | None) -> str:
    """Write the command of a run anew, as `rewrite_command` does."""
    once = dict.fromkeys(("resume", "dry_run", "json"))  # of another run they say nothing
    return wrap_in_lab(manifest, rewrite_command(get_typed_words(manifest), name, **{**once, **changes}))


def write_repeat_command(manifest: Manifest) -> str:
    """Write the command that repeats a run, into a folder of its own; empty where it is not told."""
    return write_command(manifest, out=None) if manifest.command else ""


def write_resume_command(manifest: Manifest, folder: Path, **changes: str) -> str:
    """Write the command that goes on with a run; the user names a workload again, as it is code."""
    head, _ = split_command(get_typed_words(manifest))
    workload = manifest.settings.workload
    code = {"workload": workload} if workload else {}
    return wrap_in_lab(manifest, rewrite_command(head, resume=str(folder), **code, **changes))


COMMAND = "COMMAND"
"""Word for the user's command, which no file but the manifest holds."""

COMMAND_MEANING = f" ({COMMAND} starts your training)"


def choose_new_folder(name: str) -> str:
    """Return a folder's name, with the first number from 2 on where a folder of that name exists."""
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    return next(one for one in names if not Path(one).exists())


def write_watch_comparison(name: str, *options: str, baseline: str = "", candidate: str = "") -> str:
    """Write what watches a training, started by COMMAND, into a new folder, and gates it with the other side.

    The side of the gate that is empty is the new folder.
    """
    out = choose_new_folder(name)
    watch = format_command("watch", *options, "--out", out, "--", COMMAND)
    return escape_controls(f"{watch} && {format_command('gate', baseline or out, candidate or out)}")


def name_training(step: NextStep | None, watched: Watched | None) -> NextStep | None:
    """Put the user's command in place of COMMAND, for the user's terminal.

    The words that a launcher gives each of its ranks, a script or `-m`, start no training by themselves.
    """
    words = watched.command if watched else ()
    if step is None or not words or words[0] == "-m" or words[0].endswith(".py"):
        return step
    command = step.command.replace(f" -- {COMMAND} ", f" -- {' '.join(map(quote_word, words))} ", 1)
    return replace(step, why=step.why.replace(COMMAND_MEANING, "", 1), command=command)
