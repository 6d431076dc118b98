"""A user's model that fails late, for real: what is kept, printed and shown of it, and how the run ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT

from bench.errors import ExitCode
from bench.results.store import failure_file, load_run

NET = """\
import os
import torch


class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(3 * 8 * 8, 4)
        self.steps = 0

    def forward(self, x):
        # Two devices have four images each, single has eight; the proof's reference has four, four times.
        if len(x) == 4 and x.dtype == torch.float32 and torch.is_grad_enabled():
            self.steps += 1
            if self.steps > 4 and os.environ["RANK"] in os.environ["BUG_ON"]:
                late()
        return super().forward(x.flatten(1))


def late():
    raise ValueError("late bug")


class Sometimes(Net):
    def __init__(self):
        super().__init__()
        self.head, self.aux = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        self.steps += x.dtype == torch.float32
        y = torch.nn.Linear.forward(self, x.flatten(1))
        return self.head(y) if self.steps == 5 else self.aux(self.head(y))
"""
AT = f"{next(n for n, line in enumerate(NET.splitlines(), 1) if 'late bug' in line)}, in late"
SWEEP = (
    *("--image-size", "8", "--batch-size", "8", "--scaling", "strong", "--device", "cpu", "--gpus", "2"),
    *("--bucket-cap-mb", "default", "--rounds", "4", "--steps", "1", "--passes", "none"),
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's folder with a model in it."""
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


def measure(project: Path, *arguments: str, bug_on: str = "") -> subprocess.CompletedProcess[str]:
    """`bench.run` in the user's folder; the ranks in `bug_on` have the bug."""
    return subprocess.run(
        [sys.executable, "-m", "bench.run", *arguments],
        cwd=project,
        env={**os.environ, "BUG_ON": bug_on, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_failures_are_kept_through_resumes_until_the_bug_is_gone(project: Path) -> None:
    out = project / "results" / "late"
    done = measure(
        project, "--workload", "net:Net", "--modes", "dp,ddp", *SWEEP, "--out", "results/late", bug_on="01"
    )
    assert done.returncode == ExitCode.NOT_MEASURED == 4, done.stderr[-4000:]
    cases = load_run(out).cases.set_index("mode")
    assert cases["status"].to_dict() == {"single": "ok", "dp": "failed", "ddp": "failed"}
    reason = f"ValueError: late bug (net.py:{AT})"
    names = {mode: failure_file(cases.loc[mode, "case_id"]) for mode in ("dp", "ddp")}
    for mode, name in names.items():
        assert cases.loc[mode, "reason"].removesuffix("; its finished rounds are kept") == reason
        end = f'net.py", line {AT}\n    raise ValueError("late bug")\nValueError: late bug\n'
        kept = (out / name).read_text()
        assert kept.count(end) == 1, "ranks that raised the same are told once"
        assert (
            "ranks 0-1: raised\nTraceback" in kept if mode == "ddp" else "rank 0: raised\nTraceback" in kept
        )
        said = f"{cases.loc[mode, 'case_id']}: failed: {cases.loc[mode, 'reason']}; results/late/{name}"
        assert said in done.stdout.splitlines()
        assert said in done.stderr.splitlines()
    last = done.stderr.splitlines()[-3:]
    assert last[0] == "bench.run: tracebacks of all ranks: results/late/failures"
    assert [
        line.startswith(f"bench.run: error: every {mode} case failed: {reason}")
        for line, mode in zip(last[1:], names, strict=True)
    ] == [True, True]
    assert f'<a href="./{names["ddp"]}">' in (out / "report.html").read_text(encoding="utf-8")

    # One rank of DDP alone: the other waits for it, and is not the cause.
    before = {name: (out / name).read_text() for name in names.values()}
    again = measure(project, "--resume", "results/late", "--workload", "net:Net", "--quiet", bug_on="1")
    assert again.returncode == ExitCode.NOT_MEASURED, again.stderr[-4000:]
    lines = again.stderr.splitlines()
    assert lines[-1].startswith(
        f"bench.run: error: every ddp case failed: ValueError: late bug (net.py:{AT}; rank 1)"
    )
    assert "every dp case" not in again.stderr
    assert (out / names["dp"]).read_text() == before[names["dp"]]
    added = (out / names["ddp"]).read_text().removeprefix(before[names["ddp"]])
    assert "rank 0: ended because another rank failed\n" in added
    assert "rank 1: raised\nTraceback" in added
    assert added.count("ValueError: late bug\n") == 1

    mended = measure(project, "--resume", "results/late", "--workload", "net:Net", "--quiet")
    assert (mended.returncode, mended.stderr) == (0, "")
    assert load_run(out).cases["status"].eq("ok").all()
    assert (out / names["ddp"]).read_text() == before[names["ddp"]] + added


def test_parameters_that_a_step_does_not_use_are_named(project: Path) -> None:
    """Only the fifth step leaves them out: the proof has seen nothing of it."""
    done = measure(project, "--workload", "net:Sometimes", "--modes", "ddp", *SWEEP, "--json")
    assert done.returncode == ExitCode.NOT_MEASURED, done.stderr[-4000:]
    summary = json.loads(done.stdout)
    by_mode = {row["mode"]: row for row in summary["cases"]}
    assert by_mode["single"]["status"] == "ok"
    assert by_mode["ddp"]["reason"].removesuffix("; its finished rounds are kept") == (
        "give --find-unused-parameters on, which searches the graph in every step: a step did not use "
        "aux.weight, aux.bias, whose gradients DDP waits for"
    )
    command = summary["next"]["command"].split()
    assert command[:3] == ["python", "-m", "bench.run"]
    assert "--find-unused-parameters" in command
