"""The page in a real browser: it fits, it can be read, and its script sorts, filters and nothing else."""

from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest
from PIL import Image
from selection import in_campaign

pytestmark = pytest.mark.browser
WIDTHS = (1440, 390)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_figure_is_visible_and_fits_and_the_page_never_scrolls_sideways(look_at, width):
    tab = look_at(width)
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    assert tab.locator("figure svg[role=img]").first.is_visible()
    unfold(tab, "details")
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    figures = tab.locator("figure svg[role=img]")
    assert figures.count() == 4
    for figure in figures.all():
        assert figure.is_visible()
        box = figure.bounding_box()
        assert box["width"] > 300
        assert box["height"] > 75
        assert box["x"] + box["width"] <= width
        assert len(figure.get_attribute("aria-label")) > 40


def test_no_column_is_cut_on_a_narrow_screen(look_at):
    """A row becomes a block: every cell is seen whole, its heading before it."""
    tab = look_at(390)
    unfold(tab)
    assert tab.locator(".scroll:has(table)").evaluate_all(
        "all => all.every(e => e.scrollWidth <= e.clientWidth)"
    )
    cells = tab.locator("section[data-grid]").first.locator("tbody tr").first.locator("td")
    for i, heading in enumerate(("Case", "Devices")):
        box = cells.nth(i).bounding_box()
        assert 0 <= box["x"] < box["x"] + box["width"] <= 390
        assert cells.nth(i).evaluate("e => getComputedStyle(e, '::before').content") == f'"{heading}"'


def computed(tab, selector, name):
    """A style property of every matching element in a page or a part of it, as the browser resolved it."""
    return tab.locator(selector).evaluate_all(f"all => all.map(e => getComputedStyle(e).{name})")


SEVERE = {"serious", "critical"}


def results(tab):
    return tab.locator("section[data-grid]", has=tab.get_by_role("heading", name="Results", exact=True))


def column(table, name):
    names = [text.strip() for text in table.locator("thead th").all_inner_texts()]
    cells = table.locator(f"tbody tr:visible td:nth-child({names.index(name) + 1})")
    return [cell.strip() for cell in cells.all_inner_texts()]


def names(table):
    """The whole names of the rows that are seen."""
    return table.locator("tbody tr:visible").evaluate_all("all => all.map(e => e.dataset.name)")


def rates(table):
    return [float(cell.split()[0].replace(",", "")) for cell in column(table, "Throughput (images/s)")]


def unfold(tab, folds="details.fold"):
    tab.locator(folds).evaluate_all("all => all.forEach(e => { e.open = true })")


def every_column(tab):
    unfold(tab)
    return tab.locator("section[data-grid]", has=tab.get_by_role("heading", name="Every column", exact=True))


def test_columns_sort_by_keyboard_both_ways_and_back(look_at):
    table = results(look_at())
    given = rates(table)
    header = table.get_by_role("columnheader", name="Throughput (images/s)")
    seen = []
    for _ in range(3):
        header.get_by_role("button").focus()
        header.page.keyboard.press("Enter")
        seen.append((header.get_attribute("aria-sort"), rates(table)))
    assert given not in (sorted(given), sorted(given, reverse=True))
    assert seen == [("ascending", sorted(given)), ("descending", sorted(given, reverse=True)), (None, given)]


def test_text_sorts_by_the_numbers_in_it_and_blanks_stay_last(look_at):
    table = every_column(look_at())
    for name in ("Case", "Against DDP's default (\N{MULTIPLICATION SIGN})"):
        for _ in range(2):
            table.get_by_role("columnheader", name=name).get_by_role("button").click()
            cells = column(table, name)
            filled = [cell for cell in cells if cell]
            assert cells == filled + [""] * (len(cells) - len(filled))
            assert name == "Case" or len(filled) < len(cells)
            caps = [float(cell.split()[-2]) for cell in cells if cell.endswith("MiB")]
            assert caps in (sorted(caps), sorted(caps, reverse=True))
    assert table.locator("[aria-sort]").count() == 1


def test_words_in_a_column_of_numbers_stay_last_whichever_way_it_is_sorted(look_at):
    table = results(look_at())
    for is_falling in (False, True):
        table.get_by_role("columnheader", name="Overlap (%)").get_by_role("button").click()
        cells = column(table, "Overlap (%)")
        numbers = [float(cell.split()[0]) for cell in cells if cell]
        assert numbers == sorted(numbers, reverse=is_falling)
        assert len(numbers) > 2
        assert [*map(bool, cells[: len(numbers)])] == [True] * len(numbers)
        assert set(cells[len(numbers) :]) == {""}


