"""A user's model that fails late, for real: what is kept, printed and shown of it, and how the run ends."""

import json
import re
from types import SimpleNamespace

import pytest
import warm_workers

from ddp_bench.bench.common.errors import ExitCode
from ddp_bench.bench.results.run_folder import name_failure_file
from ddp_bench.bench.results.store import load_run

NET = """\
import os
import torch


class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(3 * 8 * 8, 4)
        self.steps = [0]  # DP's replicas, which are made for each step, count in the same list

    def forward(self, x):
        # Two devices have four images each, single has eight; the proof's reference has four, four times.
        if len(x) == 4 and x.dtype == torch.float32 and torch.is_grad_enabled():
            self.steps[0] += 1
            if self.steps[0] > 4 and os.environ["RANK"] in os.environ["BUG_ON"]:
                late()
        return super().forward(x.flatten(1))


def late():
    raise ValueError("late bug")


class Sometimes(Net):
    def __init__(self):
        super().__init__()
        self.head, self.aux = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        self.steps[0] += x.dtype == torch.float32
        y = torch.nn.Linear.forward(self, x.flatten(1))
        return self.head(y) if self.steps[0] == 5 else self.aux(self.head(y))
"""
AT = f"{next(n for n, line in enumerate(NET.splitlines(), 1) if 'late bug' in line)}, in late"
SWEEP = (
    *("--image-size", "8", "--batch-size", "8", "--scaling", "strong", "--device", "cpu", "--gpus", "2"),
    *("--bucket-cap-mb", "default", "--rounds", "4", "--steps", "1", "--passes", "none"),
)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A user's folder with a model in it."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "net.py").write_text(NET)
    return folder


def measure(project, *arguments, bug_on="", env=None):
    """`bench.run` in the user's folder; the ranks in `bug_on` have the bug."""
    return warm_workers.measure(arguments, project, {"BUG_ON": bug_on, **(env or {})})


OUT = "results/late"
RESUME = ("--resume", OUT, "--workload", "net:Net", "--quiet")
RAISED = rf"ValueError: late bug \(net.py:{AT}(; rank \d)?\)(; its finished rounds are kept)?"
"""The reason of a case; it has a rank where the other, on a busy machine, did not come within seconds."""


@pytest.fixture(scope="module")
def failed(project):
    """A run whose ranks all have the bug, what it said, and what it kept, by mode, then and now."""
    arguments = ("--workload", "net:Net", "--modes", "dp,ddp", *SWEEP, "--out", OUT)
    in_ci = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(project / "summary.md")}
    done = measure(project, *arguments, bug_on="01", env=in_ci)
    cases = load_run(project / OUT).cases.set_index("mode")

    def kept_now(mode):
        return (project / OUT / name_failure_file(cases.loc[mode, "case_id"])).read_text()

    kept = {mode: kept_now(mode) for mode in ("dp", "ddp")}
    return SimpleNamespace(project=project, done=done, cases=cases, kept=kept, kept_now=kept_now)


def test_in_ci_each_failed_mode_is_annotated_and_the_job_has_a_summary(failed):
    commands = [line for line in failed.done.stderr.splitlines() if line.startswith("::")]
    assert [mode for line in commands for mode in re.findall(r"\b(dp|ddp)\b", line)] == ["dp", "ddp"]
    assert all(line.startswith("::error title=bench.run::") for line in commands)
    summary = (failed.project / "summary.md").read_text(encoding="utf-8")
    assert "late bug" in summary
    assert "<summary>Not measured" in summary


def test_a_failed_case_keeps_its_tracebacks(failed):
    cases = failed.cases
    assert cases["status"].to_dict() == {"single": "ok", "dp": "failed", "ddp": "failed"}
    end = f'net.py", line {AT}\n    raise ValueError("late bug")\nValueError: late bug\n'
    for mode, kept in failed.kept.items():
        assert re.fullmatch(RAISED, cases.loc[mode, "reason"])
        assert kept.count(end) == 1, "ranks that raised the same are told once"
        title, reason, *_ = kept.splitlines()
        assert title.endswith(f"{cases.loc[mode, 'case_id']}: failed in {title.rpartition(' in ')[2]}")
        assert cases.loc[mode, "reason"].startswith(reason)
    assert "\nrank 0: raised\nTraceback" in failed.kept["dp"]
    of_one = "; rank" in cases.loc["ddp", "reason"]
    assert of_one or "\nranks 0-1: raised\nTraceback" in failed.kept["ddp"]


