from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    pass

pytestmark = pytest.mark.browser
WIDTHS = (1440, 390)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_figure_is_visible_and_fits(open_page, width):
    tab = open_page(width)
    assert tab.locator("figure > svg[role=img]").first.is_visible()
    tab.locator("details.fold").evaluate_all("all => all.forEach(e => { e.open = true })")
    figures = tab.locator("figure > svg[role=img]")
    assert figures.count() >= 5
    for figure in figures.all():
        assert figure.is_visible()
        box = figure.bounding_box()
        assert box["width"] > 300
        assert box["height"] > 75
        assert box["x"] + box["width"] <= width
        assert len(figure.get_attribute("aria-label")) > 40


@pytest.mark.parametrize("width", WIDTHS)
def test_page_never_scrolls_sideways(open_page, width):
    tab = open_page(width)
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    tab.locator("details").evaluate_all("all => all.forEach(e => { e.open = true })")
    assert tab.evaluate("document.documentElement.scrollWidth") == width


def test_no_figure_is_cut_on_paper(open_page):
    """A page of paper has room for the highest figure, which is kept together."""
    tab = open_page(690)
    tab.emulate_media(media="print")
    tab.locator("details.fold").evaluate_all("all => all.forEach(e => { e.open = true })")
    for figure in tab.locator("figure").all():
        assert figure.evaluate("e => getComputedStyle(e).breakInside") == "avoid"
        assert figure.bounding_box()["height"] < 1000  # 297 mm less margins, at 96 pixels an inch


def test_printed_page_is_no_wider_than_the_paper(open_page):
    tab = open_page(690)  # A4 less its margins
    tab.emulate_media(media="print")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 690


def test_no_column_is_cut_on_a_narrow_screen(open_page):
    """A row becomes a block: every cell is seen whole, its heading before it."""
    tab = open_page(390)
    tab.locator("details.fold").evaluate_all("all => all.forEach(e => { e.open = true })")
    assert tab.locator(".scroll:has(table)").evaluate_all(
        "all => all.every(e => e.scrollWidth <= e.clientWidth)"
    )
    cells = tab.locator("section[data-grid]").first.locator("tbody tr").first.locator("td")
    for i, heading in enumerate(("Case", "Throughput (images/s)")):
        box = cells.nth(i).bounding_box()
        assert 0 <= box["x"] < box["x"] + box["width"] <= 390
        assert cells.nth(i).evaluate("e => getComputedStyle(e, '::before').content") == f'"{heading}"'


def test_no_word_of_a_heading_is_broken_on_a_narrow_screen(open_page):
    """A word that is broken has rectangles on two lines."""
    tab = open_page(390)
    tab.locator("details.fold").evaluate_all("all => all.forEach(e => { e.open = true })")
    broken = tab.locator("h1, h2, h3, th, .state, summary, .command button").evaluate_all(
        """all => all.flatMap(e => {
          const walker = document.createTreeWalker(e, NodeFilter.SHOW_TEXT);
          const found = [];
          for (let node; (node = walker.nextNode()); ) {
            for (const word of node.data.matchAll(/[\\p{L}\\d]+/gu)) {
              const range = document.createRange();
              range.setStart(node, word.index);
              range.setEnd(node, word.index + word[0].length);
              const lines = new Set([...range.getClientRects()].map(r => Math.round(r.top)));
              if (lines.size > 1) found.push(word[0]);
            }
          }
          return found;
        })"""
    )
    assert broken == []


def test_a_command_wraps_between_its_options(open_page):
    tab = open_page(390)
    heights = tab.locator(".next .command span").evaluate_all(
        "all => all.map(e => e.getClientRects()[0].height)"
    )
    assert len(heights) > 3
    assert max(heights) < 1.5 * min(heights)


def test_wide_tables_scroll_inside_their_box_and_by_keyboard(open_page):
    tab = open_page(600)
    box = tab.locator(".scroll").first
    assert box.evaluate("e => e.scrollWidth > e.clientWidth")
    name = box.locator("td").first.bounding_box()
    box.focus()
    scrolled = box.evaluate_handle(
        "e => ({done: new Promise(done => { e.onscroll = () => done(e.scrollLeft) })})"
    )
    tab.keyboard.press("ArrowRight")
    assert scrolled.evaluate("s => s.done") > 0
    assert box.locator("td").first.bounding_box()["x"] == pytest.approx(name["x"], abs=2)


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.campaign)])
def test_text_and_marks_stand_out_from_the_paper(open_page, scheme):
    """WCAG 2.2 contrast: 4.5 for text, 3 for graphics, computed from what the browser resolved."""
    tab = open_page(1440, scheme)
    paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    selectors = {".caption": 4.5, ".note": 4.5, "dt": 4.5, "th": 4.5, "td": 4.5, "figure svg text": 4.5}
    for selector, least in selectors.items():
        property_name = "fill" if "svg" in selector else "color"
        colours = computed(tab, selector, property_name)
        assert colours
        assert min(contrast(colour, paper) for colour in colours) >= least, selector
    marks = tab.locator("figure svg use").evaluate_all(
        "all => all.map(e => getComputedStyle(e)).map(s => [s.fill, s.stroke])"
    )
    assert marks
    for fill_and_stroke in marks:
        assert max(contrast(colour, paper) for colour in fill_and_stroke if colour != "none") >= 3


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.campaign)])
def test_areas_are_hatched_and_outlined(open_page, scheme):
    """Parts of a bar are told by hatch, outline and label; colour comes on top."""
    tab = open_page(1440, scheme)
    paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    bars = tab.locator("figure[id$=anatomy] svg")
    fills = computed(bars, "path", "fill")
    hatches = {fill for fill in fills if fill.startswith("url")}
    assert len(hatches) >= 3
    assert all(bars.locator(hatch[5:-2]).count() == 1 for hatch in hatches)
    outlines = {colour for colour in computed(bars, "path", "stroke") if colour != "none"}
    assert max(contrast(colour, paper) for colour in outlines) >= 4.5


def test_figures_follow_the_colour_scheme(open_page):
    light, dark = (
        computed(open_page(1440, scheme), "figure svg text", "fill") for scheme in ("light", "dark")
    )
    assert set(light).isdisjoint(dark)


def test_labels_of_a_figure_do_not_overlap(open_page):
    tab = open_page(1440)
    for figure in tab.locator("figure > svg").all():
        boxes = figure.locator("text").evaluate_all(
            "all => all.map(e => e.getBoundingClientRect()).map(b => [b.left, b.top, b.right, b.bottom])"
        )
        assert not [
            (a, b)
            for i, a in enumerate(boxes)
            for b in boxes[i + 1 :]
            if a[0] < b[2] - 1 and b[0] < a[2] - 1 and a[1] < b[3] - 3 and b[1] < a[3] - 3
        ]


def computed(tab, selector, name):
    """A style property of every matching element in a page or a part of it, as the browser resolved it."""
    return tab.locator(selector).evaluate_all(f"all => all.map(e => getComputedStyle(e).{name})")


def contrast(one, other):
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour):
    channels = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
