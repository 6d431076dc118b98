"""Text that a user typed, as values: each parser raises UsageError, which says what to write instead."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from typing import TypeVar

from .errors import UsageError

T = TypeVar("T")

MIN_DURATION_S = 0.1
"""Shortest duration that an option takes: nothing that is measured here is done sooner."""

_DURATION_S = {"s": 1.0, "m": 60.0, "h": 3600.0}


def suggest_known(word: str, known: Iterable[str]) -> str:
    """Return the tail of an error message: the nearest known word, then all of them."""
    names = list(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}known: {', '.join(names)}"


def make_choice_parser(known: Iterable[str]) -> Callable[[str], str]:
    """Make a parser that takes one of `known`."""
    names = tuple(known)

    def parse(text: str) -> str:
        if text not in names:
            raise UsageError(f"unknown value {text!r}; {suggest_known(text, names)}")
        return text

    return parse


def make_csv_parser(item: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Make a parser of comma-separated values without duplicates."""

    def parse(text: str) -> tuple[T, ...]:
        parts = [part.strip() for part in text.split(",")]
        if not all(parts):
            raise UsageError(f"empty value in {text!r}; separate values by single commas, as in 1,2,4")
        values = tuple(item(part) for part in parts)
        twice = [str(value) for i, value in enumerate(values) if value in values[:i]]
        if twice:
            raise UsageError(f"{twice[0]} is given twice in {text!r}; name each value once")
        return values

    return parse


def parse_option(key: str, parse: Callable[[str], T], text: str, *, where: str = "") -> T:
    """`parse` of `text`; its UsageError begins with `where` and names the option `key`."""
    try:
        return parse(text)
    except UsageError as error:
        raise UsageError(f"{where}--{key.replace('_', '-')}: {error}") from None


def parse_positive_int(text: str) -> int:
    """Parse a whole number of at least 1."""
    return parse_whole_number(text, least=1)


def parse_whole_number(text: str, *, least: int = 0) -> int:
    """Parse a whole number of at least `least`."""
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < least:
        raise UsageError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


def parse_switch(text: str) -> bool:
    """Read `on` or `off`, also `true` and `false`."""
    values = {"on": True, "true": True, "off": False, "false": False}
    if text.lower() not in values:
        raise UsageError(f"{text!r} is neither on nor off")
    return values[text.lower()]


def parse_duration_s(text: str) -> float:
    """`90s`, `10m` or `1.5h`, in seconds. A bare number could be seconds or minutes and is refused."""
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        raise UsageError(f"{text!r} has no unit; write {text}s or {text}m")
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]+)?)([smh])", text)
    seconds = float(match[1]) * _DURATION_S[match[2]] if match else 0.0
    if seconds < MIN_DURATION_S:
        raise UsageError(
            f"{text!r} is not a duration of {MIN_DURATION_S:g}s or more; write it as 90s, 10m or 1.5h"
        )
    return seconds


def parse_fraction(text: str) -> float:
    """`2%` or `0.02`, as a fraction between 0 and 1."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(%?)", text)
    value = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 < value < 1:
        raise UsageError(f"{text!r} is not a share above 0% and below 100%; write it as 2% or 0.02")
    return value
