import numpy as np
import pytest
from report_runs import case, dashed, drawn, run, ticks, timed, usual_cases

from ddp_bench.bench.stats import Interval, ratio_of_estimates
from ddp_bench.report.build import markdown, render
from ddp_bench.report.cases import workloads
from ddp_bench.report.drawing import LOOKS, MOST_RUNS
from ddp_bench.report.page import page
from ddp_bench.report.together import MeasuredRun


def faster(factor, name, **manifest):
    scaled = (
        row | {key: row[key] * factor for key in row if key.startswith("images_per_s")}
        for row in usual_cases()
    )
    return run(list(scaled), {"name": name, **manifest}, path=f"runs/{name}")


def chart(shown, key):
    (found,) = (figure for figure in shown.together.figures if figure.key == f"together-1-{key}")
    return found


def marks(line):
    return [(mark.x, round(mark.y, 6)) for mark in line]


@pytest.fixture(scope="module")
def three():
    return page(
        [
            faster(1.0, "old", versions={"torch": "2.11"}, environment={"host": "a"}),
            faster(1.1, "new", versions={"torch": "2.15"}, environment={"host": "a"}),
            faster(0.5, "other box", versions={"torch": "2.15"}, environment={"host": "b"}),
        ]
    )


def test_throughput_has_a_panel_per_mode_and_a_series_per_run(three):
    figure = chart(three, "throughput")
    (dp, _), (ddp, lines) = drawn(figure)
    assert (dp, ddp) == ("DP: throughput (images/s)", "DDP: throughput (images/s)")
    assert list(lines) == ["old", "new", "other box"]
    assert marks(lines["other box"]) == [(1, 49), (2, 90), (4, 120)]
    assert dashed("DDP on 2 GPUs: new 198 (196--200) images/s, old 180") in figure.caption
    assert figure.caption in figure.alt
    assert "Hollow marks" in figure.how_to_read


def test_rounds_are_counted_in_the_unit_of_the_rates_beside_them():
    def rounds(**more):
        data = run([row | more for row in usual_cases()])
        (workload,) = workloads(data.cases)
        return {key: dict(found) for key, found in MeasuredRun("one", "run1", data, workload).rounds.items()}

    samples, tokens = rounds(), rounds(unit="tokens", units_per_sample=100)
    assert samples
    assert tokens == {
        case_id: {r: pytest.approx(100 * rate) for r, rate in by_round.items()}
        for case_id, by_round in samples.items()
    }


def test_efficiency_compares_machines_of_different_speed(three):
    figure = chart(three, "efficiency")
    assert [marks(line) for line in drawn(figure)[1][1].values()] == [[(1, 98), (2, 90), (4, 60)]] * 3


def test_caps_have_a_panel_per_count_that_several_runs_swept(three):
    figure = chart(three, "buckets")
    ((title, lines),) = drawn(figure)
    assert title == "DDP, 2 GPUs: step time (ms)"
    assert ticks(figure) == ["default", "1", "25"]
    assert marks(lines["other box"])[2] == (2, 200)
    assert "other box has its shortest step at 25 MiB, 200" in figure.caption


def test_table_sets_equal_cases_beside_each_other(three):
    (table,) = three.together.tables
    assert [column.name for column in table.columns] == [
        "Case",
        "old (images/s)",
        "new (images/s)",
        "new / old (\N{MULTIPLICATION SIGN})",
        "other box (images/s)",
        "other box / old (\N{MULTIPLICATION SIGN})",
    ]
    cells = {row[0]: row[1:] for row in table.rows}
    assert cells["DDP, 2 GPUs, cap 25 MiB"] == (
        dashed("200 (198--202)"),
        dashed("220 (218--222)"),
        dashed("1.10 (1.08--1.12)"),
        dashed("100 (99--101)"),
        dashed("0.500 (0.489--0.511)"),
    ), "sqrt(2) x 1%, and 2.95 standard errors instead of 1.96: 16 ratios hold at once"


