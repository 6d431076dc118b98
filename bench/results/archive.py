"""An archive of a run, to hand on: a zip of its manifest and tables, in which nobody's names are.

One may be anybody's. It is unpacked by names that are known beforehand, within limits of size.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from ..common.errors import UsageError
from ..common.text import to_json
from ..machine.manifest import MANIFEST
from ..plan.settings import list_options
from .case_columns import FILES
from .columns import BY_PLAN, EQUAL_LAYOUT, NOT_REACHED, Column
from .disk import read_bytes
from .tables import encode_table

if TYPE_CHECKING:
    from .store import RunData

SUFFIX = ".zip"

MAX_UNPACKED_BYTES = 256 * 2**20
"""Bytes of all members together, packed or not: more is no archive of ours, or would fill the disk."""

_PUBLIC_REASONS = (BY_PLAN, EQUAL_LAYOUT, NOT_REACHED)
"""Codes of reasons whose text is ours."""

LEFT_OUT = "left out of the public file"
"""Stands for a reason: it may quote a traceback of the user's code."""

_TEXTS = (
    "run_id interleaved_id preset created_utc utc plan_hash version versions git commit code_sha256 "
    "os cpu_model governors huge_pages cgroup gpus gpu_pairs device gpu bound_cores model timing nccl"
)
_COLUMNS = {column.name for of_file in FILES.values() for column in of_file if column.public}
_PARSED = {option.name for option in list_options() if option.metadata["parse"] is not str}
PUBLIC = {*_TEXTS.split(), *_COLUMNS, *_PARSED}
"""Fields and columns, and records for all in them, of which texts are kept; numbers always are.

What is not named stays private until somebody decides that it names neither a person nor a machine.
"""


def is_archive(path: Path) -> bool:
    """Tell whether a path names an archive, and not a results folder."""
    return path.suffix == SUFFIX and path.is_file()


def name_data_kind(data: str) -> str:
    """Name where batches come from, without the path of a folder, which names a user or a machine."""
    return data if data in ("", "device", "host") else "folder"


def _publish_value(value: Any, name: str, hosts: dict[str, str]) -> Any:
    """Return the public part of the value of a field or column; None for a text that is not public.

    Names of hosts become `host0`, `host1`, …, in the order in which `hosts` gets to know them.
    """
    match value:
        case dict():
            if name == "hosts":
                value = {hosts.setdefault(host, f"host{len(hosts)}"): one for host, one in value.items()}
            kept = {
                key: _publish_value(one, name if name in PUBLIC else key, hosts) for key, one in value.items()
            }
            return {key: one for key, one in kept.items() if one is not None}
        case list():
            return [one for item in value if (one := _publish_value(item, name, hosts)) is not None]
        case str() if name == "host":
            return hosts.setdefault(value, f"host{len(hosts)}")
        case str():
            in_part = {"data": name_data_kind(value), "workload": "WORKLOAD"}
            return in_part.get(name, value if name in PUBLIC else None)
    return value


def _publish_table(frame: pd.DataFrame, columns: Sequence[Column], hosts: dict[str, str]) -> bytes:
    in_part = ("host", "data", "reason")
    names = [c.name for c in columns if c.kind != "text" or c.name in (*PUBLIC, *in_part)]
    kept = {name: frame[name] for name in names}
    if "reason" in kept:
        is_ours = kept["reason_code"].isin(_PUBLIC_REASONS) | kept["reason"].isna()
        kept["reason"] = kept["reason"].where(is_ours, LEFT_OUT)
    for name in {"host", "data"} & {*kept}:
        public = {cell: _publish_value(cell, name, hosts) for cell in kept[name].dropna().unique()}
        kept[name] = kept[name].map(public, na_action="ignore")
    return encode_table(pd.DataFrame(kept, copy=False))


def publish_members(run: RunData) -> dict[str, bytes]:
    """Return the files of a run's folder by name, its manifest first, with what of them is public."""
    hosts: dict[str, str] = {}
    manifest = _publish_value(json.loads(run.manifest.to_json()), "", hosts)
    members = {MANIFEST: f"{to_json(manifest, indent=1)}\n".encode()}
    members |= {n: _publish_table(getattr(run, Path(n).stem), columns, hosts) for n, columns in FILES.items()}
    if sum(map(len, members.values())) > MAX_UNPACKED_BYTES:
        raise UsageError(f"the tables of {run.path} are too large for an archive; hand the folder on")
    return members


def encode_archive(members: Mapping[str, bytes]) -> bytes:
    """Encode an archive of files by name, the same bytes for the same content."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        for name, data in members.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = 0o644 << 16
            # A tenth larger than by default, in a third of the time.
            file.writestr(info, data, zipfile.ZIP_DEFLATED, compresslevel=3)
    return content.getvalue()


@contextlib.contextmanager
def open_run_folder(path: Path) -> Iterator[Path]:
    """Open the results folder that `path` names: itself, or of an archive a temporary one with its files.

    Raises UsageError for an archive that holds anything else than a run, also within.
    """
    if not is_archive(path):
        yield path
        return
    members = read_archive(path)
    # Not by the prefix of `make_scratch_folder`: what has that and nobody holds locked is removed.
    with tempfile.TemporaryDirectory(prefix="unpacked-ddp-bench-") as name:
        for member, content in members.items():
            (Path(name) / member).write_bytes(content)
        try:
            yield Path(name)
        except UsageError as error:
            # The user knows the archive, not the folder.
            error.args = (str(error).replace(name, str(path)),)
            raise


def read_archive(path: Path) -> dict[str, bytes]:
    """Read the members of an archive, by name."""
    content = read_bytes(path, most_bytes=MAX_UNPACKED_BYTES, follow=True)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as file:
            found = {info.filename: info for info in file.infolist()}
            if strange := found.keys() - {MANIFEST, *FILES}:
                raise ValueError(f"it holds {min(strange)!r}")
            if {info.compress_type for info in found.values()} - {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
                raise ValueError("it is packed in another way")
            if (size := sum(info.file_size for info in found.values())) > MAX_UNPACKED_BYTES:
                raise ValueError(f"{size} bytes unpacked are more than {MAX_UNPACKED_BYTES}")
            # Nothing longer than its header says is read.
            return {name: file.read(info) for name, info in found.items()}
    except Exception as error:  # noqa: BLE001 - a wrong offset, name or length: zipfile raises anything
        raise UsageError(f"{path} is no archive of a run, or damaged: {error}; fetch it again") from None
