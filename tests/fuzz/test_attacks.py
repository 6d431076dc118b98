"""Bad input for every command: what a stranger's results folder, file or option may hold.

Every attack runs in a fork of this process, so that imports are neither timed nor counted. It is held against
the same command on a good folder: no traceback, no hang, an exit code of the table, no more memory, nothing
written outside what was asked. The scheduled run takes other attacks each time.
"""

import contextlib
import functools
import importlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from commands import ROOT, SMALL
from fuzzing import damaged_table, edited, mutated, options
from hypothesis import settings
from in_process import Reached, first_worker, reached

from ddp_bench.bench.common.errors import ExitCode
from ddp_bench.bench.doctor import main as doctor
from ddp_bench.bench.export.main import main as export
from ddp_bench.bench.gate import sides
from ddp_bench.bench.gate.main import main as gate
from ddp_bench.bench.lab import main as lab
from ddp_bench.bench.lab import network
from ddp_bench.bench.predict.main import main as predict
from ddp_bench.bench.run import close, tune
from ddp_bench.bench.run import main as run
from ddp_bench.report.main import main as report

MOST_S = 10.0
MOST_MIB = 256.0
"""Above what the command takes for a good folder."""

FILES = ("cases.csv", "blocks.csv", "buckets.csv", "allreduce.csv", "manifest.json", "journal.jsonl")
TABLES = FILES[:4]


@dataclass(frozen=True)
class Attack:
    """One bad input: what is done to the folder, the command, and whether nothing but a refusal will do."""

    name: str
    command: str
    arguments: tuple[str, ...]
    spoil: Callable[[Path], object] = lambda _: None
    must_refuse: bool = False


def commands(run, other, new):
    """What reads a folder: `run` is bad, `other` good, `new` is where outputs go."""
    return {
        "report": (str(run), "--out", str(new / "page.html")),
        "markdown": (str(run), "--markdown"),
        "predictions": (
            *(str(other), "--predictions", str(run / "predictions.json"), "--out", str(new / "p.html")),
        ),
        "gate": (str(other), str(run)),
        "predict": (str(run), "--gpus", "2,8", "--validate", str(run)),
        "network": (str(other), "--gpus", "2", "--network", str(run)),
        "networks": (str(other), "--gpus", "2", "--network", f"{run}/networks.toml:own"),
        "resume": ("--resume", str(run), "--quiet"),
        "config": ("--config", f"{run}/settings.toml", "--arch", "resnet20", "--dry-run"),
        "export": (str(run), "--format", "pytest-benchmark"),
        "finish": (str(run),),
    }


READS = {
    **dict.fromkeys(("report", "markdown"), (*TABLES, "manifest.json")),
    "predictions": ("predictions.json",),
    **dict.fromkeys(("gate", "export"), ("cases.csv", "blocks.csv", "manifest.json")),
    "predict": (*TABLES, "manifest.json", "calibration.json"),
    "network": ("calibration.json",),
    "networks": ("networks.toml",),
    "resume": ("manifest.json", "journal.jsonl"),
    "config": ("settings.toml",),
    "finish": ("manifest.json", "journal.jsonl"),
}
"""Files that a command reads of the bad folder."""


def options_attack(command, line):
    return Attack(f"options {line}"[:300], f"options of {command}", line)


def generate(draw, lines, outside):
    """One attack on one of the command lines; `outside` holds what nobody may change."""
    if draw.random() < 0.25:
        command = draw.choice(list(OPTIONS_OF))
        return options_attack(command, options(draw, known_options(command)))
    command = draw.choice(list(lines))
    name = draw.choice(READS[command])
    kind = draw.choice(["odd file", "odd file", "bytes", *[KINDS.get(Path(name).suffix, "bytes")] * 4])
    if kind == "odd file":
        odd = draw.choice(list(ODD))
        # A file that nobody links to, or that is small enough to be read as an empty one, is no attack.
        must = odd in ("pipe", "device", "sparse", "folder", "link", "link to nothing")
        return Attack(
            f"{odd} as {name}", command, lines[command], lambda at: ODD[odd](at / name, outside), must
        )
    seed = draw.randrange(2**32)
    return Attack(
        f"{kind} of {name} ({seed})", command, lines[command], lambda at: damage(at / name, kind, seed)
    )


KINDS = {".csv": "table", ".json": "value", ".jsonl": "line"}
"""What of a file is changed, as its text."""


def damage(path, kind, seed):
    draw = random.Random(seed)
    if kind == "bytes":
        path.write_bytes(mutated(path.read_bytes(), seed))
        return
    text = path.read_text(encoding="utf-8")
    if kind == "table":
        text = damaged_table(text, draw)
    elif kind == "value":
        text = json.dumps(edited(json.loads(text), draw))
    else:
        lines = text.splitlines()
        at = draw.randrange(len(lines))
        lines[at] = json.dumps(edited(json.loads(lines[at]), draw))
        text = "".join(f"{line}\n" for line in lines)
    path.write_text(text, encoding="utf-8", errors="replace")