def test_ratio_of_two_runs_covers_what_the_two_intervals_mean():
    """Oracle: the spread of quotients of independent draws, log-normal with these 95% intervals."""
    random = np.random.default_rng(1)
    one, other = Interval(110.0, 100.0, 121.0), Interval(50.0, 40.0, 62.5)
    draws = [
        value.estimate * np.exp(random.normal(0, np.log(value.high / value.estimate) / 1.96, 400_000))
        for value in (one, other)
    ]
    low, high = np.percentile(draws[0] / draws[1], [2.5, 97.5])
    found = ratio_of_estimates(one, other)
    assert found == Interval(2.2, pytest.approx(low, rel=0.01), pytest.approx(high, rel=0.01))
    assert ratio_of_estimates(one, Interval(50.0, float("nan"), float("nan"))).high != found.high
    assert ratio_of_estimates(one, None) is None


def test_page_and_markdown_begin_with_the_finding_and_end_with_what_differs(three):
    html = render(three)
    order = ("The runs side by side", "ot told apart", "Not interleaved", "<svg", "What differs", "Next</h2>")
    places = [html.index(text) for text in order]
    assert places == sorted(places)
    assert html.count("<svg") == len(three.figures) > 3 * len(three.runs[0].figures)
    text = markdown(three)
    order = ("ot told apart", "Not interleaved", "Throughput side by side", "What differs", "## old: ")
    places = [text.index(part) for part in order]
    assert places == sorted(places)


