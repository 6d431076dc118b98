"""Pages of two run folders, and a real browser to look at them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from made_runs import default_run, paper_run

from report import build

if TYPE_CHECKING:
    from collections.abc import Iterator

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


@pytest.fixture(scope="session", params=[default_run, paper_run], ids=["default", "paper"])
def page_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = request.param(tmp_path_factory.mktemp("runs") / "first-look")
    return build([folder], tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=chromium, args=list(FLAGS))
        yield running
        running.close()
