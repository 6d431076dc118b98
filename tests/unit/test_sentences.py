"""A sentence is formed once, of facts, and neither parsed nor edited afterwards."""

import ast

import pytest
from commands import ROOT

FORMED = {"answer", "note", "reason", "said", "sentence", "text", "verdict", "why"}
"""Names of variables and attributes that hold what people read, or `text(row["reason"])`, one of a table."""

EDITING = {
    *("replace", "split", "rsplit", "partition", "rpartition", "removeprefix", "removesuffix"),
    *("startswith", "endswith", "index", "find", "match", "fullmatch", "search", "sub", "findall"),
}

WHERE = (
    "bench/findings",
    "bench/run/summary.py",
    "bench/export",
    "bench/gate/output.py",
    "bench/plan.py",
    "report",
)
FILES = [path for name in WHERE for path in sorted((ROOT / name).rglob("*.py") or [ROOT / name])]


def edits(source):
    """Calls that look into a formed sentence, or change it."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr in EDITING and any(map(holds_a_sentence, (node.func.value, *node.args))):
            yield ast.unparse(node)


def holds_a_sentence(node):
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in FORMED
        case ast.Subscript(slice=ast.Constant(value=name)):
            return name in FORMED
        case ast.Call(args=[inner, *_]):
            return holds_a_sentence(inner)
    return False


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_sentence_is_parsed_or_edited(path):
    assert list(edits(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        're.match("same layout as (.*);", reason)',
        'verdict.sentence.replace(" (CPU stand-in)", "")',
        'text(row["reason"]).split(";")',
        'reason.partition(";")[0]',
        "pattern.sub('', said)",
    ],
)
def test_what_was_found_once_would_be_found(source):
    assert list(edits(source))
    assert not list(edits('changed.replace("_", " "); name.split("/")'))
