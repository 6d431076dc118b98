import pytest
from report_runs import Drawn, case, communicating, dashed, drawn, figure_of, run, ticks, usual_cases

from ddp_bench.bench.findings.findings import conclude
from ddp_bench.bench.findings.numbers import TIMES
from ddp_bench.bench.findings.wording import CPU_STAND_IN
from ddp_bench.bench.results.aggregate import comparisons_of_run
from ddp_bench.bench.text import visible
from ddp_bench.report.cases import workloads
from ddp_bench.report.figures import bucket_caps
from ddp_bench.report.page import page
from ddp_bench.report.tables import Heading


def view(cases, manifest=None):
    return page([run(cases, manifest)]).runs[0]


def column(table, name):
    index = [c.name for c in table.columns].index(name)
    return [row[index] for row in table.rows]


def point(x, y, **more):
    """A mark whose interval is 1% either way."""
    return Drawn(float(x), pytest.approx(y), pytest.approx(0.99 * y), pytest.approx(1.01 * y), **more)


def test_answers_and_the_next_command_come_from_the_findings():
    data = run(usual_cases())
    found = conclude(data.path, data.manifest, data.cases, data.blocks, comparisons_of_run(data))
    shown = page([data]).runs[0]
    assert [card.sentence for card in shown.cards] == [verdict.sentence for verdict in found.verdicts]
    assert len(shown.cards) > 1
    assert shown.following.command == found.next_step.command
    assert shown.trust == found.trust.sentence
    assert shown.notes == found.notes


def test_throughput_figure_of_the_usual_run():
    figure = view(usual_cases()).figures[0]
    assert ticks(figure) == ["1", "2", "4\nshared"]
    ((title, lines),) = drawn(figure)
    assert title == "throughput (images/s)"
    assert lines == {
        "single": [point(1, 100)],
        "DP": [point(2, 150), point(4, 160, hollow=True)],
        "DDP": [point(1, 98), point(2, 180), point(4, 240, hollow=True)],
        "ideal": [Drawn(1.0, 100.0), Drawn(2.0, 200.0), Drawn(4.0, 400.0)],
    }
    assert figure.caption == dashed("At 2 GPUs: DDP 180 (178--182) images/s; DP 150 (148--152) images/s.")
    assert figure.alt == f"throughput (images/s) against devices (GPUs), weak scaling. {figure.caption}"
    assert "Hollow marks" in figure.how_to_read
    assert scales(figure) == ("linear", "linear")


def test_efficiency_figure_of_the_usual_run():
    figure = view(usual_cases()).more_figures[0]
    ((title, lines),) = drawn(figure)
    assert list(lines) == ["DP", "DDP", "ideal"]
    assert lines["DDP"] == [point(1, 98), point(2, 90), point(4, 60, hollow=True)]
    assert {mark.y for mark in lines["ideal"]} == {100.0}
    assert title == "efficiency, weak scaling (%)"
    assert figure.caption == dashed("Efficiency at 2 GPUs: DDP 90.0 (89.1--90.9)%, DP 75.0 (74.2--75.8)%.")


def test_bucket_figure_has_a_panel_where_caps_can_be_compared():
    figure = figure_of(view(usual_cases()), "Step time against bucket cap")
    assert ticks(figure) == ["default", "1", "25"]
    ((title, lines),) = drawn(figure)
    assert title == "2 GPUs: step time (ms)"
    marks = lines["DDP"]
    assert [(mark.x, mark.y) for mark in marks] == [
        (0.0, pytest.approx(20_000 / 180)),
        (1.0, pytest.approx(20_000 / 160)),
        (2.0, pytest.approx(100.0)),
    ]
    assert [text.get_text() for text in figure.canvas().axes[0].texts] == ["3", "12", "2"]
    assert (marks[2].low, marks[2].high) == (pytest.approx(100 / 1.01), pytest.approx(100 / 0.99))
    assert figure.caption == dashed(
        "2 GPUs: shortest step at 25 MiB, 100 (99--101) ms, default 111 (110--112) ms."
    )


def test_of_many_caps_the_best_and_an_even_choice_are_drawn():
    many = [case("ddp", 2, 150.0 + (cap == 77), bucket_cap_mb=str(cap)) for cap in range(1, 201)]
    figure = bucket_caps(workloads(run([case("ddp", 2, 140.0), *many]).cases)[0], key="k")
    labels = ticks(figure)
    assert len(labels) == 13
    assert {"default", "77", "200"} <= set(labels)
    marks = drawn(figure)[0][1]["DDP"]
    assert [p.x for p in marks] == [float(i) for i in range(13)]
    assert min(marks, key=lambda p: p.y).x == labels.index("77")
    assert "Of 201 caps 13 are drawn" in figure.how_to_read
    assert figure.caption.startswith("2 GPUs: shortest step at 77 MiB")


