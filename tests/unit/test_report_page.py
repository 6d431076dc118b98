"""What the page makes of runs: cards, headings, figures, tables, links to files. Its words are recorded.

Tables are those of the terminal too: rates formed for them, and that quotients agree as printed.
"""

import re
from dataclasses import replace
from html import unescape

import pytest
import torch
from finding_cases import CAP_1, CPU, DDP, DP, ENDS, SINGLE, concluded, made_run, over
from made import made_manifest
from report_runs import Drawn, case, communicating, dashed, drawn, measured, paper_like, run
from rich.cells import cell_len
from sample_runs import EVERY_SAMPLE, SAMPLES, rebuilt, sample

from ddp_bench.bench.findings import findings as run_summary
from ddp_bench.bench.findings.findings import conclude_run, summarize_run
from ddp_bench.bench.findings.wording import label_case
from ddp_bench.bench.machine.manifest import Manifest
from ddp_bench.bench.page import terminal
from ddp_bench.bench.page.page import Link
from ddp_bench.bench.page.render import render_html
from ddp_bench.bench.results.case_result import get_text, read_case_results
from ddp_bench.bench.results.run_folder import name_failure_file
from ddp_bench.report import page as run_page
from ddp_bench.report.cases import DENSE_PEAKS, add_rates
from ddp_bench.report.columns import TERMS
from ddp_bench.report.conditions import describe_status
from ddp_bench.report.page import Files, make_cards, make_page
from ddp_bench.report.tables import ANATOMY, tabulate_results


@pytest.mark.parametrize("name", ENDS)
def test_card_names_the_state_of_its_answer(name):
    few = {"num_rounds": 4} if name == "too few" else {}
    found = concluded(SINGLE, DP, DDP, by=(over(DDP, DP, *ENDS[name], **few),)).verdicts
    verdict, card = found[0], make_cards(found)[0]
    assert card.state == {"equal": "equal", "open": "open", "too few": "open"}.get(name, "found")
    assert (card.label, card.sentence, card.paste) == (verdict.label, verdict.sentence, verdict.paste)


def test_status_says_that_nothing_compares_and_that_a_run_was_interrupted():
    cases = run([case("single", 1, 9.0), case("ddp", 2, status="oom")]).results
    assert describe_status(made_manifest(timing={}), cases, []).startswith(
        "Nothing to compare · 1 of 2 cases "
    )
    interrupted = made_manifest(timing={"stopped_because": "interrupted"})
    assert describe_status(interrupted, cases, []).startswith("Interrupted, nothing to compare · ")


def test_status_tells_cases_that_run_from_those_that_can_be_compared():
    """Their number is that of the rows of the first table."""
    cases = [SINGLE, DP, DDP, case("ddp", 4, 240.0, oversubscribed=True), case("dp", 1, status="skipped")]
    found = run([one | CPU for one in cases]).results
    assert "4 of 5 cases measured, 2 comparable · 1 skipped" in describe_status(made_manifest(), found, [])
    assert len(tabulate_results(found)[0].rows) == 2


SLOW, SLOW_1 = case("ddp", 2, 80.0), case("ddp", 2, 95.0, bucket_cap_mb="1")
AS_FAST_1 = SLOW_1 | {"speedup_low": 0.9, "speedup_high": 1.02}


@pytest.mark.parametrize(
    ("cases", "ratio", "row", "why"),
    [
        ((SINGLE, DDP, CAP_1), "equal", 1, "recommended"),
        ((SINGLE, DDP, CAP_1 | {"images_per_s": 190.0}), "faster", 2, "recommended"),
        ((SINGLE, DDP, CAP_1), "open", None, ""),
        ((SINGLE, DDP, CAP_1), "too few", None, ""),
        ((SINGLE, SLOW, AS_FAST_1), "faster", 2, "best DDP setting"),
        ((SINGLE, SLOW, SLOW_1), "faster", 0, "recommended"),
        ((SINGLE, SLOW, AS_FAST_1), "open", None, ""),
    ],
)
def test_a_star_stands_only_where_an_answer_recommends_the_row(cases, ratio, row, why, capsys):
    few = {"num_rounds": 4} if ratio == "too few" else {}
    page = make_page(made_run(cases, (over(cases[2], cases[1], *ENDS[ratio], **few),)))
    results = page.tables[0]
    assert results.best == row
    assert [i for i, cells in enumerate(results.rows) if "★" in cells[0]] == [row] * (row is not None)
    assert [line for line in results.below if "★" in line] == [f"★ {why}."] * (row is not None)
    terminal.print_page(page)
    assert capsys.readouterr().out.count("★") == 2 * (row is not None)