OPTIONS_OF = {
    **dict.fromkeys(("run", "tune"), "ddp_bench.bench.run.main"),
    **{name: f"ddp_bench.bench.{name}.main" for name in ("gate", "predict", "doctor", "lab", "export")},
    "report": "ddp_bench.report.main",
}
"""The module of each command's parser."""


@functools.cache
def known_options(command):
    if command == "lab":  # its parser is made where it is used
        return ("--hosts", "--rate", "--ranks-per-host", "--quiet")
    module = importlib.import_module(OPTIONS_OF[command])
    make = module._make_parser if command == "report" else module.make_parser
    return tuple(name for action in make()._actions for name in action.option_strings)


def replaced(make):
    def spoil(path, outside):
        path.unlink(missing_ok=True)
        make(path, outside)

    return spoil


def sparse(path, num_bytes):
    with path.open("wb") as file:
        file.truncate(num_bytes)


ODD = {
    "pipe": replaced(lambda path, _: os.mkfifo(path)),
    "link": replaced(lambda path, outside: path.symlink_to(outside / "mine.txt")),
    "link to nothing": replaced(lambda path, outside: path.symlink_to(outside / "new.txt")),
    "device": replaced(lambda path, _: path.symlink_to("/dev/zero")),
    "folder": replaced(lambda path, _: path.mkdir()),
    "sparse": replaced(lambda path, _: sparse(path, 2**36)),
    "zeros": replaced(lambda path, _: sparse(path, 60 * 2**20)),
    "much": replaced(lambda path, _: path.write_bytes(b"0\n" * 2**24)),
    "nested": replaced(lambda path, _: path.write_bytes(b"[" * 2**20)),
    "many": replaced(lambda path, _: path.write_bytes(b"[" + b"{}," * 2**21 + b"{}]")),
    "empty": replaced(lambda path, _: path.touch()),
    "gone": replaced(lambda *_: None),
    "hard link": replaced(lambda path, outside: os.link(outside / "mine.txt", path)),
}


# Running them.


def finish(arguments):
    close.close_broken_run(Path(arguments[0]), "broken off")
    return 0


MAINS = {
    "tune": tune.main,
    "doctor": doctor.main,
    "lab": lab.main,
    "export": export,
    "finish": finish,
    **dict.fromkeys(("run", "resume", "config"), run.main),
    **dict.fromkeys(("report", "markdown", "predictions"), report),
    "gate": gate,
    **dict.fromkeys(("predict", "network", "networks"), predict),
}


def disarm():
    """Take away from the commands of this process what starts processes."""
    for owner, name, new in (
        (run, "hold_workers", first_worker),
        *((owner, name, reached) for owner, name in ((sides, "check_sides"), (doctor, "examine"))),
        (lab, "run", reached),
        *((network, name, lambda *_: None) for name in ("require_support", "become_root")),
    ):
        setattr(owner, name, new)


@dataclass(frozen=True)
class Ended:
    """How a command ended in its fork: memory is its peak above that of this process."""

    code: int
    error: str
    cpu_s: float
    mib: float


