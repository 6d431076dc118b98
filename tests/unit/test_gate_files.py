"""What the gate reads, never a bad folder as a pass, and what it prints and leaves in a job."""

import base64
import csv
import io
import json
import math
import re
import shutil
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest
from commands import ROOT
from gate_runs import STEADY, failed, gated, made_run, of_metric, plan, slowed, write_run
from matplotlib.figure import Figure as Canvas
from msgspec import structs
from recorded_pages import text_of

from ddp_bench.bench.common.console import MAX_ANNOTATIONS, Annotation, show_on_github
from ddp_bench.bench.common.errors import ExitCode, UsageError
from ddp_bench.bench.gate import headline, output, wording
from ddp_bench.bench.gate.code import check_one_code, describe_same_code, name_sides
from ddp_bench.bench.gate.command import read_policy
from ddp_bench.bench.gate.decide import EXIT_CODES
from ddp_bench.bench.gate.judge import VERDICTS
from ddp_bench.bench.gate.main import main, make_parser
from ddp_bench.bench.gate.page import make_outline, make_page, render_markdown
from ddp_bench.bench.gate.runs import read_run
from ddp_bench.bench.page import terminal
from ddp_bench.bench.results.case_columns import GATED_METRICS
from ddp_bench.bench.stats.interval import Interval


def edit(name, change):
    def apply(folder):
        text = (folder / name).read_text(encoding="utf-8")
        changed = change(text)
        assert changed != text, "the edit hit nothing"
        (folder / name).write_text(changed, encoding="utf-8")

    return apply


def cell(name, column, value, row=0):
    """Overwrite one cell of a CSV."""

    def change(text):
        header, *lines = text.splitlines()
        cells = lines[row].split(",")
        cells[header.split(",").index(column)] = value
        lines[row] = ",".join(cells)
        return "\n".join([header, *lines]) + "\n"

    return edit(name, change)


def without_line(name, index):
    return edit(
        name, lambda text: "".join(x for i, x in enumerate(text.splitlines(keepends=True)) if i != index)
    )


def manifest(**changes):
    return edit("manifest.json", lambda text: json.dumps({**json.loads(text), **changes}))


BAD = {
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "not a results folder"),
    "cut manifest": (edit("manifest.json", lambda t: t[:-20]), "not valid JSON"),
    "list for a manifest": (lambda f: (f / "manifest.json").write_text("[]"), "JSON object"),
    "newer schema": (manifest(schema_version=99), "schema 99"),
    "a setting in words": (manifest(settings={"least_block_s": "x"}), "settings: "),
    "no cases.csv": (lambda f: (f / "cases.csv").unlink(), "cases.csv"),
    "no blocks.csv": (lambda f: (f / "blocks.csv").unlink(), "blocks.csv"),
    "empty cases.csv": (lambda f: (f / "cases.csv").write_text(""), "cases.csv"),
    "header alone": (edit("cases.csv", lambda t: t.splitlines()[0] + "\n"), "no case"),
    "cut inside a line": (edit("blocks.csv", lambda t: t[:-9]), "has been cut"),
    "a line lost": (without_line("blocks.csv", 2), "num_blocks"),
    "a rank lost": (without_line("blocks.csv", 13), "lacks ranks"),
    "a case lost": (without_line("cases.csv", 3), "does not hold"),
    "a case twice": (edit("cases.csv", lambda t: t + t.splitlines(keepends=True)[1]), "stands twice"),
    "a block twice": (edit("blocks.csv", lambda t: t + t.splitlines(keepends=True)[1]), "stands twice"),
    "binary": (lambda f: (f / "cases.csv").write_bytes(b"\xff\xfe\x00\n"), "cases.csv"),
    "column renamed": (edit("blocks.csv", lambda t: t.replace("block_ms", "ms", 1)), "column block_ms"),
    "rate not a number": (cell("cases.csv", "images_per_s", "nan"), "'nan'"),
    "negative memory": (cell("cases.csv", "peak_mem_mib", "-1"), "peak_mem_mib"),
    **{
        f"{column} {value!r}": (cell(name, column, value), f"{column} ")
        for name, column, values in (
            ("cases.csv", "images_per_s", ("", "0", "inf")),
            ("cases.csv", "global_batch", ("999",)),
            ("cases.csv", "num_devices", ("",)),
            ("cases.csv", "status", ("fine",)),
            ("blocks.csv", "block_ms", ("", "0", "-5", "inf", "1e300")),
            ("blocks.csv", "num_steps", ("0",)),
            ("blocks.csv", "round", ("",)),
            ("blocks.csv", "phase", ("tim",)),
        )
        for value in values
    },
    "nothing measured": (
        lambda f: (shutil.rmtree(f), write_run(f, {("ddp", 2): STEADY["ddp", 2]}, planned=plan()[:1])),
        "status ok",
    ),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("good") / "run")


