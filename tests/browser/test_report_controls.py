"""What the page's script adds, in a real browser: sorting, filtering, themes, downloads, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bench.results.store import load_run
from report.__main__ import main

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.browser
SEVERE = {"serious", "critical"}


def results(tab: Any) -> Any:
    return tab.locator("section[data-grid]", has=tab.get_by_role("heading", name="Results", exact=True))


def column(table: Any, name: str) -> list[str]:
    names = [text.strip() for text in table.locator("thead th").all_inner_texts()]
    cells = table.locator(f"tbody tr:visible td:nth-child({names.index(name) + 1})")
    return [cell.strip() for cell in cells.all_inner_texts()]


def rates(table: Any) -> list[float]:
    return [float(cell.split()[0].replace(",", "")) for cell in column(table, "Throughput")]


def test_columns_sort_by_keyboard_both_ways_and_back(open_page: Callable[..., Any]) -> None:
    table = results(open_page())
    given = rates(table)
    header = table.get_by_role("columnheader", name="Throughput")
    seen = []
    for _ in range(3):
        header.get_by_role("button").focus()
        header.page.keyboard.press("Enter")
        seen.append((header.get_attribute("aria-sort"), rates(table)))
    assert given not in (sorted(given), sorted(given, reverse=True))
    assert seen == [("ascending", sorted(given)), ("descending", sorted(given, reverse=True)), (None, given)]


def test_text_sorts_by_the_numbers_in_it_and_blanks_stay_last(open_page: Callable[..., Any]) -> None:
    table = results(open_page())
    button = table.get_by_role("columnheader", name="DDP settings").get_by_role("button")
    for _ in range(2):
        button.click()
        cells = column(table, "DDP settings")
        filled = [cell for cell in cells if cell]
        assert cells == filled + [""] * (len(cells) - len(filled))
        caps = [float(cell.split()[1]) for cell in filled if cell.endswith("MiB")]
        assert caps in (sorted(caps), sorted(caps, reverse=True))
    assert table.locator("[aria-sort]").count() == 1


def test_filter_keeps_rows_with_every_word_and_says_how_many(open_page: Callable[..., Any]) -> None:
    table = results(open_page())
    everything = column(table, "Mode")
    box = table.get_by_role("searchbox", name="Filter rows of Results")
    box.fill("DDP  default")
    assert set(column(table, "Mode")) == {"DDP"}
    assert all("default" in cell for cell in column(table, "DDP settings"))
    kept = len(column(table, "Mode"))
    assert 0 < kept < len(everything)
    assert table.get_by_role("status").inner_text() == f"{kept} of {len(everything)} rows"
    box.fill("<b>")
    assert column(table, "Mode") == []
    box.fill("")
    assert column(table, "Mode") == everything
    assert table.get_by_role("status").inner_text() == ""


def test_theme_can_be_chosen_against_the_systems(open_page: Callable[..., Any]) -> None:
    tab = open_page(scheme="dark")
    colour = "getComputedStyle(document.body).backgroundColor"
    seen = {}
    for theme in ("light", "dark", "auto"):
        tab.get_by_label("Theme").select_option(theme)
        seen[theme] = tab.evaluate(colour)
    assert seen["dark"] == seen["auto"]
    assert seen["light"] == "rgb(255, 255, 255)" != seen["dark"]
    tab.emulate_media(media="print")
    assert tab.evaluate(colour) == "rgb(255, 255, 255)"


def test_downloads_are_the_runs_files_to_the_byte(
    open_page: Callable[..., Any], page_file: Path, tmp_path: Path
) -> None:
    tab = open_page()
    for name in ("cases.csv", "blocks.csv", "manifest.json"):
        with tab.expect_download() as started:
            tab.get_by_role("button", name=name).click()
        assert started.value.suggested_filename == name
        started.value.save_as(tmp_path / name)
        assert (tmp_path / name).read_bytes() == (page_file.parent / name).read_bytes()


def test_row_leads_to_its_rounds_and_its_trace(
    open_page: Callable[..., Any], page_file: Path, tmp_path: Path
) -> None:
    tab = open_page()
    table = results(tab)
    row = table.locator("tbody tr", has=tab.get_by_role("link", name="trace")).first
    case_id = row.locator("td").last.inner_text()
    row.get_by_role("link", name="rounds").click()
    opened = tab.locator("details[open]")
    assert opened.locator("summary code").inner_text() == case_id
    blocks = load_run(page_file.parent).blocks
    own = blocks[(blocks["case_id"] == case_id) & (blocks["phase"] == "timed")]
    assert opened.locator("tbody tr").count() == own["round"].nunique()
    assert opened.locator("thead th").count() == 1 + own["rank"].nunique()
    assert opened.locator("summary").bounding_box()["y"] >= 0
    with tab.expect_download() as started:
        row.get_by_role("link", name="trace").click()
    started.value.save_as(tmp_path / "trace.json.gz")
    trace = page_file.parent / "traces" / f"{case_id}-rank0.json.gz"
    assert (tmp_path / "trace.json.gz").read_bytes() == trace.read_bytes()


def test_everything_is_readable_without_the_script(open_page: Callable[..., Any]) -> None:
    tab = open_page(java_script_enabled=False)
    assert column(results(tab), "Mode")
    assert tab.locator("details").count() == results(tab).locator("tbody tr").count()
    assert tab.locator("button:visible, input:visible, select:visible").count() == 0


@pytest.mark.parametrize(
    ("scheme", "width"),
    [
        ("light", 1440),
        pytest.param("dark", 390, marks=pytest.mark.campaign),
        pytest.param("dark", 1440, marks=pytest.mark.campaign),
        pytest.param("light", 390, marks=pytest.mark.campaign),
    ],
)
def test_axe_finds_no_serious_violation(open_page: Callable[..., Any], scheme: str, width: int) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="pip install axe-playwright-python"
    )
    tab = open_page(width, scheme)
    tab.locator("summary").first.click()
    results(tab).get_by_role("button").first.click()
    found = axe.Axe().run(tab).response["violations"]
    assert [(v["id"], [node["target"] for node in v["nodes"]]) for v in found if v["impact"] in SEVERE] == []


@pytest.mark.campaign
@pytest.mark.usefixtures("browser")
def test_page_prints_as_pdf(page_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.pdf"
    assert main([str(page_file.parent), "--pdf", str(out)]) == 0, capsys.readouterr().err
    assert out.read_bytes().startswith(b"%PDF-")
    assert sorted(tmp_path.iterdir()) == [out]
    assert shutil.which("chromium") or shutil.which("chromium-browser")