def test_tables_of_the_usual_run():
    shown = view(usual_cases())
    results, every, layouts = shown.tables
    assert results.columns == (
        Heading("Case"),
        Heading("Throughput (images/s)", "number"),
        Heading(f"Against DDP's default ({TIMES})", "number"),
        Heading(f"Speed-up ({TIMES})", "number"),
        Heading("Efficiency (%)", "number"),
        Heading("Rounds", "number"),
    )
    assert results.rows[3] == (
        "DDP, 2 GPUs, cap default",
        dashed("180 (178--182)"),
        "1, the default",
        dashed("1.80 (1.78--1.82)"),
        dashed("90.0 (89.1--90.9)"),
        "2",
    )
    assert column(every, "Sharing") == ["", "", "shared", "", "", "", "", "shared"]
    assert results.below == ("2 cases on shared devices: see “Every column”.",)
    assert column(layouts, "Sizes in all-reduce order")[1] == "1.00 + 2.00 + 10.0 MiB"
    assert column(shown.unmeasured, "Reason") == ["rank 3 died: exit code 9"]


def test_results_have_what_communication_adds_and_what_of_it_is_hidden():
    (results, *_) = view([case("single", 1, 100.0), communicating(2, 180.0)]).tables
    assert column(results, "Exposed (ms)") == ["", dashed("20.0 (19.8--20.2)")]
    assert column(results, "Hidden (%)") == ["", dashed("50.0 (49.5--50.5)")]


def test_skipped_cases_are_one_line_and_counted_alike():
    shown = view(usual_cases())
    assert shown.skipped == "1 case skipped. DP, 1 GPU: DataParallel on one device is the plain module."
    assert " · 8 of 9 cases measured · 1 skipped · " in shown.status
    equal = [
        case("ddp", 2, case_id=f"e{cap}", bucket_cap_mb=str(cap), status="skipped", reason=SAME)
        for cap in range(1, 100)
    ]
    many = view([case("ddp", 2, 180.0, case_id="kept"), *equal])
    assert many.skipped == (
        "99 cases skipped. DDP, 2 GPUs, cap 1 MiB; DDP, 2 GPUs, cap 2 MiB; DDP, 2 GPUs, cap 3 MiB and 96 "
        "more: the same buckets as a measured case."
    )
    assert many.unmeasured is None


SAME = "same bucket layout as kept; see its row"


def test_warnings_name_what_a_reader_must_know_first():
    shared, unfinished = view(usual_cases()).warnings
    assert "shared" in shared
    assert unfinished == "1 of 9 cases did not finish: see “Not measured”."
    (stand_in,) = view([case("single", 1, 9.0, device_type="cpu")]).warnings
    assert stand_in.startswith(f"{CPU_STAND_IN}.")
    assert view([case("single", 1, 9.0)]).warnings == []


def test_cpu_stand_in_is_explained_once():
    cpu = {"device_type": "cpu", "device_name": "Test CPU"}
    shown = view([case("single", 1, 100.0, **cpu), case("dp", 2, 150.0, impl="cpu_standin", **cpu)])
    assert "devices (CPU cores), weak scaling" in shown.figures[0].alt
    assert "DP 150" in shown.figures[0].caption
    assert column(shown.tables[0], "Case") == ["single, 1 CPU core", "DP, 2 CPU cores"]
    assert "DP stand-in (CPU): nn.DataParallel's stages" in shown.warnings[0]
    assert "DP stand-in (CPU)" in shown.cards[0].sentence
    assert shown.cards[0].label == "DP stand-in (CPU) is faster"


def test_one_case_only_has_a_table_and_no_figure():
    shown = view([case("single", 1, 100.0)])
    assert shown.figures == []
    assert shown.unmeasured is None
    assert [table.title for table in shown.tables] == ["Results", "Every column"]
    assert "DDP settings" not in [c.name for c in shown.tables[1].columns]


def test_all_failed_says_so_and_shows_every_reason():
    failed = [case(mode, 2, status="failed", reason=f"{mode} broke") for mode in ("dp", "ddp")]
    shown = view(failed)
    assert (shown.figures, shown.tables) == ([], [])
    nothing, why = shown.notes
    assert shown.cards == []
    assert nothing == "Nothing was measured: no case ended with status ok."
    assert why.startswith("2 cases not measured: DP on 2 GPUs: failed (dp broke); DDP on ")
    assert column(shown.unmeasured, "Reason") == ["dp broke", "ddp broke"]
    assert shown.warnings == ["2 of 2 cases did not finish: see “Not measured”."]


def test_no_ddp_leaves_its_figure_and_tables_out():
    shown = view([case("single", 1, 100.0), case("dp", 2, 150.0), case("dp", 4, 160.0)])
    assert [figure.key for figure in shown.figures] == ["run1-1-throughput"]
    assert [figure.key for figure in shown.more_figures] == ["run1-1-efficiency"]
    assert [table.title for table in shown.tables] == ["Results", "Every column"]


def test_without_single_there_is_no_ideal_line():
    figure = view([case("ddp", 2, 150.0)]).figures[0]
    assert list(drawn(figure)[0][1]) == ["DDP"]
    assert figure.caption == dashed("At 2 GPUs: DDP 150 (148--152) images/s.")


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


