import pytest
from report_runs import Drawn, case, dashed, drawn, run, timed, usual_cases

from ddp_bench.bench.findings.numbers import TIMES
from ddp_bench.bench.results.aggregate import typical_of
from ddp_bench.bench.results.comparisons import Comparison
from ddp_bench.bench.results.round_times import RoundTimes
from ddp_bench.bench.stats import Interval
from ddp_bench.report.cases import workloads
from ddp_bench.report.figures import dp_against_ddp, memory


def ratio(cases, blocks):
    data = run(cases, timed_blocks=blocks)
    return dp_against_ddp(workloads(data.cases)[0], typical_of(RoundTimes.of(data.blocks)), (), key="k")


def test_ratio_is_formed_inside_each_round_so_that_drift_cancels():
    dp, ddp = case("dp", 2, 150.0), case("ddp", 2, 180.0)
    # The machine slows threefold from round to round, and DDP takes 80% of DP's time in each of them.
    slowed = [(r, 100.0 * 3**r) for r in range(1, 7)]
    blocks = [timed(dp, r, ms) for r, ms in slowed] + [timed(ddp, r, 0.8 * ms) for r, ms in slowed]
    figure = ratio([case("single", 1, 100.0), dp, ddp], blocks)
    ((_, lines),) = drawn(figure)
    assert lines["DDP / DP"] == [Drawn(2.0, *[pytest.approx(1.25)] * 3)]
    assert lines["equally fast"] == [Drawn(1.0, 1.0), Drawn(2.0, 1.0)]
    assert figure.caption.startswith("Throughput of DDP over DP: 1.25")


def test_slower_ddp_lies_below_the_line_and_stand_ins_are_named():
    cpu = {"device_type": "cpu"}
    dp, ddp = (
        case("dp", 2, 150.0, impl="cpu_standin", **cpu),
        case("ddp", 2, 100.0, oversubscribed=True, **cpu),
    )
    figure = ratio([dp, ddp], [timed(dp, 1, 100.0), timed(ddp, 1, 200.0)])
    assert drawn(figure)[0][1]["DDP / DP"] == [Drawn(2.0, pytest.approx(0.5), hollow=True)]
    assert figure.caption == f"Throughput of DDP over DP: 0.500{TIMES} on 2 CPU cores (shared)."
    assert "Hollow marks" in figure.how_to_read


def test_ratio_needs_both_modes_at_one_count_and_common_rounds():
    dp, ddp = case("dp", 2, 150.0), case("ddp", 4, 180.0)
    assert ratio([dp, ddp], [timed(dp, 1, 100.0), timed(ddp, 1, 90.0)]) is None
    ddp = case("ddp", 2, 180.0)
    assert ratio([dp, ddp], [timed(dp, 1, 100.0), timed(ddp, 2, 90.0)]) is None
    assert ratio([dp, ddp], []) is None


def test_memory_is_drawn_where_it_is_known_and_never_as_zero():
    assert memory(workloads(run(usual_cases()).cases)[0], key="k") is None
    cases = [
        case("single", 1, 100.0, peak_mem_mib=1000.0),
        case("dp", 2, 150.0, peak_mem_mib=1600.0),
        case("ddp", 2, 180.0, peak_mem_mib=1100.0),
        case("ddp", 4, 300.0),
    ]
    figure = memory(workloads(run(cases).cases)[0], key="k")
    assert drawn(figure)[0][1] == {
        "single": [Drawn(1.0, 1000.0)],
        "DP": [Drawn(2.0, 1600.0)],
        "DDP": [Drawn(2.0, 1100.0)],
    }
    assert figure.caption == "On 2 GPUs: DP 1,600 MiB, DDP 1,100 MiB."
    assert "gathers outputs" in figure.how_to_read
    del cases[1]
    without_dp = memory(workloads(run(cases).cases)[0], key="k")
    assert "DataParallel" not in without_dp.how_to_read


@pytest.mark.parametrize("turned", [False, True])
def test_the_ratio_has_the_interval_of_the_answer_and_no_other(*, turned):
    """The rounds by themselves give a narrower one; it would call faster what the answer leaves open."""
    dp, ddp = case("dp", 2, 150.0), case("ddp", 2, 180.0)
    blocks = [timed(dp, r, 100.0 + r) for r in range(6)] + [timed(ddp, r, 80.0 + r) for r in range(6)]
    data = run([case("single", 1, 100.0), dp, ddp], timed_blocks=blocks)
    answer = Interval(1.25, 0.9, 1.7)
    ids = (dp["case_id"], ddp["case_id"]) if turned else (ddp["case_id"], dp["case_id"])
    one = Comparison(*ids, answer.inverted() if turned else answer, 0.05, 6)
    typical = typical_of(RoundTimes.of(data.blocks))
    alone, answered = (
        dp_against_ddp(workloads(data.cases)[0], typical, found, key="k") for found in ((), (one,))
    )
    assert alone is not None
    by_rounds, shown = (drawn(figure)[0][1]["DDP / DP"][0] for figure in (alone, answered))
    assert by_rounds.low is not None
    assert by_rounds.low > 1
    assert (shown.y, shown.low, shown.high) == pytest.approx((1.25, 0.9, 1.7))
    assert dashed("1.2 (0.9--1.7)") in answered.caption
