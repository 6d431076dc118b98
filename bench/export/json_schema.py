"""JSON Schemas of what runs leave and commands print: `ddp-bench export --schema NAME` prints one.

Objects may have more keys than these: later versions, and users, add some.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgspec

from ..gate.output import Printed
from ..manifest import SCHEMA_VERSION, Manifest
from ..results.column_types import MOST, Column
from ..results.schema import FILES
from ..run.summary import Summary
from ..settings import Settings

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
    return {
        "type": "object",
        "properties": {column.name: _cell(column) for column in columns},
        "required": [column.name for column in columns if column.needed],
    }


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


def _manifest() -> Schema:
    whole = msgspec.json.schema(Manifest)
    options = {one.name: {"description": one.metadata.get("help", "")} for one in fields(Settings)}
    whole["$defs"]["Settings"] = {"type": "object", "properties": options}
    return whole


def _summary() -> Schema:
    whole = msgspec.json.schema(Summary)
    whole["$defs"]["Summary"]["properties"]["cases"] = {"type": "array", "items": _row(FILES["cases.csv"])}
    return whole


def _gate() -> Schema:
    whole = msgspec.json.schema(Printed)
    for end in whole["$defs"]["Interval"]["properties"].values():
        end["type"] = ["number", "null"]  # one that is not known
    return whole


SCHEMAS: dict[str, tuple[str, Schema]] = {
    **{
        file.removesuffix(".csv"): (f"A row of {file} as an object; an empty field is null", _row(columns))
        for file, columns in FILES.items()
    },
    "manifest": ("manifest.json: what a run was measured under, and how it ended", _manifest()),
    "summary": ("What `ddp-bench run --json` prints at the end of a run", _summary()),
    "gate": ("What `ddp-bench gate --json` prints", _gate()),
}
"""By name the title and the schema."""
