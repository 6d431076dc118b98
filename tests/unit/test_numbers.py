"""Numbers, intervals and settings as people read them."""

import math

import pandas as pd
import pytest

from ddp_bench.bench.findings.numbers import (
    TIMES,
    count,
    duration,
    finite,
    mib,
    number,
    plain,
    plural,
    quantity,
    rate,
    short,
    singular,
    with_interval,
)
from ddp_bench.bench.findings.wording import link_name, ranged
from ddp_bench.bench.stats.interval import Interval


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (70.12, "70.1 ms"),
        (0.001234, "0.00123 ms"),
        (0.0, "0 ms"),
        (24479.0, "24,479 ms"),
        (-3.14159, "-3.14 ms"),
        (None, ""),
    ],
)
def test_quantity_keeps_three_significant_digits(value, shown):
    assert quantity(value, "ms") == shown


@pytest.mark.parametrize(
    ("values", "unit", "shown"),
    [
        ((70.12, 69.23, 70.88), "images/s", "70.1 (69.2\N{EN DASH}70.9) images/s"),
        ((0.0, -1.24, 1.31), "ms", "0.0 (-1.2 to 1.3) ms"),
        ((1.734, 1.7, 1.76), TIMES, f"1.73 (1.70\N{EN DASH}1.76){TIMES}"),
        ((99.5, 98.4, 100.7), "%", "100 (98\N{EN DASH}101)%"),
        ((73.1, 64.8, 81.3), "ms", "73 (65\N{EN DASH}81) ms"),
        ((221.0, 199.0, 243.0), "ms", "221 (199\N{EN DASH}243) ms"),
        ((-0.2, -8.0, 3.0), "%", "0 (-8 to 3)%"),
        ((4321.0, 1234.0, 5678.0), "images/s", "4,321 (1,234\N{EN DASH}5,678) images/s"),
        ((70.12, None, None), "images/s", "70.1 images/s"),
        ((None, 1.0, 2.0), "images/s", ""),
    ],
)
def test_interval_shares_decimals_and_needs_an_estimate(values, unit, shown):
    row = dict(zip(("step_ms", "step_ms_low", "step_ms_high"), values, strict=True))
    assert ranged(row, "step_ms", unit) == shown


@pytest.mark.parametrize("missing", [None, math.nan, math.inf, pd.NA, "", "x"])
def test_missing_is_never_a_number(missing):
    assert finite(missing) is None


def test_small_words():
    assert (count(11689512), count(None)) == ("11,689,512", "")
    assert (mib(2**20 * 44.6), mib(None)) == ("44.6 MiB", "")
    assert (plural(1, "GPU"), plural(2, "GPU")) == ("1 GPU", "2 GPUs")
    assert (duration(42.0), duration(125.0), duration(None)) == ("42.0 s", "2 min 05 s", "")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, ""),
        (True, "yes"),
        (0.02, "0.02"),
        (["dp", "ddp"], "dp, ddp"),
        ({"a": 1, "b": [True]}, "a: 1, b: yes"),
        (math.nan, ""),
    ],
)
def test_plain_writes_settings_as_a_person_would(value, shown):
    assert plain(value) == shown


def test_links_are_named_as_people_write_them():
    assert link_name("1gbit") == "1 Gbit/s"
    assert link_name("200mbit+5ms") == "200 Mbit/s with 5 ms of delay"
    assert link_name("InfiniBand") == "InfiniBand"


def test_numbers_have_three_digits_and_no_powers():
    assert [number(x) for x in (0.0, 0.00123, 1.0, 46_758_048.0)] == ["0", "0.00123", "1.00", "46,758,048"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (41087.3, "41,090 tokens/s"),
        (8934.0, "8,934 tokens/s"),
        (301.23, "301 tokens/s"),
        (0.01234, "0.0123 tokens/s"),
        (Interval(41087.3, 40181.0, 41994.0), "41,090 (40,180\N{EN DASH}41,990) tokens/s"),
        (Interval(9990.0, 9900.0, 10010.0), "9,990 (9,900\N{EN DASH}10,010) tokens/s"),
        (None, ""),
    ],
)
def test_rates_have_thousands_and_four_digits_at_most(value, shown):
    assert rate(value, "tokens") == shown


def test_no_number_for_people_has_a_power_of_ten():
    assert (short(1234.5, 2), short(120.0, 2), short(0.5), short(41087.0)) == (
        "1,200",
        "120",
        "0.5",
        "41,090",
    )
    assert with_interval(Interval(12.0, 11.0, 14.27), "%", 100.0) == "1,200 (1,100\N{EN DASH}1,427)%"


@pytest.mark.parametrize(
    ("plural", "one"), [("images", "image"), ("queries", "query"), ("boxes", "box"), ("data", "data")]
)
def test_energy_is_of_one(plural, one):
    assert singular(plural) == one
