"""Samples and baselines hold what today's code makes of their blocks."""

import csv
import io

import pandas as pd
import pytest
from renewed import KEPT, RESULTS, TABLES, renewed

from ddp_bench.bench.results.archive import is_archive, publish_members, read_archive
from ddp_bench.bench.results.store import load_run


def test_every_published_run_is_looked_at():
    assert len(KEPT) >= 8
    assert {is_archive(path) for path in KEPT} == {True, False}


@pytest.mark.parametrize("path", KEPT, ids=lambda path: str(path.relative_to(RESULTS)))
def test_published_tables_are_those_of_todays_code(path):
    """Where this fails, columns or what they mean have changed: run tests/renewed.py."""
    run = load_run(path)
    made = renewed(run)
    for name in TABLES:
        pd.testing.assert_frame_equal(getattr(run, name), getattr(made, name), rtol=1e-5)
        content = (
            read_archive(path)[f"{name}.csv"] if is_archive(path) else (path / f"{name}.csv").read_bytes()
        )
        header = next(csv.reader(io.StringIO(content.decode())))
        today = list(getattr(made, name))
        if is_archive(path):
            today = next(csv.reader(io.StringIO(publish_members(made)[f"{name}.csv"].decode())))
        assert header == today