@pytest.mark.parametrize(
    ("name", "side"), [*((name, 0) for name in BAD), ("cut manifest", 1), ("nothing measured", 1)]
)
def test_bad_input_is_one_line_and_never_a_pass(name, side, good, tmp_path, capsys):
    folders = [shutil.copytree(good, tmp_path / label) for label in ("base", "new")]
    spoil, message = BAD[name]
    spoil(folders[side])
    if name == "nothing measured" and side == 1:
        assert main([str(f) for f in folders]) == 1, "a candidate that measured nothing lacks every case"
        return
    assert main([str(f) for f in folders]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert shown.err.startswith("bench.gate: error: ")


def test_a_good_folder_comes_as_it_is(tmp_path):
    run = read_run(write_run(tmp_path / "run", peak_mem_mib=512.0))
    assert [c.result.mode for c in run.cases] == ["single", "dp", "ddp"]
    ddp = run.cases[2]
    assert ddp.rounds["images_per_s"][0, 1] == pytest.approx(2 * 16 * 1000 / 125.0)
    assert ddp.rounds["speedup"][0, 1] == pytest.approx(2 * 100 / 125)
    assert ddp.rounds["exposed_comm_ms"][0, 1] == pytest.approx(25.0)
    assert ddp.rounds["peak_mem_mib"] == {(0, 0): 512.0}
    assert run.cases[0].rounds["speedup"] == {}


def test_figures_come_from_the_blocks_alone(tmp_path):
    run = write_run(tmp_path / "run")

    def figures():
        return [(case.key, case.rounds, case.fitted) for case in read_run(run).cases]

    before = figures()
    for column, value in (("images_per_s", "170"), ("speedup", "1.9"), ("exposed_comm_ms", "")):
        cell("cases.csv", column, value, 2)(run)
    assert figures() == before


def test_a_baseline_of_an_earlier_version_without_later_columns_is_read(tmp_path):
    base, new = write_run(tmp_path / "base"), write_run(tmp_path / "new")
    for name, column in (("cases.csv", "link"), ("blocks.csv", "detail")):
        path = base / name
        rows = [line.split(",") for line in path.read_text(encoding="utf-8").splitlines()]
        at = rows[0].index(column)
        path.write_text("".join(",".join(r[:at] + r[at + 1 :]) + "\n" for r in rows), encoding="utf-8")
    assert main([str(base), str(new)]) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("images_per_sec=5%", "did you mean 'images_per_s'"),
        ("5%,images_per_s=5", "'5' is not a share"),
        ("-5%", "'-5%' is not a share above 0% and below 100%"),
        ("", "share"),
    ],
)
def test_bad_thresholds(text, message, good, capsys):
    assert main([str(good), str(good), "--threshold", text]) == 2
    assert message in capsys.readouterr().err


def test_a_threshold_of_a_metric_goes_before_that_of_all():
    def read(threshold):
        return read_policy(make_parser().parse_args(["a", "b", "--threshold", threshold]))

    found = read("images_per_s=3%,8%,speedup=0.00001")
    assert (found.threshold, found.named) == (0.08, {"images_per_s": 0.03, "speedup": 1e-5})
    assert read("speedup=1%").threshold == 0.05
    assert [read(given).can_fail(GATED_METRICS["speedup"]) for given in ("speedup=1%", "1%")] == [True, False]


