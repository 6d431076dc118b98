"""Several batch sizes in one run: what is planned, compared, said and drawn of them."""

import re
from dataclasses import replace
from itertools import product

import pytest
from commands import ROOT
from finding_cases import exposing, made_run, over, pair
from made import block, case_of, made_manifest, times_of
from recorded_pages import compiled
from report_runs import case, drawn, measured, run
from test_next_step import parsed
from test_plan import make, resolved

from ddp_bench.bench.common.errors import UsageError
from ddp_bench.bench.findings.answers import BATCH_HEADING, answer_questions
from ddp_bench.bench.findings.findings import conclude_run
from ddp_bench.bench.findings.verdicts import BATCH, RESOLVED
from ddp_bench.bench.findings.wording import label_planned_case
from ddp_bench.bench.gate.compare import join
from ddp_bench.bench.gate.runs import check_run
from ddp_bench.bench.plan.resolve import resolve, write_options
from ddp_bench.bench.plan.sweep import is_calibrated
from ddp_bench.bench.predict.calibration import load_calibration
from ddp_bench.bench.predict.runs import predict_held_out
from ddp_bench.bench.results.aggregate import describe_planned_case, make_case_rows
from ddp_bench.bench.results.case_columns import CASES
from ddp_bench.bench.results.case_result import read_case_results
from ddp_bench.bench.results.columns import BLOCKS, make_frame
from ddp_bench.bench.results.comparisons import compute_speedup_over_default, list_pairs
from ddp_bench.bench.results.store import load_run
from ddp_bench.report.page import make_page
from ddp_bench.report.tables import tabulate_results, tabulate_unmeasured


@pytest.mark.parametrize(("text", "sizes"), [("32,8,16", (8, 16, 32)), ("8", (8,))])
def test_sizes_are_measured_the_smallest_first_and_written_back(text, sizes):
    settings = resolve({"batch_size": text})
    assert settings.batch_size == sizes
    assert write_options(settings, ()) == ["--batch-size", ",".join(map(str, sizes))]
    assert (
        made_manifest(settings={"batch_size": settings.stored()["batch_size"]}).settings.batch_size == sizes
    )
    for mistake in ("8,8", "0", "8,,16"):
        with pytest.raises(UsageError, match="--batch-size"):
            resolve({"batch_size": mistake})


def test_a_manifest_holds_one_size_as_a_number_as_it_always_did():
    assert resolve({"batch_size": "8"}).stored()["batch_size"] == 8


def test_every_size_has_the_cases_of_a_run_of_its_own():
    options = {"gpus": (1, 2), "bucket_cap_mb": ("default", "25"), "compile": "off,on"}
    alone = [p.case for size in (16, 32) for p in make(batch_size=size, **options)]
    assert [p.case for p in make(batch_size="32,16", **options)] == alone
    assert len({one.case_id for one in alone}) == len(alone)


def test_under_star_one_of_sizes_compilers_and_settings_varies_at_a_time():
    how = {"gpus": (2,), "modes": "ddp", "bucket_cap_mb": "default,1", "compile": "off,on", "sweep": "star"}
    found = [
        (p.case.batch, p.case.compile, p.case.bucket_cap_mb)
        for p in make(batch_size="16,32", **how)
        if p.case.mode == "ddp"
    ]
    first = (16, "off", "default")
    assert found == [first, (16, "off", "1"), (16, "default", "default"), (32, "off", "default")]


def test_the_global_batch_of_each_size_has_to_divide_and_the_smallest_is_calibrated():
    with pytest.raises(UsageError, match="--batch-size 9 does not divide over 2 devices"):
        make(gpus=(1, 2), scaling="strong", batch_size="8,9")
    strong = make(gpus=(1, 2), scaling="strong", batch_size="8,16")
    assert [{p.case.global_batch for p in strong if p.case.batch == size} for size in (8, 16)] == [{8}, {16}]
    how = {"gpus": (2,), "modes": "ddp", "bucket_cap_mb": "default", "batch_size": "8,16"}
    settings = resolved(calibrate=True, **how)
    assert [p.case.batch for p in make(**how) if is_calibrated(p.case, settings)] == [8]


