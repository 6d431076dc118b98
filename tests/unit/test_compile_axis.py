"""Several modes of torch.compile in one run: what is planned, compared and said of it."""

from itertools import product

import pytest
from finding_cases import made_run, over, pair
from made import block, times_of
from recorded_pages import compiled
from report_runs import case, run
from test_plan import make, names, resolved

from ddp_bench.bench.common.errors import UsageError
from ddp_bench.bench.findings.answers import answer_questions
from ddp_bench.bench.findings.settings import answer_compile
from ddp_bench.bench.findings.verdicts import CAP, COMPILE, WRAPPER
from ddp_bench.bench.findings.wording import write_ddp_call
from ddp_bench.bench.gate.runs import check_run
from ddp_bench.bench.plan.resolve import resolve, write_options
from ddp_bench.bench.plan.settings import Settings
from ddp_bench.bench.results.aggregate import describe_planned_case, make_case_rows
from ddp_bench.bench.results.case_columns import CASES
from ddp_bench.bench.results.case_result import CaseResult, read_case_results
from ddp_bench.bench.results.columns import BLOCKS, make_frame
from ddp_bench.bench.results.comparisons import Comparison, compute_speedup_over_default, list_pairs
from ddp_bench.bench.run.schedule import list_fixed_phases
from ddp_bench.bench.stats.interval import Interval

WAYS = ("ddp_optimizer", "no_optimization")


@pytest.mark.parametrize(
    ("text", "modes"),
    [
        ("off,on", ("off", "default")),
        ("on", ("default",)),
        ("max-autotune,on,off", ("off", "max-autotune", "default")),
    ],
)
def test_eager_comes_first_on_is_the_default_mode_and_both_are_written_back(text, modes):
    assert resolve({"compile": text}).axes["compile"] == modes
    assert write_options(Settings(axes={"compile": modes}), ()) == ["--compile", ",".join(modes)]
    assert write_options(Settings(device="cpu", axes={"compile": ("off",)}), ["device"]) == []
    for mistake in ("on,default", "fast", "off,,on"):
        with pytest.raises(UsageError, match="--compile"):
            resolve({"compile": mistake})


def test_every_mode_has_its_own_single_and_eager_cases_keep_their_ids():
    options = {"gpus": (2,), "bucket_cap_mb": ("default", "25")}
    eager, compiled = (make(compile=mode, **options) for mode in ("off", "default"))
    both = make(compile=("default", "off"), **options)
    assert [p.case for p in both] == [p.case for p in [*eager, *compiled]]
    assert names(both)[:4] == [("single", 1, ""), ("dp", 2, ""), ("ddp", 2, "default"), ("ddp", 2, "25")]
    reasons = {p.case.compile: str(p.skip_reason) for p in both if p.case.mode == "dp"}
    assert "cannot replicate" in reasons["default"]
    assert reasons["off"] == "None"


def test_ways_of_optimising_ddp_are_crossed_with_compiled_cases_alone():
    plan = make(gpus=(1, 2), modes=("ddp",), compile="off,on", optimize_ddp=WAYS, bucket_cap_mb="default")
    found = [(p.case.compile, p.case.num_devices, p.case.optimize_ddp) for p in plan if p.case.mode == "ddp"]
    assert found == [
        *(("off", n, "ddp_optimizer") for n in (1, 2)),
        ("default", 1, "ddp_optimizer"),
        *(("default", 2, way) for way in WAYS),
    ]
    with pytest.raises(UsageError, match="--compile on"):
        make(optimize_ddp="no_optimization")


def test_what_a_way_of_optimising_cannot_do_is_skipped():
    """Only DDPOptimizer asserts that the first bucket is the smallest."""
    caps = ("default", "0.25", "1/25")
    varied = {"optimize_ddp": WAYS, "bucket_cap_mb": ",".join(caps), "static_graph": (False, True)}
    plan = make(gpus=(2,), modes=("ddp",), compile="on", **varied)
    skipped = {
        (p.case.optimize_ddp, str(p.case.bucket_cap_mb), p.case.static_graph): p.skip_reason
        for p in plan
        if p.skip_reason
    }
    assert skipped.keys() == {("ddp_optimizer", "0.25", graph) for graph in (False, True)}
    assert "1 MiB" in str(skipped["ddp_optimizer", "0.25", False])


def test_compiled_cases_have_the_passes_of_eager_ones():
    """The one that calibrates is the first."""
    settings = resolved(gpus=(2,), compile="off,on", optimize_ddp=WAYS, calibrate=True, rounds=1)
    phases = {
        (p.case.compile, p.case.optimize_ddp): set(list_fixed_phases(p, round_index=1, settings=settings))
        for p in make(gpus=(2,), modes=("ddp",), compile="off,on", optimize_ddp=WAYS, bucket_cap_mb="default")
        if p.case.mode == "ddp"
    }
    assert phases["default", "no_optimization"] == {"timed", "no_sync", "comm", "anatomy", "trace"}
    assert phases["off", "ddp_optimizer"] == phases["default", "no_optimization"] | {"calibration"}


RATES = {"off": {1: 100.0, 2: 160.0}, "default": {1: 120.0, 2: 240.0}}
PLAN = make(gpus=(1, 2), modes=("ddp",), compile="off,on", bucket_cap_mb="default,25")


def rate(one):
    """Images per second, 1.1 times as many with a cap of 25 MiB."""
    return RATES[one.compile][one.num_devices] * (1.1 if str(one.bucket_cap_mb) == "25" else 1.0)


