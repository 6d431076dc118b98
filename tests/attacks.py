"""Bad input for every command, by a generator: what a stranger's results folder, file or option may hold.

Every attack runs in a fork of this process, so that imports are neither timed nor counted. It is held against
the same command on a good folder: no traceback, no hang, an exit code of the table, no more memory, nothing
written outside what was asked. By hand: `python tests/attacks.py --number 400` prints its seed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from commands import ROOT, SMALL

from ddp_bench.bench.errors import ExitCode

MOST_S = 10.0
MOST_MIB = 256.0
"""Above what the command takes for a good folder."""

FILES = ("cases.csv", "blocks.csv", "buckets.csv", "allreduce.csv", "manifest.json", "journal.jsonl")
TABLES, CALIBRATION = FILES[:4], "calibration.json"
NUMBERS = ("0", "-1", "inf", "-inf", "nan", "1e308", "1e-320", "0.5", "9" * 25, "4097", "999999999", "")
WORDS = ("x", "=1+1", "\u202e", "\x1b[31m", "../..", "[]", "True", "a" * 70_000, "1/0", "<script>")
VALUES: tuple[Any, ...] = (
    *(None, 0, -1, 5, 1e308, True, "", "x", [], ["x"], [[]], {}, {"a": {}}, 2**70),
    "\x1b[31m",
    ["9" * 5000],
)

NCCL_LOG = json.dumps(
    {
        "version": 3,
        "nccl_version": 22803,
        "config": {"nthreads": 1, "ngpus": 2, "devices": [{"rank": 0, "device_info": "NVIDIA H100"}]},
        "results": [
            {
                "size": size,
                "type": "float",
                "redop": "sum",
                "in_place": {"time": us, "alg_bw": bw, "bus_bw": bw},
            }
            for size, us, bw in ((2**20, 96.21, 10.9), (2**26, 1391.1, 48.24))
        ],
        "average_bus_bandwidth": {"bandwidth": 7.5},
    }
)


@dataclass(frozen=True)
class Attack:
    """One bad input: what is done to the folder, the command, and whether nothing but a refusal will do."""

    name: str
    command: str
    arguments: tuple[str, ...]
    spoil: Callable[[Path], None]
    must_refuse: bool = False


def commands(run: Path, other: Path, new: Path) -> dict[str, tuple[str, ...]]:
    """What reads a folder: `run` is bad, `other` good, `new` is where outputs go."""
    return {
        "report": (str(run), "--out", str(new / "page.html")),
        "markdown": (str(run), str(other), "--markdown"),
        "predictions": (
            str(other),
            "--predictions",
            str(run / "predictions.json"),
            "--out",
            str(new / "p.html"),
        ),
        "gate": (str(other), str(run)),
        "baseline": ("--save-baseline", str(run), "--baselines", str(new / "baselines")),
        "predict": (str(run), "--gpus", "2,8", "--validate", str(run), "--out", str(new / "p.json")),
        "network": (str(other), "--gpus", "2", "--network", str(run)),
        "log": (str(other), "--gpus", "2", "--network", str(run / "nccl.log")),
        "networks": (str(other), "--gpus", "2", "--network", str(run / "networks.toml")),
        "resume": ("--resume", str(run), "--quiet"),
        "config": ("--config", f"{run}/settings.toml", "--arch", "resnet20", "--dry-run"),
        "finish": (str(run),),
    }


READS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("report", "markdown"), (*TABLES, "manifest.json")),
    "predictions": ("predictions.json",),
    **dict.fromkeys(("gate", "baseline"), ("cases.csv", "blocks.csv", "manifest.json")),
    "predict": (*TABLES, "manifest.json", CALIBRATION),
    "network": (CALIBRATION,),
    "log": ("nccl.log",),
    "networks": ("networks.toml",),
    "resume": ("manifest.json", "journal.jsonl"),
    "config": ("settings.toml",),
    "finish": ("blocks.csv", "allreduce.csv", "manifest.json", "journal.jsonl"),
}
"""Files that a command reads of the bad folder."""


def generate(draw: random.Random, run: Path, other: Path, new: Path, outside: Path) -> Attack:
    """One attack; `outside` holds what nobody may change."""
    lines = commands(run, other, new)
    if draw.random() < 0.15:
        return _options(draw)
    command = draw.choice(list(lines))
    name = draw.choice(READS[command])
    kinds = ["odd file", "odd file", "bytes"]
    kinds += ["value"] * 4 if name.endswith(".json") else ["cell"] * 4 if name.endswith(".csv") else []
    kinds += ["line"] * 4 if name == "journal.jsonl" else []
    kinds += ["output"] if command in ("report", "predict") else []
    kind = draw.choice(kinds)
    seed = draw.randrange(2**32)
    if kind == "output":
        return _onto(draw, command, lines[command], run, outside)
    if kind == "odd file":
        odd = draw.choice(list(ODD))
        # A file that nobody links to, or that is small enough to be read as an empty one, is no attack.
        must = odd in ("pipe", "device", "sparse", "folder", "link", "link to nothing")
        return Attack(
            f"{odd} as {name}", command, lines[command], lambda at: ODD[odd](at / name, outside), must
        )
    act = {"bytes": _flip, "value": _value, "cell": _cell, "line": _line}[kind]
    return Attack(f"{kind} of {name} ({seed})", command, lines[command], lambda at: act(at / name, seed))


def _options(draw: random.Random) -> Attack:
    """A command line of known options and words of harm."""
    command = draw.choice(list(_parsers()))
    known = [n for action in _parsers()[command]._actions for n in action.option_strings]
    words = [*NUMBERS, *WORDS, "a\x00b", "1,2", "90s", "default,25", "\udcff", "--", "", "x" * 300]
    pairs = [(draw.choice(known), draw.choice(words)) for _ in range(draw.randrange(5))]
    line = [word for pair in pairs for word in (pair if draw.random() < 0.8 else pair[:1])]
    return Attack(f"options {line}", f"options of {command}", tuple(line), lambda _: None)


@functools.cache
def _parsers() -> dict[str, argparse.ArgumentParser]:
    from ddp_bench.bench.doctor.main import parser as doctor
    from ddp_bench.bench.gate.main import parser as gate
    from ddp_bench.bench.predict.main import parser as predict
    from ddp_bench.bench.run.main import parser as run
    from ddp_bench.report.main import _parser as report

    parsers = {"run": run, "tune": run, "gate": gate, "predict": predict, "doctor": doctor, "report": report}
    return {name: make() for name, make in parsers.items()}


def _onto(draw: random.Random, command: str, line: tuple[str, ...], run: Path, outside: Path) -> Attack:
    """Output where none may go: over measurements, a folder, or through a link."""
    where = draw.choice([*(run / name for name in FILES), run, outside / "none" / "x", run / "link"])
    index = line.index("--out") + 1
    asked = (*line[:index], str(where), *line[index + 1 :])

    def spoil(at: Path) -> None:
        (at / "link").symlink_to(outside / "mine.txt")

    return Attack(f"--out {where.name}", command, asked, spoil, must_refuse=where.name != "link")


def _replaced(make: Callable[[Path, Path], object]) -> Callable[[Path, Path], None]:
    def spoil(path: Path, outside: Path) -> None:
        path.unlink(missing_ok=True)
        make(path, outside)

    return spoil


def _sparse(path: Path, num_bytes: int) -> None:
    with path.open("wb") as file:
        file.truncate(num_bytes)


ODD: dict[str, Callable[[Path, Path], None]] = {
    "pipe": _replaced(lambda path, _: os.mkfifo(path)),
    "link": _replaced(lambda path, outside: path.symlink_to(outside / "mine.txt")),
    "link to nothing": _replaced(lambda path, outside: path.symlink_to(outside / "new.txt")),
    "device": _replaced(lambda path, _: path.symlink_to("/dev/zero")),
    "folder": _replaced(lambda path, _: path.mkdir()),
    "sparse": _replaced(lambda path, _: _sparse(path, 2**36)),
    "zeros": _replaced(lambda path, _: _sparse(path, 60 * 2**20)),
    "much": _replaced(lambda path, _: path.write_bytes(b"0\n" * 2**24)),
    "nested": _replaced(lambda path, _: path.write_bytes(b"[" * 2**20)),
    "many": _replaced(lambda path, _: path.write_bytes(b"[" + b"{}," * 2**21 + b"{}]")),
    "empty": _replaced(lambda path, _: path.touch()),
    "gone": _replaced(lambda *_: None),
    "hard link": _replaced(lambda path, outside: os.link(outside / "mine.txt", path)),
}


def _flip(path: Path, seed: int) -> None:
    draw = random.Random(seed)
    content = bytearray(path.read_bytes() if path.exists() else b"x")
    for _ in range(draw.choice((1, 3, 30))):
        at = draw.randrange(len(content) + 1)
        content[at : at + draw.choice((0, 1, 100))] = draw.randbytes(draw.choice((0, 1, 5)))
    path.write_bytes(content)


def _cell(path: Path, seed: int) -> None:
    draw = random.Random(seed)
    header, *rows = [line.split(",") for line in path.read_text(encoding="utf-8").splitlines()]
    if not rows:
        return
    row, column = draw.randrange(len(rows)), draw.randrange(len(header))
    if draw.random() < 0.15:
        rows.append(list(rows[row]))
    word = draw.choice(NUMBERS + WORDS)
    for one in rows if draw.random() < 0.2 else rows[row : row + 1]:
        one[min(column, len(one) - 1)] = word
    text = "\n".join(",".join(cells) for cells in [header, *rows])
    path.write_text(f"{text}\n", encoding="utf-8", errors="replace")


def _edited(value: Any, draw: random.Random) -> Any:
    """The value with one thing in it, at any depth, replaced, removed or repeated."""
    if not isinstance(value, dict | list) or not value or draw.random() < 0.1:
        return draw.choice(VALUES)
    if isinstance(value, list):
        at = draw.randrange(len(value))
        how = draw.random()
        if how < 0.1:
            return value[:at] + value[at + 1 :]
        return [*value[:at], *([value[at]] if how < 0.2 else []), _edited(value[at], draw), *value[at + 1 :]]
    key = draw.choice(list(value))
    if draw.random() < 0.1:
        return {k: v for k, v in value.items() if k != key}
    return {**value, key: _edited(value[key], draw)}


def _value(path: Path, seed: int) -> None:
    draw = random.Random(seed)
    path.write_text(json.dumps(_edited(json.loads(path.read_text(encoding="utf-8")), draw)), encoding="utf-8")


def _line(path: Path, seed: int) -> None:
    draw = random.Random(seed)
    lines = path.read_text(encoding="utf-8").splitlines()
    at = draw.randrange(len(lines))
    lines[at] = json.dumps(_edited(json.loads(lines[at]), draw))
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


# Running them.


class _Reached(BaseException):
    """A command accepted its input and would now start processes."""


def _mains() -> dict[str, Callable[[list[str]], int]]:
    """The commands, with what starts processes taken away."""
    from ddp_bench.bench.doctor import main as doctor_command
    from ddp_bench.bench.gate import interleave
    from ddp_bench.bench.gate import main as gate_command
    from ddp_bench.bench.predict.main import main as predict
    from ddp_bench.bench.run import main as run_command
    from ddp_bench.bench.run.close import finish_and_say
    from ddp_bench.bench.tune import main as tune_command
    from ddp_bench.report.main import main as report

    def starts(*_: object, **__: object) -> NoReturn:
        raise _Reached

    from in_process import first_worker

    run_command.running_workers = first_worker(starts)
    interleave.measure_in_turns = starts  # type: ignore[assignment]
    doctor, gate, tune, run = (one.main for one in (doctor_command, gate_command, tune_command, run_command))

    def finish(arguments: list[str]) -> int:
        finish_and_say(Path(arguments[0]), "broken off")
        return 0

    return {
        **dict.fromkeys(("report", "markdown", "predictions"), report),
        **dict.fromkeys(("gate", "baseline"), gate),
        **dict.fromkeys(("predict", "network", "log", "networks"), predict),
        **dict.fromkeys(("resume", "config", "options of run"), run),
        "options of tune": tune,
        "options of gate": gate,
        "options of predict": predict,
        "options of doctor": doctor,
        "options of report": report,
        "finish": finish,
    }


@dataclass(frozen=True)
class Ended:
    """How a command ended in its fork."""

    code: int
    error: str
    seconds: float
    mib: float


def ended(main: Callable[[list[str]], int], arguments: Sequence[str]) -> Ended:
    """Run a command in a fork of this process."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        began_s = time.monotonic()
        child = os.fork()
        if child == 0:
            _act(main, arguments, said.fileno())
        code, mib = _awaited(child, began_s + 3 * MOST_S)
        seconds = time.monotonic() - began_s
        said.seek(0)
        return Ended(code, said.read(), seconds, mib)


