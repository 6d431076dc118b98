"""One results folder through faults and resumes, and what is asked of it after each."""

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
import psutil
from commands import ROOT

from ddp_bench.bench.machine.manifest import Manifest
from ddp_bench.bench.results.case_columns import IDENTITY
from ddp_bench.bench.results.store import load_run

HERE = Path(__file__).parent
SWEEP = (
    *("--workload", "faulty_workload:model", "--image-size", "8", "--batch-size", "4", "--device", "cpu"),
    *("--modes", "ddp", "--gpus", "1,2", "--bucket-cap-mb", "default", "--rounds", "3", "--steps", "1"),
    *("--gradient-as-bucket-view", "off,on", "--sync-buffers", "on,off"),
)
TWO_DEVICES = (5, 6, 7, 8)
"""Indices of the cases of SWEEP that both ranks train."""

SAME = [column.name for column in IDENTITY] + ["num_buckets", "bucket_bytes", "num_rounds"]
GONE_LIMIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Deed:
    """A fault: `kind-moment`, what is done, and when: at the `nth` block that fits."""

    name: str
    act: str
    argument: object = None
    ranks: tuple[int, ...] = (0,)
    where: str = "forward"
    what: str = ""
    cases: tuple[int, ...] = ()
    nth: int = 1
    after: str = ""
    """A deed of an earlier attempt, without which this one waits."""


def deed(kind, moment, act, argument=None, **more):
    """A deed at a named moment; which block of those that fit is drawn from the name."""
    name = f"{kind}-{moment}"
    when = {
        "before_first_block": {"what": "preparation"},
        "in_timed_block": {"what": "(timed)"},
        "in_no_sync_block": {"what": "(no_sync)"},
        "in_anatomy_block": {"what": "(anatomy)"},
        "between_rounds": {"where": "between"},
        "while_writing": {"where": "write", "what": "round"},
    }[moment]
    nth = 1 if moment == "between_rounds" else random.Random(name).randint(1, 3)
    return Deed(name=name, act=act, argument=argument, **{"nth": nth, **when, **more})


@dataclass(frozen=True)
class Ended:
    """How one start of the command ended, and what was in the folder then."""

    code: int
    error: str
    cases: pd.DataFrame
    logged: frozenset[bytes]
    """The blocks in its log."""
    blocks: pd.DataFrame
    manifest: Manifest


class Campaign:
    """A run in `folder/run` that goes on from start to start."""

    def __init__(self, folder, sweep=SWEEP):
        self.folder, self.sweep = folder, sweep
        self.out, self.markers = folder / "run", folder / "markers"
        self.markers.mkdir(parents=True)
        self.ended = {}
        """By the name of the deed that ended it; the last one is `end`."""

    @property
    def resume(self):
        """The options that go on; the workload, first in every sweep, is named again."""
        return ("--resume", str(self.out), *self.sweep[:2])

    def environment(self, *deeds):
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE / "faults" / "hooks"), str(HERE), str(ROOT)]),
            "FAULTS_OUT": str(self.out),
            "FAULTS_MARKERS": str(self.markers),
            "FAULTS_DEEDS": json.dumps([asdict(d) for d in deeds]),
        }

    def command(self, *more):
        """A new run where there is none yet, else its resume."""
        begun = (self.out / "manifest.json").exists()
        how = self.resume if begun else (*self.sweep, "--out", str(self.out))
        return [sys.executable, "-m", "bench.run", *how, "--quiet", *more]

    def start(self, *deeds, within=(), more=()):
        """`run`, and what is in the folder then."""
        ended = self.look(*self.run(*deeds, within=within, more=more))
        self.ended.update({d.name: ended for d in deeds} or {"end": ended})
        return ended

    def run(self, *deeds, within=(), more=()):
        """Run or resume with `deeds`; the exit code and stderr, when every process has gone."""
        with (self.folder / "stderr.txt").open("w+") as log:
            done = subprocess.run(
                [*within, *self.command(*more)],
                cwd=ROOT,
                env=self.environment(*deeds),
                stdout=subprocess.DEVNULL,
                stderr=log,
                timeout=240,
                check=False,
            )
            self.await_end()
            log.seek(0)
            return done.returncode, log.read()

    def look(self, code, error):
        run = load_run(self.out)
        logged = logged_blocks(self.out / "journal.jsonl")
        return Ended(code, error, run.cases, logged, run.blocks, run.manifest)

    def await_end(self):
        """Wait until no process of this run is left."""
        deadline_s = time.monotonic() + GONE_LIMIT_S
        while left := [p for p in psutil.process_iter() if self._is_ours(p)]:
            assert time.monotonic() < deadline_s, f"still there: {[(p.pid, p.cmdline()) for p in left]}"
            time.sleep(0.05)

    def _is_ours(self, process):
        try:
            return process.environ().get("FAULTS_MARKERS") == str(self.markers)
        except psutil.Error:
            return False

    def kept(self, name):
        """The fault happened, cost nothing that was finished, and the resumed run came to its end."""
        proofs = sorted(self.markers.glob(f"{name}.*.log"))
        assert proofs, f"{name} never happened: {self.ended[name].error}"
        ended, end = self.ended[name], self.ended["end"]
        for proof in proofs:
            before = logged_blocks(proof)
            assert before <= ended.logged
            assert before <= end.logged
        assert end.code == 0, end.error
        assert ended.cases["case_id"].tolist() == end.cases["case_id"].tolist()
        blocks = end.blocks
        assert len(blocks) == sum(len(json.loads(line)["ranks"]) for line in end.logged)
        assert not blocks.duplicated(["case_id", "phase", "round", "rank"]).any()
        return ended

    def check(self, name, undisturbed):
        """As `kept`, and the resumed run is an undisturbed one."""
        pd.testing.assert_frame_equal(self.ended["end"].cases[SAME], undisturbed)
        return self.kept(name)

    def outcome(self, name):
        """Status and reason of the case in which `name` was done, right after that start."""
        marker = next(self.markers.glob(f"{name}.*.json"))
        row = self.ended[name].cases.iloc[json.loads(marker.read_text())["now"]["index"]]
        return str(row["status"]), str(row["reason"])


BLOCK = b'{"event": "block"'


def logged_blocks(path):
    """The blocks in a log, each the whole line that tells of it."""
    lines = path.read_bytes().splitlines(keepends=True)
    return frozenset(line for line in lines if line.startswith(BLOCK) and line.endswith(b"\n"))


def damage(out, seed):
    """Cut a log in the middle of its last block and put zeros there, as a loss of power may; that block."""
    log = out / "journal.jsonl"
    content = log.read_bytes()
    begin = content.rindex(BLOCK)
    end = content.index(b"\n", begin) + 1
    cut = random.Random(seed).randrange(begin + 1, end)
    log.write_bytes(content[:cut] + b"\0" * 100)
    return content[begin:end]


def forget(campaign, gone):
    """Do not ask after a block that was damaged away."""
    for proof in campaign.markers.glob("*.log"):
        proof.write_bytes(proof.read_bytes().replace(gone, b""))