def measured_blocks():
    return [
        block(p.case.case_id, r, 1000 * p.case.global_batch / rate(p.case), rank=rank)
        for p, r in product(PLAN, range(1, 8))
        for rank in range(p.case.num_devices if p.case.mode == "ddp" else 1)
    ]


def test_speed_up_refers_to_single_compiled_alike():
    blocks = make_frame(measured_blocks(), BLOCKS)
    rows = make_case_rows([describe_planned_case(p, num_buckets=1) for p in PLAN], times_of(blocks))
    speedup = {
        (row["compile"], row["num_devices"]): row["speedup"]
        for row in rows.to_dict("records")
        if row["bucket_cap_mb"] != "25"
    }
    assert speedup["off", 2] == pytest.approx(1.6)
    assert speedup["default", 2] == pytest.approx(2.0)
    assert rows.loc[rows["mode"] == "single", "speedup"].tolist() == pytest.approx([1.0, 1.0])
    gate = check_run(run(rows.to_dict("records"), timed_blocks=measured_blocks()))
    gated = {
        (c.result.compile, c.result.get_text("bucket_cap_mb"), c.result.num_devices): c for c in gate.cases
    }
    found = gated["default", "default", 2].rounds["speedup"]
    assert list(found.values()) == pytest.approx([2.0] * 7)
    assert len({one.key for one in gate.cases}) == len(PLAN), "each case of a run has a key of its own"


SINGLE, DP, DDP, CAP_25 = (
    case("single", 1, 100.0, compile="off"),
    case("dp", 2, 150.0, compile="off"),
    case("ddp", 2, 160.0, compile="off"),
    case("ddp", 2, 150.0, compile="off", bucket_cap_mb="25"),
)
SINGLE_C, DDP_C, WHOLE_C = (
    compiled("single", 1, 120.0),
    compiled("ddp", 2, 210.0),
    compiled("ddp", 2, 180.0, optimize_ddp="no_optimization", accumulate=1) | {"case_id": "whole"},
)
ROWS = [SINGLE, DP, DDP, CAP_25, SINGLE_C, DDP_C, WHOLE_C]
RESULTS = [CaseResult.from_row(row) for row in ROWS]


def test_modes_are_compared_within_themselves_and_then_by_their_defaults():
    within = [pair(DDP, DP), pair(CAP_25, DDP), pair(WHOLE_C, DDP_C)]
    assert list_pairs(RESULTS) == [*within, pair(SINGLE_C, SINGLE), pair(DDP_C, DDP)]
    assert list_pairs(read_case_results(make_frame(ROWS, CASES))) == list_pairs(RESULTS)


def test_only_cases_that_differ_in_torch_compile_alone_are_held_against_each_other():
    """Under star the default stands for a mode, and under a cap that was not measured eager nothing does."""
    capped = compiled("ddp", 2, 1.0, bucket_cap_mb="1")
    assert pair(capped, DDP) not in list_pairs(map(CaseResult.from_row, [SINGLE, DDP, capped]))
    shared = [case("ddp", 4, 1.0, oversubscribed=True), compiled("ddp", 4, 1.0, oversubscribed=True)]
    assert list_pairs(map(CaseResult.from_row, [SINGLE, DDP, SINGLE_C, DDP_C, *shared])) == [
        pair(SINGLE_C, SINGLE),
        pair(DDP_C, DDP),
    ]


COMPARISONS = [
    over(DDP, DP, 1.05, 1.10),
    over(CAP_25, DDP, 0.91, 0.97),
    over(WHOLE_C, DDP_C, 1.08, 1.12),
    over(SINGLE_C, SINGLE, 1.18, 1.22),
    over(DDP_C, DDP, 1.25, 1.38),
]


def test_the_ratio_to_ddps_default_stays_within_a_mode():
    found = compute_speedup_over_default(COMPARISONS, RESULTS)
    assert found[DDP_C["case_id"]].estimate == found[DDP["case_id"]].estimate == 1.0
    assert found["whole"].low == 1.08
    assert SINGLE["case_id"] not in found


def test_a_line_to_paste_is_given_only_where_a_gain_is_seen():
    for low, high, paste in (
        (1.2, 1.3, "model.compile(); model = DDP(model)"),
        (1.01, 1.03, ""),
        (0.9, 1.2, ""),
        (0.8, 0.9, ""),
    ):
        (found,) = answer_compile(RESULTS, [over(DDP_C, DDP, low, high)])
        assert found.paste == paste


def test_every_mode_has_the_answers_of_a_run_of_its_own():
    modes = ([row for row in ROWS if row["compile"] == mode] for mode in ("off", "default"))
    alone = [v.sentence for own in modes for v in answer_questions(made_run(own, COMPARISONS))]
    both = [v for v in answer_questions(made_run(ROWS, COMPARISONS)) if v.question != COMPILE]
    assert [v.sentence for v in both] == alone
    assert [(v.question, v.scope) for v in both] == [
        (WRAPPER, "eager"),
        (CAP, "eager"),
        (WRAPPER, "compiled"),
        (CAP, "compiled"),
    ]


def test_optimize_ddp_is_no_argument_of_ddp():
    assert write_ddp_call({"optimize_ddp": "no_optimization", "bucket_cap_mb": "25"}) == (
        'torch._dynamo.config.optimize_ddp = "no_optimization"; model = DDP(model, bucket_cap_mb=25)'
    )


def test_a_comparison_whose_case_failed_is_about_no_compiler():
    """Its reference ran some rounds, so the comparison is there, and then the case is gone."""
    ok = case("ddp", 2, 100.0)
    one = Comparison(str(ok["case_id"]), "failed-since", Interval(1.2, 1.1, 1.3), 0.05, 10)
    assert answer_compile([CaseResult.from_row(ok)], [one]) == []
