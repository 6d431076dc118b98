"""The GitHub Action: the steps of action.yml, run as GitHub would on a project with a slower commit."""

import importlib.util
import json
import os
import re
import shutil
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import yaml
from commands import ROOT, finished
from made_project import NET, OURS, RUN, commit, git

from ddp_bench.bench.common.errors import ExitCode
from ddp_bench.bench.results.store import load_run

ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))


GH = """#!{python}
import json, os, re, sys
place = {comments!r}
api, path, *options = sys.argv[1:]
assert api == "api", sys.argv
if os.environ.get("GH_TOKEN") != "may-write":
    sys.exit("gh: Resource not accessible by integration (HTTP 403)")
found = json.loads(open(place).read())
if "--jq" in options:
    assert path == "repos/me/mynet/issues/7/comments?per_page=100" and "--paginate" in options
    begins = json.loads(re.search(r'startswith\\((".*")\\)', options[options.index("--jq") + 1])[1])
    print(*(one["id"] for one in found if one["body"].startswith(begins)), sep="\\n")
    sys.exit()
method, body = options[options.index("--method") + 1], json.load(sys.stdin)
if method == "POST":
    assert path == "repos/me/mynet/issues/7/comments"
    found.append({{"id": len(found) + 1, **body}})
else:
    assert method == "PATCH"
    found[int(path.removeprefix("repos/me/mynet/issues/comments/")) - 1].update(body)
open(place, "w").write(json.dumps(found))
"""
"""GitHub's command line, as far as it deals with comments; a token other than `may-write` may not."""


class GitHub:
    """A runner's gh and the comments of pull request 7."""

    def __init__(self, folder):
        self._comments, self.bin = folder / "comments.json", folder / "gh-bin"
        self._comments.write_text('[{"id": 1, "body": "Nice!"}]')
        self.bin.mkdir()
        (self.bin / "gh").write_text(GH.format(python=sys.executable, comments=str(self._comments)))
        (self.bin / "gh").chmod(0o755)

    @property
    def comments(self):
        return json.loads(self._comments.read_text())


@pytest.fixture
def github(tmp_path, monkeypatch):
    made = GitHub(tmp_path)
    monkeypatch.setenv("PATH", f"{made.bin}{os.pathsep}{os.environ['PATH']}")
    return made


