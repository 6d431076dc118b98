"""Hostile input, by one generator: texts, JSON values, files and tables that a stranger may hand on.

Tests take of it what they need with `@given(DRAWS)`, the same examples in every run; `test_attacks.py` plays
whole commands with it. `pytest tests/fuzz --hypothesis-profile thorough` takes forty times as many, other
ones each time.
"""

import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from ddp_bench.bench.common.errors import UsageError

QUICK_EXAMPLES = 100
COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("quick", max_examples=QUICK_EXAMPLES, derandomize=True, database=None, **COMMON)
settings.register_profile("thorough", max_examples=40 * QUICK_EXAMPLES, **COMMON)
settings.load_profile("quick")

DRAWS = st.integers(0, 2**32 - 1).map(random.Random)

NUMBERS = ("0", "-1", "inf", "-inf", "nan", "1e308", "1e-320", "0.5", "9" * 25, "4097", "999999999", "")
WORDS = (
    *("x", "=1+1", "\u202e", "\x1b[31m", "../..", "[]", "[x", "True", "a" * 70_000, "9" * 5000, "1/0"),
    *("<script>", "%s{0}", "a\x00b", "a\nb", "\udcff", "--", "---", "1,2", "default,25", "on", "ddp", "90s"),
    *("2%", "cpu", "1gbit"),
)
VALUES = (
    *(None, 0, -1, 5, 0.25, 1e308, float("nan"), float("inf"), 2**70, 10**400, True, "", "x", "\x1b[31m"),
    *([], ["x"], [[]], [0.5], [1e-9, 3], {}, {"a": {}}, ["9" * 5000]),
)


def bounded(num_examples):
    """An eighth of `num_examples`; with the profile `thorough` ten times as many as `num_examples`."""
    is_quick = settings.default.max_examples == QUICK_EXAMPLES
    return settings(max_examples=max(num_examples // 8, 1) if is_quick else 10 * num_examples)


def word(draw):
    """A text that means harm, or any."""
    if draw.random() < 0.2:
        return "".join(map(chr, draw.choices(range(0x3000), k=draw.randrange(12))))
    return draw.choice(NUMBERS + WORDS)


def options(draw, known):
    """A command line of known options and hostile words."""
    line = []
    for _ in range(draw.randrange(6)):
        name, value = draw.choice(known), word(draw)
        line += draw.choice([*[[name, value]] * 6, *[[f"{name}={value}"]] * 2, [name], [value]])
    return tuple(line)


def edited(value, draw):
    """The value with one thing in it, at any depth, replaced, removed or repeated."""
    if not isinstance(value, dict | list) or not value or draw.random() < 0.1:
        return draw.choice((*VALUES, word(draw)))
    if isinstance(value, list):
        at = draw.randrange(len(value))
        how = draw.random()
        if how < 0.1:
            return value[:at] + value[at + 1 :]
        return [*value[:at], *([value[at]] if how < 0.2 else []), edited(value[at], draw), *value[at + 1 :]]
    key = draw.choice(list(value))
    if draw.random() < 0.1:
        return {k: v for k, v in value.items() if k != key}
    return {**value, key: edited(value[key], draw)}


def mutated(content, seed):
    """`content` with some bytes changed, put in or left out, or cut short, as the seed has it."""
    draw = random.Random(seed)
    changed = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(changed) + 1)
        changed[at : at + draw.choice((0, 1, 1, 1, 100))] = draw.randbytes(draw.choice((0, 1, 1, 1, 5)))
    return bytes(changed[: draw.randrange(len(changed) + 1)] if draw.random() < 0.1 else changed)


def damaged_table(text, draw):
    """A CSV table with a cell, a row, a column or its head changed."""
    header, *rows = [line.split(",") for line in text.splitlines()]
    if not rows:
        return text
    row, column, how = draw.randrange(len(rows)), draw.randrange(len(header)), draw.random()
    if how < 0.1:
        rows.append(list(rows[row]))
    elif how < 0.15:
        del rows[row]
    elif how < 0.2:
        other = draw.randrange(len(header))
        header[column], header[other] = header[other], header[column]
    else:
        cell = word(draw)
        for one in rows if how < 0.4 else rows[row : row + 1]:
            one[min(column, len(one) - 1)] = cell
    return "".join(f"{','.join(cells)}\n" for cells in [header, *rows])


def read_or_refused(reading):
    """Whether it was read; a refusal must be one harmless line."""
    refusal = None
    try:
        reading()
    except UsageError as error:
        refusal = str(error)
    assert refusal is None or refusal.isprintable()
    return refusal is None