def test_foreign_text_stays_text():
    nasty = "a | b\n# c <img src=x> @someone [x](http://y.z) `d` *e* www.evil.com \x1b[31m"
    runs = made_run(STEADY), failed(made_run(STEADY), "ddp-n2", nasty)
    gate = gated(*runs)
    text = render_markdown(gate)
    assert {line.count("|") for line in text.splitlines() if line.startswith("|")} == {7}
    for breakout in ("<img", "@someone", "](", "http://", "`d`", "*e*", "www.", "\x1b", "\n# c"):
        assert breakout not in text
    assert "&#60;img src" in text
    assert headline.describe_verdict(gate).isprintable()


@pytest.mark.parametrize(
    ("ratio", "shown", "said"),
    [
        (Interval(0.926, 0.91, 0.942), "-7.4% (-9.0 to -5.8)", "7.4% slower (5.8--9.0)"),
        (Interval(0.84, 0.80, 0.87), "-16.0% (-20.0 to -13.0)", "16.0% slower (13.0--20.0)"),
        (Interval(1.42, 1.35, 1.5), "+42% (+35 to +50)", "42% faster (35--50)"),
        (Interval(0.96, 0.91, 1.03), "-4% (-9 to +3)", "between 9% slower and 3% faster"),
        (Interval(0.926, 0.5, 1e300), "-50 to >999%", "between 50% slower and >999% faster"),
        (Interval(1.31, 0.55, 4.21), "-45 to +321%", "between 45% slower and 321% faster"),
        (Interval(4.0, 3.5, 4.6), "+300% (+250 to +360)", "300% faster (250--360)"),
        (Interval(1.5, math.nan, math.nan), "+50.0%", "50.0% faster"),
        (Interval(0.99999, 0.99998, 1.00001), "+0.0% (+0.0 to +0.0)", "between 0.0% slower and 0.0% faster"),
    ],
)
def test_a_change_is_shown_as_far_as_it_is_known(ratio, shown, said):
    found = structs.replace(of_metric(gated(STEADY, STEADY), "images_per_s")[0], ratio=ratio)
    assert wording.format_row(found)[-2] == shown
    assert wording.describe_change(found) == f"{found.name} is {said}".replace("--", "\N{EN DASH}")


OWN = {"ddp_bench": {"version": "0.1.0"}, "git": {"commit": "c" * 40, "dirty": False}}


def side(commit, code="x", *, dirty=False, **more):
    workload = {"spec": "net:make", "file": "net.py", "repository": "mynet", "code_sha256": code}
    return {**OWN, "workload": {**workload, "commit": commit * 40, "dirty": dirty}, **more}


BOTH = "both sides import identical code: "
OTHERS = {"ddp_bench": {"version": "0.2.0"}, "git": {}}
UNCOMMITTED = " with uncommitted changes"


@pytest.mark.parametrize(
    ("ours", "theirs", "variables", "interleaved", "compared", "same"),
    [
        (OWN, OWN, {}, True, "baseline ddp-bench ccccccc, T → candidate ddp-bench ccccccc, T", ""),
        ({}, OWN, {}, True, "baseline ddp-bench, T → candidate ddp-bench ccccccc, T", ""),
        (
            *(side("a"), side("b", "y", dirty=True), {}, True),
            f"baseline mynet aaaaaaa, T → candidate mynet bbbbbbb{UNCOMMITTED}, T",
            "",
        ),
        (
            *(side("a"), side("b"), {}, True),
            *("baseline mynet aaaaaaa, T → candidate mynet bbbbbbb, T", f"{BOTH}this is an A/A comparison"),
        ),
        (
            *(side("a"), side("a", versions={"torch": "2.16"}), {}, True),
            "baseline mynet aaaaaaa, T → candidate mynet aaaaaaa, torch 2.16",
            f"{BOTH}what differs is the environment",
        ),
        (
            *(side("a"), side("a"), {"A": "1"}, True),
            "baseline mynet aaaaaaa, T → candidate mynet aaaaaaa, T, A=1",
            f"{BOTH}what differs is the environment",
        ),
        (
            *(side("a"), side("b", **OTHERS), {}, False),
            "baseline mynet aaaaaaa, T → candidate mynet bbbbbbb, T",
            "both runs imported identical code of the workload",
        ),
    ],
)
def test_the_commits_torch_and_variables_are_named(ours, theirs, variables, interleaved, compared, same):
    ours, theirs = (made_run(STEADY, **one) for one in (ours, theirs))
    theirs = replace(theirs, variables=variables)
    gate = gated(ours, theirs, interleaved=interleaved)
    said = compared.replace(", T", ", torch 2.15.0")
    assert name_sides(ours, theirs) == said
    assert output.list_facts(gate)[0] == f"{said[:1].upper()}{said[1:]}."
    assert describe_same_code(ours, theirs, interleaved=interleaved) == same