@pytest.fixture
def python_of_job(tmp_path):
    """Environment variables of a job that has installed all that ddp-bench needs, into a Python of its own.

    Those packages are this environment's, which pip reads and leaves as they are.
    """
    folder = tmp_path / "python"
    venv.create(folder, with_pip=True)
    packages = sysconfig.get_path("purelib", "venv", vars={"base": str(folder), "platbase": str(folder)})
    (Path(packages) / "beside.pth").write_text(sysconfig.get_path("purelib"))
    return {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": None}


def environment_of(folder, action=ROOT):
    """Return what a runner sets for a step of a pull request's job that uses `action`."""
    files = {name: folder / name for name in ("outputs", "summary", "event")}
    files["outputs"].touch()
    files["event"].write_text(json.dumps({"pull_request": {"number": 7}}))
    return {
        "GITHUB_ACTIONS": "true",
        "GITHUB_ACTION_PATH": str(action),
        "GITHUB_REPOSITORY": "me/mynet",
        "GITHUB_WORKFLOW": "ci",
        "GITHUB_JOB": "gate",
        "GITHUB_EVENT_PATH": str(files["event"]),
        "GITHUB_OUTPUT": str(files["outputs"]),
        "GITHUB_STEP_SUMMARY": str(files["summary"]),
    }


def run_action(checkout, temp, environment, matrix="null", **given):
    """Run the action's commands with these inputs, as a runner does, up to one that fails; the last one."""
    inputs = {name: str(one.get("default", "")) for name, one in ACTION["inputs"].items()}
    assert set(given) <= set(inputs)
    inputs |= {"artifact": "ddp-bench-gate-0"} | given  # of github.job and strategy.job-index

    def resolved(text):
        known = {"runner.temp": str(temp), "toJSON(matrix)": matrix}
        known |= {f"inputs.{name}": value for name, value in inputs.items()}
        return re.sub(r"\$\{\{ ([\w.()-]+) \}\}", lambda found: known[found[1]], text)

    *steps, upload = ACTION["runs"]["steps"]
    assert "run" not in upload
    for step in steps:
        done = finished(
            ["bash", "-e", "-o", "pipefail", "-c", resolved(step["run"])],
            checkout / resolved(step.get("working-directory", "")),
            environment | {name: resolved(value) for name, value in step.get("env", {}).items()},
        )
        if done.returncode:
            break
    return done


def copy_ours(folder):
    """Copy this tree as it stands, without what git ignores, as a runner has it of an action."""
    names = git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    for name in filter(None, names):
        if os.path.lexists(ROOT / name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


@pytest.mark.campaign
@pytest.mark.smoke
def test_a_slower_commit_ends_with_1_and_is_named_in_comment_summary_and_annotation(
    tmp_path, github, python_of_job
):
    """In a clone of depth 1, as actions/checkout makes it."""
    project, checkout, temp = (tmp_path / name for name in ("mynet", "checkout", "temp"))
    temp.mkdir()
    others = {f"{name}/__init__.py": "raise SystemExit('not ours')" for name in OURS}
    base = commit(project, {"net.py": NET.format(products=30), **others})
    head = commit(project, {"net.py": NET.format(products=240)})
    git(tmp_path, "clone", "--quiet", "--depth", "1", project.as_uri(), str(checkout))
    environment = environment_of(tmp_path, copy_ours(tmp_path / "action")) | python_of_job
    # Beside other programs a few rounds decide nothing: its steps take less than a millisecond.
    given = {"workload": "net:make", "run": " ".join([*RUN, "--rounds", "40"]), "gate": "--launches 1"}
    done = run_action(checkout, temp, environment, **given | {"token": "may-write"})
    assert done.returncode == ExitCode.FAILED, done.stderr
    outputs = (tmp_path / "outputs").read_text().splitlines()
    assert set(outputs) == {"verdict=regression", "exit-code=1"}
    (annotation,) = (line for line in done.stderr.splitlines() if line.startswith("::"))
    title = "ddp-bench gate%3A regressed"
    assert re.fullmatch(
        rf"::error title={title}::single on 1 CPU core is [\d.]+%25 slower \(.*\)", annotation
    )
    kind, said = github.comments[0], github.comments[1]["body"]
    assert kind["body"] == "Nice!"
    assert f"{head[:7]}" in said
    assert "| regressed |" in said
    assert said.partition("\n")[2].strip() == (tmp_path / "summary").read_text().strip()
    kept = temp / "ddp-bench-gate-0"
    assert (kept / "gate.md").read_text() in said + "\n"
    for side, of_side in {"baseline": base, "candidate": head}.items():
        folder = kept / "sides" / "launch1" / side
        assert load_run(folder).manifest.workload.commit == of_side
        assert of_side in (folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.campaign
@pytest.mark.smoke
@pytest.mark.timeout(600)  # it installs, and measures as often as bench-gate.yml does in a launch
def test_our_own_gate_passes_on_equal_code(tmp_path, github, python_of_job):
    """With the action and the arguments of bench-gate.yml, in a clone of depth 2, as it makes one."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/bench-gate.yml").read_text(encoding="utf-8"))
    *_, gate = workflow["jobs"]["gate"]["steps"]
    assert gate["uses"] == "./"
    ours, checkout, temp = (tmp_path / name for name in ("ours", "checkout", "temp"))
    temp.mkdir()
    base = commit(copy_ours(ours), {})
    head = commit(ours, {"no-code": ""})
    git(tmp_path, "clone", "--quiet", "--depth", "2", ours.as_uri(), str(checkout))
    environment = environment_of(tmp_path, checkout) | python_of_job
    few = {"threshold": "50%", "gate": "--launches 1", "run": f"{gate['with']['run']} --passes none"}
    done = run_action(checkout, temp, environment, **gate["with"] | few | {"token": "may-write"})
    assert done.returncode in {ExitCode.OK, ExitCode.UNDECIDED}, done.stdout + done.stderr
    verdict, code = (tmp_path / "outputs").read_text().splitlines()
    assert verdict in {"verdict=pass", "verdict=undecided"}
    assert code == f"exit-code={done.returncode}"
    summary = (tmp_path / "summary").read_text()
    assert "## ddp-bench gate: " in summary
    assert summary.strip() == github.comments[1]["body"].partition("\n")[2].strip()
    for side, of_side in {"baseline": base, "candidate": head}.items():
        manifest = load_run(temp / "ddp-bench-gate-0" / "sides" / "launch1" / side).manifest
        assert (manifest.git.commit, manifest.git.dirty) == (of_side, False)


@pytest.fixture
def step(github, tmp_path, monkeypatch):  # noqa: ARG001 - its gh
    """The step's program within this process, with these inputs."""
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("of_the_action", ROOT / ".github" / "gate.py")
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    inputs = {"OUT": "out", "RUN": "", "THRESHOLD": "5%", "COMMENT": "true", "GH_TOKEN": "may-write"}
    for name, value in (environment_of(tmp_path) | inputs).items():
        monkeypatch.setenv(name, value)
    return program


def test_a_base_that_cannot_be_had_is_a_mistake_and_replaces_its_comment(step, github, monkeypatch, capsys):
    commit(Path(), {"net.py": "1"})
    for base in ("", "no-such-branch"):
        monkeypatch.setenv("BASE", base)
        assert step.main() == ExitCode.USAGE
        assert "fetch-depth" in capsys.readouterr().out
    assert len(github.comments) == 2


@pytest.mark.parametrize(
    ("code", "said", "fails_on", "ends", "verdict"),
    [
        (3, "Undecided: 1 undecided", "undecided", 3, "undecided"),
        (4, "", "regression", 4, "not measured"),
        (0, "Pass, no regression: DDP changed by +0.1%", "regression", 0, "pass"),
        (1, "Regression: it is slower", "regression", 1, "regression"),
        (1, "regression: it is slower", "undecided", 0, "regression"),
        (1, "missing: a case", "regression undecided", 0, "missing"),
        (1, "missing: a case", "missing", 1, "missing"),
        (3, "undecided: 1 undecided", "regression, missing", 0, "undecided"),
        (3, "not comparable\n\nno case is in both: single", "regression", 3, "not comparable"),
        (
            3,
            "nothing to compare\n\nthe baseline has no net.py",
            "regression missing",
            0,
            "nothing to compare",
        ),
        (3, "nothing to compare\n\nthe baseline has no net.py", "new", 3, "nothing to compare"),
        (0, "Pass, no regression: x", "slower", 2, ""),
    ],
)
def test_the_step_fails_on_the_verdicts_that_are_chosen(
    step, github, monkeypatch, code, said, fails_on, ends, verdict
):
    heading = f"## ddp-bench gate: {said}" if said else ""
    monkeypatch.setattr(step, "run_gate", lambda *_: (code, heading))
    monkeypatch.setenv("FAIL_ON", fails_on)
    assert step.main() == ends
    outputs = Path("outputs").read_text()
    assert outputs == (f"verdict={verdict}\nexit-code={code}\n" if verdict else "")
    assert not verdict or (heading or f"## ddp-bench gate: {verdict}") in github.comments[1]["body"]


def test_a_token_that_may_not_comment_is_no_error(step, github, monkeypatch, capsys):
    """A pull request from a fork has such a token."""
    monkeypatch.setattr(step, "run_gate", lambda *_: (0, ""))
    monkeypatch.setenv("GH_TOKEN", "may-read")
    assert step.main() == 0
    said = capsys.readouterr().err
    assert "no comment was written, the job's summary has the result: gh: Resource not accessible" in said
    assert [one["body"] for one in github.comments] == ["Nice!"]


def test_a_runner_without_gh_has_its_verdict_all_the_same(step, github, monkeypatch, capsys):
    monkeypatch.setattr(step, "run_gate", lambda *_: (1, "## ddp-bench gate: regression: it is slower"))
    (github.bin / "gh").unlink()
    monkeypatch.setenv("PATH", str(github.bin))
    assert step.main() == 1
    assert "no comment was written" in capsys.readouterr().err


def test_entries_of_a_matrix_and_later_runs_have_their_own_comment(step, github, monkeypatch):
    monkeypatch.setattr(step, "run_gate", lambda *_: (0, "## ddp-bench gate: pass: as fast"))
    for entry in ('{"torch": "2.14"}', '{"torch": "2.15"}', '{"torch": "2.14"}'):
        monkeypatch.setenv("MATRIX", entry)
        assert step.main() == 0
    assert len(github.comments) == 1 + 2
    assert len({one["body"].splitlines()[0] for one in github.comments}) == 1 + 2


def test_arguments_keep_their_quotes(step, monkeypatch):
    seen = []
    monkeypatch.setattr(step, "run_gate", lambda of_run, _: seen.append(of_run) or (0, ""))
    monkeypatch.setenv("RUN", "--name 'my net' --gpus 2")
    step.main()
    assert seen == [["--name", "my net", "--gpus", "2"]]


@pytest.mark.parametrize("verdict", ["not comparable", "undecided"])
def test_the_nightly_gate_takes_a_new_base_where_its_own_cannot_be_compared(verdict, tmp_path):
    nightly = yaml.safe_load((ROOT / ".github/workflows/nightly-gate.yml").read_text(encoding="utf-8"))
    *_, gate, decide = nightly["jobs"]["gate"]["steps"]
    assert gate["continue-on-error"] is True
    assert decide["if"] == f"steps.{gate['id']}.outcome == 'failure'"
    assert decide["env"]["VERDICT"] == f"${{{{ steps.{gate['id']}.outputs.verdict }}}}"
    summary = tmp_path / "summary"
    here = {"VERDICT": verdict, "BASE": "1a2b", "GITHUB_SHA": "3c4d", "GITHUB_STEP_SUMMARY": str(summary)}
    done = finished(["bash", "-e", "-c", decide["run"]], env=here)
    assert (done.returncode == 0) == (verdict == "not comparable") == summary.exists()
    assert done.returncode or summary.read_text().startswith("New base taken: 3c4d")


def test_the_action_keeps_what_the_gate_left_and_reads_every_input():
    *_, keep = ACTION["runs"]["steps"]
    assert keep["if"] == "always()"
    assert keep["with"]["path"] == "${{ runner.temp }}/${{ inputs.artifact }}"
    used = set(re.findall(r"inputs\.([\w-]+)", (ROOT / "action.yml").read_text(encoding="utf-8")))
    assert used == set(ACTION["inputs"])
