"""The code that a run measures, by repository, commit and content: ours, and the user's workload."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tomllib
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from ..common.cli import get_version
from ..common.process import INSTALL_FOLDERS, PACKAGE
from ..common.tracebacks import LIBRARY_FOLDERS
from .manifest import FirstHost, Git, Host, Manifest, OwnVersion, RankPlace, WorkloadCode

ROOT = PACKAGE.parent
"""The checkout that this code runs from, or the folder that it is installed in."""

GIT_TIMEOUT_S = 10

GIT_LOCAL = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_PREFIX")
"""Variables by which git tells its hooks of their repository; the one asked about may be another."""


def run_git(
    folder: Path, *arguments: str, timeout_s: float = GIT_TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """Run git in `folder`. Raises OSError or SubprocessError where it cannot be run, or takes too long."""
    return subprocess.run(
        ["git", *arguments],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name not in GIT_LOCAL},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=False,
    )


def ask_git(folder: Path, *arguments: str) -> str | None:
    """Return git's answer in `folder`; None where it fails."""
    try:
        done = run_git(folder, *arguments)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def find_repository(folder: Path) -> Path | None:
    """Find the top folder of the git repository that a folder is in; None outside one."""
    top = ask_git(folder, "rev-parse", "--show-toplevel")
    return Path(top) if top else None


def find_repository_with(file: Path) -> Path | None:
    """Find the top folder of the git repository that has a file; None outside one.

    A file that git ignores, or that is installed in an environment within the repository, is not its own.
    """
    top = find_repository(file.parent)
    if top is None or not is_own(file, top):
        return None
    return top if ask_git(top, "check-ignore", "--quiet", str(file)) is None else None


def is_own(file: Path, top: Path) -> bool:
    """Tell whether a file or folder is below `top`, and not in an environment there."""
    return file.is_relative_to(top) and INSTALL_FOLDERS.isdisjoint(file.relative_to(top).parts)


def is_tracked(path: Path, top: Path) -> bool:
    """Tell whether the repository at `top` has a file, or files in a folder, under version control."""
    return bool(ask_git(top, "ls-files", "--", str(path)))


def describe_commit(folder: Path) -> Git:
    """Commit, and whether tracked files differ from it (`dirty`), as far as git tells."""
    commit = ask_git(folder, "rev-parse", "HEAD")
    changes = ask_git(folder, "status", "--porcelain", "--untracked-files=no")
    return Git(commit=commit, dirty=None if commit is None or changes is None else bool(changes))


def describe_package_commit() -> Git:
    """Commit and cleanliness of the checkout this code runs from; empty where it is installed.

    The folder of installed packages may lie within a repository of the user's.
    """
    return describe_commit(ROOT) if is_tracked(PACKAGE / "__init__.py", ROOT) else Git()


