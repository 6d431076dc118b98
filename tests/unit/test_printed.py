"""What terminal and page print is what the files hold, rounded: so quotients agree there too."""

import re
from dataclasses import replace

import pytest
from rich.console import Console
from sample_runs import EVERY_SAMPLE, rebuilt, sample

from ddp_bench.bench.findings.wording import text
from ddp_bench.bench.run.summary import COLUMNS, OF_SCALING, case_table
from ddp_bench.report.page import page

NUMBER = re.compile(r"-?[0-9][0-9,]*\.?[0-9]*")


def printed(cell):
    """The first number of a cell, and half a unit of its last digit."""
    found = NUMBER.match(cell)
    assert found is not None, cell
    digits = len(found[0].partition(".")[2])
    return float(found[0].replace(",", "")), 0.5 * 10**-digits


@pytest.mark.parametrize("path", EVERY_SAMPLE)
def test_the_terminal_prints_what_cases_csv_holds(path):
    cases = rebuilt(path).reset_index()
    ok = cases[cases["status"] == "ok"].to_dict("records")
    table = {column.header: list(column.cells) for column in case_table(cases).columns}
    checked = 0
    for name, shown in COLUMNS.items():
        for row, cell in zip(ok, table[shown.heading or "images/s (95%)"], strict=True):
            if row["oversubscribed"] is True and name in OF_SCALING:
                assert cell == ""
            elif cell:
                number, half = printed(str(cell))
                assert abs(number - shown.factor * row[name]) <= half * (1 + 1e-9)
                checked += 1
    assert checked >= 2


@pytest.mark.parametrize("path", EVERY_SAMPLE)
def test_the_table_fits_a_terminal_of_100_columns(path):
    assert Console(width=1000).measure(case_table(rebuilt(path).reset_index())).maximum <= 100


@pytest.mark.parametrize("path", EVERY_SAMPLE)
def test_the_page_prints_rates_whose_quotients_are_its_speed_ups(path):
    (view,) = page([replace(sample(path), cases=rebuilt(path))]).runs
    every = next(table for table in view.tables if table.title == "Every column")
    names = [column.name.partition(" (")[0] for column in every.columns]
    rows = [dict(zip(names, row, strict=True)) for row in every.rows]
    single = next((row for row in rows if text(row["Case"]).startswith("single")), None)
    if single is None or "Speed-up" not in names:
        return
    reference, least = printed(single["Throughput"])
    for row in rows:
        rate, half = printed(row["Throughput"])
        speedup, rounding = printed(row["Speed-up"])
        assert abs(speedup - rate / reference) <= rounding + (half + least * rate / reference) / reference
