"""Pages of recorded runs, and a real browser to look at them."""

import functools
import gzip
import shutil

import pytest
from commands import ROOT

from ddp_bench.bench.gate.main import main as gate
from ddp_bench.bench.results.store import load_run
from ddp_bench.report.build import build

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


SAMPLE = ROOT / "results" / "samples" / "cpu-lab-1gbit-2hosts"


@pytest.fixture(scope="session")
def page_file(tmp_path_factory):
    """The page of a copy of a recorded run, as if it had kept its traces."""
    folder = shutil.copytree(SAMPLE, tmp_path_factory.mktemp("runs") / "first-look")
    (folder / "traces").mkdir()
    for case_id in load_run(folder).cases["case_id"]:
        for rank in range(2 if case_id.startswith("ddp-n2") else 1):
            trace = folder / "traces" / f"{case_id}-rank{rank}.json.gz"
            trace.write_bytes(gzip.compress(case_id.encode()))
    build(folder, folder / "report.html")
    return folder / "report.html"


@pytest.fixture(scope="session")
def gate_page_file(tmp_path_factory):
    """The page of two runs of which the second has a faster network."""
    runs = (str(SAMPLE.parent / f"tune/resnet18-2hosts-{rate}.zip") for rate in ("1gbit", "2gbit"))
    page = tmp_path_factory.mktemp("gate") / "gate.html"
    gate([*runs, "--ratios-only", "--quiet", "--html", str(page)])
    return page


@pytest.fixture(scope="session")
def browser():
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    # Hosted runners have Chrome; Ubuntu's chromium-browser is a snap, which cannot open /tmp.
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=chromium, args=list(FLAGS))
        yield running
        running.close()


AS_OPENED = """() => {
  document.querySelectorAll("details").forEach((fold) => { fold.open = false; });
  document.querySelectorAll("[aria-sort]").forEach((head) => {
    while (head.hasAttribute("aria-sort")) head.querySelector("button").click();
  });
  document.querySelectorAll("input[type=search]").forEach((box) => {
    box.value = "";
    box.dispatchEvent(new Event("input"));
  });
  scrollTo(0, 0);
}"""
"""Undoes what a reader does to a page."""


@pytest.fixture(scope="module")
def open_page(browser, page_file, gate_page_file):
    """Opens a page from disk; a request for anything else or a word on the console fails at the end."""
    contexts, asked, said = [], [], []
    files = {"run": page_file, "gate": gate_page_file}
    known = (*(file.as_uri() for file in files.values()), (page_file.parent / "traces").as_uri())

    def answer(route):
        if route.request.url.startswith(known):
            route.continue_()
        else:
            asked.append(route.request.url)
            route.abort()

    def opened(of="run", **more):
        contexts.append(browser.new_context(**more))
        contexts[-1].route("**/*", answer)
        tab = contexts[-1].new_page()
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.goto(files[of].as_uri(), wait_until="load")
        return tab

    yield opened
    for context in contexts:
        context.close()
    assert asked == []
    assert said == []


@pytest.fixture(scope="module")
def look_at(open_page):
    """A page as it is when it has been opened in a window of this width: one tab for all tests."""
    tab_of = functools.cache(open_page)

    def seen(width=1440, scheme="light", of="run"):
        tab = tab_of(of)
        tab.set_viewport_size({"width": width, "height": 900})
        tab.emulate_media(color_scheme=scheme, media="null")
        tab.evaluate(AS_OPENED)
        return tab

    return seen
