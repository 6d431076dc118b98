"""The step of action.yml: gates the checked-out commit against its base, comments on the pull request.

Its inputs are environment variables, which action.yml explains. Exits with the gate's exit code, or
0 where its verdict is none that the step fails on.
Runs with Python's standard library alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

HEADING = "## ddp-bench gate: "
"""Beginning of its result; the verdict follows."""

CHOSEN = {one: one for one in ("regression", "missing", "undecided")} | {"nothing to compare": "new"}
"""Verdicts of which the input fail-on chooses, by its words; every other but a pass fails the step."""

USAGE, NOT_MEASURED = 2, 4
"""The gate's exit codes for a mistake, and for a side that could not be measured."""

MOST_CHARACTERS = 65_000
"""GitHub refuses a comment of more than 65,536."""


def main() -> int:
    """Gate, leave the outputs of the step, comment; the exit code of the step."""
    fails_on = os.environ.get("FAIL_ON", "regression missing undecided new").replace(",", " ").split()
    if unknown := [one for one in fails_on if one not in CHOSEN.values()]:
        print(f"::error title=ddp-bench gate::fail-on {unknown[0]!r}; choose of {', '.join(CHOSEN.values())}")
        return USAGE
    out = Path(os.environ["OUT"])
    out.mkdir(parents=True, exist_ok=True)
    workload = os.environ.get("WORKLOAD", "")
    of_run = [*(["--workload", workload] if workload else []), *shlex.split(os.environ["RUN"])]
    code, said = run_gate(of_run, out / "sides")
    (out / "gate.md").write_text(said, encoding="utf-8")
    verdict = read_verdict(code, said)
    with Path(os.environ["GITHUB_OUTPUT"]).open("a", encoding="utf-8") as outputs:
        outputs.write(f"verdict={verdict}\nexit-code={code}\n")
    number = read_pull_request()
    if os.environ.get("COMMENT") == "true" and number is not None:
        nothing = f"## ddp-bench gate: {verdict}\n\nNothing was compared; the log of the job says why."
        post_comment(number, make_marker(of_run), said or nothing)
    return 0 if verdict in CHOSEN and CHOSEN[verdict] not in fails_on else code


def read_verdict(code: int, said: str) -> str:
    """Read the first words of the gate's result, up to a comma, a colon or the line's end."""
    if said.startswith(HEADING):
        return re.split("[,:\n]", said.removeprefix(HEADING), maxsplit=1)[0].strip().lower()
    return "not measured" if code == NOT_MEASURED else "error"


def run_gate(of_run: list[str], sides: Path) -> tuple[int, str]:
    """Measure HEAD and its base in turns: the exit code, and the result as Markdown."""
    base = os.environ.get("BASE") or find_first_parent()
    commit = None if base is None else find_commit(base)
    if commit is None:
        wrong = f"the clone lacks the base commit {base or ''}; give actions/checkout fetch-depth: 2"
        print(f"::error title=ddp-bench gate::{wrong}, or name another base")
        return USAGE, ""
    how = ["--threshold", os.environ["THRESHOLD"], "--markdown", "--out", str(sides)]
    whole = ["ddp-bench", "gate", "--interleave", commit, *how, *shlex.split(os.environ.get("GATE", ""))]
    done = subprocess.run([*whole, "--", *of_run], stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    return done.returncode, done.stdout


def find_first_parent() -> str | None:
    """Find the first parent of HEAD, which a shallow clone knows by name only; None where it has none."""
    lines = run_git("cat-file", "-p", "HEAD").splitlines()
    return next((line.removeprefix("parent ") for line in lines if line.startswith("parent ")), None)


def find_commit(reference: str) -> str | None:
    """Find the commit of a reference, fetched from origin where the clone lacks it; None where that fails."""
    try:
        return run_git("rev-parse", "--quiet", "--verify", f"{reference}^{{commit}}")
    except subprocess.CalledProcessError:
        pass
    try:
        run_git("fetch", "--quiet", "--no-tags", "--depth", "1", "origin", reference)
        return run_git("rev-parse", "FETCH_HEAD")
    except subprocess.CalledProcessError:
        return None


def run_git(*arguments: str) -> str:
    """Run git and return what it prints."""
    return subprocess.check_output(["git", *arguments], text=True).strip()


def read_pull_request() -> int | None:
    """Read the number of the pull request that the job runs for; None for other events."""
    event = json.loads(Path(os.environ["GITHUB_EVENT_PATH"]).read_text(encoding="utf-8"))
    number: int | None = event.get("pull_request", {}).get("number")
    return number


def make_marker(of_run: list[str]) -> str:
    """Make the unseen line that the comment begins with: the next gate of this job replaces it.

    Each entry of a matrix and each list of arguments has a comment of its own.
    """
    of_job = [os.environ["GITHUB_WORKFLOW"], os.environ["GITHUB_JOB"], os.environ.get("MATRIX", ""), *of_run]
    return f"<!-- ddp-bench gate {hashlib.sha256(' '.join(of_job).encode()).hexdigest()[:16]} -->"


def post_comment(number: int, first_line: str, text: str) -> None:
    """Write the comment, or write it anew; where that fails a line says so, the job's summary has it all."""
    of_issue = f"repos/{os.environ['GITHUB_REPOSITORY']}/issues"
    body = json.dumps({"body": f"{first_line}\n{text}"[:MOST_CHARACTERS]})
    ours = f".[] | select(.body | startswith({json.dumps(first_line)})) | .id"
    try:
        found = run_gh(f"{of_issue}/{number}/comments?per_page=100", "--paginate", "--jq", ours).split()
        if found:
            run_gh(f"{of_issue}/comments/{found[0]}", "--method", "PATCH", "--input", "-", content=body)
        else:
            run_gh(f"{of_issue}/{number}/comments", "--method", "POST", "--input", "-", content=body)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or f"{error}").strip().splitlines() or ["gh failed"]
        print(f"no comment was written, the job's summary has the result: {said[-1]}", file=sys.stderr)


def run_gh(*arguments: str, content: str | None = None) -> str:
    """Return what GitHub's API answers by gh. Raises OSError without gh, SubprocessError where it refuses."""
    done = subprocess.run(
        ["gh", "api", *arguments], input=content, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