RATES = {16: {1: 100.0, 2: 150.0}, 32: {1: 120.0, 2: 216.0}}
"""Samples per second by batch size and devices."""


def rows_and_blocks(**how):
    plan = make(gpus=(1, 2), modes="ddp", bucket_cap_mb="default", batch_size="16,32", **how)
    blocks = [
        block(
            p.case.case_id, r, 1000 * p.case.global_batch / RATES[p.case.batch][p.case.num_devices], rank=rank
        )
        for p, r in product(plan, range(1, 8))
        for rank in range(p.case.num_ranks)
    ]
    return make_case_rows(
        [describe_planned_case(p) for p in plan], times_of(make_frame(blocks, BLOCKS))
    ), blocks


@pytest.mark.parametrize("scaling", ["weak", "strong"])
def test_speed_up_and_efficiency_refer_to_single_with_as_large_a_batch(scaling):
    rows, blocks = rows_and_blocks(scaling=scaling)
    gate = check_run(run(rows.to_dict("records"), timed_blocks=blocks))
    by_size = {(one.result.batch, one.result.mode, one.result.num_devices): one for one in gate.cases}
    for size, speedup in ((16, 1.5), (32, 1.8)):
        found = by_size[size, "ddp", 2]
        assert found.result.speedup.estimate == pytest.approx(speedup)
        assert found.result.efficiency.estimate == pytest.approx(speedup / 2)
        assert list(found.rounds["speedup"].values()) == pytest.approx([speedup] * 7)
    renamed = replace(
        gate, cases=tuple(replace(c, result=replace(c.result, case_id="x")) for c in gate.cases)
    )
    assert [(a.result.batch, b.result.batch) for a, b in join(gate, renamed)] == [
        (size, size) for size in (16, 32) for _ in range(3)
    ], "a gate pairs equal batches, also where another version names cases otherwise"


def sized(size, mode, devices, rate=None, **more):
    """A case of this batch per device."""
    row = case(mode, devices, rate, **{"compile": "off", **more})
    return row | {
        "case_id": f"{mode}-n{devices}-b{size}-{row['compile']}-{more.get('bucket_cap_mb', 'x')}",
        "batch_per_device": size,
        "global_batch": size * devices,
    }


SIZES = (16, 32, 64)
SINGLES = [sized(size, "single", 1, 100.0) for size in SIZES]
DDPS = [sized(size, "ddp", 2, rate) for size, rate in zip(SIZES, (150.0, 190.0, 196.0), strict=True)]
OUT = {"status": "oom", "reason": "CUDA out of memory"}


def read(rows):
    return read_case_results(make_frame(rows, CASES))


def test_sizes_are_compared_within_themselves_and_then_by_their_defaults_with_the_smallest():
    cap = sized(32, "ddp", 2, bucket_cap_mb="25")
    eager = [SINGLES[0], DDPS[0], SINGLES[1], DDPS[1], cap]
    across = [pair(SINGLES[1], SINGLES[0]), pair(DDPS[1], DDPS[0])]
    assert list_pairs(read(eager)) == [pair(cap, DDPS[1]), *across]
    both = [SINGLES[0], sized(16, "single", 1, compile="default"), SINGLES[1]]
    both.append(sized(32, "single", 1, compile="default"))
    small, small_compiled, large, large_compiled = both
    assert list_pairs(read(both)) == [
        pair(small_compiled, small),
        pair(large, small),
        pair(large_compiled, large),
        pair(large_compiled, small_compiled),
    ]
    ratios = compute_speedup_over_default(
        [over(cap, DDPS[1], 1.1, 1.2), over(DDPS[1], DDPS[0], 1.3, 1.4)], read(eager)
    )
    assert ratios.keys() == {cap["case_id"], DDPS[1]["case_id"]}, "a ratio to the default has equal batches"


def answered(rows, *by):
    found = [one for one in answer_questions(made_run(rows, by)) if one.question == BATCH]
    assert all(one.heading == BATCH_HEADING for one in found)
    return [(one.answer, one.sentence, one.notes[:1]) for one in found]