def test_workloads_are_never_mixed_in_a_figure():
    small = [case("single", 1, 100.0, case_id="a"), case("ddp", 2, 150.0, case_id="b")]
    large = [case("single", 1, 10.0, case_id="c", arch="vit"), case("ddp", 2, 15.0, case_id="d", arch="vit")]
    shown = view([*small, *large])
    assert len(shown.figures) == 2
    assert len({figure.key for figure in shown.figures}) == 2
    assert shown.figures[1].title.startswith("Scaling curve: vit")
    assert drawn(shown.figures[1])[0][1]["single"] == [point(1, 10)]
    assert [w.split(" · ")[0] for w in column(shown.tables[0], "Workload")] == ["resnet50"] * 2 + ["vit"] * 2


def test_strong_scaling_is_one_workload_and_is_named():
    strong = {"scaling": "strong", "global_batch": 20}
    shown = view(
        [
            case("single", 1, 100.0, batch_per_device=20, **strong),
            case("ddp", 2, 150.0, batch_per_device=10, **strong),
        ]
    )
    (throughput,), (efficiency,) = shown.figures, shown.more_figures
    assert "devices (GPUs), strong scaling" in throughput.alt
    assert drawn(efficiency)[0][0] == "efficiency, strong scaling (%)"
    assert "20 images in all" in shown.subtitle[0]


def test_many_devices_are_drawn_on_logarithmic_axes():
    shown = view([case("single", 1, 100.0), case("ddp", 64, 6000.0)])
    (throughput,), (efficiency,) = shown.figures, shown.more_figures
    assert scales(throughput) == ("log", "log")
    assert scales(efficiency) == ("log", "linear")


def scales(figure):
    """Of the axis of devices, and of the other."""
    (axes,) = figure.canvas().axes
    return axes.get_xscale(), axes.get_yscale()


def test_several_runs_stand_side_by_side_with_their_differences():
    first = run(usual_cases(), {"name": "a", "seed": 0, "versions": {"torch": "2.11"}})
    second = run(usual_cases(), {"name": "b", "seed": 0, "versions": {"torch": "2.15", "cuda": "13"}})
    shown = page([first, second])
    assert [r.key for r in shown.runs] == ["run1", "run2"]
    assert shown.differences.columns == (Heading("Condition"), Heading("a"), Heading("b"))
    assert shown.differences.rows == (("torch", "2.11", "2.15 (CUDA 13)"),)
    assert page([first]).differences is None


def test_equal_layouts_share_a_mark_and_say_so():
    equal = case("ddp", 2, case_id="equal", bucket_cap_mb="50", status="skipped")
    kept = case("ddp", 2, 200.0, bucket_cap_mb="25", num_buckets=2)
    equal["reason"] = f"same bucket layout as {kept['case_id']}; see its row"
    (workload,) = workloads(run([case("ddp", 2, 180.0, num_buckets=3), kept, equal]).cases)
    figure = bucket_caps(workload, key="k")
    assert ticks(figure) == ["default", "25=50"]
    assert "share a mark: 25=50." in figure.how_to_read


def test_two_hundred_cases_have_a_row_each_and_a_page_of_bounded_figures():
    many = [case("ddp", 2, 100.0 + cap, bucket_cap_mb=str(cap), num_buckets=1) for cap in range(1, 200)]
    whole = page([run([case("single", 1, 100.0), *many])])
    (shown,) = whole.runs
    assert len(shown.tables[0].rows) == 200
    assert len(ticks(figure_of(shown, "Step time against bucket cap"))) <= 13
    assert len(drawn(figure_of(shown, "Every case"))[0][1]) <= 24
    said = [card.sentence for card in shown.cards] + list(shown.notes)
    assert len(said) < 10
    assert max(map(len, said)) < 600


def test_machines_of_a_run_on_several_hosts_are_listed():
    hosts = [{"rank": i, "host": f"node{i // 2}", "device_name": "Test GPU"} for i in range(4)]
    shown = view([case("single", 1, 100.0), case("ddp", 4, 300.0, num_nodes=2)], {"ranks": hosts})
    assert column(shown.ranks, "Host") == ["node0", "node0", "node1", "node1"]
    assert "hosts node0, node1" in shown.subtitle
    assert shown.heading == dashed("resnet50, 1--4 GPUs of 2 hosts").replace("resnet", "ResNet-")
    assert "on 4 GPUs of 2 hosts" in shown.cards[0].sentence


def test_hostile_strings_stay_text_in_the_view():
    hostile = "<b>x</b> | `y` \x1b[31m"
    named = {"arch": hostile, "device_name": hostile, "data": hostile, "link": hostile, "reason": hostile}
    shown = view(
        [
            case("single", 1, 100.0, **named | {"case_id": f"a{hostile}"}),
            case("ddp", 2, 150.0, **named | {"case_id": f"b{hostile}", "bucket_cap_mb": hostile}),
            case("ddp", 4, **named | {"case_id": f"c{hostile}", "bucket_cap_mb": hostile}, status="failed"),
        ]
    )
    assert any(visible(hostile) in sentence for sentence in shown.notes)
    assert hostile in shown.subtitle[0]
    assert column(shown.unmeasured, "Reason") == [hostile]
