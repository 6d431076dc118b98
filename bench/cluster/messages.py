"""What ranks send each other, as JSON: nothing that arrives is unpickled, imported or called.

Whoever reaches a rank's port could send it something. So a message holds data alone: JSON's own types,
tuples, sets, bytes, and dataclasses and records that the program named beforehand with `may_be_sent`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec

_CLASSES: dict[str, type] = {}
"""Dataclasses and records that may be sent, by name; the same on every rank, for all run one program."""


def may_be_sent(*classes: type) -> None:
    """Let messages hold instances of these classes. Raises ValueError for a name that is taken."""
    for one in classes:
        if _CLASSES.setdefault(one.__name__, one) is not one:
            raise ValueError(f"two classes named {one.__name__} cannot both be sent")


def encode(value: Any) -> bytes:
    """The message that `decode` makes `value` of again, with all its types.

    Subclasses of str, int and float arrive as these. Raises TypeError for what a message cannot hold.
    """
    return json.dumps(_plain(value), separators=(",", ":")).encode()


def decode(message: bytes) -> Any:
    """What a message holds. Raises ValueError for bytes that are no message."""
    try:
        return _restored(json.loads(message))
    except (AttributeError, KeyError, RecursionError, TypeError) as error:
        raise ValueError(f"no message of a rank: {error!r}") from None


def _plain(value: Any) -> Any:
    """`value` in JSON's types; what JSON lacks is an object with one key, the name of the type."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[_plain(key), _plain(item)] for key, item in value.items()]}
    for name, kind in (("tuple", tuple), ("frozenset", frozenset), ("set", set)):
        if type(value) is kind:
            return {name: [_plain(item) for item in value]}
    name = type(value).__name__
    if not isinstance(value, bytes) and _CLASSES.get(name) is not type(value):
        raise TypeError(f"ranks cannot send a {name}: it is no JSON; name its class with may_be_sent")
    if not is_dataclass(value):
        return {name: msgspec.to_builtins(value)}  # a record, or bytes
    return {name: {f.name: _plain(getattr(value, f.name)) for f in fields(value)}}


_RESTORE: dict[str, Callable[[Any], Any]] = {
    "dict": lambda pairs: {_restored(key): _restored(item) for key, item in pairs},
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "tuple": lambda items: tuple(map(_restored, items)),
    "frozenset": lambda items: frozenset(map(_restored, items)),
    "set": lambda items: set(map(_restored, items)),
}


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(item) for item in value]
    if not isinstance(value, dict):
        return value
    [(name, content)] = value.items()
    if name in _RESTORE:
        return _RESTORE[name](content)
    kind = _CLASSES[name]
    if issubclass(kind, msgspec.Struct):
        return msgspec.convert(content, kind)
    return kind(**{field: _restored(item) for field, item in content.items()})
