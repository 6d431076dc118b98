"""Pages and Markdown as files: whole, safe, the same each time."""

import base64
import hashlib
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import matplotlib as mpl
import pytest
from made import new_run, write_blocks
from report_runs import blocks, case, dashed, run, usual_cases

from ddp_bench.bench.common.errors import UsageError
from ddp_bench.bench.page.render import render_markdown
from ddp_bench.bench.results.case_columns import CASES
from ddp_bench.bench.results.run_folder import write_table
from ddp_bench.report.build import build
from ddp_bench.report.main import main
from ddp_bench.report.page import make_page

HOSTILE = (
    "<script>alert(1)</script>\"'><img src=x onerror=alert(2)> =cmd|'/C calc'!A0 $\\frac{$ &amp; \x1b[31m 火"
)
ENUMERATED = {"status", "exposed_by", "reason_code", "mode", "impl", "device_type", "scaling", "precision"}


class Elements(HTMLParser):
    """Every element and the text of a page, as a browser would take it."""

    def __init__(self, html):
        super().__init__()
        self.tags = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def write(folder, cases, manifest=None):
    new_run(folder, **manifest or {})
    made = run(cases)
    write_blocks(folder, blocks(cases))
    write_table(folder, "cases.csv", made.cases)
    write_table(folder, "comparisons.csv", made.comparisons)
    return folder


def built(run, out):
    build(run, out)
    return out


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    return write(tmp_path_factory.mktemp("runs") / "usual", usual_cases(), {"name": "usual"})


@pytest.fixture(scope="module")
def html_file(usual, tmp_path_factory):
    """The page of the usual run."""
    return built(usual, tmp_path_factory.mktemp("page") / "a.html")


def test_same_run_gives_the_same_bytes_whatever_a_user_has_set_in_matplotlib(usual, html_file, tmp_path):
    with mpl.rc_context({"axes.spines.bottom": False, "svg.fonttype": "path"}):
        assert built(usual, tmp_path / "b.html").read_bytes() == html_file.read_bytes()
    assert html_file.read_bytes().count(b"<svg") == 2