def test_code_that_was_edited_between_launches_is_refused():
    check_one_code([made_run(STEADY, **side(commit)) for commit in "ab"])
    check_one_code([made_run(STEADY, **OWN)] * 2)
    with pytest.raises(UsageError, match="was changed while it was measured"):
        check_one_code([made_run(STEADY, **side("a", code)) for code in "xxy"])


def test_programs_are_told_the_commits():
    gate = gated(*(made_run(STEADY, **side(commit)) for commit in "ab"))
    code = json.loads(output.encode_gate(gate))["code"]
    assert code["identical"] is True
    assert [code[name]["workload"]["commit"] for name in ("baseline", "candidate")] == ["a" * 40, "b" * 40]
    assert code["baseline"]["ddp_bench"] == {"version": "0.1.0"}


WIDE = {("single", 1): [ms * (1, 4)[i % 2] for i, ms in enumerate(STEADY["single", 1])]}


@pytest.fixture
def summary(tmp_path, monkeypatch):
    place = tmp_path / "summary.md"
    place.write_text("of an earlier step\n", encoding="utf-8")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(place))
    return place


def test_a_regression_is_in_the_json_an_error_and_in_the_summary(tmp_path, summary, capsys):
    def refuse(constant):
        raise AssertionError(constant)

    sides = (("a", STEADY), ("b", slowed(1.25, "ddp")))
    runs = [str(write_run(tmp_path / name, steps, peak_mem_mib=512.0)) for name, steps in sides]
    assert main([*runs, "--json", "--strict"]) == ExitCode.FAILED
    told = capsys.readouterr()
    found = json.loads(told.out, parse_constant=refuse)
    assert (found["verdict"], found["exit_code"], found["cpu_stand_in"]) == ("regression", 1, True)
    memory = [c for c in found["comparisons"] if c["metric"] == "peak_mem_mib"]
    assert {c["verdict"] for c in memory} == {"no regression"}
    assert memory[0]["ratio"] == {"estimate": 1.0, "low": None, "high": None}
    regressed = [c for c in found["comparisons"] if c["verdict"] == "regressed"]
    commands = told.err.splitlines()
    assert len(commands) == len(regressed) > 1
    assert all(line.startswith("::error title=bench.gate%3A regressed::") for line in commands)
    assert any(
        "exposed communication of DDP on 2 CPU cores is 25.0%25 of the step higher" in line
        for line in commands
    )
    text = summary.read_text(encoding="utf-8")
    assert text.startswith("of an earlier step\n## bench.gate: Regression: ")
    assert text.count("| regressed |") == len(regressed)


LOST = {key: series for key, series in STEADY.items() if key[0] != "ddp"}
SCATTERED = {key: [ms * (1, 1.6)[i % 2] for i, ms in enumerate(ms_s)] for key, ms_s in STEADY.items()}