def _act(main: Callable[[list[str]], int], arguments: Sequence[str], stderr: int) -> None:
    os.setsid()
    os.dup2(stderr, 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    code = 97
    try:
        code = main(list(arguments))
    except _Reached:
        code = ExitCode.OK
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else 1
    except BaseException:  # noqa: BLE001 - what we are looking for
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        sys.stderr.flush()
        os._exit(code)


def _awaited(child: int, deadline_s: float) -> tuple[int, float]:
    """Exit code and peak memory, MiB, above that of this process; -9 where it had to be killed."""
    while True:
        found, status, usage = os.wait4(child, os.WNOHANG)
        if found:
            own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return os.waitstatus_to_exitcode(status), (usage.ru_maxrss - own) / 1024
        if time.monotonic() > deadline_s:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.005)


def good_run(folder: Path) -> Path:
    """A small real run with everything that a command may read, as long as a busy machine needs."""
    more = ("--modes", "ddp", "--gpus", "1,2", "--steps", "1", "--bucket-cap-mb", "default,0.25")
    extra = ("--calibrate", "--allreduce-curve", "--trace", "--quiet", "--out", str(folder))
    predict = ("bench.predict", str(folder), "--gpus", "2,4", "--out", str(folder / "predictions.json"))
    for num_rounds in ("3", "12", "48"):
        shutil.rmtree(folder, ignore_errors=True)
        run = [sys.executable, "-m", "bench.run", *SMALL, *more, "--rounds", num_rounds, *extra]
        subprocess.run(run, cwd=ROOT, check=True)
        predicted = subprocess.run(
            [sys.executable, "-m", *predict], cwd=ROOT, check=False, stdout=subprocess.DEVNULL
        )
        if predicted.returncode == 0:  # else the calibration's intervals are too wide to predict from
            break
    else:
        raise SystemExit("no calibration of this machine is quiet enough to predict from")
    (folder / "nccl.log").write_text(NCCL_LOG)
    (folder / "networks.toml").write_text('[own]\nlevel = "inter"\nbusbw_gb_per_s = 4.0\n')
    (folder / "settings.toml").write_text('modes = ["dp", "ddp"]\ngpus = [1, 2]\nrounds = 3\n')
    return folder


