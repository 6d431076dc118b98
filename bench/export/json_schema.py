"""JSON Schemas of what runs leave and commands print: `ddp-bench export --schema NAME` prints one.

Objects may have more keys than these: later versions, and users, add some.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import msgspec

from ddp_bench.bench.manifest import SCHEMA_VERSION, Manifest
from ddp_bench.bench.results.schema import FILES, MOST, Column
from ddp_bench.bench.run.summary import Summary
from ddp_bench.bench.settings import Settings

Schema = dict[str, Any]


def json_schema(name: str) -> Schema:
    """The schema of this name, one of `SCHEMAS`; its `$id` changes with the version of the results files."""
    title, described = SCHEMAS[name]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:ddp-bench:schema:{SCHEMA_VERSION}:{name}",
        "x-version": SCHEMA_VERSION,
        "title": title,
        **described,
    }


def _row(columns: tuple[Column, ...]) -> Schema:
    needed = [column.name for column in columns if column.needed]
    return _object({column.name: _cell(column) for column in columns}) | {"required": needed}


def _cell(column: Column) -> Schema:
    found: Schema = {"description": column.meaning}
    if unit := column.unit:
        found["x-unit"] = unit
    if column.among:
        found["enum"] = [*column.among, *([] if column.needed else [None])]
        return found
    kind = {"text": "string", "int": "integer", "float": "number", "bool": "boolean"}[column.kind]
    found["type"] = kind if column.needed else [kind, "null"]
    if column.above > -MOST:
        whole = column.kind == "int"
        found["minimum" if whole else "exclusiveMinimum"] = int(column.above) + whole
    if column.most < MOST:
        found["maximum"] = column.most
    return found


def _object(properties: Mapping[str, Schema]) -> Schema:
    return {"type": "object", "properties": dict(properties)}


def _complete(properties: Mapping[str, Schema]) -> Schema:
    """An object that has all of its properties."""
    return _object(properties) | {"required": list(properties)}


def _table(values: Schema) -> Schema:
    """An object of any keys."""
    return {"type": "object", "additionalProperties": values}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return schema | {"type": [schema["type"], "null"]}


def _said(schema: Schema, description: str) -> Schema:
    return {"description": description, **schema}


def _manifest() -> Schema:
    whole = msgspec.json.schema(Manifest)
    options = {one.name: _said({}, one.metadata.get("help", "")) for one in fields(Settings)}
    whole["$defs"]["Settings"] = _object(options)
    return whole


def _summary() -> Schema:
    whole = msgspec.json.schema(Summary)
    whole["$defs"]["Summary"]["properties"]["cases"] = _list(_row(FILES["cases.csv"]))
    return whole


_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_FLAG: Schema = {"type": "boolean"}
_ANY: Schema = {"type": "object"}

_RATIO = {"estimate": _or_null(_NUMBER), "low": _or_null(_NUMBER), "high": _or_null(_NUMBER)}
_GATED = {
    "case_id": _TEXT,
    "stand_in": _said(_FLAG, "whether CPU cores stood in for GPUs in DP"),
    "metric": _said(_or_null(_TEXT), "a column of cases.csv; null where the whole case is missing"),
    "verdict": {"enum": ["regressed", "missing", "not comparable", "inconclusive", "unchanged", "improved"]},
    "reason": _TEXT,
    "baseline": _said(_or_null(_NUMBER), "median over rounds, in the metric's unit"),
    "candidate": _said(_or_null(_NUMBER), "the same of the candidate"),
    "ratio": _said(
        _or_null(_complete(_RATIO)), "candidate / baseline; an end is null where unbounded or unknown"
    ),
    "threshold": _said(_or_null(_NUMBER), "the change that matters, a fraction"),
    "num_rounds": _said(_or_null(_list(_COUNT)), "of the baseline and of the candidate"),
    "units": _said(_list(_TEXT), "what throughput counts, in the baseline and the candidate"),
    "suspected": _said(_FLAG, "a regression that may be the machine's; reason says why"),
}
_SIDE = _object({"workload": _ANY, "ddp_bench": _object({"version": _TEXT}), "git": _ANY})
_CODE_OF_BOTH = {
    "identical": _said(_or_null(_FLAG), "whether both imported the same code; null: not recorded"),
    "baseline": _SIDE,
    "candidate": _SIDE,
}
_DIFFERENCE = {
    "name": _TEXT,
    "baseline": _TEXT,
    "candidate": _TEXT,
    "blocking": _said(_FLAG, "whether it makes the runs not comparable"),
}
_GATE: dict[str, Schema] = {
    "verdict": {"enum": ["pass", "regression", "not comparable", "undecided"]},
    "exit_code": {"enum": [0, 1, 3]},
    "sentence": _said(_TEXT, "the verdict and what decided it"),
    "interval_confidence": _said(_NUMBER, "of each single interval, a fraction"),
    "cpu_stand_in": _said(_FLAG, "whether devices were CPU cores"),
    "code": _complete(_CODE_OF_BOTH),
    "interleaved": _said(_FLAG, "whether both sides took turns on one machine"),
    "interleave_command": _said(_or_null(_TEXT), "the command that measures both in turns"),
    "model_change": _said(_or_null(_TEXT), "how the candidate's model differs"),
    "differences": _list(_complete(_DIFFERENCE)),
    "only_in_candidate": _said(_list(_TEXT), "cases that were not gated"),
    "comparisons": _said(_list(_complete(_GATED)), "worst first"),
}

SCHEMAS: dict[str, tuple[str, Schema]] = {
    **{
        file.removesuffix(".csv"): (f"A row of {file} as an object; an empty field is null", _row(columns))
        for file, columns in FILES.items()
    },
    "manifest": ("manifest.json: what a run was measured under, and how it ended", _manifest()),
    "summary": ("What `ddp-bench run --json` prints at the end of a run", _summary()),
    "gate": ("What `ddp-bench gate --json` prints", _complete(_GATE)),
}
"""By name the title and the schema."""
