"""The two sides of an interleaved comparison: whose repository it is, and the baseline's worktree of it.

With a workload of the user's, its repository; both sides then run this ddp-bench. Else ddp-bench's own.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..cli import speaker
from ..cluster.process import end_all, ended, ended_with_us, huge_pages_env, uninterrupted
from ..cluster.scratch import PREFIX, locks, scratch_folder
from ..errors import UsageError
from ..manifest import Manifest, WorkloadCode
from ..package import OWN_FOLDERS, ROOT, own_command
from ..provenance import INSTALLED, ask_git, import_root, is_own, is_tracked, repository_of, run_git
from ..settings import Settings
from .code import Code
from .importing import Seen, moved_folder, moved_path

LOOK_S = 600.0
"""So long a side may take to import its workload."""

WORKING_TREE = "."
"""The reference that means the code as it stands, for the baseline too."""


@dataclass(frozen=True)
class Side:
    """A process of one side that was started."""

    process: subprocess.Popen[str]
    log: Path
    """Its stderr: of a pipe, the end would only come with that of all that it has started."""

    def last_line(self) -> str:
        """The last line that it said, without the command's name."""
        said = self.log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
        return said[-1].removeprefix(f"{speaker('run')}: error: ")


@dataclass(frozen=True)
class Checkout:
    """Code and interpreter of one side of the comparison."""

    name: str
    folder: Path
    """Where its runs are started."""
    python: str
    environment: Mapping[str, str] = field(default_factory=dict)
    """What its runs have beside this process's variables."""
    has_own_bench: bool = False
    """Whether its runs are of the ddp-bench in `folder`, which may be of another commit than this one."""
    code: WorkloadCode | None = None
    """What its manifests will say of the workload's code, where that was looked at."""

    def start(
        self, module: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> Side:
        """Start a module of ddp-bench, its stderr to `log`. Raises UsageError without an interpreter."""
        if shutil.which(self.python) is None:
            raise UsageError(
                f"{self.python} cannot be started: it is missing or no program; name a Python interpreter "
                "with --python"
            )
        how = (
            [self.python, "-m", module]
            if self.has_own_bench
            else own_command("-m", f"ddp_bench.{module}", python=self.python)
        )
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as stderr:
            process = subprocess.Popen(
                ended_with_us([*how, *arguments]),
                cwd=self.folder,
                env={**os.environ, **huge_pages_env(os.environ), **self.environment, **(environment or {})},
                pass_fds=locks(),  # where this process is killed, the run still needs its checkout
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                text=True,
            )
        return Side(process, log)


@contextlib.contextmanager
def both_checkouts(
    reference: str, settings: Settings, arguments: Sequence[str], python: str | None
) -> Iterator[tuple[Checkout, Checkout]]:
    """Baseline and candidate, as long as the context lasts; `python` is the baseline's interpreter.

    The candidate is the code as it stands, under this interpreter. `arguments` are those of the runs.
    Raises UsageError where there is no such reference, or both sides would load the same file.
    """
    python = python or sys.executable
    if os.sep in python:
        python = str(Path(python).absolute())  # the runs may start in another folder
    here = Path.cwd()
    candidate = Checkout("candidate", here, sys.executable)
    if reference == WORKING_TREE:
        yield Checkout("baseline", here, python), candidate
    elif settings.workload is None:
        with worktree(own_repository(), reference) as place:
            yield (
                Checkout("baseline", place, python, has_own_bench=True),
                Checkout("candidate", ROOT, sys.executable, has_own_bench=True),
            )
    else:
        with scratch_folder() as folder:
            candidates = look(candidate, arguments, folder)
        top = repository_to_compare(settings.workload, candidates)
        with worktree(top, reference) as place:
            roots = [root for item in candidates.modules.items() if (root := import_root(*item)) is not None]
            path = moved_path(roots, top, place, python_path=os.environ.get("PYTHONPATH", ""))
            start = moved_folder(here, top, place)
            start.mkdir(parents=True, exist_ok=True)  # one that git does not know is empty in the checkout
            baseline = Checkout("baseline", start, python, {"PYTHONPATH": path})
            baselines = look(baseline, arguments, place.parent, top)
            refuse_uncompared(baselines, candidates, top, place)
            yield replace(baseline, code=baselines.code), replace(candidate, code=candidates.code)


def planned_code(baseline: Checkout, candidate: Checkout) -> Code:
    """Which code will be compared, as far as that was looked at."""
    ours, theirs = (
        Manifest(workload=side.code, versions={"interpreter": side.python}) for side in (baseline, candidate)
    )
    return Code(ours, theirs, interleaved=True)


def own_repository() -> Path:
    """The repository of ddp-bench, whose commits the built-in models change with.

    Raises UsageError where this code is installed, or is called from within another repository.
    """
    name_one = "name a workload of yours after --, as --workload module:name"
    if repository_of(ROOT) != ROOT:
        raise UsageError(
            "--interleave: the built-in models are ddp-bench's own, which runs from no git checkout here; "
            f"{name_one}"
        )
    current = repository_of(Path.cwd())
    if current != ROOT:
        where = "here" if current is None else f"with the commits of {current}"
        raise UsageError(
            f"--interleave: the built-in models do not change {where}; {name_one}, or "
            f"compare ddp-bench's own commits in {ROOT}"
        )
    return ROOT


def repository_to_compare(workload: str, candidate: Seen) -> Path:
    """The repository with a workload's file, else the current folder's. Raises UsageError without either."""
    if any(candidate.file.resolve().is_relative_to(folder) for folder in OWN_FOLDERS):
        raise UsageError(f"--workload {workload} is ddp-bench's own; leave it out to compare its commits")
    if candidate.top is None:
        raise UsageError(
            f"--interleave: neither {candidate.file} nor the current folder is in a git repository; put the "
            "workload under version control, or compare the code as it stands with --interleave ."
        )
    return candidate.top


def look(side: Checkout, arguments: Sequence[str], folder: Path, top: Path | None = None) -> Seen:
    """Have a side import its workload; `top` is the repository's where it is known.

    Raises UsageError with what it said if it fails.
    """
    out = folder / f"{side.name}.json"
    with uninterrupted():
        asked = [str(out), str(top or ""), *arguments]
        begun = side.start("bench.gate.importing", asked, out.with_suffix(".txt"))
    try:
        (code,) = ended([begun.process], within_s=LOOK_S)
    finally:
        end_all([begun.process], within_s=1.0)
    if code != 0:
        here = repository_of(side.folder)
        lacks = side.name == "baseline" and here is not None and (here / ".gitmodules").exists()
        more = "; its checkout has no files of submodules" if lacks else ""
        raise UsageError(f"the {side.name} side cannot be measured: {begun.last_line()}{more}")
    return Seen.read(out)


def refuse_uncompared(baseline: Seen, candidate: Seen, top: Path, place: Path) -> None:
    """Raise UsageError where a side's workload, or what the baseline's needs, is not its commit's.

    What git does not track there, such as a submodule's files, is in no checkout and the same on both sides.
    """
    outside = [file for file in baseline.modules.values() if not file.is_relative_to(place)]
    files = baseline.file.resolve(), candidate.file.resolve()
    if files[0] == files[1]:
        who, file = "both sides load", files[0]
    elif not is_own(files[1], top):
        who, file = "the candidate loads", files[1]
    elif not files[0].is_relative_to(place):
        who, file = "the baseline loads", files[0]
    elif left := [file for file in outside if is_tracked(file, top)]:
        who, file = "both sides load", left[0]
    else:
        return
    if not INSTALLED.isdisjoint(file.parts):
        fix = "it is an installed copy: install the project with pip install -e, or run where its source lies"
    elif not is_own(file, top):
        fix = f"it lies outside of the repository {top}: put it there, and under version control"
    else:
        fix = "something puts its folder on the path: leave that to PYTHONPATH, or to pip install -e"
    raise UsageError(f"--interleave: {who} {file}, so no two commits would be compared; {fix}")


@contextlib.contextmanager
def worktree(top: Path, reference: str) -> Iterator[Path]:
    """The repository at `top` at a git reference, in a worktree of its own that is gone afterwards.

    Raises UsageError where git does not know the reference.
    """
    is_shallow = ask_git(top, "rev-parse", "--is-shallow-repository") == "true"
    shallow = ", a shallow clone, which git fetch --unshallow completes" if is_shallow else ""
    unknown = f"git knows no {reference!r} in {top}{shallow}"
    _git(top, "rev-parse", "--verify", "--quiet", f"{reference}^{{commit}}", why=unknown)
    with scratch_folder() as folder:
        # What a gate that was killed had checked out has just gone, but git still knows of it.
        _forget_lost_worktrees(top)
        place = folder.resolve() / "checkout"
        try:
            # A git that is ended in the middle leaves a worktree that it takes for locked. No hooks of the
            # repository: they may be for people who work in it.
            with uninterrupted():
                hooks = ("-c", f"core.hooksPath={os.devnull}")
                add = ("worktree", "add", "--detach", str(place), reference)
                _git(top, *hooks, *add, why="git cannot check it out")
            yield place
        finally:
            _remove_worktree(top, place)


def _forget_lost_worktrees(top: Path) -> None:
    """Let git forget the worktrees of gates that were killed; other lost ones are not ours to forget."""
    with contextlib.suppress(UsageError):
        known = _git(top, "worktree", "list", "--porcelain", why="git cannot list its worktrees")
        for place in (Path(path) for path in re.findall(r"^worktree (.+)$", known, re.MULTILINE)):
            if place.parent.name.startswith(PREFIX) and not place.exists():
                _remove_worktree(top, place)


def _remove_worktree(top: Path, place: Path) -> None:
    # Twice: one that git was ended in the middle of making is locked.
    with contextlib.suppress(UsageError):
        remove = ("worktree", "remove", "--force", "--force", str(place))
        _git(top, *remove, why="git cannot remove its worktree")


def _git(top: Path, *arguments: str, why: str) -> str:
    try:
        # A checkout of a large repository, or one that fetches its large files, takes minutes.
        done = run_git(top, *arguments, timeout_s=600)
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(f"--interleave: git cannot be run here: {error}") from None
    if done.returncode != 0:
        said = "".join(f": {line}" for line in done.stderr.strip().splitlines()[-1:])
        raise UsageError(f"--interleave: {why}{said}; name a commit, a branch or a tag")
    return done.stdout
