"""The two sides of an interleaved comparison: whose repository it is, and the baseline's worktree of it.

With a workload of the user's, its repository; both sides then run this ddp-bench. Else ddp-bench's own.
"""

from __future__ import annotations

import contextlib
import os
import pkgutil
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..common.errors import NothingToCompareError, UsageError
from ..common.process import (
    INSTALL_FOLDERS,
    PACKAGE_FOLDERS,
    choose_huge_pages_env,
    hold_signals,
    make_package_command,
    tie_to_parent,
)
from ..common.scratch import get_locks, make_scratch_folder
from ..machine.manifest import Manifest
from ..machine.provenance import (
    ROOT,
    ask_git,
    explain_not_found,
    find_import_root,
    find_repository,
    find_repository_with,
    is_own,
    is_tracked,
    run_git,
)
from ..plan.settings import Settings

WORKING_TREE = "."
"""The reference that means the code as it stands, for the baseline too."""

WORKTREE_MARK = "a checkout of ddp-bench gate"
"""Reason by which our worktrees are locked: no other is ever removed from a repository."""


@dataclass(frozen=True)
class Checkout:
    """Code and interpreter of one side of the comparison."""

    name: str
    folder: Path
    """Folder in which its runs are started."""
    python: str
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of its runs beside this process's."""
    has_own_bench: bool = False
    """True where its runs are of the ddp-bench in `folder`, which may be of another commit than this one."""
    moved: tuple[Path, Path] | None = None
    """The user's repository, and the checkout of it that its runs import from instead."""

    def add_variables(self, more: Mapping[str, str]) -> Checkout:
        """Return the same with further variables for its runs."""
        return replace(self, environment={**self.environment, **more})

    def start(
        self,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        output: Path | None = None,
    ) -> subprocess.Popen[str]:
        """Start `bench.run arguments`, its stderr to `log` and its stdout to `output`, if any.

        Raises UsageError without an interpreter.

        Of a pipe, the end would only come with that of all that the run has started.
        """
        if shutil.which(self.python) is None:
            raise UsageError(
                f"{self.python} cannot be started: it is missing or no program; name a Python interpreter "
                "with --python"
            )
        how = (
            [self.python, "-m", "bench.run"]
            if self.has_own_bench
            else make_package_command("-m", "ddp_bench.bench.run", python=self.python)
        )
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as stderr, (output or Path(os.devnull)).open("w") as stdout:
            return subprocess.Popen(
                tie_to_parent([*how, *arguments]),
                cwd=self.folder,
                env={**os.environ, **choose_huge_pages_env(os.environ), **self.environment, **environment},
                pass_fds=get_locks(),  # where this process is killed, the run still needs its checkout
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                text=True,
            )


@contextlib.contextmanager
def check_out_both(
    reference: str, settings: Settings, python: str | None
) -> Iterator[tuple[Checkout, Checkout]]:
    """Baseline and candidate, as long as the context lasts; `python` is the baseline's interpreter.

    The candidate is the code as it stands, under this interpreter. Raises UsageError where there is no such
    reference, or the workload is in no repository.
    """
    python = python or sys.executable
    if os.sep in python:
        python = str(Path(python).absolute())  # the runs may start in another folder
    here = Path.cwd()
    candidate = Checkout("candidate", here, sys.executable)
    if reference == WORKING_TREE:
        yield Checkout("baseline", here, python), candidate
    elif settings.workload is None:
        with make_worktree(find_package_repository(), reference) as place:
            yield (
                Checkout("baseline", place, python, has_own_bench=True),
                Checkout("candidate", ROOT, sys.executable, has_own_bench=True),
            )
    else:
        module = settings.workload.partition(":")[0]
        file = find_workload_file(module)
        top = find_comparable_repository(settings.workload, file)
        with make_worktree(top, reference) as place:
            if is_tracked(file, top) and not (place / file.relative_to(top)).exists():
                raise NothingToCompareError(
                    f"the baseline {reference} has no {file.relative_to(top)}; --allow-new passes what is new"
                )
            root = find_import_root(module, file)
            roots = () if root is None else (root,)
            path = move_python_path(roots, top, place, python_path=os.environ.get("PYTHONPATH", ""))
            start = move_folder(here, top, place)
            try:
                # One that git does not know is empty in the checkout.
                start.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(
                    f"--interleave: {reference} has no folder {start.relative_to(place)} ({error.strerror}); "
                    f"run it from {top}"
                ) from None
            yield Checkout("baseline", start, python, {"PYTHONPATH": path}, moved=(top, place)), candidate


def find_package_repository() -> Path:
    """Find the repository of ddp-bench, whose commits the built-in models change with.

    Raises UsageError where this code is installed, or is called from within another repository.
    """
    if not find_repository(ROOT) == find_repository(Path.cwd()) == ROOT:
        raise UsageError(
            "--interleave: this folder is not a ddp-bench checkout, so the built-in models have no commits "
            "here; name your model after --, as in -- --workload module:name"
        )
    return ROOT


def find_workload_file(module: str) -> Path:
    """Find the file that a run here would import `module` from, without importing. Raises UsageError."""
    top, *parts = module.split(".")
    folders = [str(Path.cwd()), *sys.path]
    found = next((spec for one in sys.meta_path if (spec := one.find_spec(top, folders))), None)
    for part in parts:
        # The finders above would look for the package in sys.modules.
        within = map(pkgutil.get_importer, (found and found.submodule_search_locations) or ())
        found = next((spec for one in within if one and (spec := one.find_spec(part, None))), None)
    if found is None or found.origin is None or not Path(found.origin).is_file():
        raise UsageError(explain_not_found(module, Path.cwd()))
    return Path(found.origin).resolve()


