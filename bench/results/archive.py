"""The file of an archived run: a zip of its manifest and tables, the same bytes for the same content.

An archive may be anyone's. It is unpacked by names that are known beforehand, within limits of size.
"""

from __future__ import annotations

import contextlib
import io
import stat
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..errors import UsageError
from .disk import read_bytes
from .schema import FILES

SUFFIX = ".zip"

MEMBERS = ("manifest.json", *FILES)
"""Files of a results folder that an archive may hold, in its order."""

MOST_ARCHIVE_BYTES = 64 * 2**20
"""Of the file; tables of a run pack to a fifth."""

MOST_UNPACKED_BYTES = 256 * 2**20
"""Of all members together: more is no archive of ours, or would fill the disk."""

_PREFIX = "unpacked-ddp-bench-"
"""Of temporary folders. `bench.process` removes those of its prefix that nobody holds locked."""

_DATE = (1980, 1, 1, 0, 0, 0)
"""Of every member, as zip needs one: the time of packing must not change the bytes."""


def is_archive(path: Path) -> bool:
    """Whether a path names an archive, and not a results folder."""
    return path.suffix == SUFFIX and path.is_file()


def packed(members: Mapping[str, bytes]) -> bytes:
    """An archive of `members`, which are among `MEMBERS`. Raises UsageError for more than would be read."""
    content = io.BytesIO()
    size = sum(map(len, members.values()))
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as file:
        for name in MEMBERS:
            if name in members:
                info = zipfile.ZipInfo(name, _DATE)
                info.compress_type = zipfile.ZIP_DEFLATED
                info.create_system = 3  # Unix everywhere: Python writes the platform's
                info.external_attr = (stat.S_IFREG | 0o644) << 16
                file.writestr(info, members[name])
    if size > MOST_UNPACKED_BYTES or content.tell() > MOST_ARCHIVE_BYTES:
        raise UsageError(f"{size} bytes of tables are too many for an archive; hand the folder on")
    return content.getvalue()


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Path]:
    """The results folder that `path` names: itself, or of an archive a temporary one with its files.

    Raises UsageError for an archive that holds anything else than a run, also within.
    """
    if not is_archive(path):
        yield path
        return
    members = unpacked(path)
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name:
        folder = Path(name)
        for member, content in members.items():
            (folder / member).write_bytes(content)
        try:
            yield folder
        except UsageError as error:
            # The user knows the archive, not the folder.
            error.args = (str(error).replace(name, str(path)),)
            raise


def unpacked(path: Path) -> dict[str, bytes]:
    """The members of an archive, by name."""
    content = read_bytes(path, most_bytes=MOST_ARCHIVE_BYTES, follow=True)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as file:
            infos = file.infolist()
            _check(path, infos)
            # Nothing longer than its header says is read, and nothing by a name that is not known.
            return {info.filename: file.read(info) for info in infos}
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001 - a wrong offset, name or length: zipfile raises anything
        raise UsageError(f"{path} is no archive of a run, or damaged: {error}; fetch it again") from None


def _check(path: Path, infos: list[zipfile.ZipInfo]) -> None:
    names = [info.filename for info in infos]
    if {info.compress_type for info in infos} - {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
        raise UsageError(f"{path} is no archive of a run: it is packed in another way; name another file")
    strange = [name for name in names if name not in MEMBERS]
    if strange:
        raise UsageError(f"{path} is no archive of a run: it holds {strange[0]!r}; name another file")
    if len(set(names)) != len(names) or MEMBERS[0] not in names:
        raise UsageError(
            f"{path} is no archive of a run: it needs {MEMBERS[0]}, and each file once; name another file"
        )
    size = sum(info.file_size for info in infos)
    if size > MOST_UNPACKED_BYTES:
        raise UsageError(
            f"{path} is too large: {size} bytes unpacked, at most {MOST_UNPACKED_BYTES} are read; is it "
            "the one?"
        )
