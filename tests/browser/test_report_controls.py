"""What the page's script adds, in a real browser: sorting, filtering, themes, and nothing else."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    pass

pytestmark = pytest.mark.browser
SEVERE = {"serious", "critical"}


def results(tab):
    return tab.locator("section[data-grid]", has=tab.get_by_role("heading", name="Results", exact=True))


def column(table, name):
    names = [text.strip() for text in table.locator("thead th").all_inner_texts()]
    cells = table.locator(f"tbody tr:visible td:nth-child({names.index(name) + 1})")
    return [cell.strip() for cell in cells.all_inner_texts()]


def rates(table):
    return [float(cell.split()[0].replace(",", "")) for cell in column(table, "Throughput (images/s)")]


def unfold(tab):
    tab.locator("details.fold").evaluate_all("all => all.forEach(e => { e.open = true })")


def every_column(tab):
    unfold(tab)
    return tab.locator("section[data-grid]", has=tab.get_by_role("heading", name="Every column", exact=True))


def test_columns_sort_by_keyboard_both_ways_and_back(open_page):
    table = results(open_page())
    given = rates(table)
    header = table.get_by_role("columnheader", name="Throughput (images/s)")
    seen = []
    for _ in range(3):
        header.get_by_role("button").focus()
        header.page.keyboard.press("Enter")
        seen.append((header.get_attribute("aria-sort"), rates(table)))
    assert given not in (sorted(given), sorted(given, reverse=True))
    assert seen == [("ascending", sorted(given)), ("descending", sorted(given, reverse=True)), (None, given)]


def test_text_sorts_by_the_numbers_in_it_and_blanks_stay_last(open_page):
    table = every_column(open_page())
    button = table.get_by_role("columnheader", name="DDP settings").get_by_role("button")
    for _ in range(2):
        button.click()
        cells = column(table, "DDP settings")
        filled = [cell for cell in cells if cell]
        assert cells == filled + [""] * (len(cells) - len(filled))
        caps = [float(cell.split()[1]) for cell in filled if cell.endswith("MiB")]
        assert caps in (sorted(caps), sorted(caps, reverse=True))
    assert table.locator("[aria-sort]").count() == 1


def test_filter_keeps_rows_with_every_word_and_says_how_many(open_page):
    tab = open_page()
    table, every = results(tab), every_column(tab)
    everything = column(table, "Case")
    assert tab.get_by_role("searchbox").count() == 1
    box = tab.get_by_role("searchbox", name="Filter cases of ResNet-18")
    box.fill("DDP  default")
    kept = column(table, "Case")
    assert kept == [name for name in everything if "DDP" in name and "default" in name]
    assert 0 < len(kept) < len(everything)
    assert set(column(every, "Mode")) == {"DDP"}
    assert tab.get_by_role("status").inner_text() == f"{len(kept)} of {len(everything)} cases"
    box.fill("<b>")
    assert column(table, "Case") == []
    box.fill("")
    assert column(table, "Case") == everything
    assert tab.get_by_role("status").inner_text() == ""


def test_filter_fades_the_marks_of_other_cases(open_page):
    tab = open_page()
    marks = tab.locator("svg .tip")
    names = marks.evaluate_all("all => all.map(e => e.querySelector('title').textContent)")
    assert any(" rounds" in name for name in names)
    tab.get_by_role("searchbox").fill("single")
    shown = marks.evaluate_all("all => all.map(e => getComputedStyle(e).opacity === '1')")
    assert shown == ["single" in name for name in names]
    assert len(set(shown)) == 2


def test_commands_are_copied_to_the_letter(open_page):
    tab = open_page(permissions=["clipboard-read", "clipboard-write"])
    command = tab.locator(".next .command")
    command.get_by_role("button", name="Copy").click()
    command.get_by_role("button", name="Copied").wait_for()
    copied = tab.evaluate("navigator.clipboard.readText()")
    assert copied == command.locator("pre").inner_text()
    assert copied.startswith("python -m bench.")


def test_link_into_a_fold_opens_it(open_page):
    tab = open_page()
    fold = tab.locator("details.fold", has=tab.get_by_role("heading", name="Conditions"))
    assert fold.get_attribute("open") is None
    tab.get_by_role("navigation").get_by_role("link", name="Conditions").click()
    assert fold.get_attribute("open") is not None


def test_folds_are_open_on_paper(open_page):
    tab = open_page(java_script_enabled=False)
    assert not tab.locator(".fold figure svg").first.is_visible()
    tab.emulate_media(media="print")
    assert tab.locator(".fold figure svg").first.is_visible()
    assert tab.get_by_text("Versions", exact=True).first.is_visible()


def test_theme_can_be_chosen_against_the_systems(open_page):
    tab = open_page(scheme="dark")
    colour = "getComputedStyle(document.body).backgroundColor"
    seen = {}
    for theme in ("light", "dark", "auto"):
        tab.get_by_label("Theme").select_option(theme)
        seen[theme] = tab.evaluate(colour)
    assert seen["dark"] == seen["auto"]
    assert seen["light"] == "rgb(255, 255, 255)" != seen["dark"]
    tab.get_by_label("Theme").select_option("light")
    tab.reload()
    assert tab.get_by_label("Theme").input_value() == "light"
    assert tab.evaluate(colour) == seen["light"]
    tab.get_by_label("Theme").select_option("dark")
    tab.emulate_media(media="print")
    assert tab.evaluate(colour) == "rgb(255, 255, 255)"


def test_row_leads_to_its_traces(open_page, page_file, tmp_path):
    tab = open_page()
    row = every_column(tab).locator("tbody tr", has=tab.get_by_role("link", name="rank 1")).first
    case_id = row.locator("td").last.inner_text()
    with tab.expect_download() as started:
        row.get_by_role("link", name="rank 1").click()
    started.value.save_as(tmp_path / "trace.json.gz")
    trace = page_file.parent / "traces" / f"{case_id}-rank1.json.gz"
    assert (tmp_path / "trace.json.gz").read_bytes() == trace.read_bytes()


def test_everything_is_readable_without_the_script(open_page):
    tab = open_page(java_script_enabled=False)
    assert column(results(tab), "Case")
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
def test_axe_finds_no_serious_violation(open_page, scheme, width):
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="pip install axe-playwright-python"
    )
    tab = open_page(width, scheme)
    unfold(tab)
    tab.locator(".how summary").first.click()
    results(tab).get_by_role("button").first.click()
    found = axe.Axe().run(tab).response["violations"]
    assert [(v["id"], [node["target"] for node in v["nodes"]]) for v in found if v["impact"] in SEVERE] == []
