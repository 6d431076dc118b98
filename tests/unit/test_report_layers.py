from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT

NOT_PURE = {"__init__", "__main__", "build", "export", "figures", "files", "palette"}
"""Modules of `report` that read, write or plot, beside the `draw_` ones; all others work on values alone."""

MODULES = sorted(
    path
    for path in (ROOT / "report").glob("*.py")
    if path.stem not in NOT_PURE and not path.stem.startswith("draw_")
)
ALLOWED = {
    *("__future__", "collections", "dataclasses", "math", "re", "statistics", "typing"),
    *("bench", "pandas", "report"),
}


def test_report_never_imports_torch() -> None:
    code = "import sys, report.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_view_model_neither_plots_nor_reads_files(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    imported |= {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    assert {name.split(".")[0] for name in imported} <= ALLOWED
    own = {name.removeprefix("report.") for name in imported if name.startswith("report.")}
    assert not {name for name in own if name in NOT_PURE or name.startswith("draw_")}