def test_a_run_has_one_command_on_its_page():
    typed = "python -m bench.run --modes ddp --gpus 2 --out results/here"
    html = render_html(make_page(run([SINGLE, DDP], {"command": typed})))
    assert re.sub("<[^>]+>", "", html).count("--modes ddp") == 1


@pytest.mark.parametrize(
    ("cases", "figures"),
    [
        ([case("single", 1, 100.0)], []),
        ([case("single", 1, 100.0), case("dp", 2, 150.0)], ["speedup"]),
        ([case("ddp", 2, 150.0)], []),
    ],
)
def test_a_figure_that_has_nothing_to_show_is_not_there(cases, figures):
    assert [one.key.removeprefix("w1-") for one in make_page(run(cases)).figures] == figures


def test_what_a_term_means_is_said_once_where_it_first_stands():
    html = unescape(render_html(make_page(paper_like())))
    assert {html.count(f"{term}: {meaning}.") for term, meaning in TERMS.items()} == {0, 1}
    captions = re.findall("<figcaption>.*?</figcaption>", html, re.DOTALL)
    for caption, term in zip(captions, ("Speed-up", "Against DDP's default", "Exposed"), strict=True):
        assert f"{term}: " in caption
    assert "<li>Efficiency: " in html.partition("<h3>Results</h3>")[2].partition("<h3>")[0]


def column(table, name):
    index = [c.name for c in table.columns].index(name)
    return [row[index] for row in table.rows]


def test_one_round_shows_the_estimate_without_an_interval():
    gone = {f"{name}_{end}": None for name in ("images_per_s", "speedup") for end in ("low", "high")}
    shown = make_page(run([case("single", 1, 100.0), case("ddp", 2, 150.0, **gone)]))
    assert drawn(shown.figures[0])["DDP"] == [Drawn(2.0, 1.5)]
    assert column(shown.tables[0], "Throughput (images/s)")[1] == "150"


def test_figures_compare_modes_at_default_settings_only():
    static = case("ddp", 2, 300.0, static_graph=True, case_id="static")
    shown = make_page(run([case("single", 1, 100.0), static, case("ddp", 2, 150.0, static_graph=False)]))
    assert [mark.y for mark in drawn(shown.figures[0])["DDP"]] == [1.5]
    assert column(shown.tables[0], "Case") == ["single", "DDP, static graph", "DDP"]


def test_files_are_linked_where_the_page_lies_above_them(tmp_path):
    folder = tmp_path / "a run"
    (folder / "traces").mkdir(parents=True)
    for name in ("c#1-rank10.json.gz", "c#1-rank2.json.gz", "notes.txt", "odd.json.gz"):
        (folder / "traces" / name).touch()
    for name in ("manifest.json", "cases.csv", "other.txt"):
        (folder / name).touch()
    beside, above, elsewhere = (
        Files.from_folder(folder, place) for place in (folder, tmp_path, tmp_path / "pages")
    )
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
        (folder / name_failure_file(row["case_id"])).touch()
    name = name_failure_file(failed["case_id"])
    above, elsewhere = (
        make_page(run([SINGLE, failed, skipped]), Files.from_folder(folder, page_folder)).tables[-1]
        for page_folder in (tmp_path, tmp_path / "pages")
    )
    at = [column.name for column in above.columns].index("Tracebacks")
    assert [row[at] for row in above.rows] == [(Link(name, f"./a%20run/{name}"),)]
    assert [row[at] for row in elsewhere.rows] == [(Link(name, ""),)]


