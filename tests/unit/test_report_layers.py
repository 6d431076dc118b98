from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from types import ModuleType

import pytest

import report.view
from report import (
    anatomy,
    caps,
    charts,
    communication,
    conditions,
    devices,
    drawings,
    drift,
    fields,
    markdown,
    model,
    numbers,
    paired,
    paper,
    paper_figures,
    predicted,
    rounds,
    select,
    spread,
    tables,
    timeline,
    together,
)


def test_report_never_imports_torch() -> None:
    code = "import sys, report.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "module",
    [
        anatomy,
        caps,
        charts,
        communication,
        conditions,
        devices,
        drawings,
        drift,
        fields,
        markdown,
        model,
        numbers,
        paired,
        paper,
        paper_figures,
        predicted,
        rounds,
        select,
        spread,
        tables,
        timeline,
        together,
        report.view,
    ],
    ids=lambda module: module.__name__,
)
def test_view_model_neither_plots_nor_reads_files(module: ModuleType) -> None:
    tree = ast.parse(inspect.getsource(module))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    roots = {name.split(".")[0] for name in imported if name}
    assert roots <= {
        "__future__",
        "bench",
        "collections",
        "dataclasses",
        "math",
        "pandas",
        "re",
        "report",
        "statistics",
        "typing",
    }
    assert not {
        name
        for name in imported
        if name.startswith(
            ("report.build", "report.draw_", "report.export", "report.figures", "report.files")
        )
    }
