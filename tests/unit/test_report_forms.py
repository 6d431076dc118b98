import pytest
from report_runs import case, dashed, drawn, measured, run

from ddp_bench.bench.results.comparisons import pairs_of
from ddp_bench.report.page import page

CASES = [
    case("single", 1, 100.0),
    case("ddp", 2, 180.0, peak_mem_mib=300.0, mem_by_device_mib="300.0/290.0"),
    case("fsdp", 2, 150.0, peak_mem_mib=200.0, mem_by_device_mib="200.0/199.0"),
    case("partition", 2, 90.0, layers_by_device="4/7", **measured(bubble_pct=51.0)),
    case("pipeline", 2, 120.0, pipeline_schedule="1f1b", micro_batches=4, **measured(bubble_pct=25.0)),
]


def section(cases):
    return page([run(cases)]).runs[0].forms


def test_forms_stand_side_by_side_with_their_memory_and_bubble():
    shown = section(CASES)
    (table,) = shown.tables
    names = [column.name for column in table.columns]
    rows = {row[0]: dict(zip(names, row, strict=True)) for row in table.rows}
    assert rows["DDP, 2 GPUs, cap default"]["Form"] == "data parallel"
    assert rows["FSDP2, 2 GPUs"]["Memory of each device (MiB)"] == "200 / 199"
    assert rows["partition, 2 GPUs"]["Layers of each device"] == "4 + 7"
    pipeline = rows["pipeline, 2 GPUs, 1F1B, 4 micro-batches"]
    assert pipeline["Bound (\N{MULTIPLICATION SIGN})"] == "1.60"  # 2 x 4 / (4 + 2 - 1), the GPipe paper
    assert pipeline["Bubble (%)"] == dashed("25.0 (24.8--25.2)")


def test_speed_and_memory_share_a_figure_and_the_finding_names_both():
    shown = section(CASES)
    (figure,) = shown.figures
    assert [title for title, _ in drawn(figure)] == ["throughput (images/s)", "memory per device (MiB)"]
    assert "most images/s with DDP, 180" in figure.caption
    assert "least memory with FSDP2, 200 MiB" in figure.caption


def test_no_section_without_a_mode_beside_dp_and_ddp():
    assert section(CASES[:2]) is None


@pytest.mark.parametrize(("rate", "said"), [(90.0, False), (130.0, True)])
def test_a_partition_faster_than_one_device_is_explained(rate, *, said):
    shown = section([CASES[0], case("partition", 2, rate)])
    assert any("only one of its devices computes at a time" in note for note in shown.notes) == said


def test_every_form_is_compared_with_ddps_default():
    default = str(CASES[1]["case_id"])
    assert pairs_of(CASES) == [(str(row["case_id"]), default) for row in CASES[2:]]