def folded(shown, title):
    return next(table for fold in shown.folds for table in fold.tables if table.title == title)


@pytest.mark.parametrize(
    ("low", "width", "cost"),
    [(-40.0, 8.0, "below the noise"), (-1.0, 8.0, "below the noise"), (4.0, 8.0, dashed("8 (4--12)"))],
)
def test_instruments_never_cost_less_than_nothing(low, width, cost):
    ends = {"": low + width / 2, "_low": low, "_high": low + width}
    row = communicating(2, 200.0) | {f"anatomy_slowdown_pct{end}": value for end, value in ends.items()}
    assert folded(make_page(run([row])), ANATOMY).rows[0][-1] == cost


MANIFEST = {"model": {"forward_flops_per_image": 4e9}}


def test_shared_gpus_draw_and_rank_nothing():
    shown = make_page(run([case("single", 1, 100.0), case("ddp", 2, 150.0, oversubscribed=True)]))
    assert (shown.cards, shown.figures) == ([], [])
    assert shown.status.startswith("It works, but shared GPUs tell nothing about speed")
    assert not shown.are_bars
    alone, beside = shown.tables
    assert (len(alone.rows), len(beside.rows), beside.title) == (1, 1, "Also run, not comparable")
    names = [column.name.partition(" (")[0] for column in beside.columns]
    assert "Speed-up" not in names
    row = dict(zip(names, beside.rows[0], strict=True))
    assert row["Throughput"].startswith("150")
    assert row["Why"] == "devices are shared"


MIB = 2**20


def rates(*cases):
    return [add_rates(one, made_manifest(**MANIFEST)).cells for one in run(cases).results]


def test_arithmetic_is_three_forwards_per_image_and_device():
    one, two = rates(case("single", 1, 100.0), case("ddp", 2, 180.0))
    assert one["tflop_per_s"] == pytest.approx(1.2)
    assert two["tflop_per_s"] == pytest.approx(180 * 12e9 / 2 / 1e12)
    assert (two["tflop_per_s_low"], two["tflop_per_s_high"]) == pytest.approx((1.0692, 1.0908))
    (alone,) = run([case("single", 1, 100.0)]).results
    assert add_rates(alone, Manifest()).get_number("tflop_per_s") is None, "its operators are not counted"


def mfu(name):
    manifest = made_manifest(**MANIFEST)
    one = case("single", 1, 100.0, device_name=name, precision="bf16")
    return add_rates(run([one]).results[-1], manifest).get_number("mfu_pct")


def test_mfu_is_the_arithmetic_over_the_data_sheets_peak_where_that_is_known():
    assert mfu("NVIDIA H200") == pytest.approx(100 * 1.2 / 989.4)
    for name in ("NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"):
        assert mfu(name) is None


@pytest.mark.parametrize("name", sorted(DENSE_PEAKS))
def test_peaks_are_those_that_torch_has_of_the_data_sheets(name):
    """Its H100 is the SXM5 card, counted with sparsity; an H200 has the same chip."""
    known = pytest.importorskip("torch._inductor.analysis.device_info")._device_mapping
    info = known["NVIDIA A100" if "A100" in name else "NVIDIA H100"]
    found, keys = DENSE_PEAKS[name], {"tf32": "torch.tf32", "bf16": torch.bfloat16, "fp16": torch.float16}
    sparse = getattr(info, "tops_sparsity_factor", None)
    if sparse is None:  # in torch 2.11: there the H100's TF32 is the A100's
        sparse = 1 if "A100" in name else 2
        del keys["tf32"]
    for precision, key in keys.items():
        assert found[precision] == pytest.approx(info.tops[key] / sparse, rel=0.005)
    assert found["fp32"] == pytest.approx(info.tops[torch.float32], rel=0.01)  # 67.5 of 66.9 in torch 2.11


