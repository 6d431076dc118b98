import pytest
from report_runs import case, communicating, dashed, measured, run

from ddp_bench.bench.findings.numbers import TIMES
from ddp_bench.report.cases import workloads
from ddp_bench.report.page import page
from ddp_bench.report.tables import communication


def shown(*cases):
    (workload,) = workloads(run(cases).cases)
    made = communication(workload.cases.assign(workload=""))
    assert made is not None
    return made


def with_trace(trace_pct, slowdown=1.25, **more):
    return communicating(2, 200.0, **more) | measured(overlap_trace_pct=trace_pct, compute_slowdown=slowdown)


def test_every_measure_stands_side_by_side_with_its_interval():
    row = with_trace(55.0) | measured(overlap_window_pct=80.0, rank_skew_ms=3.0)
    table = shown(case("single", 1, 100.0), communicating(1, 98.0), row)
    assert [column.name for column in table.columns] == [
        "Case",
        "Communication alone (ms)",
        "Exposed (ms)",
        "Hidden (%)",
        "Overlap, trace (%)",
        "Overlap, DDP window (%)",
        f"Compute slow-down ({TIMES})",
        "Rank skew (ms)",
        "Step without synchronising (ms)",
    ]
    assert table.rows == (
        (
            "DDP, 2 GPUs, cap default",
            *map(
                dashed,
                (
                    "40.0 (39.6--40.4)",
                    "20.0 (19.8--20.2)",
                    "50.0 (49.5--50.5)",
                    "55.0 (54.5--55.5)",
                    "80.0 (79.2--80.8)",
                    "1.25 (1.24--1.26)",
                    "3.00 (2.97--3.03)",
                    "80.0 (79.2--80.8)",
                ),
            ),
        ),
    )


def test_each_shown_column_is_explained_below_and_no_other():
    table = shown(communicating(2, 200.0))
    named = [line.split(":")[0] for line in table.below]
    assert named == [column.name for column in table.columns[1:]]
    assert "Overlap, trace (%)" not in named


def test_measures_that_agree_need_no_explanation():
    assert not [line for line in shown(with_trace(59.0)).below if "points apart" in line]


def test_disagreement_says_what_it_is_made_of_with_numbers():
    *_, why, numbers = shown(with_trace(70.0), with_trace(52.0, bucket_cap_mb="25")).below
    assert why.startswith("The trace's overlap and the hidden share are more than 10 points apart in 1 case.")
    assert "compute that it slows" in why
    assert "gaps between operators" not in why
    assert numbers == (
        dashed(
            "DDP, 2 GPUs, cap default: trace 70.0 (69.3--70.7)%, hidden 50.0 (49.5--50.5)%, "
            "compute slowed 1.25 (1.24--1.26)\N{MULTIPLICATION SIGN}."
        )
    )


def test_disagreement_the_other_way_has_its_own_reason():
    *_, why, _ = shown(with_trace(30.0)).below
    assert "gaps between operators" in why
    assert "compute that it slows" not in why


def test_many_disagreements_are_counted_not_all_listed():
    table = shown(*(with_trace(90.0, bucket_cap_mb=str(cap)) for cap in range(1, 10)))
    assert "in 9 cases" in table.below[-2]
    assert table.below[-1].endswith("; 3 more cases.")


def test_page_without_communication_has_no_such_table():
    tables = page([run([case("single", 1, 100.0), case("ddp", 1, 98.0)])]).runs[0].tables
    assert "Communication" not in [table.title for table in tables]


def test_a_steady_rate_stands_beside_that_of_the_rounds_where_there_is_one():
    steady = {"steady_images_per_s": 95.0, "steady_images_per_s_low": 94.0, "steady_images_per_s_high": 96.0}
    change = {"steady_change_pct": -4.0, "steady_change_pct_low": -5.0, "steady_change_pct_high": -3.0}
    whole = everything(case("single", 1, 100.0) | steady | change)
    assert whole["Throughput, steady state (images/s)"] == dashed("95.0 (94.0--96.0)")
    assert whole["Steady state against the start (%)"] == "-4.0 (-5.0 to -3.0)"
    assert not [name for name in everything(case("single", 1, 100.0)) if "teady" in name]


