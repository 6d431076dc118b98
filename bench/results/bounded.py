"""Files from elsewhere, read within limits: a results folder may be anyone's.

Nothing here, or anywhere else in the suite, unpickles what it reads. Every failure is a UsageError that names
the file.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

from bench.errors import UsageError

MOST_MANIFEST_BYTES = 64 * 2**20
MOST_TRACE_BYTES = 2 * 2**30
"""Of an unpacked trace; a few steps make some tens of MiB."""

MOST_CSV_BYTES = 8 * 2**30
"""5,000 cases x 30 rounds x 64 ranks of ten steps take 2 GiB."""

_PIECE_BYTES = 2**20


def check(path: Path, *, most_bytes: int) -> None:
    """Raise UsageError unless `path` is a regular file of at most `most_bytes`; a pipe could hang us."""
    try:
        if not path.is_file():
            raise UsageError(f"{path} is missing or no regular file; name a folder or file that is whole")
        size = path.stat().st_size
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {_reason(error)}; name a readable file") from None
    if size > most_bytes:
        raise UsageError(f"{path} is too large: {size} bytes, at most {most_bytes} are read; is it the one?")


def read_bytes(path: Path, *, most_bytes: int) -> bytes:
    """The content of a regular file of at most `most_bytes`."""
    check(path, most_bytes=most_bytes)
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {_reason(error)}; name a readable file") from None


def read_json(path: Path, *, most_bytes: int = MOST_MANIFEST_BYTES) -> Any:
    """The value in a JSON file."""
    return parse_json(read_bytes(path, most_bytes=most_bytes), path)


def parse_json(content: bytes | str, where: Path | str) -> Any:
    """The value that `content` holds; `where` is named in errors."""
    try:
        return json.loads(content)
    except RecursionError:
        raise UsageError(f"{where} is nested too deeply to be read; restore the file") from None
    except ValueError as error:
        raise UsageError(f"{where} is not valid JSON ({error}): broken off or edited; restore it") from None


def gunzip(path: Path, *, most_bytes: int = MOST_TRACE_BYTES) -> bytes:
    """What a gzip file holds; never more than `most_bytes` are unpacked, however small the file is."""
    unpacker = zlib.decompressobj(wbits=31)
    pieces, left = [], most_bytes
    check(path, most_bytes=most_bytes)
    try:
        with path.open("rb") as file:
            while not unpacker.eof and (piece := unpacker.unconsumed_tail or file.read(_PIECE_BYTES)):
                pieces.append(unpacker.decompress(piece, min(left + 1, _PIECE_BYTES)))
                left -= len(pieces[-1])
                if left < 0:
                    raise UsageError(
                        f"{path} unpacks to more than {most_bytes} bytes; it is no trace of ours"
                    )
    except (OSError, zlib.error) as error:
        raise UsageError(f"{path} is no whole gzip file: {_reason(error)}; restore the file") from None
    if not unpacker.eof:
        raise UsageError(f"{path} is no whole gzip file: it is cut off; restore the file")
    return b"".join(pieces)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