@pytest.mark.parametrize(("ranks", "hook", "factor"), [(2, "none", 1.0), (4, "none", 1.5), (4, "bf16", 0.75)])
def test_bus_bandwidth_is_that_of_nccl_tests(ranks, hook, factor):
    """Communication alone takes 40 ms; a half-precision hook sends half the bytes."""
    (row,) = rates(communicating(ranks, 200.0, bucket_bytes=f"{30 * MIB}/{10 * MIB}", comm_hook=hook))
    assert row["bus_gb_per_s"] == pytest.approx(factor * 40 * MIB / 0.040 / 1e9)
    assert row["bus_gb_per_s_low"] < row["bus_gb_per_s"] < row["bus_gb_per_s_high"]


NUMBER = re.compile(r"-?[0-9][0-9,]*\.?[0-9]*")


def printed(cell):
    """The first number of a cell, and half a unit of its last digit."""
    found = NUMBER.match(cell)
    assert found is not None, cell
    digits = len(found[0].partition(".")[2])
    return float(found[0].replace(",", "")), 0.5 * 10**-digits


IN_CASES_CSV = {
    "Step": ("step_ms", 1),
    "Throughput": ("images_per_s", 1),
    "Speed-up": ("speedup", 1),
    "Efficiency": ("efficiency", 100),
    "Exposed": ("exposed_comm_ms", 1),
    "Overlap": ("hidden_pct", 1),
    "Peak memory": ("peak_mem_mib", 1),
}
"""The numbers of the results, and the columns and factors that they come from."""


@pytest.mark.parametrize("path", EVERY_SAMPLE)
def test_the_results_are_what_cases_csv_holds(path):
    cases = rebuilt(path).reset_index()
    ok = cases[cases["status"] == "ok"].to_dict("records")
    found = read_case_results(cases)
    of_name = {}
    for case_result, row in zip((one for one in found if one.is_ok), ok, strict=True):
        of_name.setdefault(label_case(case_result), []).append(row)
    tables = [table for table in tabulate_results(found) if table]
    assert sum(len(table.rows) for table in tables) == len(ok)
    checked = 0
    for table in tables:
        names = [heading.term for heading in table.columns]
        for label, cells in zip(table.names, table.rows, strict=True):
            row = of_name[label].pop(0)
            for name, cell in zip(names, cells, strict=True):
                if name not in IN_CASES_CSV or not cell:
                    continue
                column, factor = IN_CASES_CSV[name]
                if (name, cell) == ("Overlap", "0"):
                    assert row["hidden_pct"] < 0.5
                    continue
                number, half = printed(cell)
                assert abs(number - factor * row[column]) <= half * (1 + 1e-9)
                checked += 1
    assert checked >= 2


@pytest.mark.parametrize("path", EVERY_SAMPLE)
@pytest.mark.parametrize("width", [80, 100, 1000])
def test_a_narrow_terminal_drops_columns_and_never_rows(path, width, capsys):
    shown = make_page(sample(path))
    table = shown.tables[0]
    terminal.print_page(shown, piped_width=width)
    lines = capsys.readouterr().out.splitlines()
    begin = lines.index("Results")
    rows = lines[begin + 4 : begin + 4 + len(table.rows)]
    assert all(cell_len(line.rstrip()) <= width for line in lines[begin : begin + 4 + len(table.rows)])
    rates = column(table, next(h.name for h in table.columns if h.term == "Throughput"))
    assert [rate in row for rate, row in zip(rates, rows, strict=True)] == [True] * len(rows)
    kept = [h for h in table.columns if h.term in " ".join(lines[begin + 1 : begin + 3])]
    gone = [h for h in table.columns if h not in kept]
    assert max((h.drop for h in kept), default=0) <= min((h.drop for h in gone), default=9)
    if width == 1000:
        assert not gone


def every_table(view):
    return [*view.tables, *(found for part in (*view.sections, *view.folds) for found in part.tables)]