def everything(row):
    """The cells of the only row of the table of every column, by heading."""
    found = next(t for t in page([run([row])]).runs[0].tables if t.title == "Every column")
    return dict(zip((column.name for column in found.columns), found.rows[0], strict=True))


def test_dp_stages_show_intervals_and_name_the_stand_in():
    stages = measured(dp_scatter_ms=2.0, dp_device0_pct=25.0)
    cpu, gpu = (
        page([run([case("dp", 2, 150.0, **stages, **more)])]).runs[0].tables[-1]
        for more in ({"impl": "cpu_standin", "device_type": "cpu"}, {})
    )
    assert cpu.title == gpu.title == "DataParallel's stages"
    assert cpu.rows == (("DP, 2 CPU cores", dashed("2.00 (1.98--2.02)"), dashed("25.0 (24.8--25.2)")),)
    assert "stand-in" in cpu.note
    assert "stand-in" not in gpu.note


def test_memory_of_gpus_is_shown_and_where_dp_needs_more_on_device_0():
    memory = {"peak_mem_mib": 600.0, "reserved_mem_mib": 700.0, "dp_device0_mem_ratio": 4.0}
    tables = {table.title: table for table in page([run([case("dp", 2, 150.0, **memory)])]).runs[0].tables}
    every, stages = tables["Every column"], tables["DataParallel's stages"]
    cells = {column.name: cell for column, cell in zip(every.columns, every.rows[0], strict=True)}
    assert (cells["Peak memory (MiB)"], cells["Reserved memory (MiB)"]) == ("600", "700")
    assert "Memory is that of the worst device" in every.note
    assert "Reserved is" in every.note
    assert stages.columns[-1].name == f"Memory of device 0 / mean of the others ({TIMES})"
    assert stages.rows[0][-1] == "4.00"


def test_cpu_cores_have_peak_memory_alone():
    every = page([run([case("single", 1, 100.0, peak_mem_mib=135.0)])]).runs[0].tables[1]
    assert [column.name for column in every.columns if "emory" in column.name] == ["Peak memory (MiB)"]
    assert "Memory is that of the worst device" in every.note
    assert "Reserved" not in every.note


def test_a_run_that_kept_no_count_of_memory_has_no_columns_of_it():
    every = page([run([case("single", 1, 100.0)])]).runs[0].tables[1]
    assert every.title == "Every column"
    assert not [column for column in every.columns if "emory" in column.name]
    assert "Memory" not in every.note


def test_communication_that_adds_more_than_it_takes_alone_hides_less_than_nothing():
    row = communicating(2, 200.0) | {"hidden_pct": -22.0, "hidden_pct_low": -40.0, "hidden_pct_high": 3.0}
    table = shown(row)
    hidden = [column.name for column in table.columns].index("Hidden (%)")
    assert table.rows[0][hidden] == "-22 (-40 to 3)"


@pytest.mark.parametrize(
    ("low", "width", "cost"),
    [
        (-40.0, 8.0, "below the noise"),
        (-1.0, 8.0, "below the noise"),
        (4.0, 8.0, dashed("8 (4--12)")),
        (-1.0, 80.0, "not known"),
    ],
)
def test_instruments_never_cost_less_than_nothing(low, width, cost):
    ends = {"": low + width / 2, "_low": low, "_high": low + width}
    row = communicating(2, 200.0) | {f"anatomy_slowdown_pct{end}": value for end, value in ends.items()}
    table = next(t for t in page([run([row])]).runs[0].tables if t.title == "Where the step goes")
    assert table.rows[0][-1] == cost