def test_page_is_self_contained_and_holds_its_numbers(usual, html_file):
    elements = Elements(html_file.read_text(encoding="utf-8"))
    references = [
        value
        for _, attributes in elements.tags
        for name, value in attributes.items()
        if name in {"src", "href", "srcset", "data", "action", "poster"}
    ]
    within = [one.removeprefix("data:text/csv;base64,") for one in references if "csv" in one]
    assert [base64.b64decode(one) for one in within] == [(usual / "cases.csv").read_bytes()]
    assert all(one.startswith(("data:", "#")) for one in references)
    (policy,) = (a["content"] for _, a in elements.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';")


def test_policy_lets_one_script_run_by_its_hash(html_file):
    html = html_file.read_text(encoding="utf-8")
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    sha256 = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{sha256}';" in html
    assert script.count("\n") < 240
    tags = Elements(html).tags
    assert [attributes.get("type") for tag, attributes in tags if tag == "script"] == [None]
    assert {"input", "select", "button"}.isdisjoint(tag for tag, _ in tags), "nor are there dead controls"


def test_page_in_the_runs_folder_links_to_its_files(usual, tmp_path, capsys):
    folder = Path(shutil.copytree(usual, tmp_path / "run"))
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    elements = Elements((folder / "report.html").read_text(encoding="utf-8"))
    linked = [a["href"] for tag, a in elements.tags if tag == "a" and (a.get("href") or "").startswith("./")]
    assert linked == ["./cases.csv", "./comparisons.csv", "./blocks.csv", "./manifest.json"]
    assert all((folder / href).is_file() for href in linked)


def test_ids_are_unique_and_every_reference_is_met(usual, tmp_path):
    html = built(usual, tmp_path / "a.html").read_text(encoding="utf-8")
    attributes = [a for _, a in Elements(html).tags]
    ids = [a["id"] for a in attributes if "id" in a]
    assert len(ids) == len(set(ids))
    wanted = {a["href"][1:] for a in attributes if a.get("href", "").startswith("#")}
    wanted |= {a["clip-path"][5:-1] for a in attributes if "clip-path" in a}
    assert wanted
    assert wanted <= set(ids)


def test_hostile_text_is_shown_and_never_becomes_markup(html_file, tmp_path):
    text_columns = [c.name for c in CASES if c.kind == "text" and c.name not in ENUMERATED]
    hostile = dict.fromkeys(text_columns, HOSTILE)
    cases = [
        case("single", 1, 100.0, **hostile | {"case_id": f"a{HOSTILE}"}),
        case("ddp", 2, 150.0, **hostile | {"case_id": f"b{HOSTILE}"}),
        case("ddp", 2, 160.0, **hostile | {"case_id": f"c{HOSTILE}", "bucket_cap_mb": f"1{HOSTILE}"}),
        case("dp", 1, **hostile | {"case_id": f"d{HOSTILE}"}, status="failed"),
    ]
    part = {HOSTILE: HOSTILE}
    manifest = {
        **dict.fromkeys(("name", "created_utc", "command", "plan_hash", "link"), HOSTILE),
        "settings": dict.fromkeys(("arch", "data"), HOSTILE),
        "versions": part,
        "git": {"commit": HOSTILE},
        "environment": {
            **dict.fromkeys(("host", "os", "cpu_model"), HOSTILE),
            "gpus": [{"name": HOSTILE}],
            "env": part,
        },
        "model": {"arch": HOSTILE},
        "ranks": [{"rank": 0, "host": HOSTILE, "device_name": HOSTILE}],
        "timing": {"stopped_because": HOSTILE},
    }
    usual_tags = {tag for tag, _ in Elements(html_file.read_text(encoding="utf-8")).tags}
    html = built(write(tmp_path / "run", cases, manifest), tmp_path / "a.html").read_text(encoding="utf-8")
    elements = Elements(html)
    assert {tag for tag, _ in elements.tags} - usual_tags <= {"pre", "code"}
    assert not [name for _, a in elements.tags for name in a if name.startswith("on")]
    assert elements.text.count(HOSTILE) > 20
    assert [tag for tag, _ in elements.tags].count("script") == 1


def test_page_that_cannot_be_written_leaves_nothing_behind(usual, tmp_path):
    (tmp_path / "taken").mkdir()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UsageError, match="--out"):
        build(usual, tmp_path / "taken")
    assert sorted(tmp_path.iterdir()) == before


def test_hostile_text_cannot_leave_its_cell():
    hostile = "a|b\n| c | [x](javascript:1) <img src=x> `d` @someone $x$ ~~e~~ https://x.y **f** \\| #1"
    text = render_markdown(
        make_page(run([case("ddp", 2, status="failed", reason=hostile)], {"name": hostile}))
    )
    (row,) = [line for line in text.splitlines() if "| failed |" in line]
    assert row.count("|") == 5
    assert "a&#124;b &#124; c &#124; [x&#93;(javascript:1)" in row
    assert not set("<`@$~*\\#") & set(row.replace("&#", ""))
    assert "://" not in text
    assert text.count("\n## ") == 0


def test_markdown_is_one_summary_on_the_terminal_and_in_a_file(usual, tmp_path, capsys):
    assert main([str(usual), "--markdown"]) == 0
    assert capsys.readouterr().out.startswith(dashed("## ResNet-50, 1--2 GPUs\n"))
    out = tmp_path / "summary.md"
    assert main([str(usual), "--markdown", "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert out.read_text(encoding="utf-8").startswith(dashed("## ResNet-50, 1--2 GPUs\n"))


def test_two_runs_are_sent_to_the_gate(usual, capsys):
    assert main([str(usual), str(usual)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"bench.gate {usual} {usual} --html FILE" in said