def test_a_mode_that_failed_ends_the_run_with_4_and_is_said_last(failed):
    done, cases = failed.done, failed.cases
    assert done.returncode == ExitCode.NOT_MEASURED == 4, done.stderr[-4000:]
    for mode in failed.kept:
        path = f"{OUT}/{name_failure_file(cases.loc[mode, 'case_id'])}"
        case_id, reason = cases.loc[mode, ["case_id", "reason"]]
        ending = f"failed: {reason}: {path.removeprefix(f'{OUT}/')}: {case_id}"
        assert ending in " ".join(done.stdout.split()), done.stdout
        assert f"{case_id}: failed: {reason}; {path}" in done.stderr.splitlines()
        page = (failed.project / OUT / "report.html").read_text(encoding="utf-8")
        assert f'<a href="./{path.removeprefix(f"{OUT}/")}">' in page
    lines = done.stderr.splitlines()
    why = lines[lines.index(f"bench.run: tracebacks of all ranks: {OUT}/failures") + 1 :]
    reasons = cases.loc[["dp", "ddp"], "reason"]
    assert [line.partition(" failed: ")[2] for line in why] == list(dict.fromkeys(reasons)), done.stderr[
        -2000:
    ]


def test_a_quiet_run_says_which_case_failed_where_others_of_its_mode_are_measured(project):
    arguments = ["--workload", "net:Net", "--modes", "ddp", *SWEEP, "--quiet", "--out", "results/quiet"]
    arguments[arguments.index("--gpus") + 1] = "1,2"
    done = measure(project, *arguments, bug_on="1")
    cases = load_run(project / "results/quiet").cases
    ((case_id, reason),) = cases.loc[cases["status"] == "failed", ["case_id", "reason"]].to_numpy().tolist()
    assert "late bug" in reason
    kept = f"results/quiet/{name_failure_file(case_id)}"
    assert done.stderr == f"{case_id}: failed: {reason}; {kept}\n"
    assert (done.returncode, done.stdout) == (ExitCode.OK, "")


@pytest.mark.campaign
def test_a_rank_that_waits_for_one_that_raised_is_not_the_cause(failed):
    """On `--resume` only rank 1 has the bug, which DP does not use: DP is measured, DDP fails once more."""
    again = measure(failed.project, *RESUME, bug_on="1")
    assert again.returncode == ExitCode.NOT_MEASURED, again.stderr[-4000:]
    last = again.stderr.splitlines()[-1]
    assert last.startswith(
        f"bench.run: error: every case of ddp failed: ValueError: late bug (net.py:{AT}; rank 1)"
    )
    assert "every case of dp" not in again.stderr
    assert failed.kept_now("dp") == failed.kept["dp"]
    assert failed.kept_now("ddp").startswith(failed.kept["ddp"])
    added = failed.kept_now("ddp").removeprefix(failed.kept["ddp"])
    assert "\nrank 0: ended because another rank failed\n" in added
    assert "\nrank 1: raised\nTraceback" in added
    assert added.count("ValueError: late bug\n") == 1


def test_a_mended_run_goes_on_and_what_was_kept_outlasts_the_bug(failed):
    before = {mode: failed.kept_now(mode) for mode in failed.kept}
    mended = measure(failed.project, *RESUME, "--rounds", "5")
    assert mended.returncode == 0, mended.stderr
    cases = load_run(failed.project / OUT).cases
    assert cases["status"].eq("ok").all()
    assert cases["num_rounds"].tolist() == [5, 5, 5]
    assert {mode: failed.kept_now(mode) for mode in failed.kept} == before


@pytest.mark.campaign
def test_parameters_that_a_step_does_not_use_are_named(project):
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


@pytest.mark.campaign
def test_a_run_goes_on_with_no_other_code_than_it_began_with(failed):
    code, kept = failed.project / "net.py", failed.project / OUT
    before = {
        file.name: file.read_bytes() for file in kept.iterdir() if file.is_file() and file.name != ".lock"
    }
    code.write_text(f"{NET}\n# another version\n")
    try:
        refused = measure(failed.project, *RESUME, "--rounds", "6")
    finally:
        code.write_text(NET)
    assert refused.returncode == ExitCode.UNDECIDED == 3, refused.stderr[-4000:]
    (line,) = [line for line in refused.stderr.splitlines() if line.startswith("bench.run: ")]
    assert line.startswith("bench.run: not comparable: ")
    assert line.endswith(
        "the workload's code has changed since the run began; start anew, or go back to the code as it was"
    )
    assert {name: (kept / name).read_bytes() for name in before} == before
