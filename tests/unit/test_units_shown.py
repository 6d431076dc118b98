"""Nothing that people read of a run of tokens speaks of images; one of images still does."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from gate_runs import plan, write_run
from report_runs import case, run
from sample_runs import SAMPLES, sample
from test_scaling_predict import SAMPLE
from token_runs import LENGTH, counted_in_tokens, token_run

from ddp_bench.bench.findings.findings import conclude
from ddp_bench.bench.findings.numbers import rate, short, singular, with_interval
from ddp_bench.bench.findings.stability import cautions
from ddp_bench.bench.findings.trust import Trust
from ddp_bench.bench.findings.wording import workload_parts
from ddp_bench.bench.gate import main as gate_command
from ddp_bench.bench.manifest import Timing
from ddp_bench.bench.predict import main as predict_command
from ddp_bench.bench.predict.calibration import save_calibration
from ddp_bench.bench.predict.from_pass import read_source
from ddp_bench.bench.predict.output import Predictions
from ddp_bench.bench.results.aggregate import comparisons_of_run
from ddp_bench.bench.results.store import RunWriter, claim, load_run
from ddp_bench.bench.run.summary import case_table, print_summary, summary_of
from ddp_bench.bench.stats import Interval
from ddp_bench.report.main import main as report_command
from ddp_bench.report.page import page

pytestmark = pytest.mark.usefixtures("few_resamples")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return token_run(tmp_path_factory.mktemp("units") / "tokens")


class Visible(HTMLParser):
    """What a reader of a page sees, tips included, without its scripts."""

    def __init__(self, html):
        super().__init__()
        self.hidden, self.text = 0, ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.hidden += tag in ("script", "style")
        self.text += "".join(f" {value} " for name, value in attrs if name in ("title", "alt", "aria-label"))

    def handle_endtag(self, tag):
        self.hidden -= tag in ("script", "style")

    def handle_data(self, data):
        self.text += "" if self.hidden else data


def assert_speaks_of_tokens(said):
    assert "tokens/s" in said
    found = re.search(r".{0,60}\bimages?.{0,30}", said, re.IGNORECASE)
    assert found is None, found


def test_the_terminal_says_the_unit(tokens, tmp_path, capsys):
    found = load_run(tokens)
    conclusion = conclude(tmp_path, found.manifest, found.cases, found.blocks, comparisons_of_run(found))
    warned = cautions(found.cases, found.blocks, target=0.001)
    conclusion = replace(conclusion, cautions=tuple(warned), trust=Trust.of(warned, on_cpu=False))
    timing = Timing(
        rounds=12,
        total_s=9.0,
        measuring_s=7.0,
        startup_s=1.0,
        timed_share_pct=90.0,
        stopped_because="rounds done",
    )
    print_summary(found.cases, conclusion, timing, tokens / "report.html")
    printed = capsys.readouterr().out
    said = printed + " ".join(f"{one.text} {one.advice}" for one in warned)
    assert_speaks_of_tokens(said)
    assert "8 samples of 512 tokens per device" in said
    assert {"two levels", "wide intervals", "steady rate"} <= {one.kind for one in warned}
    shown = summary_of(tokens, found.cases, conclusion, timing)
    assert {row["unit"] for row in shown.cases} == {"tokens"}


def test_the_page_says_the_unit(tokens, tmp_path):
    out = tmp_path / "page.html"
    assert report_command([str(tokens), "--out", str(out)]) == 0
    said = Visible(out.read_text(encoding="utf-8")).text
    assert_speaks_of_tokens(said)
    for words in (
        *("throughput (tokens/s)", "Throughput, steady state (tokens/s)", "Energy (J/token)"),
        *("synthetic samples on the device", "GFLOP/sample", "tokens, 512 per sample"),
    ):
        assert words in said, words


def test_markdown_says_the_unit(tokens, capsys):
    assert report_command([str(tokens), "--markdown"]) == 0
    assert_speaks_of_tokens(capsys.readouterr().out)


def test_the_gate_says_the_unit(tokens, tmp_path, capsys):
    slower = token_run(tmp_path / "slower", scale=4)
    cases = load_run(tokens).cases
    rate = float(cases.loc[cases["mode"] == "single", "images_per_s"].iloc[0])
    for form in ([], ["--markdown"]):
        assert gate_command.main([str(tokens), str(slower), *form]) == 1
        said = capsys.readouterr().out
        assert_speaks_of_tokens(said)
        # What the run's own table says, and a quarter of it, in four digits.
        assert f"{round(rate, -1):,.0f} tokens/s" in said
        assert f"{rate / 4:,.0f} tokens/s" in said
    assert gate_command.main([str(tokens), str(slower), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert "tokens/s" in found["sentence"]
    assert {tuple(c["units"]) for c in found["comparisons"]} == {("tokens", "tokens")}


def test_the_command_names_the_units_that_differ(tmp_path, capsys):
    old = write_run(tmp_path / "old")
    new = write_run(tmp_path / "new", planned=[in_samples(p) for p in plan()])
    assert gate_command.main([str(old), str(new)]) == 3
    said = capsys.readouterr().out
    assert "differs: unit: images -> samples" in said
    assert re.search(r"[0-9] images/s +[0-9,.]+ samples/s", said), "each in its own unit"
    assert "not comparable: the runs differ in unit; --ratios-only still compares" in said
    assert gate_command.main([str(old), str(write_run(tmp_path / "images"))]) == 0


def in_samples(planned):
    return replace(planned, case=replace(planned.case, unit="samples"))


def test_a_page_of_several_units_compares_no_throughput(tokens):
    images = run([case("single", 1, 100.0), case("ddp", 2, 180.0)])
    together = page([load_run(tokens), images]).together
    assert "Throughput of every run" not in [figure.title for figure in together.figures]
    assert not together.tables
    (note,) = (note for note in together.notes if "not comparable" in note)
    assert "count different units: tokens tokens, by-hand images." in note
    alike = page([load_run(tokens), load_run(tokens)]).together
    assert alike.figures[0].axes == "DP: throughput (tokens/s) against devices (CPU cores)"
    assert "(tokens/s)" in alike.tables[0].columns[1].name


def test_predict_and_its_page_say_the_unit(tmp_path, capsys):
    folder = tmp_path / "run"
    found = load_run(SAMPLE)
    in_tokens = counted_in_tokens(found.cases)
    RunWriter(claim(folder)).replace("cases.csv", in_tokens)
    for name in ("manifest.json", "blocks.csv", "buckets.csv", "allreduce.csv"):
        (folder / name).write_bytes((SAMPLE / name).read_bytes())
    own = read_source(SAMPLE).calibration
    identity = replace(own.identity, unit="tokens", units_per_sample=LENGTH, arch="lm:model", image_size=None)
    save_calibration(folder, replace(own, identity=identity))
    document = tmp_path / "predictions.json"
    assert predict_command.main([str(folder), "--gpus", "2,64", "--out", str(document)]) == 0
    said = capsys.readouterr().out
    assert_speaks_of_tokens(said)
    assert re.search(r" [1-9][0-9]{0,2},[0-9]{2}0 \([0-9,]+0\N{EN DASH}[0-9,]+0\) ", said), "41,090 (...)"
    assert not re.search(r"[0-9]e[+-]?[0-9]", said)
    assert Predictions.from_json(document.read_text()).identity.unit == "tokens"
    out = tmp_path / "page.html"
    assert report_command([str(folder), "--predictions", str(document), "--out", str(out)]) == 0
    shown = Visible(out.read_text(encoding="utf-8")).text
    assert_speaks_of_tokens(shown[shown.index("On hardware you do not have") :][:5000])
    assert not re.search(r"[0-9]e\+[0-9]", shown)


def test_a_sample_counts_images():
    found = sample(SAMPLES[0])
    assert set(found.cases["unit"]) == {"images"}
    assert set(found.cases["units_per_sample"]) == {1}
    assert "images/s (95%)" in [column.header for column in case_table(found.cases).columns]
    assert "images per device" in " ".join(workload_parts(found.cases.iloc[0], 16.0))
    table = page([found]).runs[0].tables[0]
    assert "Throughput (images/s)" in [column.name for column in table.columns]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (41087.3, "41,090 tokens/s"),
        (8934.0, "8,934 tokens/s"),
        (301.23, "301 tokens/s"),
        (0.01234, "0.0123 tokens/s"),
        (Interval(41087.3, 40181.0, 41994.0), "41,090 (40,180\N{EN DASH}41,990) tokens/s"),
        (Interval(9990.0, 9900.0, 10010.0), "9,990 (9,900\N{EN DASH}10,010) tokens/s"),
        (None, ""),
    ],
)
def test_rates_have_thousands_and_four_digits_at_most(value, shown):
    assert rate(value, "tokens") == shown


def test_no_number_for_people_has_a_power_of_ten():
    assert (short(1234.5, 2), short(120.0, 2), short(0.5), short(41087.0)) == (
        "1,200",
        "120",
        "0.5",
        "41,090",
    )
    assert with_interval(Interval(12.0, 11.0, 14.27), "%", 100.0) == "1,200 (1,100\N{EN DASH}1,427)%"


@pytest.mark.parametrize(
    ("plural", "one"), [("images", "image"), ("queries", "query"), ("boxes", "box"), ("data", "data")]
)
def test_energy_is_of_one(plural, one):
    assert singular(plural) == one
