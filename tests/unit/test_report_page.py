"""What the page makes of runs: cards, headings, figures, links to files. Its words are recorded."""

import math

import pytest
from made import made_manifest
from report_runs import Drawn, case, dashed, drawn, run

from ddp_bench.bench.findings.answers import verdicts
from ddp_bench.bench.findings.numbers import between
from ddp_bench.bench.findings.verdicts import (
    CAP,
    RESOLVED,
    CommunicationVerdict,
    Ratio,
    SettingsVerdict,
    WrapperVerdict,
)
from ddp_bench.bench.results.comparisons import EQUAL, FASTER, SLOWER, TOO_FEW, UNRESOLVED, Comparison
from ddp_bench.bench.results.store import failure_file
from ddp_bench.bench.stats.interval import Interval
from ddp_bench.report.cases import workloads
from ddp_bench.report.forest import against_default, ratio_ticks
from ddp_bench.report.page import Files, cards, heading, model_name, page, status
from ddp_bench.report.tables import Link


def compared(low, high, case_id="a", reference_id="b"):
    return Comparison(case_id, reference_id, Interval(math.sqrt(low * high), low, high), 0.05, 10)


def wrapper(answer, *by, faster="DDP"):
    ratio = Ratio(faster, "DP", Interval(1.2, 1.1, 1.3))
    return WrapperVerdict(
        answer=answer, comparisons=by, ratio=ratio, where="on 2 GPUs", margin=0.05, paste="p" if by else ""
    )


def settings(answer, best=None):
    return SettingsVerdict(answer=answer, standing="the default", noun="cap", best=best, few=("cap 1",))


def communication(answer):
    return CommunicationVerdict(
        answer=answer, exposed_ms=Interval(3.0, 2.0, 4.0), step_ms=10.0, place="2 GPUs"
    )


GAIN = Ratio("cap 1", "the default", Interval(1.2, 1.1, 1.3))


@pytest.mark.parametrize(
    ("verdict", "state", "label"),
    [
        (wrapper(FASTER, compared(1.2, 1.3)), "found", "DDP is faster"),
        (wrapper(SLOWER, compared(0.7, 0.8), faster="DP"), "found", "DP is faster"),
        (wrapper(FASTER, compared(1.01, 1.02)), "found", "DDP is faster, by less than 5%"),
        (wrapper(SLOWER, faster="one device"), "found", "one device is faster"),
        (wrapper(EQUAL, compared(0.99, 1.02)), "equal", "no difference above 5%"),
        (settings(UNRESOLVED), "open", "unresolved"),
        (settings(FASTER, GAIN), "found", "cap 1 is faster"),
        (settings(EQUAL), "equal", "keep the default"),
        (communication(TOO_FEW), "open", "too few rounds"),
        (communication(RESOLVED), "found", "adds 3.0 (2.0\N{EN DASH}4.0) ms"),
    ],
)
def test_card_names_the_state_of_its_answer(verdict, state, label):
    (card,) = cards([verdict])
    assert (card.state, card.label, card.sentence) == (state, label, verdict.sentence)
    assert card.paste == verdict.paste


def test_heading_names_model_and_devices():
    cases = run([case("single", 1, 9.0, arch="resnet18"), case("ddp", 4, 9.0, arch="resnet18")]).cases
    assert heading(cases) == dashed("ResNet-18, 1--4 GPUs")
    assert (
        heading(run([case("ddp", 2, 9.0, device_type="cpu", arch="my:Net")]).cases) == "my:Net, 2 CPU cores"
    )
    assert heading(run([]).cases) == ""
    assert [model_name(name) for name in ("resnext50_32x4d", "wide_resnet50_2", "vit")] == [
        "ResNeXt-50_32x4d",
        "Wide ResNet-50_2",
        "vit",
    ]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.45, 2.2, [0.5, 1, 2]),
        (0.8, 1.25, [0.8, 0.9, 1.0, 1.1, 1.2]),
        (0.05, 20.0, [0.0625, 0.25, 1, 4, 16]),
    ],
)
def test_ratio_axis_has_round_ticks(low, high, ticks):
    assert ratio_ticks(low, high) == ticks