@pytest.mark.parametrize(
    ("steps", "allowed", "outcomes"),
    [
        (slowed(1.25, "ddp"), [], [None, None, "failure"]),
        (STEADY, [], [None, None, None]),
        (LOST, [], [None, None, "failure"]),
        (LOST, ["--allow-missing"], [None, None, "skipped"]),
        (SCATTERED, [], ["skipped", "skipped", "skipped"]),
    ],
    ids=["slower", "equal", "missing", "missing is allowed", "undecided"],
)
def test_junit_has_a_test_case_for_each_case(steps, allowed, outcomes, tmp_path):
    runs = [str(write_run(tmp_path / name, one)) for name, one in (("a", STEADY), ("b", steps))]
    main([*runs, "--quiet", *allowed, "--junit", str(tmp_path / "gate.xml")])
    suite = ET.parse(tmp_path / "gate.xml").getroot()
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    names = ("single, 1 CPU core", "DP emulated, 2 CPU cores", "DDP, 2 CPU cores, cap default")
    found = [next((e.tag for e in cases[name] if e.tag != "system-out"), None) for name in names]
    assert found == outcomes
    counted = [int(suite.get(name)) for name in ("tests", "failures", "skipped", "errors")]
    assert counted == [3, outcomes.count("failure"), outcomes.count("skipped"), 0]
    assert all(e.get("message") for e in suite.iter() if e.tag in ("failure", "skipped"))


def read_csv(link):
    """The rows of the CSV that a page holds."""
    return list(csv.DictReader(io.StringIO(base64.b64decode(link.partition("base64,")[2]).decode())))


def test_the_page_says_what_the_terminal_says_and_holds_the_ratios_of_the_json(tmp_path, capsys):
    versions = {"versions": {"torch": "2.15.0", "python": "3.13.0"}}
    sides = (("a", STEADY, {}), ("b", LOST, versions))
    runs = [str(write_run(tmp_path / name, one, **more)) for name, one, more in sides]
    page = tmp_path / "gate.html"
    assert main([*runs, "--html", str(page)]) == ExitCode.FAILED
    lines = text_of(page.read_text(encoding="utf-8"))
    first, rest, who, why, *_ = capsys.readouterr().out.splitlines()
    why_missing = "the candidate did not measure DDP on 2 CPU cores (failed: no such luck)"
    said = f"✘ Missing: {why_missing}; 2 other cases: no regression. Read the candidate's log."
    assert f"{first} {rest.strip()}" == said
    assert {said, who, why} <= {*lines}
    places = [
        lines.index(one) for one in ("What differs between the sides", "| ✘ missing", "Every comparison")
    ]
    assert places == sorted(places), "the cause first; the chart marks the case that is missing"
    (link,) = re.findall('href="(data:text/csv[^"]+)"', page.read_text(encoding="utf-8"))
    found = read_csv(link)
    main([*runs, "--json"])
    told = json.loads(capsys.readouterr().out)["comparisons"]
    assert [row["ratio"] for row in found] == [str((c["ratio"] or {}).get("estimate") or "") for c in told]
    assert [row["case"] for row in found] == [c["label"] for c in told]


def test_a_gate_that_decides_nothing_is_a_warning(tmp_path, summary, capsys):
    runs = [str(write_run(tmp_path / name, WIDE)) for name in "ab"]
    assert main(runs) == ExitCode.UNDECIDED
    (command,) = capsys.readouterr().err.splitlines()
    assert command.startswith("::warning title=bench.gate::Undecided: ")
    assert "## bench.gate: Undecided: " in summary.read_text(encoding="utf-8")


def test_a_pass_has_a_summary_and_quiet_has_none(tmp_path, summary, capsys):
    runs = [str(write_run(tmp_path / name)) for name in "ab"]
    before = summary.read_text(encoding="utf-8")
    assert main([*runs, "--quiet"]) == ExitCode.OK
    assert summary.read_text(encoding="utf-8") == before
    assert main(runs) == ExitCode.OK
    assert "## bench.gate: Pass, no regression: " in summary.read_text(encoding="utf-8")
    assert capsys.readouterr().err == ""


def test_no_text_ends_a_command_or_begins_another(capsys):
    nasty = Annotation("error", "a,b:c%\n", "50% slower\n::error::x\r")
    show_on_github([nasty] * 20, lambda: "", {"GITHUB_ACTIONS": "true"})
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["::error title=a%2Cb%3Ac%25\\x0a::50%25 slower\\x0a::error::x\\x0d"] * MAX_ANNOTATIONS


def test_a_summary_that_cannot_be_written_is_a_line(capsys, tmp_path):
    environment = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(tmp_path)}
    show_on_github([], lambda: "text", environment)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("no job summary: ")