def test_the_answer_names_the_fastest_per_sample_and_the_largest_that_fits():
    by = over(DDPS[1], DDPS[0], 1.25, 1.28), over(DDPS[2], DDPS[0], 1.29, 1.32)
    ((answer, sentence, notes),) = answered([*SINGLES, *DDPS], *by)
    assert answer == "faster"
    assert sentence.startswith("Batch 64 is 1.30")
    assert sentence.endswith("as fast as batch 16 per sample for DDP on 2 GPUs, the best of 3 sizes.")
    assert notes == ("The largest batch size that fits is 64",)


def test_sizes_that_ran_out_of_memory_are_part_of_the_answer():
    out = sized(64, "ddp", 2, **OUT)
    ((answer, sentence, notes),) = answered([*SINGLES, *DDPS[:2], out], over(DDPS[1], DDPS[0], 0.80, 0.84))
    assert (answer, sentence[:12]) == ("slower", "Batch 16 is ")
    assert notes == ("The largest batch size that fits is 32; 64 ran out of memory",)
    few = sized(32, "ddp", 2, **OUT)
    ((answer, sentence, _),) = answered([SINGLES[0], DDPS[0], few, out])
    assert answer == RESOLVED
    assert sentence == "Only batch 16 fits for DDP on 2 GPUs: 32, 64 ran out of memory."
    shown = tabulate_unmeasured(read([SINGLES[0], DDPS[0], few, out]), {})
    assert [row[0] for row in shown.rows] == [f"DDP, 2 GPUs, batch {n}, cap default" for n in (32, 64)]


def test_without_ddp_it_is_of_one_device_and_of_one_size_nothing_is_said():
    ((_, sentence, _),) = answered(SINGLES[:2], over(SINGLES[1], SINGLES[0], 1.25, 1.28))
    assert sentence.endswith("per sample for single on 1 GPU.")
    assert answered([SINGLES[0], DDPS[0]]) == []
    failed = sized(32, "ddp", 2, status="failed", reason="it broke")
    assert answered([SINGLES[0], DDPS[0], failed]) == []


def test_every_size_has_the_answers_of_a_run_of_its_own():
    alone = [v.sentence for n in (0, 1) for v in answer_questions(made_run([SINGLES[n], DDPS[n]]))]
    both = answer_questions(made_run([SINGLES[0], DDPS[0], SINGLES[1], DDPS[1]]))
    assert [v.sentence for v in both if v.question != BATCH] == alone
    assert [v.scope for v in both if v.question != BATCH] == ["batch 16", "batch 32"]
    named = [SINGLES[0], compiled("single", 1, 120.0, batch_per_device=16), DDPS[1]]
    assert [v.scope for v in answer_questions(made_run(named))] == ["batch 32, eager"]


def test_the_page_draws_rate_and_exposed_share_over_sizes_and_names_them_in_tables():
    step = measured(step_ms=100.0)
    ddps = [row | step | exposing(at - 1, at + 1) for row, at in zip(DDPS, (40, 20, 10), strict=True)]
    made = make_page(made_run([*SINGLES, *ddps]))
    figures = {figure.key: figure for figure in made.figures}
    rates = drawn(figures["batch-images_per_s"])
    assert {name: [(m.x, m.y) for m in marks] for name, marks in rates.items()} == {
        "single": [(size, 100.0) for size in SIZES],
        "DDP": [*zip(SIZES, (150.0, 190.0, 196.0), strict=True)],
    }
    assert [tuple(mark) for mark in drawn(figures["batch-exposed_pct"])["DDP"]] == [
        (size, pytest.approx(at), pytest.approx(at - 1), pytest.approx(at + 1))
        for size, at in zip(SIZES, (40, 20, 10), strict=True)
    ]
    assert "at batch 64" in figures["batch-exposed_pct"].caption
    table, _ = tabulate_results(read([*SINGLES, *ddps]))
    names = [heading.name for heading in table.columns]
    assert [row[names.index("Workload")] for row in table.rows] == [
        f"batch {size}" for size in SIZES for _ in "12"
    ]
    one_size = make_page(made_run([SINGLES[0], ddps[0]]))
    assert not {"batch-images_per_s", "batch-exposed_pct"} & {figure.key for figure in one_size.figures}
    assert "batch 16" not in f"{one_size.tables}{one_size.cards}{one_size.notes}"


