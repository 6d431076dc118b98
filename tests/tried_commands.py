"""Commands of ours, tried as far as their first process."""

import contextlib
import io
import itertools
import shutil
from pathlib import Path

from commands import ROOT
from documented import own
from in_process import Reached, reached

from ddp_bench.__main__ import load_main
from ddp_bench.bench.lab.main import split_arguments
from ddp_bench.bench.results.journal import VERSION, Journal, Plan
from ddp_bench.bench.run.main import parse_settings

SAMPLES = ROOT / "results" / "samples"
SEAMS = (
    "ddp_bench.bench.gate.sides.check_interpreter",
    "ddp_bench.bench.lab.network.require_support",
    "ddp_bench.bench.run.dry_run.show_plan",
    "ddp_bench.bench.watch.launch.start",
)
"""Where commands would start processes, become root, or, with a plan that is made, train for seconds."""


def stop_at_processes(monkeypatch):
    """Have these raise `Reached`; the fixture `in_process` does so for workers. Pages have no drawings."""
    for seam in SEAMS:
        monkeypatch.setattr(seam, reached)
    monkeypatch.setattr("ddp_bench.bench.page.drawing.render_svg", lambda _figure: "")


def put_run(sample, folder):
    """Put a sample into a folder, as a run that broke off at its start."""
    shutil.copytree(SAMPLES / sample, folder)
    Journal(folder).write(Plan(cases=(), version=VERSION))


def tried(words):
    """How far a command of ours has come: its exit code, or None where it would start processes."""
    name, arguments = own(words)
    if ("--device", "cuda") in itertools.pairwise(arguments):
        return parse_settings(arguments) and None  # parsed: there may be no GPU here
    if name in ("run", "tune") and not {"--help", "--help-all", "--resume"} & {*arguments}:
        arguments = [*arguments, "--dry-run"]
    arguments = [str(Path(word).expanduser()) if word.startswith("~/") else word for word in arguments]
    try:
        code = load_main(name)(arguments)
    except SystemExit as end:
        code = end.code
    except Reached:
        code, behind = None, split_arguments(arguments)[1]
        if name == "gate":
            tried(["python", "-m", "bench.run", *behind])
        if name in ("lab", "watch") and own(behind):
            tried(behind)
    assert code in {"gate": (None, 0, 1, 3), "doctor": (0, 1), "run": (None, 0)}.get(name, (None, 0)), words
    return code


def check_names(words):
    """Check a command of ours of which a part is left out: its options are those of its help."""
    name, arguments = own(words)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        load_main(name)(["--help-all"])
    for word in arguments:
        assert not word.startswith("-") or word in said.getvalue().replace("[", " ").split(), words
