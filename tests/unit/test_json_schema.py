"""The printed JSON Schemas: valid, true of the recorded runs, and false of broken ones."""

import json

import pytest
import schemas
from commands import ROOT
from gate_runs import STEADY, write_run
from jsonschema import Draft202012Validator
from sample_runs import EVERY_SAMPLE

from ddp_bench.bench.export import main as export
from ddp_bench.bench.export.json_schema import json_schema
from ddp_bench.bench.gate import main as gate
from ddp_bench.bench.gate.judge import VERDICTS
from ddp_bench.bench.manifest import SCHEMA_VERSION
from ddp_bench.bench.results.schema import FILES

SAMPLE = ROOT / "results" / "samples" / "cpu-lab-1gbit-2hosts"


@pytest.mark.parametrize("name", [*schemas.TABLES, "manifest", "summary", "gate"])
def test_each_is_a_schema_with_a_versioned_name(name, capsys):
    assert export.main(["--schema", name]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(json.dumps(json_schema(name)))
    Draft202012Validator.check_schema(found)
    assert found["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert found["x-version"] == SCHEMA_VERSION
    assert found["$id"] == f"urn:ddp-bench:schema:{SCHEMA_VERSION}:{name}"


@pytest.mark.parametrize("folder", EVERY_SAMPLE)
def test_recorded_runs_are_what_they_describe(folder):
    assert schemas.problems_of_run(folder) == []


@pytest.mark.parametrize("name", FILES)
def test_every_column_is_described(name):
    described = json_schema(name.removesuffix(".csv"))["properties"]
    assert list(described) == [column.name for column in FILES[name]]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("cases", {"status": "fine"}),
        ("cases", {"status": None}),
        ("cases", {"num_devices": 0}),
        ("cases", {"num_devices": 1.5}),
        ("cases", {"images_per_s": -1.0}),
        ("cases", {"images_per_s": "fast"}),
        ("cases", {"oversubscribed": "yes"}),
        ("blocks", {"round": -1}),
        ("blocks", {"block_ms": None}),
        ("manifest", {"schema_version": SCHEMA_VERSION + 1}),
        ("manifest", {"settings": []}),
        ("manifest", {"environment": {"env": {"OMP_NUM_THREADS": 1}}}),
        ("manifest", {"ranks": [{"rank": "first"}]}),
    ],
)
def test_what_is_wrong_is_refused(name, change):
    if name == "manifest":
        good = json.loads((SAMPLE / "manifest.json").read_text(encoding="utf-8"))
    else:
        good = next(schemas.rows(SAMPLE / f"{name}.csv", json_schema(name)["properties"]))
    assert schemas.problems(name, good) == []
    assert schemas.problems(name, good | change)
    assert schemas.problems(name, good | {"of_a_later_version": 1}) == []


def test_the_gate(tmp_path, capsys):
    runs = [write_run(tmp_path / "base", peak_mem_mib=100.0)]
    for name, factor in (("same", 1.0), ("slow", 1.3)):
        steps = {key: [factor * ms for ms in series] for key, series in STEADY.items()}
        runs.append(write_run(tmp_path / name, steps, peak_mem_mib=100.0))
    runs.append(write_run(tmp_path / "lost", {("single", 1): STEADY["single", 1]}))
    other = write_run(tmp_path / "other", versions={"torch": "2.14.0"})
    for run in (*runs[1:], other):
        gate.main([str(runs[0]), str(run), "--json"])
        found = json.loads(capsys.readouterr().out)
        assert schemas.problems("gate", found) == []
    assert schemas.problems("gate", found | {"verdict": "maybe"})
    verdicts = json_schema("gate")["$defs"]["Comparison"]["properties"]["verdict"]
    assert set(verdicts["enum"]) == set(VERDICTS)