def long_run(factor, name, *, paces=(1.0,), **manifest):
    """Forty rounds of steps that scatter by 1%; `paces` are the machine's in parts of the run."""
    rows = [
        case("single", 1, 100.0 * factor),
        case("ddp", 2, 180.0 * factor),
        case("ddp", 4, 240.0 * factor, oversubscribed=True),
    ]
    pace = np.repeat(paces, 40 // len(paces))
    blocks = [
        timed(
            row,
            r,
            1000 * row["global_batch"] / row["images_per_s"] / pace[r] * (1 + 0.01 * ((r * 7) % 5 - 2)),
        )
        for row in rows
        for r in range(40)
    ]
    return run(rows, {"name": name, **manifest}, timed_blocks=blocks, path=f"runs/{name}")


def said(*runs):
    together = page(list(runs)).together
    assert together.warnings == ["Not interleaved: a change may be the machine's."]
    return tuple(together.findings)


def test_the_headline_names_the_faster_run_its_cases_and_ratios():
    (faster,) = said(long_run(1.0, "old"), long_run(1.25, "new"))
    assert faster.startswith("new is faster than old in 2 of 2 cases: ")
    assert "DDP, 2 GPUs, cap default 1.25\N{MULTIPLICATION SIGN} (1.2" in faster
    assert "4 GPUs" not in faster, "shared devices tell nothing"
    (slower,) = said(long_run(1.0, "old"), long_run(0.8, "new"))
    assert slower.startswith("new is slower than old in 2 of 2 cases: ")
    (equal,) = said(long_run(1.0, "old"), long_run(1.0, "new"))
    assert equal == "No difference above 5% between new and old in 2 of 2 cases."


def test_runs_that_took_turns_are_divided_round_by_round():
    """A machine four times as slow in half of the rounds leaves the ratio within a round alone."""
    paces = (1.0, 0.25)
    both = [long_run(f, n, paces=paces, interleaved_id="abc") for f, n in ((1.0, "old"), (1.1, "new"))]
    together = page(both).together
    assert (together.warnings, together.following) == ([], None)
    (faster,) = together.findings
    assert faster.startswith("new is faster than old in 2 of 2 cases: ")
    assert "1.10\N{MULTIPLICATION SIGN} (1.10\N{EN DASH}1.10)" in faster
    assert "in turns, so the ratio is the median" in together.tables[0].note
    third = long_run(1.1, "third", paces=paces)
    assert "Not interleaved" in page([*both, third]).together.warnings[0]


def test_a_machine_that_changes_within_a_run_is_not_called_the_faster_run():
    steady, restless = long_run(1.0, "old"), long_run(1.25, "new", paces=(0.7, 1.3, 0.8, 1.2))
    (sentence,) = said(steady, restless)
    assert sentence.startswith("Not told apart are new and old in 2 of 2 cases: ")


def test_the_table_has_the_ratio_of_the_headline():
    shown = page([long_run(1.0, "old"), long_run(1.25, "new")]).together
    cells = {row[0]: row[-1] for row in shown.tables[0].rows}
    assert cells["DDP, 2 GPUs, cap default"].partition(" ")[2] in shown.findings[0]


def test_two_runs_of_one_machine_have_the_command_that_tells_more():
    settings = {"settings": {"modes": ["ddp"], "gpus": [2], "rounds": 40, "device": "cpu"}}
    first = long_run(1.0, "old", git={"commit": "0123456789abcdef"}, **settings)
    shown = page([first, long_run(1.0, "new", **settings)]).together
    assert shown.following.command.startswith(
        "python -m bench.gate --interleave 0123456789ab -- --modes ddp "
    )
    html = render(page([first, long_run(1.0, "new", **settings)]))
    assert shown.following.command in html.replace("</span> <span>", " ")
    other = long_run(1.0, "new", environment={"cpu_model": "Another CPU"}, **settings)
    elsewhere = page([first, other]).together
    assert elsewhere.following is None, "two machines cannot take turns"


def test_only_what_can_change_a_step_is_listed_as_different_settings_first():
    same = {
        "created_utc": "1",
        "settings": {"precision": "fp32", "out": "x", "rounds": 10, "max_time": 60.0, "name": "a"},
        "versions": {"torch": "2.11", "matplotlib": "3.10", "pandas": "2.0"},
        "environment": {"env": {"BENCH_STARTED_S": "1", "NCCL_ALGO": "Ring"}},
        "timing": {"total_s": 10.0},
    }
    other = {
        "created_utc": "2",
        "settings": {"precision": "bf16", "out": "y", "rounds": 20, "max_time": 90.0, "name": "b"},
        "versions": {"torch": "2.15", "matplotlib": "3.11", "pandas": "3.0"},
        "environment": {"env": {"BENCH_STARTED_S": "2", "NCCL_ALGO": "Tree"}},
        "timing": {"total_s": 20.0},
    }
    shown = page([faster(1.0, "a", **same), faster(1.0, "b", **other)])
    assert shown.differences.rows == (
        ("precision", "fp32", "bf16"),
        ("torch", "2.11", "2.15"),
        ("NCCL_ALGO", "Ring", "Tree"),
    )


def test_runs_of_one_name_are_told_apart():
    first, second = (
        run(usual_cases(), {"name": "run"}, path="a/x"),
        run(usual_cases(), {"name": "run"}, path="b/y"),
    )
    assert [view.title for view in page([first, second]).runs] == ["run (x)", "run (y)"]
    assert [view.title for view in page([first, first]).runs] == ["run (x), 1", "run (x), 2"]


def test_runs_of_other_work_are_drawn_with_a_word_of_warning():
    half = [row | {"precision": "bf16"} for row in usual_cases()]
    shown = page([run(usual_cases(), {"name": "a"}), run(half, {"name": "b"})])
    assert "only ratios compare" in shown.together.notes[1]
    assert not shown.together.findings, "no run is faster at other work"
    assert len(shown.together.figures) == 3


def test_a_run_without_a_measurement_leaves_the_others_side_by_side():
    broken = run([case("ddp", 2, status="failed", reason="x")], {"name": "broken"})
    shown = page([faster(1.0, "a"), broken, faster(1.0, "b")])
    assert list(drawn(chart(shown, "throughput"))[0][1]) == ["a", "b"]
    assert page([faster(1.0, "a"), broken]).together is None


@pytest.mark.campaign
def test_every_run_has_a_look_of_its_own():
    styles = [LOOKS[f"run{i}"] for i in range(1, MOST_RUNS + 1)]
    assert len({style["marker"] for style in styles}) == MOST_RUNS
    assert len({str(style["linestyle"]) for style in styles}) == MOST_RUNS
    many = page([faster(1.0 + i, f"r{i}") for i in range(MOST_RUNS + 2)])
    assert len(drawn(chart(many, "throughput"))[0][1]) == MOST_RUNS
    assert "Of 10 runs the first 8 are drawn." in many.together.notes


def test_one_run_is_compared_with_nothing():
    assert page([faster(1.0, "a")]).together is None
