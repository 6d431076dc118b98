"""Values as JSON, and text that others wrote, made harmless where it is shown: CSV, terminal, Markdown.

HTML needs nothing of this: the page's template escapes by itself.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

_LONG_WORD = re.compile(r"\S{400,}")
_FORMULA = re.compile(r"'*[=+\-@\uff1d\uff0b\uff0d\uff20]")
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?")
_CODED = re.compile(r"\\(\\|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")
_MARKUP = re.compile(r"[\\`*_<>#!|~&$@]|\](?=[\[(:])|://|(?<=[wW]{3})\.")


def begin_sentence(text: str) -> str:
    """Write the first letter as a capital, and the others as they are."""
    return f"{text[:1].upper()}{text[1:]}"


def escape_controls(text: str) -> str:
    r"""Text on one line for a terminal: control, escape and bidirectional characters as `\x1b`, `\u202e`.

    Idempotent; printable text, `\` included, stays as it is.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escape_character(c) for c in text)


MAX_WORD, MAX_MESSAGE = 400, 4000
"""Characters of one word and of a whole message that are worth reading."""


def shorten_message(message: str) -> str:
    """Cut the middle out of words, and of a message, that a value of the user's makes endless."""
    return _cut_middle(_LONG_WORD.sub(lambda found: _cut_middle(found[0], MAX_WORD), message), MAX_MESSAGE)


def _cut_middle(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}… ({len(text)} characters) …{text[-most // 4 :]}"


def escape_lines(text: str) -> str:
    """Text of several lines for a terminal, each as `escape_controls` has it."""
    return "\n".join(escape_controls(line.expandtabs()) for line in text.split("\n"))


def escape_csv_cell(text: str) -> str:
    r"""Text as a cell that no spreadsheet takes for a formula and that holds no control character.

    What would begin a formula (`=`, `+`, `-`, `@` and their full-width forms) and is no number gets a leading
    apostrophe; characters that do not print become `\x0a` or `\u202e`, and `\` itself `\\`. `decode_csv_cell`
    undoes both.
    """
    if "\\" in text or not text.isprintable():
        text = escape_controls(text.replace("\\", "\\\\"))
    if _FORMULA.match(text) and not _NUMBER.fullmatch(text):
        return f"'{text}"
    return text


def decode_csv_cell(cell: str) -> str:
    """Return the text of which `escape_csv_cell` made `cell`."""
    if cell[:1] == "'" and _FORMULA.match(cell):
        cell = cell[1:]
    return _CODED.sub(_decode_escape, cell) if "\\" in cell else cell


def escape_markdown(text: str) -> str:
    """Text on one line in which nothing is markup, a mention or a link; it fits into a table's cell."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    # Entities rather than backslashes: GitHub reads mentions and dollars after it has taken backslashes out.
    return _MARKUP.sub(lambda found: "".join(f"&#{ord(c)};" for c in found[0]), line)


def _escape_character(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _decode_escape(found: re.Match[str]) -> str:
    what = found[1]
    code = 0x5C if what == "\\" else int(what[1:], 16)
    return chr(code) if code <= 0x10FFFF else found[0]


def format_list(names: Sequence[str], most: int = 3) -> str:
    """Name the first few: `a, b, c and 2 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def to_json(value: Any, *, indent: int | None = 2) -> str:
    """JSON of a value or a record, in ASCII; NaN and infinity, which JSON lacks, are null.

    Not by msgspec: names of files and hosts may hold bytes that are no UTF-8, as lone surrogates.
    """
    import msgspec  # every command prints errors, even where its packages are missing

    return json.dumps(_replace_nonfinite(msgspec.to_builtins(value)), indent=indent, allow_nan=False)


def _replace_nonfinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_nonfinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