def test_changes_are_sorted_with_their_sign(look_at):
    tab = look_at(of="gate")
    table = tab.locator("section[data-grid]", has=tab.locator("thead th", has_text="Change")).first
    header = table.locator("thead th", has_text="Change").first
    header.get_by_role("button").click()
    changes = [cell for cell in column(table, header.inner_text().strip()) if "(" in cell]
    shares = [float(cell.split("%")[0].replace("\N{MINUS SIGN}", "-")) for cell in changes]
    assert any(cell.startswith("+") for cell in changes)
    assert shares == sorted(shares)


def test_what_the_filter_leaves_out_is_gone_on_a_phone_too(look_at):
    tab = look_at(390)
    table = results(tab)
    tab.get_by_role("searchbox").fill("cap 25")
    assert names(table) == ["DDP, 2 CPU cores, cap 25 MiB"]


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        ("DDP  default", ["DDP, 1 CPU core, cap default", "DDP, 2 CPU cores, cap default"]),
        ("cap 25", ["DDP, 2 CPU cores, cap 25 MiB"]),
        ("cap 1", ["DDP, 2 CPU cores, cap 1 MiB"]),
        ("ddp, 2 cpu cores, cap 100", ["DDP, 2 CPU cores, cap 100 MiB"]),
        ("sing", ["single, 1 CPU core"]),
        ("<b>", []),
        ("12", []),
    ],
)
def test_filter_reads_names_and_says_how_many_cases_are_left(look_at, typed, kept):
    """A number is a whole one, and none of the figures beside the name."""
    tab = look_at()
    table, every = results(tab), every_column(tab)
    everything = names(table)
    box = tab.get_by_role("searchbox")
    box.fill(typed)
    assert names(table) == column(every, "Case") == kept
    assert tab.get_by_role("status").inner_text() == f"{len(kept)} of {len(everything)} cases"
    faded = tab.locator("svg .faded title").evaluate_all("all => all.map(e => e.textContent.split(' · ')[0])")
    assert set(faded).isdisjoint(kept)
    box.fill("")
    assert names(table) == everything
    assert tab.get_by_role("status").inner_text() == ""


