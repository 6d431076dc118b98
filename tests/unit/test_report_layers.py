from __future__ import annotations

import ast
from pathlib import Path

import pytest
from commands import ROOT

READS_OR_DRAWS = {"__init__", "__main__", "build", "files", "main"}
"""Modules of `report` that read, write or draw, beside the folder `draw`; all others work on values alone."""

MODULES = sorted(path for path in (ROOT / "report").glob("*.py") if path.stem not in READS_OR_DRAWS)
ALLOWED = {
    *("__future__", "collections", "dataclasses", "itertools", "math", "re", "statistics", "typing"),
    *("ddp_bench", "pandas"),
}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_view_model_neither_plots_nor_reads_files(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    imported = {f"{node.module}.{a.name}" for node in imports for a in node.names}
    imported |= {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    assert {name.split(".")[0] for name in imported} <= ALLOWED
    own = {name.split(".")[2] for name in imported if name.startswith("ddp_bench.report.")}
    assert not own & {*READS_OR_DRAWS, "draw"}