def ended(main, attack):
    """Run the attack's command in a fork of this process."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        child = os.fork()
        if child == 0:
            act(main, attack, said.fileno())
        _, status, usage = os.wait4(child, 0)
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        said.seek(0)
        cpu_s, mib = usage.ru_utime + usage.ru_stime, (usage.ru_maxrss - own) / 1024
        return Ended(os.waitstatus_to_exitcode(status), said.read(), cpu_s, mib)


def act(main, attack, stderr):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it ends what hangs
    signal.alarm(round(9 * MOST_S))
    os.dup2(stderr, 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    code = 97
    disarm()
    try:
        code = main(list(attack.arguments))
    except Reached:
        code = ExitCode.OK
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else 1
    except BaseException:  # noqa: BLE001 - what we are looking for
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


def completed(folder):
    """A results folder with everything beside it that a command may read; made to predict from."""
    with (folder / "predictions.json").open("w") as file, contextlib.redirect_stdout(file):
        code = predict([str(folder), "--gpus", "2,4", "--json"])
    assert code == 0
    (folder / "networks.toml").write_text('[own]\nlevel = "inter"\nbusbw_gb_per_s = 4.0\n')
    (folder / "settings.toml").write_text('modes = ["dp", "ddp"]\ngpus = [1, 2]\nrounds = 3\n')
    return folder


def snapshot(folder):
    """Everything below a folder, by path."""
    return {str(path.relative_to(folder)): content(path) for path in folder.rglob("*")}


def judge(attack, found, good_mib):
    """What is wrong with how a command took an attack."""
    wrong = []
    if found.code not in {code.value for code in ExitCode}:
        wrong.append(f"exit code {found.code}")
    if "Traceback" in found.error:
        wrong.append("a traceback")
    if found.cpu_s > MOST_S:
        wrong.append(f"{found.cpu_s:.1f} s of CPU")
    if found.mib > good_mib + MOST_MIB:
        wrong.append(f"{found.mib - good_mib:.0f} MiB above a good input")
    lines = found.error.splitlines()
    told = any("error: " in line or "not comparable: " in line or "no report: " in line for line in lines)
    if found.code in (ExitCode.USAGE, ExitCode.UNDECIDED) and attack.command != "gate" and not told:
        wrong.append("a refusal without a reason")
    if attack.must_refuse and not told:
        wrong.append("accepted")
    if not all(line.isprintable() for line in lines):
        wrong.append("control characters on the terminal")
    return wrong


FIXED = [
    *(("run", line) for line in (("--max-time", "9" * 400, "--dry-run"), ("--out", "a\x00b"))),
    *(("run", line) for line in (("--data", "a\x00b"), ("--workload", "os.path:no such"))),
    *(("run", line) for line in (("--arch", "\x1b[31m"), ("--name", "a\nb"))),
    *((command, line) for command in OPTIONS_OF for line in (("\x1b[31m",), ("a\x00b", "c"))),
    *(
        ("lab", ("--hosts", "2", *how, "--", "python", "-m", "x"))
        for how in (("--rate", "9" * 400 + "gbit"), ("--rate", "1gbit", "--ranks-per-host", "1" * 400))
    ),
]
"""Command lines that fell once."""


def campaign(number, seed, good):
    """Play `number` attacks; what went wrong, and how often each command was attacked."""
    for lazy in ("bench.worker.rank", "report.build", "bench.findings.findings"):
        importlib.import_module(f"ddp_bench.{lazy}")
    draw = random.Random(seed)
    wrong, played = [], Counter()
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        run, other, new, outside = (Path(place) / name for name in ("run", "other", "new", "outside"))
        outside.mkdir()
        (outside / "mine.txt").write_text("mine\n")
        shutil.copytree(good, other)
        before = {path: snapshot(path) for path in (other, outside)}
        usual = {}
        lines = {
            name: line
            for name, line in commands(run, other, new).items()
            if all((other / file).exists() for file in READS[name])
        }
        # First every command with a good folder.
        attacks = [Attack("nothing", name, line) for name, line in lines.items()]
        attacks += [options_attack(*fixed) for fixed in FIXED]
        attacks += [generate(draw, lines, outside) for _ in range(number)]
        for attack in attacks:
            for path in (run, new):
                shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(good, run)
            new.mkdir()
            if attack.command == "finish":
                reopen(run / "journal.jsonl")
            attack.spoil(run)
            measured = {name: content(run / name) for name in FILES}
            found = ended(MAINS[attack.command.removeprefix("options of ")], attack)
            bad = judge(attack, found, usual.setdefault(attack.command, found.mib))
            if attack.name == "nothing" and found.code not in (0, ExitCode.FAILED, ExitCode.UNDECIDED):
                bad.append(f"a good folder gives {found.code}")
            bad += [f"{path.name} was changed" for path, was in before.items() if snapshot(path) != was]
            if len(list(Path(place).iterdir())) != len((run, other, new, outside)):
                bad.append("something was written in the current folder")
            if attack.command not in ("finish", "resume"):
                changed = [name for name, was in measured.items() if content(run / name) != was]
                bad += [f"{name} was written over" for name in changed]
            played[attack.command] += 1
            if bad:
                wrong.append(f"{attack.command}: {attack.name}: {'; '.join(bad)}\n{found.error[-1500:]}")
    return wrong, played


def reopen(journal):
    """As a run leaves it that broke off."""
    lines = journal.read_text(encoding="utf-8").splitlines(keepends=True)
    journal.write_text("".join(line for line in lines if '"end"' not in line), encoding="utf-8")


def content(path):
    """What tells whether a file was changed, without reading pipes or devices."""
    if path.is_symlink():
        return path.readlink()
    if not path.is_file():
        return path.exists()
    return path.read_bytes() if path.stat().st_size < 2**28 else path.stat()


SAMPLE = ROOT / "results" / "samples" / "predictions" / "resnet18-2hosts" / "1gbit"
THOROUGH = not settings.default.derandomize


def test_no_attack_on_a_recorded_run_falls(tmp_path):
    good = completed(Path(shutil.copytree(SAMPLE, tmp_path / "good")))
    wrong, played = campaign(4, 1, good)
    assert wrong == []
    assert len(played) == 17, "of every command"


@pytest.mark.campaign
@pytest.mark.timeout(3600 if THOROUGH else 300)
def test_no_attack_on_a_real_run_falls(tmp_path):
    """That one, small and with all of its passes, is resumed and finished too; it prints its seed."""
    number, seed = (1000, random.SystemRandom().randrange(2**32)) if THOROUGH else (60, 1)
    print("seed", seed)
    more = ("--modes", "ddp", "--gpus", "1,2", "--steps", "1", "--bucket-cap-mb", "default,0.25")
    extra = ("--calibrate", "--allreduce-curve", "--trace", "--quiet", "--rounds", "12")
    out = ("--out", str(tmp_path / "good"))
    subprocess.run([sys.executable, "-m", "bench.run", *SMALL, *more, *extra, *out], cwd=ROOT, check=True)
    wrong, played = campaign(number, seed, completed(tmp_path / "good"))
    assert wrong == []
    assert {"resume", "finish"} <= set(played)