def test_an_entry_of_a_legend_hides_and_shows_its_series(look_at):
    figure = look_at().locator("figure", has_text="Speed-up over one device")
    button = figure.get_by_role("button", name="DDP", exact=True)
    for pressed, ddp in (("false", {"none"}), ("true", {"inline"})):
        button.click()
        assert button.get_attribute("aria-pressed") == pressed
        assert set(computed(figure, "[data-series=DDP]", "display")) == ddp
        assert set(computed(figure, "[data-series=single]", "display")) == {"inline"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_figure_is_saved_as_it_is_seen(look_at, scheme, tmp_path):
    """Whole, with colours of its own on the page's paper."""
    tab = look_at(1440, scheme)
    figure = tab.locator("figure").first
    saved = {}
    for kind in ("SVG", "PNG"):
        with tab.expect_download() as started:
            figure.get_by_role("button", name=f"as {kind}").click()
        saved[kind] = tmp_path / started.value.suggested_filename
        started.value.save_as(saved[kind])
    drawing = saved["SVG"].read_text(encoding="utf-8")
    assert ET.fromstring(drawing).tag == "{http://www.w3.org/2000/svg}svg"
    assert "var(" not in drawing
    image = Image.open(saved["PNG"]).convert("RGB")
    assert image.width == 1600
    paper = (255, 255, 255) if scheme == "light" else (0x14, 0x17, 0x1A)
    assert image.getpixel((2, 2)) == paper
    assert {(0x00, 0x72, 0xB2), (0x56, 0xB4, 0xE9)} & {c for _, c in image.getcolors(maxcolors=1_000_000)}


def test_the_numbers_are_saved_from_the_page(look_at, page_file, tmp_path):
    tab = look_at()
    with tab.expect_download() as started:
        tab.locator("a[download]").click()
    started.value.save_as(tmp_path / "cases.csv")
    assert (tmp_path / "cases.csv").read_bytes() == (page_file.parent / "cases.csv").read_bytes()


def test_the_first_answer_stands_on_the_first_screen_of_a_phone_and_figures_before_prose(look_at):
    for of, seen in (("run", "h1, main > .figures > figure:first-child svg"), ("gate", "h1")):
        tab = look_at(390, of=of)
        for first in tab.locator(seen).all():
            assert first.bounding_box()["y"] + first.bounding_box()["height"] <= 844
        figure, notes = (tab.locator(name).first.bounding_box() for name in ("figure svg", ".notes"))
        assert figure["y"] < notes["y"]
        assert figure["y"] < tab.locator("#tables").bounding_box()["y"]


@pytest.mark.parametrize("of", ["run", "gate"])
def test_a_print_takes_three_sheets_at_most_and_cuts_nothing(look_at, of):
    """A4 without its margins is 182 mm wide."""
    tab = look_at(688, of=of)
    assert 1 <= tab.pdf(format="A4").count(b"/Type /Page\n") <= 3
    tab.emulate_media(media="print")
    wider = "all => all.filter(e => e.getBoundingClientRect().right > 689).map(e => e.outerHTML.slice(0, 80))"
    assert tab.locator("main *").evaluate_all(wider) == []
    assert tab.locator("details.fold:visible").count() == 0
    unfold(tab)
    assert tab.locator("details.fold:visible").count() > 0


@pytest.mark.parametrize("of", ["run", "gate"])
def test_figures_and_notes_leave_no_blank_between_them(look_at, of):
    tab = look_at(1280, of=of)
    boxes = [one.bounding_box() for one in tab.locator("main > .figures > *").all()]
    assert boxes[0]["x"] < 600 < boxes[-1]["x"]
    for first, second in pairwise(boxes):
        if first["x"] == second["x"]:
            assert 0 < second["y"] - first["y"] - first["height"] < 60
    left, right = (
        max(box["y"] + box["height"] for box in boxes if (box["x"] > 600) == side) for side in (False, True)
    )
    assert abs(left - right) < min(box["height"] for box in boxes) + 60 or len(boxes) < 3


@pytest.mark.parametrize("width", WIDTHS)
def test_what_warns_is_seen_without_a_click_and_the_rest_with_one(look_at, width):
    tab = look_at(width)
    card = tab.locator(".confidence")
    for claim in (
        "Caution: rounds vary",
        "Next run? Unknown: intervals are of this run alone.",
        "Other machines? Measure",
    ):
        assert card.locator("> p", has_text=claim).is_visible()
    assert tab.locator(".next .note", has_text="A DDP step").is_visible()
    advice = card.get_by_text("Run the same command twice more")
    card.locator("details").evaluate("e => e.open = false")
    assert not advice.is_visible()
    card.get_by_text("More on confidence").click()
    assert advice.is_visible()


def test_a_phone_shows_few_columns_and_a_wide_screen_all(look_at):
    seen = {width: results(look_at(width)).locator("thead th:visible").count() for width in WIDTHS}
    assert seen[390] <= 6 < seen[1440]
    assert results(look_at(390)).locator("tbody tr").first.bounding_box()["height"] < 200


def test_commands_are_copied_to_the_letter(look_at):
    tab = look_at()
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    command = tab.locator(".next .command")
    command.get_by_role("button", name="Copy").click()
    command.get_by_role("button", name="Copied").wait_for()
    copied = tab.evaluate("navigator.clipboard.readText()")
    assert copied == command.locator("pre").inner_text()
    assert copied.startswith("python -m bench.")


def test_link_into_a_fold_opens_it(look_at):
    tab = look_at()
    fold = tab.locator("details.fold", has=tab.get_by_role("heading", name="Conditions"))
    assert fold.get_attribute("open") is None
    tab.get_by_role("navigation").get_by_role("link", name="Conditions").click()
    assert fold.get_attribute("open") is not None


def test_theme_can_be_chosen_against_the_systems_and_stays(open_page):
    tab = open_page(color_scheme="dark")
    seen, drawn = {}, {}
    for theme in ("dark", "auto", "light"):
        tab.get_by_label("Theme").select_option(theme)
        seen[theme] = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        drawn[theme] = set(computed(tab, "figure svg text", "fill"))
    assert drawn["light"].isdisjoint(drawn["dark"]), "figures follow"
    assert seen["dark"] == seen["auto"] != seen["light"] == "rgb(255, 255, 255)"
    tab.reload()
    assert tab.get_by_label("Theme").input_value() == "light"


def test_row_leads_to_its_traces(look_at, page_file, tmp_path):
    tab = look_at()
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


@pytest.mark.parametrize("of", ["run", "gate"])
@pytest.mark.parametrize(
    ("scheme", "width"),
    [
        ("light", 1440),
        *in_campaign(("dark", 390), ("dark", 1440), ("light", 390)),
    ],
)
def test_axe_finds_no_serious_violation(look_at, of, scheme, width):
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="pip install axe-playwright-python"
    )
    tab = look_at(width, scheme, of=of)
    unfold(tab)
    tab.locator("thead").first.get_by_role("button").first.click()
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    found = axe.Axe().run(tab).response["violations"]
    assert [(v["id"], [node["target"] for node in v["nodes"]]) for v in found if v["impact"] in SEVERE] == []