def test_cases_that_share_a_gpu_have_a_line_each_and_nothing_is_compared(capsys):
    """`single`, and every mode beside it on one GPU, which is not comparable; memory is told alike."""
    modes = ("dp", "ddp", "fsdp", "pipeline", "partition", "replicate")
    memory = {"peak_mem_mib": 11206.0, "mem_by_device_mib": "11206/11206", "oversubscribed": True}
    view = make_page(run([case("single", 1, 100.0), *(case(mode, 2, 150.0, **memory) for mode in modes)]))
    terminal.print_page(view, piped_width=80)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("single ") for line in lines)
    begin = next(i for i, line in enumerate(lines) if "not comparable" in line) + 4
    for mode, line in zip(modes, lines[begin:], strict=False):
        assert line.lower().startswith(mode)
        assert cell_len(line.rstrip()) <= 80
    terms = {heading.term for heading in view.tables[1].columns}
    assert not terms & {"Speed-up", "Efficiency"}
    shown = (cell for table in every_table(view) for row in table.rows for cell in row)
    assert {found for cell in shown for found in re.findall(r"11,\d+", str(cell))} == {"11,210"}


def test_forms_say_which_workload_they_are_of_where_another_has_none():
    """Fully sharded cases are measured uncompiled only."""
    modes = {"off": ("single", "ddp", "fsdp"), "default": ("single", "ddp")}
    cases = [
        case(mode, 1 if mode == "single" else 2, 100.0, compile=how) | {"case_id": f"{mode}-{how}"}
        for how in modes
        for mode in modes[how]
    ]
    (forms,) = (part for part in make_page(run(cases)).sections if part.key == "forms")
    (table,) = forms.tables
    at = [heading.term for heading in table.columns].index("Workload")
    assert [row[at] for row in table.rows] == ["eager"] * 3


@pytest.mark.parametrize("width", [*range(60, 72)])
def test_no_line_ends_within_a_word_that_has_a_hyphen(width, capsys):
    terminal.print_page(make_page(sample(SAMPLES[0])), piped_width=width)
    lines = capsys.readouterr().out.splitlines()
    assert any("single-device" in line for line in lines)
    assert not [line for line in lines if re.search(r"[a-z]-$", line.rstrip())]


def test_energy_is_that_of_one_of_what_is_counted():
    view = make_page(run([case("single", 1, 100.0, unit="queries", **measured(joules_per_image=0.25))]))
    headings = {heading.name for table in every_table(view) for heading in table.columns}
    assert "Energy (J/query)" in headings


def test_a_run_that_was_concluded_is_not_concluded_again(monkeypatch):
    """Terminal, page, Markdown and JSON of a run's end say the same, whatever lies beside it by then."""
    found = run([case("single", 1, 100.0), case("ddp", 2, 150.0)])
    conclusion = conclude_run(found)
    for module in (run_page, run_summary):
        monkeypatch.setattr(module, "conclude_run", None)
    shown, said = make_page(found, conclusion=conclusion), summarize_run(found, conclusion)
    assert [card.sentence for card in shown.cards] == [one["sentence"] for one in said["answers"]] != []
    assert [*shown.notes] == [*said["findings"]]
    assert said["step"] is conclusion.step


def test_a_long_name_is_no_reason_to_wrap_it(capsys):
    rows = [case("single", 1, 100.0), case("ddp", 2, 150.0, **dict.fromkeys(LONG, True))]
    terminal.print_page(make_page(run(rows)), piped_width=40)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("DDP, ")]
    assert dashed("150 (148--152)") in line


LONG = ("gradient_as_bucket_view", "static_graph", "find_unused_parameters")


@pytest.mark.parametrize("path", EVERY_SAMPLE)
def test_the_page_prints_rates_whose_quotients_are_its_speed_ups(path):
    view = make_page(replace(sample(path), cases=rebuilt(path)))
    every = folded(view, "Every column")
    names = [column.name.partition(" (")[0] for column in every.columns]
    rows = [dict(zip(names, row, strict=True)) for row in every.rows]
    single = next((row for row in rows if get_text(row["Case"]).startswith("single")), None)
    if single is None or "Speed-up" not in names:
        return
    reference, least = printed(single["Throughput"])
    for row in rows:
        if not row["Speed-up"]:  # of what shares devices
            continue
        rate, half = printed(row["Throughput"])
        speedup, rounding = printed(row["Speed-up"])
        assert abs(speedup - rate / reference) <= rounding + (half + least * rate / reference) / reference
