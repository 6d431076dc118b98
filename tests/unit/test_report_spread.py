from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from report_runs import case, run, timed

from report import rounds
from report.drawings import BoxPlot, Chart, Point
from report.rounds import step_times
from report.select import workloads

SINGLE, DP, DDP = case("single", 1, 100.0), case("dp", 2, 150.0), case("ddp", 2, 180.0)


def spreads(cases: list[dict[str, Any]], blocks: list[dict[str, Any]]) -> BoxPlot | None:
    data = run(cases, timed_blocks=blocks)
    return step_times(workloads(data.cases)[0], data.blocks, key="k")


def paces(blocks: list[dict[str, Any]]) -> Chart | None:
    data = run([SINGLE, DP, DDP], timed_blocks=blocks)
    return rounds.drift(workloads(data.cases)[0], data.blocks, key="k")


def test_every_rank_has_its_own_box_of_all_its_steps() -> None:
    steps = {0: [100.0, 110.0, 120.0, 130.0, 140.0, 500.0], 1: [90.0, 95.0, 100.0, 105.0, 110.0, 115.0]}
    blocks = [timed(DDP, r, *steps[rank][3 * r - 3 : 3 * r], rank=rank) for r in (1, 2) for rank in (0, 1)]
    blocks += [timed(DDP, 1, *[9.0] * 9, phase="warmup"), timed(DDP, 1, *[8.0] * 9, phase="no_sync")]
    figure = spreads([SINGLE, DDP], blocks)
    assert figure is not None
    assert [row.label for row in figure.rows] == [f"DDP, 2 GPUs, cap default, rank {rank}" for rank in (0, 1)]
    for row, expected in zip(figure.rows, steps.values(), strict=True):
        assert row.num_steps == 6
        seen = (row.low_ms, row.quarter_ms, row.median_ms, row.three_quarters_ms, row.high_ms)
        assert seen == pytest.approx(np.percentile(expected, [5, 25, 50, 75, 95]))
        assert row.longest_ms == max(expected)
    assert figure.caption.endswith("the longest 115 ms.")


def test_headline_cases_are_drawn_and_of_many_ranks_the_slowest() -> None:
    wide = case("ddp", 16, 1000.0)
    blocks = [timed(wide, 1, *[100.0 + rank] * 5, rank=rank) for rank in range(16)]
    blocks += [timed(SINGLE, 1, *[50.0] * 5), timed(DDP, 1, *[70.0] * 5)]
    figure = spreads([SINGLE, DDP, wide], blocks)
    assert figure is not None
    assert [row.median_ms for row in figure.rows] == [50.0, *(115.0 - i for i in range(8))]
    assert "Of many ranks" in figure.how_to_read


def test_without_single_steps_there_is_no_distribution() -> None:
    assert spreads([SINGLE, DDP], [timed(DDP, 1, 100.0, steps_ms=None), timed(SINGLE, 1, 50.0)]) is None


def test_rounds_are_shown_against_the_cases_own_median() -> None:
    blocks = [timed(SINGLE, r, 100.0) for r in (1, 2, 3)]
    blocks += [timed(DDP, r, ms, rank=k) for k in (0, 1) for r, ms in ((1, 50.0), (2, 100.0), (3, 200.0))]
    figure = paces(blocks)
    assert figure is not None
    single, ddp, overall = figure.panels[0].series
    assert {p.y for p in single.points} == {100.0}
    assert ddp.points == (Point(1.0, 200.0), Point(2.0, 100.0), Point(3.0, 50.0))
    assert [p.y for p in overall.points] == [150.0, 100.0, 75.0]
    assert overall.label == "median of 2 cases"
    assert figure.caption == (
        "Over 3 rounds the median case ran between 75.0% (round 3) and 150% (round 1) of its own median."
    )


def test_round_that_was_broken_off_does_not_speak_for_all_cases() -> None:
    blocks = [timed(row, r, 100.0) for row in (SINGLE, DP, DDP) for r in (1, 2, 3)] + [
        timed(SINGLE, 4, 900.0)
    ]
    figure = paces(blocks)
    assert figure is not None
    *_, overall = figure.panels[0].series
    assert [p.x for p in overall.points] == [1.0, 2.0, 3.0]
    assert figure.panels[0].series[0].points[-1].y == pytest.approx(100 / 9)


def test_two_rounds_show_no_drift() -> None:
    assert paces([timed(row, r, 100.0) for row in (SINGLE, DDP) for r in (1, 2)]) is None


def test_ticks_of_many_rounds_are_few_and_reach_both_ends() -> None:
    figure = paces([timed(SINGLE, r, 100.0 + math.sin(r)) for r in range(1, 301)])
    assert figure is not None
    places = [tick.x for tick in figure.ticks]
    assert (places[0], places[-1], len(places)) == (1.0, 300.0, 9)
