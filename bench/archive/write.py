"""Checks a run and writes its archive."""

from __future__ import annotations

import argparse
import getpass
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddp_bench.bench import cli
from ddp_bench.bench.archive.anonymous import (
    aliases,
    clean_manifest,
    clean_table,
    cleaner,
    host_names,
    left_over,
)
from ddp_bench.bench.archive.rules import check, doctor_summary
from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.gate.baseline import fingerprint
from ddp_bench.bench.gate.runs import read_run
from ddp_bench.bench.results.archive import MEMBERS, SUFFIX, opened, packed
from ddp_bench.bench.results.disk import MOST_TABLE_BYTES, read_bytes
from ddp_bench.bench.results.schema import FILES
from ddp_bench.bench.results.store import MANIFEST, load_run, write_output
from ddp_bench.bench.results.tables import readable


def write_archive(options: argparse.Namespace) -> Path:
    """Write what `options` ask for; its path. Raises UsageError where the run breaks a rule."""
    run: Path = options.run
    checked = read_run(run)
    check(checked)
    if options.doctor is None and not options.without_doctor:
        raise UsageError(
            f"name with --doctor what {cli.command('doctor')} --json said before the run, or say "
            "--without-doctor"
        )
    doctor = None if options.doctor is None else doctor_summary(options.doctor, checked.manifest)
    with opened(run) as folder:
        members = _members(folder, checked.manifest, doctor, host_names_kept=options.host_names)
    out = options.out or Path(_name(checked.manifest, members))
    if out.suffix != SUFFIX:
        raise UsageError(f"--out {out} does not end with {SUFFIX}, by which an archive is known; name it so")
    content = packed(members)
    write_output(out, lambda path: path.write_bytes(content), option="--out")
    try:
        read_run(out)
    except UsageError:
        out.unlink()  # what does not read back is no archive
        raise
    return out


def _members(
    folder: Path, manifest: Mapping[str, Any], doctor: Mapping[str, Any] | None, *, host_names_kept: bool
) -> dict[str, bytes]:
    hosts = host_names(manifest, load_run(folder).blocks["host"].dropna().unique())
    names = {name: name for name in hosts} if host_names_kept else aliases(hosts)
    clean = cleaner(names, () if host_names_kept else _users())
    whole = {**clean_manifest(manifest, names, clean), "doctor": doctor}
    members = {MANIFEST: (json.dumps(whole, indent=2) + "\n").encode("utf-8")}
    for name in FILES:
        if (folder / name).is_file():
            with readable(folder / name):
                content = read_bytes(folder / name, most_bytes=MOST_TABLE_BYTES)
                members[name] = clean_table(name, content, names, clean)
    gone = [name for name in hosts if name not in names.values()]
    for content in members.values():
        if (left := left_over(content, gone)) is not None:
            raise UsageError(
                f"the archive would still hold the host name {left!r}, which is a word of its files as well; "
                "give --host-names if it may"
            )
    return members


def _users() -> list[str]:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        return []
    return [] if user == "root" else [user]


def _name(manifest: Mapping[str, Any], members: Mapping[str, bytes]) -> str:
    """Name an archive by kind of machine and run; a run of before there were ids by its content."""
    content = b"".join(members[name] for name in MEMBERS if name in members)
    run_id = str(manifest.get("run_id") or hashlib.sha256(content).hexdigest()[:12])
    return f"{fingerprint(manifest)}-{run_id}{SUFFIX}"
