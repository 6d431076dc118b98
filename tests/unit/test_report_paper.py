from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from report_runs import case, communicating, dashed, paper_like, run

from ddp_bench.report.drawings import Bars, Chart, Figure, Point
from ddp_bench.report.model import Section
from ddp_bench.report.paper import size_label
from ddp_bench.report.view import page


def section(data: Any = None) -> Section:
    shown = page([data or paper_like()]).runs[0].paper
    assert shown is not None
    return shown


def figure(name: str) -> Any:
    return next(f for f in section().figures if f.key == f"run1-paper-{name}")


@pytest.mark.parametrize(
    ("manifest", "there"),
    [
        ({"settings": {"sweep": "star"}}, True),
        ({"preset": "ddp-paper"}, True),
        ({"settings": {"sweep": "grid"}, "preset": None}, False),
        ({}, False),
    ],
)
def test_section_stands_only_beside_a_sweep_like_the_papers(manifest: dict[str, Any], *, there: bool) -> None:
    shown = page([replace(paper_like(), manifest=manifest)]).runs[0]
    assert (shown.paper is not None) is there
    # The caps are drawn once: among the figures, or beside the paper's.
    assert ("run1-1-buckets" in [f.key for f in shown.more_figures]) is not there


def test_every_experiment_has_a_figure_that_quotes_another_machine() -> None:
    shown = section()
    assert [f.key.removeprefix("run1-paper-") for f in shown.figures] == [
        "overlap",
        "buckets",
        "allreduce",
        "latency",
        "accumulate",
    ]
    assert all(isinstance(f, Figure) and f.beside and f.caption for f in shown.figures)
    assert "38.0%" in shown.figures[0].beside
    assert "26.8%" in shown.figures[0].beside
    assert "10 to 25 MB" in shown.figures[1].beside
    assert "2020" in shown.notes[1]


def test_overlap_compares_default_buckets_with_one_round_by_round() -> None:
    drawn = figure("overlap")
    assert isinstance(drawn, Bars)
    assert [bar.label for bar in drawn.bars] == [
        "no overlap, DDP, 2 GPUs, cap 100 MiB",
        "overlap, DDP, 2 GPUs, cap default",
    ]
    assert drawn.caption == (
        dashed(
            "On 2 GPUs overlap makes DDP 1.25\N{MULTIPLICATION SIGN} as fast: 100 (99--101) ms per "
            "step with default buckets, 125 (124--126) ms with one."
        )
    )


def test_cap_zero_is_drawn_and_explained() -> None:
    drawn = figure("buckets")
    assert [tick.label for tick in drawn.ticks] == ["default", "0", "100"]
    assert drawn.panels[0].series[0].points[1].note == "60"
    assert "a bucket of its own" in drawn.how_to_read


def test_all_reduce_is_drawn_logarithmic_with_bandwidth_beside() -> None:
    drawn = figure("allreduce")
    assert isinstance(drawn, Chart)
    assert (drawn.log_x, drawn.log_y) == (True, True)
    times, rates = drawn.panels
    assert [s.label for s in times.series] == ["2 GPUs, nccl", "4 GPUs, nccl"]
    assert len({s.style for s in times.series}) == 2
    assert times.series[0].points[0] == Point(
        4096.0, pytest.approx(0.1), pytest.approx(0.099), pytest.approx(0.101)
    )
    assert rates.series[0].points[2] == Point(
        2.0**26, 3.4, pytest.approx(3.4 / 1.01), pytest.approx(3.4 / 0.99)
    )
    assert [tick.label for tick in drawn.ticks] == ["4 KiB", "1 MiB", "64 MiB"]
    assert drawn.caption == (
        dashed(
            "4 GPUs, nccl: 4 KiB take 0.100 (0.099--0.101) ms, 64 MiB 20.0 (19.8--20.2) ms; bus bandwidth is "
            "highest at 64 MiB, 3.40 (3.37--3.43) GB/s."
        )
    )


def test_step_time_against_devices_comes_from_the_plain_cases() -> None:
    drawn = figure("latency")
    single, ddp = drawn.panels[0].series
    assert [(p.x, p.y) for p in single.points] == [(1.0, pytest.approx(100.0))]
    assert [(p.x, p.y) for p in ddp.points] == [
        (1.0, pytest.approx(10_000 / 98)),
        (2.0, pytest.approx(100.0)),
    ]


def test_accumulation_is_shown_per_micro_batch_above_no_communication() -> None:
    drawn = figure("accumulate")
    ddp, floor = drawn.panels[0].series
    assert [(p.x, p.y) for p in ddp.points] == [
        (1.0, pytest.approx(100.0)),
        (2.0, pytest.approx(40_000 / 220 / 2)),
        (8.0, pytest.approx(160_000 / 240 / 8)),
    ]
    assert {p.y for p in floor.points} == {80.0}
    assert drawn.caption.startswith(
        dashed("On 2 GPUs a micro-batch takes 100 (99--101) ms with 1 per synchronisation")
    )


def test_what_differs_from_the_paper_is_stated() -> None:
    differences, curve = section().tables
    rows = {row[0]: row[2] for row in differences.rows}
    assert rows == {
        "Hardware": "2 GPUs (Test GPU)",
        "Model": "resnet50 at 224 px",
        "Gradients per step": "44.6 MiB",
        "Backend": "",
        "PyTorch": "2.15",
    }
    assert curve.rows[0] == ("2", "nccl", "4 KiB", dashed("0.100 (0.099--0.101)"), "0.0400", "5")


def test_experiments_that_were_not_run_are_left_out() -> None:
    bare = run([case("single", 1, 100.0), communicating(2, 200.0)], {"preset": "ddp-paper"})
    assert [f.key for f in section(bare).figures] == ["run1-paper-latency"]
    assert [table.title for table in section(bare).tables] == ["What differs from the paper"]
    nothing = run([case("ddp", 2, status="failed", reason="x")], {"preset": "ddp-paper"})
    assert page([nothing]).runs[0].paper is None


def test_sizes_are_written_in_binary_units() -> None:
    assert [size_label(size) for size in (512, 4096, 2**20 * 1.5, 2**31, None)] == [
        "512 B",
        "4 KiB",
        "1.5 MiB",
        "2 GiB",
        "",
    ]
