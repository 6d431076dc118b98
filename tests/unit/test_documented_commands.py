"""Every command in README, docs and help works: run where it is quick, else as far as its first process."""

import contextlib
import io
import itertools
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from commands import ROOT, finished
from documented import FENCE, FILES, OURS, behind_a_launcher, in_help, in_page, own
from made_project import commit
from PIL import Image
from stand_ins import Patch
from test_watch_gpu import on_gpus
from tried_commands import check_names, put_run, stop_at_processes, tried
from watched_folders import training, watched_run

from ddp_bench.__main__ import load_main

OTHER_TOOLS = {
    r"((python -m |\w+/bin/)?pip|python -m venv) ": "installs: .ci/run runs the README's two",
    r"python -m pytest": "these tests",
    r"python tests/": "tools of contributors, of which the file is there",
    r"(bencher|pydeps|git|sudo) ": "programs of others",
    r"python -c 'import grimp": "a package of others",
    r"python (train\.py|-m mine\.train|-m torch\.distributed\.run) …": "a program of the reader",
    r"(torchrun|srun) (--max-restarts|--kill-on-bad-exit=1)$": "an option of a launcher alone",
}
"""What is not run, by how it begins, and why."""

_, OWN_MODEL = re.findall(r"```python\n(.*?)```", (ROOT / "docs/own-model.md").read_text("utf-8"), re.DOTALL)
NET = "import torch\ndef make(): return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(4))\n"
NET = NET.replace("LazyLinear(4)", "Linear(3 * 32 * 32, 4)")
PROJECT = {
    "net.py": NET,
    "mynet/net.py": NET,
    "mypackage/train.py": f"{NET}model = make\n",
    "train.py": OWN_MODEL,
    "README.md": "",
}
RUNS = {
    **dict.fromkeys(
        ("BASELINE", "CANDIDATE", "OTHER", "BEFORE", "AFTER", "FOLDER", "before", "after"),
        "cpu-lab-1gbit-2hosts",
    ),
    **dict.fromkeys(
        ("results/200mbit", "results/1gbit", "results/4gbit"), "predictions/resnet18-2hosts/1gbit"
    ),
    **dict.fromkeys(("RUN", "TWO"), "predictions/resnet18-2hosts/1gbit"),
    "MINE": "h200-calibrated",
    "results/20260101T120000Z-node0-run": "cpu-lab-1gbit-2hosts",
    "WATCHED": "",
}
"""Runs by the names that pages give them, and which samples stand for them; "" for a watch on GPUs."""

PROGRAMS = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))


def helps():
    """The commands of every help, in the form of a terminal that is wide enough for a line each."""
    found = []
    for name in OURS:
        for option in ("--help", "--help-all"):
            said = io.StringIO()
            with (
                contextlib.redirect_stdout(said),
                contextlib.suppress(SystemExit),
                Patch.context() as m,
            ):
                m.setenv("COLUMNS", "10000")
                load_main(name)([option])
            found += in_help(name, said.getvalue())
    return list(dict.fromkeys(found))


def test_every_line_that_looks_like_a_command_is_collected():
    """Oracle: a search for the names of commands in all blocks, whatever their language."""
    for path in FILES:
        collected = " ".join(" ".join(one.words) for one in in_page(path))
        for language, block in FENCE.findall(path.read_text(encoding="utf-8")):
            lines = [] if language == "python" or path.name == "architecture.md" else block.splitlines()
            for line in lines:
                for name in re.findall(
                    r"(?:python -m (?:bench\.\w+|report)|ddp-bench [a-z]+|torchrun|srun) \S+", line
                ):
                    assert name.replace('"', "") in collected, f"{path.name}: {line}"


def put(name, folder):
    """Put what a page calls by this name into a folder."""
    if RUNS[name]:
        put_run(RUNS[name], folder / name)
    else:
        watched_run(on_gpus(folder / name, training()))


def is_begun(words, name):
    return any(pair == ("--out", name) for pair in itertools.pairwise(words))


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A repository that has everything that pages speak of, beside the runs that they name."""
    folder = tmp_path_factory.mktemp("project")
    commit(folder, PROJECT)
    for name in RUNS:
        put(name, folder)
    for kind in ("cat", "dog"):
        (folder / "imagenet/train" / kind).mkdir(parents=True)
        for red in range(64):
            Image.new("RGB", (8, 8), (red, 0, 0)).save(folder / "imagenet/train" / kind / f"{red}.png")
    (folder / "results/baselines").mkdir()
    load_main("export")([str(folder / "MINE"), "--format", "zip", "--out", str(folder / "THEIRS.zip")])
    with contextlib.redirect_stdout((folder / "p.json").open("w")) as file, file:
        load_main("predict")([str(folder / "RUN"), "--gpus", "8", "--network", "ib-400g", "--json"])
    (folder / "LOG").write_text(json.dumps({"results": [{"size": 8, "in_place": {"bus_bw": 1.5}}]}))
    return folder


@pytest.fixture
def here(project, monkeypatch):
    """In that repository, where commands end before they start processes."""
    monkeypatch.chdir(project)
    monkeypatch.setenv("HOME", str(project))
    monkeypatch.syspath_prepend(project)
    for module in ("net", "mynet", "mynet.net", "mypackage", "mypackage.train", "train"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    stop_at_processes(monkeypatch)
    return project


def how(one):
    """The way in which a command is tried, and a word for it."""
    line = " ".join(one.words).replace("import grimp;", "'import grimp;")
    known = [reason for start, reason in OTHER_TOOLS.items() if re.match(start, f"{line} ")]
    if known or re.match("|".join(OTHER_TOOLS), line):
        return "other", None
    if one.words[0] in ("torchrun", "srun"):
        if own(behind_a_launcher(one.words)) is None:
            return "other", None
        inner = behind_a_launcher(one.words)
        return ("named", inner) if one.is_elided else ("parsed", inner)
    if one.words[0] in ("jq", "pytest-benchmark"):
        return "program", one.words
    named = own(one.words)
    assert named, f"{one.place}: nobody knows how to try: {line}"
    needs_more = named[0] not in ("run", "tune", "doctor") and (
        not named[1] or one.words[0].startswith("bench.")
    )
    return ("named" if one.is_elided or (needs_more and not one.is_fenced) else "tried"), one.words


TRIED_GATES = set()


def is_tried_gate(words):
    """Tell whether a gate of two commits was tried before: it asks git much, and needs no folder of a run."""
    name, arguments = own(words) or ("", ())
    gate = tuple(arguments) if name == "gate" and "--interleave" in arguments else None
    is_known = gate in TRIED_GATES
    TRIED_GATES.update({gate} - {None})
    return is_known


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("place", [*(str(path.relative_to(ROOT)) for path in FILES), "--help"])
def test_every_command_works(place, here, capsys):
    found = helps() if place == "--help" else in_page(ROOT / place)
    begun = [name for name in RUNS if any(is_begun(one.words, name) for one in found)]
    for name in begun:
        shutil.rmtree(name)
    for one in found:
        way, words = how(one)
        if way in ("tried", "parsed") and not is_tried_gate(words):
            tried(words)
        elif way == "named":
            check_names(words)
        elif way == "program" and shutil.which(
            words[0], path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        ):
            program = shutil.which(words[0], path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
            assert finished([program, *words[1:]], here).returncode == 0
        elif one.words[:1] == ("python",) and one.words[1].startswith("tests/"):
            assert (ROOT / one.words[1]).is_file()
        for name in begun:
            if is_begun(one.words, name):
                put(name, here)
        said = capsys.readouterr()
        if one.output:
            Path(one.output).write_text(said.out)