def get_package_version() -> str | None:
    """Return the version of ddp-bench; None where neither a checkout nor installed metadata tells."""
    try:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        if project["name"] == "ddp-bench":
            return str(project["version"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return get_version("ddp-bench")


def describe_run(
    machines: Sequence[FirstHost], ranks: Sequence[RankPlace], versions: Mapping[str, str], **more: Any
) -> Manifest:
    """Describe a run that begins now: machines, the first rank's first, ranks and code.

    `more` are other fields of the manifest.
    """
    return Manifest(
        run_id=uuid.uuid4().hex[:12],
        created_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=dict(versions),
        ddp_bench=OwnVersion(version=get_package_version()),
        git=describe_package_commit(),
        environment=machines[0],
        hosts={str(one.host): msgspec.convert(msgspec.to_builtins(one), Host) for one in machines},
        ranks=tuple(ranks),
        link=ranks[0].link,
        **more,
    )


def describe_workload_code(spec: str) -> WorkloadCode:
    """Describe a loaded workload's code for a manifest.

    `file` is relative to the top of its `repository`, or to where it is imported from; `code_sha256` is of
    all files that this process has imported from there, `files` those and what it has imported from other
    checkouts of the repository.
    """
    name = spec.partition(":")[0]
    told = getattr(sys.modules.get(name), "__file__", None)
    if told is None or not Path(told).is_file():
        return WorkloadCode(spec=spec)
    file = Path(told).resolve()
    top = find_repository_with(file)
    if top is None:
        # Without a repository, the code is what is imported under the same name.
        package, modules = name.partition(".")[0], _map_imported().items()
        found = {Path(path).resolve() for one, path in modules if one.partition(".")[0] == package}
        root = find_import_root(name, file) or file.parent
    else:
        worktrees = ask_git(top, "worktree", "list", "--porcelain") or ""  # also lost ones
        tops = [top, *map(Path, re.findall(r"^worktree (.+)$", worktrees, re.MULTILINE))]
        found, root = list_imported(*tops), top
    files = {one: hash_file(one) for one in sorted({*found, file})}
    state = Git() if top is None else describe_commit(top)
    # Its commit may not have the file.
    untracked = top is not None and state.commit is not None and not is_tracked(file, top)
    return WorkloadCode(
        spec=spec,
        file=file.relative_to(root).as_posix(),
        code_sha256=hash_code(files, root),
        files={str(one): told for one, told in files.items()},
        repository=None if top is None else name_repository(top),
        commit=state.commit,
        dirty=True if untracked else state.dirty,
    )


def list_imported(*tops: Path) -> set[Path]:
    """List the files below `tops` that this process has imported.

    Those of environments there, of Python and of ddp-bench are left out.
    """

    @cache  # torch alone has a thousand modules, in few folders
    def resolve_folder(folder: str) -> Path | None:
        real = Path(folder).resolve()
        is_theirs = any(is_own(real, top) for top in tops)
        return real if is_theirs and LIBRARY_FOLDERS.isdisjoint((real, *real.parents)) else None

    return {
        folder / os.path.basename(told)  # noqa: PTH119 - in each of thousands of modules
        for told in _map_imported().values()
        if (folder := resolve_folder(os.path.dirname(told))) is not None  # noqa: PTH120
    }


def _map_imported() -> dict[str, str]:
    """Return the file of every module of this process that tells one, by module."""
    told = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    return {name: file for name, file in told.items() if isinstance(file, str)}


def find_import_root(module: str, file: Path) -> Path | None:
    """Find the folder on the path that a module was imported from; None where the file has another name."""
    parts = module.split(".")
    if file.stem == "__init__":
        parts.append("__init__")
    # An extension module's name goes on with the interpreter's: net.cpython-311-x86_64-linux-gnu.so
    own = [*file.parts[-len(parts) : -1], file.name.partition(".")[0]]
    return file.parents[len(parts) - 1] if own == parts else None


def hash_file(file: Path) -> str | None:
    """Return the SHA-256 of a file's content; None where it cannot be read."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None


def explain_not_found(module: str, folder: Path) -> str:
    """Say that no such module can be imported from a folder, and what would help."""
    if module.endswith(".py"):
        return f"{module!r} is a file; name the module: {module.removesuffix('.py').replace('/', '.')}"
    return f"no module {module!r} found from {folder}; run where it lies, or install its package"


def hash_code(files: Mapping[Path, str | None], root: Path) -> str:
    """One SHA-256 of the names and the SHA-256 of those of several files that lie below `root`."""
    lines = sorted(
        f"{told}  {os.path.relpath(one, root)}\n" for one, told in files.items() if one.is_relative_to(root)
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def name_repository(top: Path) -> str:
    """Return the name of a repository: its origin's, else its folder's, also in a further worktree of it."""
    url = (ask_git(top, "config", "--get", "remote.origin.url") or "").partition("?")[0].rstrip("/")
    if url:
        return re.split(r"[/:\\]", url)[-1].removesuffix(".git")
    common = ask_git(top, "rev-parse", "--git-common-dir")
    folder = (top / common).resolve() if common else top
    return folder.parent.name if folder.name == ".git" else folder.name.removesuffix(".git")
