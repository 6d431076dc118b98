"""CI and README: the versions that README says are tested are those of pyproject.toml and the workflows."""

import re
import shlex
import tomllib

import yaml
from commands import ROOT

from ddp_bench.bench.common.errors import ExitCode
from ddp_bench.bench.gate.main import make_parser as gate_parser
from ddp_bench.bench.run.main import parse_settings

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
README = (ROOT / "README.md").read_text(encoding="utf-8")
(CLAIM,) = re.findall(r"Each change is tested on Linux .*?\.\n?.*?untried\.", README, re.DOTALL)


def pythons():
    """Versions of Python that the project promises, oldest first."""
    found = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    return sorted(found, key=lambda version: int(version.partition(".")[2]))


def test_readme_names_the_lowest_versions_that_the_project_allows():
    (torch,) = (one.removeprefix("torch>=") for one in PROJECT["dependencies"] if one.startswith("torch>="))
    assert PROJECT["requires-python"] == f">={pythons()[0]}"
    assert f"torch {torch} on Python {pythons()[0]}," in CLAIM
    assert re.search(rf"torch 2\.\d+ on Python {re.escape(pythons()[-1])},", CLAIM)


def test_ci_has_every_python_that_its_environments_ask_for():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]
    (versions,) = (
        step["with"]["python-version"].split()
        for step in jobs["test"]["steps"]
        if "python-version" in step.get("with", {})
    )
    assert {pythons()[0], pythons()[-1]} <= set(versions) <= set(pythons())


def test_readme_names_what_is_tested_nightly():
    jobs = yaml.safe_load((ROOT / ".github/workflows/campaign.yml").read_text(encoding="utf-8"))["jobs"]
    matrix = jobs["test"]["strategy"]["matrix"]["include"]
    nightly = re.findall(r"torch==(2\.\d+)\.\*", "\n".join(one.get("torch", "") for one in matrix))
    assert f"nightly with torch {' and '.join(nightly)} on Python " in " ".join(CLAIM.split())
    untried = [one["python"] for one in matrix if one.get("untried")]
    assert not set(untried) & set(pythons())


def read_jobs():
    """The jobs of docs/ci.md: those of GitHub Actions, and those of GitLab."""
    text = (ROOT / "docs/ci.md").read_text(encoding="utf-8")
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    ours = [block["jobs"]["gate"] for block in blocks if "jobs" in block]
    return ours, [job for block in blocks if "jobs" not in block for job in block.values()]


def test_the_documented_jobs_give_the_action_what_it_takes():
    """Hosted and self-hosted: inputs of action.yml, arguments that gate and run read, known verdicts."""
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    used = [(job["runs-on"], one["with"]) for job in read_jobs()[0] for one in job["steps"] if is_ours(one)]
    assert [runner for runner, _ in used] == ["ubuntu-latest", ["self-hosted", "gpu"]]
    for _, given in used:
        assert set(given) <= set(action["inputs"])
        assert {"regression", "missing"} <= set(given["fail-on"].split())
        assert set(given["fail-on"].split()) <= {"regression", "missing", "undecided", "new"}
        assert gate_parser().parse_args(shlex.split(given["gate"])).max_time is not None
        assert parse_settings(shlex.split(given["run"])).modes == ("ddp",)


def is_ours(step):
    return step.get("uses", "").startswith("ddp-bench/")


def read_gate(script):
    """Options of the one gate among the lines of a job, as its own parser reads them."""
    (line,) = (line for line in script if line.startswith("ddp-bench gate "))
    words = shlex.split(line)[2:]
    end = words.index("--")
    assert parse_settings(words[end + 1 :]).modes == ("ddp",)
    return gate_parser().parse_args(words[:end])


def test_documented_jobs_compare_two_environments():
    """The interpreter of the baseline is of an environment that the job makes, with another torch."""
    ours, theirs = read_jobs()
    (job,) = (job for job in ours if not any(map(is_ours, job["steps"])))
    assert job["steps"][-1]["with"]["path"] == "gate.*"
    steps = [step["run"] for step in job["steps"] if "run" in step]
    for script, env in ((steps, job["env"]), (theirs[0]["script"], theirs[0]["variables"])):
        gate = read_gate(script)
        assert (gate.interleave, gate.python) == (".", "old/bin/python")
        assert (str(gate.html), str(gate.junit)) == ("gate.html", "gate.xml")
        makes = {line.split()[3]: line for line in script if line.startswith("python -m venv ")}
        assert env["PIP_EXTRA_INDEX_URL"].endswith("/whl/cpu"), "as the first job, without CUDA"
        torch = [re.search(r"torch==2\.(\d+)", makes[name])[1] for name in ("old", "new")]
        assert int(torch[0]) < int(torch[1])
        assert all(" -e . " in line and f"{name}/bin/pip" in line for name, line in makes.items())


def test_the_documented_gitlab_jobs_keep_what_the_gate_writes_and_lets_noise_pass():
    upgrade, job = read_jobs()[1]
    assert read_gate(job["script"]).interleave == "$CI_MERGE_REQUEST_DIFF_BASE_SHA"
    assert job["variables"]["GIT_DEPTH"] == "0", "of a shallow clone git may not know the baseline"
    for one in (upgrade, job):
        gate = read_gate(one["script"])
        assert one["artifacts"]["reports"]["junit"] == str(gate.junit)
        assert one["artifacts"]["paths"] == [str(gate.html)]
        assert one["allow_failure"]["exit_codes"] == [ExitCode.UNDECIDED]
