"""Holds documents and results folders against the printed JSON Schemas, by `jsonschema` and `csv` alone."""

import csv
import functools
import json

from jsonschema import Draft202012Validator

from ddp_bench.bench.export.json_schema import json_schema

TABLES = ("cases", "blocks", "buckets", "allreduce", "comparisons")

_FROM_TEXT = {"integer": int, "number": float, "boolean": {"True": True, "False": False}.__getitem__}


@functools.cache
def _validator(name):
    return Draft202012Validator(json_schema(name))


def problems(name, document):
    """What the schema `name` has against a document."""
    errors = _validator(name).iter_errors(document)
    return [f"{name} {error.json_path}: {error.message[:300]}" for error in errors]


def problems_of_run(folder):
    """What the schemas have against the files of a results folder."""
    found = problems("manifest", json.loads((folder / "manifest.json").read_text(encoding="utf-8")))
    for name in TABLES:
        if (folder / f"{name}.csv").exists():
            for row in rows(folder / f"{name}.csv", json_schema(name)["properties"]):
                found += problems(name, row)
    return found


def rows(path, properties):
    """The rows of a table as objects, each value of the type that its schema asks for."""
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            yield {name: _value(text, properties.get(name, {})) for name, text in row.items()}


def _value(text, described):
    if text == "":
        return None
    types = described.get("type", "string")
    kinds = types if isinstance(types, list) else [types]
    return _FROM_TEXT.get(kinds[0], str)(text)