@pytest.mark.parametrize(
    "ratio",
    [
        Interval(1.773, 1.074, 2.422),
        Interval(1.773, 0.897, 2.900),
        Interval(1.02, 1.01, 1.03),
        Interval(1.0, 0.99, 1.01),
        Interval(0.6, 0.5, 0.7),
        Interval(1.2, math.nan, math.nan),
    ],
)
def test_the_figure_and_the_answer_say_the_same_of_one_ratio(ratio):
    cases = [case("ddp", 2, 180.0), case("ddp", 2, 190.0, bucket_cap_mb="1")]
    rows = run(cases).cases
    compared = [Comparison(cases[1]["case_id"], cases[0]["case_id"], ratio, 0.05, 20)]
    (verdict,) = [v for v in verdicts(rows, compared) if v.question == CAP]
    figure = against_default(workloads(rows)[0], compared, key="k")
    assert (verdict.answer == FASTER) == ("is faster than DDP's default" in figure.caption)
    assert (verdict.answer == TOO_FEW) == ("too few rounds" in figure.caption)
    if verdict.answer == FASTER:
        assert between(ratio) in figure.caption
        assert between(ratio) in verdict.sentence


@pytest.mark.parametrize(
    ("timing", "verdicts", "begins"),
    [
        (
            {"stopped_because": "time limit reached"},
            [wrapper(EQUAL), settings(UNRESOLVED)],
            "1 of 2 ",
        ),
        ({}, [settings(UNRESOLVED)], "Inconclusive · "),
        ({}, [wrapper(EQUAL)], "Answered · 1 of 2 cases measured · "),
        ({}, [], "Nothing to compare · "),
        ({"stopped_because": "interrupted"}, [wrapper(EQUAL)], "Interrupted, "),
    ],
)
def test_status_says_how_the_run_ended_and_what_is_open(timing, verdicts, begins):
    cases = run([case("single", 1, 9.0, num_rounds=7), case("ddp", 2, status="oom")]).cases
    assert status(made_manifest(timing=timing), cases, verdicts).startswith(begins)


@pytest.mark.parametrize(
    ("cases", "figures"),
    [
        ([case("single", 1, 100.0)], []),
        ([case("single", 1, 100.0), case("dp", 2, 150.0)], ["throughput", "efficiency"]),
        ([case("single", 1, 9.0), case("ddp", 2, 15.0)], ["throughput", "efficiency"]),
        ([case("ddp", 2, 150.0)], ["throughput", "efficiency"]),
    ],
)
def test_a_figure_that_has_nothing_to_show_is_not_there(cases, figures):
    shown = page([run(cases)]).runs[0]
    assert [one.key.removeprefix("run1-1-") for one in (*shown.figures, *shown.more_figures)] == figures
    ideal = [drawn(figure)[0][1].get("ideal") for figure in shown.figures]
    assert all(found is None for found in ideal) == (cases[0]["mode"] != "single" or not ideal)


def view(cases, manifest=None):
    return page([run(cases, manifest)]).runs[0]


def column(table, name):
    index = [c.name for c in table.columns].index(name)
    return [row[index] for row in table.rows]


def point(x, y, **more):
    """A mark whose interval is 1% either way."""
    return Drawn(float(x), pytest.approx(y), pytest.approx(0.99 * y), pytest.approx(1.01 * y), **more)


def test_one_round_shows_the_estimate_without_an_interval():
    bare = case("ddp", 2, 150.0, images_per_s_low=None, images_per_s_high=None)
    shown = view([case("single", 1, 100.0), bare])
    assert drawn(shown.figures[0])[0][1]["DDP"] == [Drawn(2.0, 150.0)]
    assert column(shown.tables[0], "Throughput (images/s)")[1] == "150"