def test_the_shaded_band_is_the_one_that_is_judged():
    """At 30% it begins at -30%, not where 1 / 1.3 is."""
    runs = made_run(STEADY), made_run(STEADY)
    gate = gated(*runs, threshold=0.3)
    canvas = Canvas()
    make_page(gate).figures[0].draw(canvas)
    shaded = [one.get_bbox() for one in canvas.axes[0].patches]
    assert [(box.x0, box.x1) for box in shaded] == [(pytest.approx(0.7), pytest.approx(1.3))]


def test_the_headline_has_the_worst_change_and_each_verdict_its_colour_and_sign(capsys, monkeypatch):
    """Where colours go, red, green and amber; elsewhere the sign alone. Markdown has emoji for both."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    for steps, colour, sign, emoji, outcome in (
        (STEADY, 32, "✔", "✅", r"Pass, no regression: .*changed by \+0\.0% \(.*"),
        (slowed(1.25, "ddp"), 31, "✘", "❌", r"Regression: DDP on 2 CPU cores is 20\.0% slower \(.*"),
        (SCATTERED, 33, r"\?", "⚠️", "Undecided: .*"),
    ):
        runs = made_run(STEADY), made_run(steps)
        gate = gated(*runs)
        terminal.print_page(make_outline(gate))
        first = capsys.readouterr().out.splitlines()[0]
        assert re.fullmatch(rf"\x1b\[1;{colour}m{sign} {outcome}", first)
        assert f"\n**{emoji} Baseline ddp-bench, torch" in render_markdown(gate)
    monkeypatch.delenv("FORCE_COLOR")
    terminal.print_page(make_outline(gate))
    assert capsys.readouterr().out.startswith("? Undecided: ")


def test_junit_says_who_was_compared_when_and_for_how_long(tmp_path):
    when = {"created_utc": "2026-01-02T03:04:05+00:00", "timing": {"total_s": 20.0}}
    runs = [str(write_run(tmp_path / name, **side(name), **when)) for name in "ab"]
    main([*runs, "--quiet", "--junit", str(tmp_path / "gate.xml")])
    suite = ET.parse(tmp_path / "gate.xml").getroot()
    assert (suite.get("timestamp"), suite.get("time")) == (when["created_utc"], "40.0")
    told = {one.get("name"): one.get("value") for one in suite.iter("property")}
    assert told["compared"] == "baseline mynet aaaaaaa, torch 2.15.0 → candidate mynet bbbbbbb, torch 2.15.0"
    headline, compared = suite.findall("system-out")[-1].text.splitlines()
    assert headline.startswith("Pass, no regression: ")
    assert compared == told["compared"]


def test_junit_of_sides_that_are_not_comparable_has_no_failure(tmp_path):
    """One of them lacks a case of the other, which fails a gate of comparable sides."""
    sides = [str(ROOT / f"results/samples/tune/resnet18-2hosts-{rate}.zip") for rate in ("1gbit", "2gbit")]
    code = main([*sides, "--quiet", "--junit", str(tmp_path / "gate.xml")])
    suite = ET.parse(tmp_path / "gate.xml").getroot()
    assert code == ExitCode.UNDECIDED
    assert (suite.get("failures"), suite.get("skipped")) == ("0", suite.get("tests"))


def test_every_verdict_and_every_column_of_the_csv_is_documented():
    text = (ROOT / "docs" / "gate.md").read_text(encoding="utf-8")
    section = text.partition("\n## Verdicts\n")[2].partition("\n## ")[0]
    assert {*re.findall(r"^\| `([a-z ]+)` \|", section, re.MULTILINE)} == {*VERDICTS}
    told = {word: int(code) for code, word in re.findall(r"^\| (\d) \| ([a-z ]+?) \|", text, re.MULTILINE)}
    assert {word: told[word] for word in EXIT_CODES} == EXIT_CODES
    rows = read_csv(make_page(gated(STEADY, STEADY)).data.href)
    assert rows[0].keys() <= {*re.findall(r"`(\w+)`", section)}
    assert {row["metric"]: row["unit"] for row in rows} == {"images_per_s": "images/s", "speedup": ""}