def snapshot(folder: Path) -> dict[str, bytes]:
    """Everything below a folder, by path."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
        if not path.is_symlink()
    }


def judge(attack: Attack, found: Ended, good_mib: float) -> list[str]:
    """What is wrong with how a command took an attack."""
    wrong = []
    if found.code not in {code.value for code in ExitCode}:
        wrong.append(f"exit code {found.code}")
    if "Traceback" in found.error:
        wrong.append("a traceback")
    if found.seconds > MOST_S:
        wrong.append(f"{found.seconds:.1f} s")
    if found.mib > good_mib + MOST_MIB:
        wrong.append(f"{found.mib - good_mib:.0f} MiB above a good input")
    lines = found.error.splitlines()
    told = any("error: " in line or "not comparable: " in line or "no report: " in line for line in lines)
    if found.code in (ExitCode.USAGE, ExitCode.NOT_COMPARABLE) and attack.command != "gate" and not told:
        wrong.append("a refusal without a reason")
    if attack.must_refuse and not told:
        wrong.append("accepted")
    if not all(line.isprintable() for line in lines):
        wrong.append("control characters on the terminal")
    return wrong


def campaign(number: int, seed: int, good: Path) -> tuple[list[str], Counter[str]]:
    """Play `number` attacks; what went wrong, and how often each command was attacked."""
    draw = random.Random(seed)
    mains = _mains()
    wrong: list[str] = []
    played: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        run, other, new, outside = (Path(place) / name for name in ("run", "other", "new", "outside"))
        outside.mkdir()
        (outside / "mine.txt").write_text("mine\n")
        shutil.copytree(good, other)
        before = {path: snapshot(path) for path in (other, outside)}
        usual: dict[str, float] = {}
        for index in range(-len(commands(run, other, new)), number):
            attack = generate(draw, run, other, new, outside)
            if index < 0:  # first every command with a good folder
                name = list(commands(run, other, new))[index]
                attack = Attack("nothing", name, commands(run, other, new)[name], lambda _: None)
            for path in (run, new):
                shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(good, run)
            new.mkdir()
            if attack.command == "finish":
                _reopen(run / "journal.jsonl")
            attack.spoil(run)
            measured = {name: _content(run / name) for name in FILES}
            found = ended(mains[attack.command], attack.arguments)
            usual.setdefault(attack.command, found.mib)
            bad = judge(attack, found, usual[attack.command])
            if index < 0 and found.code not in (ExitCode.OK, ExitCode.FAILED, ExitCode.NOT_COMPARABLE):
                bad.append(f"a good folder gives {found.code}")
            bad += [f"{path.name} was changed" for path, was in before.items() if snapshot(path) != was]
            if attack.command not in ("finish", "resume"):
                changed = [name for name, content in measured.items() if _content(run / name) != content]
                bad += [f"{name} was written over" for name in changed]
            if index >= 0:
                played[attack.command] += 1
            wrong += (
                [f"{attack.command}: {attack.name}: {'; '.join(bad)}\n{found.error[-1500:]}"] if bad else []
            )
    return wrong, played


def _reopen(journal: Path) -> None:
    """As a run leaves it that broke off."""
    lines = journal.read_text(encoding="utf-8").splitlines(keepends=True)
    journal.write_text("".join(line for line in lines if '"end"' not in line), encoding="utf-8")


def _content(path: Path) -> object:
    """What tells whether a file was changed, without reading pipes or devices."""
    if path.is_symlink():
        return path.readlink()
    if not path.is_file():
        return path.exists()
    return path.read_bytes() if path.stat().st_size < 2**28 else path.stat()


def main() -> int:
    """Play a campaign and say what fell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=400)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--good", type=Path, help="a good folder, made by an earlier campaign or to be made")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as place:
        good = options.good or Path(place) / "good"
        if not good.exists():
            good_run(good)
        wrong, played = campaign(options.number, seed, good)
    print("\n".join(wrong))
    print(f"{len(wrong)} of {options.number} fell; {', '.join(f'{n} {c}' for c, n in played.most_common())}")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