def test_figures_compare_modes_at_default_settings_only():
    static = case("ddp", 2, 300.0, static_graph=True, case_id="static")
    plain = case("ddp", 2, 150.0, static_graph=False)
    shown = view([case("single", 1, 100.0), static, plain])
    assert drawn(shown.figures[0])[0][1]["DDP"] == [point(2, 150)]
    assert column(shown.tables[1], "DDP settings") == ["", "cap default, static graph", "cap default"]


def test_settings_that_replace_a_default_are_named():
    hooked = case("ddp", 2, 150.0, bucket_cap_mb="25", comm_hook="bf16", sync_buffers=False)
    figure = view([case("single", 1, 100.0), hooked]).figures[0]
    assert "DDP, cap 25 MiB, no sync buffers, comm hook bf16" in drawn(figure)[0][1]


def test_many_devices_are_drawn_on_logarithmic_axes():
    shown = view([case("single", 1, 100.0), case("ddp", 64, 6000.0)])
    (throughput,), (efficiency,) = shown.figures, shown.more_figures
    assert scales(throughput) == ("log", "log")
    assert scales(efficiency) == ("log", "linear")


def scales(figure):
    """Of the axis of devices, and of the other."""
    (axes,) = figure.canvas().axes
    return axes.get_xscale(), axes.get_yscale()


SINGLE, DP, DDP = case("single", 1, 100.0), case("dp", 2, 150.0), case("ddp", 2, 180.0)


def test_every_column_leads_to_a_cases_traces():
    traces = tuple(Link(f"rank {rank}", f"./traces/a-rank{rank}.json.gz") for rank in (0, 1))
    shown = page([run([SINGLE, DDP])], [Files(traces={DDP["case_id"]: traces})]).runs[0]
    every = shown.tables[1]
    at = [column.name for column in every.columns].index("Traces")
    assert [row[at] for row in every.rows] == [(), traces]


def test_files_are_linked_where_the_page_lies_above_them(tmp_path):
    folder = tmp_path / "a run"
    (folder / "traces").mkdir(parents=True)
    for name in ("c#1-rank10.json.gz", "c#1-rank2.json.gz", "notes.txt", "odd.json.gz"):
        (folder / "traces" / name).touch()
    for name in ("manifest.json", "cases.csv", "other.txt"):
        (folder / name).touch()
    beside, above, elsewhere = (Files.of(folder, place) for place in (folder, tmp_path, tmp_path / "pages"))
    ranks = [Link(f"rank {rank}", f"./traces/c%231-rank{rank}.json.gz") for rank in (2, 10)]
    assert beside.traces == {"c#1": tuple(ranks)}
    assert above.traces["c#1"][0].href == "./a%20run/traces/c%231-rank2.json.gz"
    assert elsewhere.traces == {}
    assert beside.tables == tuple(Link(name, f"./{name}") for name in ("cases.csv", "manifest.json"))
    assert [link.href for link in above.tables] == ["./a%20run/cases.csv", "./a%20run/manifest.json"]
    assert [link.href for link in elsewhere.tables] == ["", ""]


def test_a_failed_case_leads_to_its_tracebacks(tmp_path):
    folder = tmp_path / "a run"
    (folder / "failures").mkdir(parents=True)
    failed = case("ddp", 2, status="failed", reason="ValueError: late bug")
    skipped = case("dp", 1, status="skipped", reason="the plain module")
    for row in (failed, skipped, SINGLE):  # of those that are measured now, an earlier attempt failed
        (folder / failure_file(row["case_id"])).touch()
    name = failure_file(failed["case_id"])
    above, elsewhere = (
        page([run([SINGLE, failed, skipped])], [Files.of(folder, page_folder)]).runs[0].unmeasured
        for page_folder in (tmp_path, tmp_path / "pages")
    )
    at = [column.name for column in above.columns].index("Tracebacks")
    assert [row[at] for row in above.rows] == [(Link(name, f"./a%20run/{name}"),)]
    assert [row[at] for row in elsewhere.rows] == [(Link(name, ""),)]
