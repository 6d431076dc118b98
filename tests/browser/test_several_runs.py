import json

import pytest

from ddp_bench.report.build import build

pytestmark = [pytest.mark.browser, pytest.mark.campaign]
VERSIONS = ("2.11.0", "2.15.0", "2.15.0")


@pytest.fixture(scope="session")
def page_file(tmp_path_factory, with_traces):
    """Three runs that differ in PyTorch and host, and share their name."""
    folder = tmp_path_factory.mktemp("several")
    runs = []
    for i, torch in enumerate(VERSIONS):
        made = with_traces(folder / f"machine{i}" / "nightly")
        manifest = json.loads((made / "manifest.json").read_text(encoding="utf-8"))
        manifest["versions"]["torch"] = torch
        manifest["environment"]["host"] = f"machine{i}"
        (made / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
        runs.append(made)
    return build(runs, folder / "report.html")


@pytest.mark.parametrize("width", [1440, 390])
def test_runs_side_by_side_fit_the_page(open_page, width):
    tab = open_page(width)
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    drawn = tab.locator(".together figure > svg")
    assert drawn.count() == 3
    for figure in drawn.all():
        box = figure.bounding_box()
        assert box["x"] + box["width"] <= width
        assert "nightly" in figure.get_attribute("aria-label")


def test_the_finding_stands_first_and_what_differs_below_the_figures(open_page):
    tab = open_page()
    differences = tab.locator(".differences td")
    assert any(text.startswith("2.11.0") for text in differences.all_inner_texts())
    places = (".together .finding", ".together .warnings", ".together figure", ".differences", "article")
    heights = [tab.locator(place).first.bounding_box()["y"] for place in places]
    assert heights == sorted(heights)


def test_series_of_the_runs_have_colours_of_their_own(open_page):
    colours = {
        scheme: open_page(1440, scheme)
        .locator(".together figure")
        .first.locator("svg use")
        .evaluate_all("all => [...new Set(all.map(e => getComputedStyle(e).stroke))]")
        for scheme in ("light", "dark")
    }
    assert all(len(found) >= len(VERSIONS) for found in colours.values())
