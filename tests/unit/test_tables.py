import json
import os

import pandas as pd
import pytest

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.manifest import Manifest
from ddp_bench.bench.results import tables
from ddp_bench.bench.results.disk import read_json
from ddp_bench.bench.results.schema import CASES
from ddp_bench.bench.results.store import RunWriter, claim, load_run
from ddp_bench.bench.results.tables import read_table


def refused(path, reading, **limits):
    assert callable(reading)
    with pytest.raises(UsageError) as caught:
        reading(path, **limits)
    assert str(path) in str(caught.value)
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_json_too_deep_too_long_or_broken_is_refused(tmp_path):
    path = tmp_path / "manifest.json"
    path.write_text("[" * 100_000)
    assert "nested too deeply" in refused(path, read_json)
    path.write_text("1" * 10_000)
    assert "not valid JSON" in refused(path, read_json)
    path.write_bytes(b'{"a": "\xff"}')
    assert "not valid JSON" in refused(path, read_json)
    path.write_text(json.dumps("x" * 1000))
    assert "too large" in refused(path, read_json, most_bytes=1000)


def test_a_boolean_is_read_however_it_is_written_and_nothing_else_passes_for_one(tmp_path):
    columns = tuple(c for c in CASES if c.name in ("case_id", "oversubscribed"))
    path = tmp_path / "cases.csv"
    path.write_text("case_id,oversubscribed\na,true\nb,False\nc,\n")
    assert read_table(path, columns)["oversubscribed"].tolist() == [True, False, pd.NA]
    path.write_text("case_id,oversubscribed\na,yes\n")
    with pytest.raises(UsageError, match="oversubscribed is not True or False"):
        read_table(path, columns)


def test_a_pipe_cannot_hang_a_reader(tmp_path):
    folder = claim(tmp_path / "run")
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")
    with pytest.raises(UsageError, match="not a results folder"):
        load_run(folder)
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").write_bytes(Manifest().as_json())
    os.mkfifo(folder / "cases.csv")
    with pytest.raises(UsageError, match="no regular file"):
        load_run(folder)


def test_a_table_beyond_the_limit_is_refused(tmp_path, monkeypatch):
    writer = RunWriter(claim(tmp_path / "run"))
    writer.write_manifest(Manifest())
    writer.append("allreduce.csv", [{"num_devices": 2, "backend": "gloo"}] * 50)
    monkeypatch.setattr(tables, "MOST_TABLE_BYTES", 300)
    with pytest.raises(UsageError, match=r"allreduce\.csv is too large: \d+ bytes, at most 300"):
        load_run(tmp_path / "run")