EXPOSED = DDPS[0] | exposing(11, 13) | measured(step_ms=100.0)
OWN_WORK = [
    (SINGLES[0], 100.0),
    (sized(16, "ddp", 1, 90.0), 130.0),
    (DDPS[0] | exposing(1, 2) | measured(step_ms=135.0), 135.0),
]


def proposed(rows, blocks=None, **settings):
    manifest = {"settings": {"bucket_cap_mb": ["default", "1"], **settings}, "timing": {"measuring_s": 100.0}}
    made = made_run(rows, manifest=manifest)
    if blocks:
        made = replace(made, blocks=make_frame(blocks, BLOCKS))
    return conclude_run(made).next_step


def test_where_the_advice_is_a_larger_batch_the_command_tries_it():
    step = proposed([SINGLES[0], EXPOSED | {"num_buckets": 1}])
    module, given = parsed(step)
    assert (module, given.batch_size, given.bucket_cap_mb) == ("bench.run", "16,32,64", "default")
    assert "Larger batches" in step.why
    assert "check the loss" in step.why
    blocks = [
        block(row["case_id"], r, ms * (1 + 0.001 * ((7 * r) % 5)), rank=rank)
        for row, ms in OWN_WORK
        for r in range(1, 13)
        for rank in range(row["num_devices"])
    ]
    step = proposed([row for row, _ in OWN_WORK], blocks)
    assert "DDP's own overhead" in step.why
    assert parsed(step)[1].batch_size == "16,32,64"


def test_what_was_tried_is_not_proposed_and_a_search_keeps_the_size_it_is_about():
    rows = [SINGLES[0], EXPOSED | {"num_buckets": 1}, SINGLES[1], DDPS[1]]
    assert parsed(proposed(rows, batch_size=[16, 32]))[0] == "bench.export"
    search = proposed([SINGLES[0], EXPOSED, SINGLES[1], DDPS[1]], batch_size=[16, 32])
    module, given = parsed(search)
    assert (module, given.batch_size) == ("bench.tune", "16")


def test_the_sum_of_a_step_says_of_which_size_it_is():
    row = EXPOSED | measured(comm_ms=5.0)
    made = conclude_run(made_run([SINGLES[0] | measured(step_ms=80.0), row, SINGLES[1], DDPS[1]]))
    assert made.step.consists_of.startswith("A DDP step on 2 GPUs at batch 16 takes")
    singles = [row | measured(step_ms=ms) for row, ms in zip(SINGLES, (80.0, 90.0), strict=False)]
    row = DDPS[1] | exposing(11, 13) | measured(step_ms=100.0)
    made = conclude_run(made_run([*singles, DDPS[0] | {"status": "failed", "reason": "it broke"}, row]))
    assert " at batch 32 takes" in made.step.consists_of
    assert re.search(r": 90\S* \(\S+\) ms single-device step", made.step.consists_of), "of as large a batch"


def test_a_case_that_is_not_measured_yet_is_named_with_its_size_among_several():
    assert label_planned_case(case_of(), (4, 8)) == "DDP, 2 CPU cores, batch 4, cap default"
    assert label_planned_case(case_of(), (4,)) == "DDP, 2 CPU cores, cap default"


def test_a_calibration_is_held_against_cases_of_its_own_size_alone():
    """Compute is taken as proportional to the batch, and what that errs by widens every interval."""
    folder = ROOT / "results/samples/predictions/resnet18-2hosts/1gbit"
    calibration, ran = load_calibration(folder), load_run(folder)
    every = predict_held_out(calibration, ran, fitted=calibration.fitted)
    assert len(every) > 1
    of_other = ran.cases["case_id"] == every[0].case_id
    larger = ran.cases.assign(batch_per_device=ran.cases["batch_per_device"] * (1 + of_other))
    left = predict_held_out(calibration, replace(ran, cases=larger), fitted=calibration.fitted)
    assert [one.case_id for one in left] == [one.case_id for one in every[1:]]
