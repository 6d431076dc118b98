"""What the tests with generated input share: how many examples, and text that means harm.

The examples are the same in every run; `pytest tests/fuzz --hypothesis-profile thorough` takes at
least forty times as many, other ones each time.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from ddp_bench.bench.errors import UsageError

QUICK_EXAMPLES = 100
COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("quick", max_examples=QUICK_EXAMPLES, derandomize=True, database=None, **COMMON)
settings.register_profile("thorough", max_examples=40 * QUICK_EXAMPLES, **COMMON)
settings.load_profile("quick")

HOSTILE_TEXT = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        [
            "",
            "nan",
            "inf",
            "-1",
            "1e999",
            "9" * 5000,
            "\x00",
            "\x1b[31m",
            "\u202e",
            "../..",
            "=1+1",
            "%s{0}",
            "[x",
        ]
    ),
)


def bounded(num_examples: int) -> Callable[[Any], Any]:
    """An eighth of `num_examples`; with the profile `thorough` ten times as many as `num_examples`."""
    is_quick = settings.default.max_examples == QUICK_EXAMPLES
    return settings(max_examples=max(num_examples // 8, 1) if is_quick else 10 * num_examples)


def mutated(content: bytes, seed: int) -> bytes:
    """`content` with one to four bytes changed, or cut short, as the seed has it."""
    chance = random.Random(seed)
    changed = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed[: chance.randrange(len(changed))] if chance.random() < 0.1 else changed)


class Reached(BaseException):
    """A command accepted its arguments and would now do its work."""


def reached(*_arguments: object, **_options: object) -> None:
    raise Reached


def read_or_refused(reading: Callable[[], object]) -> bool:
    """Whether it was read; a refusal must be one harmless line."""
    refusal = None
    try:
        reading()
    except UsageError as error:
        refusal = str(error)
    assert refusal is None or refusal.isprintable()
    return refusal is None


@contextlib.contextmanager
def empty_folder(path: Path) -> Iterator[Path]:
    """The current folder; it must be as empty afterwards."""
    before = Path.cwd()
    path.mkdir(exist_ok=True)
    os.chdir(path)
    try:
        yield path
        assert list(path.iterdir()) == []
    finally:
        os.chdir(before)


def refused_or_reached(command: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> None:
    """A command either would work, or says in one harmless last line what is wrong and exits with 2."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            code = command(arguments)
    except Reached:
        return
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else 1
        if code == 0:
            return  # --help
    assert code == 2
    last = said.getvalue().splitlines()[-1]
    assert "error: " in last
    assert last.isprintable()
