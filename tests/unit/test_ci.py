"""CI and README: the versions that README says are tested are those of pyproject.toml and the workflows."""

import re
import shlex
import tomllib

import yaml
from commands import ROOT

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


def test_the_documented_jobs_give_the_action_what_it_takes():
    """Hosted and self-hosted: inputs of action.yml, arguments that gate and run read, known verdicts."""
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/ci.md").read_text(encoding="utf-8"), re.DOTALL)
    jobs = [yaml.safe_load(block)["jobs"]["gate"] for block in blocks]
    assert [job["runs-on"] for job in jobs] == ["ubuntu-latest", ["self-hosted", "gpu"]]
    for job in jobs:
        (given,) = (one["with"] for one in job["steps"] if one.get("uses", "").startswith("ddp-bench/"))
        assert set(given) <= set(action["inputs"])
        assert {"regression", "missing"} <= set(given["fail-on"].split())
        assert set(given["fail-on"].split()) <= {"regression", "missing", "undecided", "new"}
        assert gate_parser().parse_args(shlex.split(given["gate"])).max_time is not None
        assert parse_settings(shlex.split(given["run"])).modes == ("ddp",)