def find_comparable_repository(workload: str, file: Path) -> Path:
    """Find the repository of a workload's file. Raises UsageError where two commits cannot be compared."""
    if any(file.is_relative_to(folder) for folder in PACKAGE_FOLDERS):
        raise UsageError(f"--workload {workload} is ddp-bench's own; leave it out to compare its commits")
    top = find_repository_with(file)
    if top is not None:
        return top
    if shutil.which("git") is None:
        raise UsageError("--interleave: git is not installed or not on PATH; install it, or add it to PATH")
    if not INSTALL_FOLDERS.isdisjoint(file.parts):
        fix = "is an installed copy: install the project with pip install -e, or run where its source lies"
    else:
        fix = "is in no git repository: put it under version control, or compare the code as it stands with "
        fix += "--interleave ."
    raise UsageError(f"--interleave: {file} {fix}")


def move_folder(folder: Path, top: Path, place: Path) -> Path:
    """Return the same folder in the checkout `place` of the repository at `top`; one elsewhere stays.

    So does one in the checkout, which may be in a folder for temporary files of the repository.
    """
    real = folder.resolve()
    if is_own(real, top) and not real.is_relative_to(place):
        return place / real.relative_to(top)
    return folder.absolute()


def move_python_path(roots: Iterable[Path], top: Path, place: Path, *, python_path: str) -> str:
    """Return a PYTHONPATH that imports from the checkout `place` instead of the repository at `top`.

    `roots`, where the workload is imported from, come first; then `python_path`, the present value, and what
    else on this interpreter's path lies in the repository. What git does not track, such as an environment,
    is in no checkout and stays where it is.
    """
    given = [Path(entry).absolute() for entry in python_path.split(os.pathsep) if entry]
    found = []
    for entry in [*roots, *given, *map(Path, filter(None, sys.path))]:
        moved = move_folder(entry, top, place)
        if moved != entry.absolute() and moved.exists():
            found.append(moved)
        elif entry in given and not is_tracked(entry.resolve(), top):
            # A tracked folder that the other commit lacks has nothing of it.
            found.append(entry)
    return os.pathsep.join(map(str, dict.fromkeys(found)))


def check_loaded(baseline: Manifest, top: Path, place: Path) -> None:
    """Raise UsageError where the baseline has loaded code, by its manifest, that is not its commit's.

    That lies in `place`. What git does not track in `top`, such as a submodule, is the same on both sides.
    """
    files = [Path(file) for file in (baseline.workload.files if baseline.workload else ())]
    outside = [file for file in files if not file.is_relative_to(place)]
    left = [file for file in outside if len(outside) == len(files) or is_tracked(file, top)]
    if left:
        raise UsageError(
            f"--interleave: the baseline loads {left[0]}, which is not of its commit's checkout, so no two "
            "commits would be compared; name its folder in PYTHONPATH, and in nothing else that puts it on "
            "the path"
        )


@contextlib.contextmanager
def make_worktree(top: Path, reference: str) -> Iterator[Path]:
    """Make the repository at `top` at a git reference, in a worktree of its own that is gone afterwards.

    Raises UsageError where git does not know the reference.
    """
    is_shallow = ask_git(top, "rev-parse", "--is-shallow-repository") == "true"
    shallow = ", a shallow clone, which git fetch --unshallow completes" if is_shallow else ""
    unknown = f"git knows no {reference!r} in {top}{shallow}"
    _run_git(top, "rev-parse", "--verify", "--quiet", f"{reference}^{{commit}}", why=unknown)
    with make_scratch_folder() as folder:
        # What a gate that was killed had checked out has just gone, but git still knows of it.
        _forget_lost_worktrees(top)
        place = folder.resolve() / "checkout"
        try:
            # A git that is ended in the middle leaves a worktree that it takes for locked. No hooks of the
            # repository: they may be for people who work in it.
            with hold_signals():
                hooks = ("-c", f"core.hooksPath={os.devnull}")
                add = ("worktree", "add", "--detach", str(place), reference)
                _run_git(top, *hooks, *add, why="git cannot check it out")
                _run_git(
                    top, "worktree", "lock", "--reason", WORKTREE_MARK, str(place), why="git cannot lock it"
                )
            yield place
        finally:
            _remove_worktree(top, place)


def _forget_lost_worktrees(top: Path) -> None:
    """Let git forget the worktrees of gates that were killed: those with our mark whose folder is gone."""
    common = top / (ask_git(top, "rev-parse", "--git-common-dir") or ".git")
    for mark in common.glob("worktrees/*/locked"):
        with contextlib.suppress(OSError, ValueError):
            place = Path(mark.with_name("gitdir").read_text().strip()).parent
            if mark.read_text().strip() == WORKTREE_MARK and not place.exists():
                _remove_worktree(top, place)


def _remove_worktree(top: Path, place: Path) -> None:
    # Twice: one that git was ended in the middle of making is locked.
    with contextlib.suppress(UsageError):
        remove = ("worktree", "remove", "--force", "--force", str(place))
        _run_git(top, *remove, why="git cannot remove its worktree")


def _run_git(top: Path, *arguments: str, why: str) -> str:
    try:
        # A checkout of a large repository, or one that fetches its large files, takes minutes.
        done = run_git(top, *arguments, timeout_s=600)
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(f"--interleave: git cannot be run here: {error}") from None
    if done.returncode != 0:
        said = "".join(f": {line}" for line in done.stderr.strip().splitlines()[-1:])
        raise UsageError(f"--interleave: {why}{said}; name a commit, a branch or a tag")
    return done.stdout
