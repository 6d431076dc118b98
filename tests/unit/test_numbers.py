"""Numbers, intervals and settings as people read them."""

import math

import pandas as pd
import pytest

from ddp_bench.bench.common import numbers
from ddp_bench.bench.findings.wording import name_link
from ddp_bench.bench.results.case_result import CaseResult, parse_finite
from ddp_bench.bench.stats.interval import Interval

WRITTEN = {
    numbers.format_quantity: [
        *((70.12, "ms", "70.1 ms"), (0.001234, "ms", "0.00123 ms"), (0.0, "ms", "0 ms"), (None, "ms", "")),
        *((24479.0, "ms", "24,479 ms"), (-3.14159, "ms", "-3.14 ms")),
    ],
    numbers.format_number: [(0.0, "0"), (0.00123, "0.00123"), (1.0, "1.00"), (46_758_048.0, "46,758,048")],
    numbers.format_integer: [(11689512, "11,689,512"), (None, "")],
    numbers.format_mib: [(2**20 * 44.6, "44.6 MiB"), (None, "")],
    numbers.format_count: [(1, "GPU", "1 GPU"), (2, "GPU", "2 GPUs")],
    numbers.make_singular: [("images", "image"), ("queries", "query"), ("boxes", "box"), ("data", "data")],
    numbers.format_duration: [(42.0, "42.0 s"), (125.0, "2 min 05 s"), (None, "")],
    numbers.format_setting: [
        *((None, ""), (math.nan, ""), (True, "yes"), (0.02, "0.02"), (["dp", "ddp"], "dp, ddp")),
        ({"a": 1, "b": [True]}, "a: 1, b: yes"),
    ],
    name_link: [
        *(("1gbit", "1 Gbit/s"), ("InfiniBand", "InfiniBand")),
        ("200mbit+5ms", "200 Mbit/s with 5 ms of delay"),
    ],
    numbers.format_short: [(1234.5, 2, "1,200"), (120.0, 2, "120"), (0.5, "0.5"), (41087.0, "41,090")],
    numbers.format_interval: [(Interval(12.0, 11.0, 14.27), "%", 100.0, "1,200% (1,100\N{EN DASH}1,427)")],
}
"""By function: what it is given, and what it writes."""


@pytest.mark.parametrize(("write", "row"), [(write, row) for write, rows in WRITTEN.items() for row in rows])
def test_a_value_is_written_as_people_would(write, row):
    *given, shown = row
    assert write(*given) == shown


@pytest.mark.parametrize(
    ("values", "unit", "shown"),
    [
        ((70.12, 69.23, 70.88), "images/s", "70.1 (69.2\N{EN DASH}70.9) images/s"),
        ((0.0, -1.24, 1.31), "ms", "0.0 (-1.2 to 1.3) ms"),
        ((1.734, 1.7, 1.76), numbers.TIMES, f"1.73{numbers.TIMES} (1.70\N{EN DASH}1.76)"),
        ((99.5, 98.4, 100.7), "%", "100% (98\N{EN DASH}101)"),
        # Thousands, and at most four digits.
        ((41087.3, 40181.0, 41994.0), "tokens/s", "41,090 (40,180\N{EN DASH}41,990) tokens/s"),
        ((41087.3, None, None), "tokens/s", "41,090 tokens/s"),
        ((0.01234, None, None), "tokens/s", "0.0123 tokens/s"),
        ((73.1, 64.8, 81.3), "ms", "73 (65\N{EN DASH}81) ms"),
        ((221.0, 199.0, 243.0), "ms", "221 (199\N{EN DASH}243) ms"),
        ((-0.2, -8.0, 3.0), "%", "0% (-8 to 3)"),
        ((4321.0, 1234.0, 5678.0), "images/s", "4,321 (1,234\N{EN DASH}5,678) images/s"),
        # As many digits as tell the ends from the estimate.
        ((1.022, 1.02196, 1.02206), numbers.TIMES, f"1.02200{numbers.TIMES} (1.02196\N{EN DASH}1.02206)"),
        ((97.87, 97.84, 97.9), "%", "97.87% (97.84\N{EN DASH}97.90)"),
        ((1.34, 0.72, 8.43), "ms", "1.3 (0.7\N{EN DASH}8.4) ms"),
        ((1.0, 1.0 - 1e-12, 1.0 + 1e-12), "ms", "1.00 ms"),
        ((100.0, 100.0, 100.0), "%", "100%"),
        ((70.12, None, None), "images/s", "70.1 images/s"),
        ((None, 1.0, 2.0), "images/s", ""),
    ],
)
def test_interval_shares_decimals_and_needs_an_estimate(values, unit, shown):
    case = CaseResult.from_row(dict(zip(("step_ms", "step_ms_low", "step_ms_high"), values, strict=True)))
    assert numbers.format_interval(case.step_ms, unit) == shown


@pytest.mark.parametrize("missing", [None, math.nan, math.inf, pd.NA, "", "x"])
def test_missing_is_never_a_number(missing):
    assert parse_finite(missing) is None
