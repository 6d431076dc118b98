"""The answers of a run by code and figures, and the notes below them. The words are recorded."""

import math

import pytest
from finding_cases import (
    CAP_1,
    CAP_25,
    CPU,
    DDP,
    DP,
    ENDS,
    FAILED,
    NAN,
    SINGLE,
    concluded,
    exposing,
    made_run,
    over,
)
from made import block
from report_runs import case, measured, run, timed, usual_cases

from ddp_bench.bench.common.numbers import format_interval
from ddp_bench.bench.findings.answers import answer_questions, select_headline
from ddp_bench.bench.findings.cautions import Caution, find_cautions
from ddp_bench.bench.findings.confidence import assess_confidence
from ddp_bench.bench.findings.findings import conclude_run
from ddp_bench.bench.findings.notes import explain_not_measured
from ddp_bench.bench.findings.verdicts import CAP, WRAPPER, Verdict
from ddp_bench.bench.findings.wording import describe_stand_ins
from ddp_bench.bench.results.case_columns import CASES
from ddp_bench.bench.results.case_result import CaseResult, read_case_results
from ddp_bench.bench.results.columns import BLOCKS, make_frame
from ddp_bench.bench.results.comparisons import EQUAL, FASTER, SLOWER, TOO_FEW, UNRESOLVED, list_pairs

BF16 = case("ddp", 2, 250.0, case_id="bf16", comm_hook="bf16")


def found(*cases, by=()):
    return {one.question: one for one in answer_questions(made_run(cases, by))}


def wrapper(low, high, *, dp=DP, ddp=DDP, num_rounds=20):
    return found(SINGLE, dp, ddp, by=(over(ddp, dp, low, high, num_rounds=num_rounds),))[WRAPPER]


@pytest.mark.parametrize(
    ("name", "answer", "faster", "within", "paste"),
    [
        ("faster", FASTER, "DDP", False, "model = DDP(model)"),
        ("slower", SLOWER, "DP", False, "model = nn.DataParallel(model)"),
        ("equal", EQUAL, "DP", True, ""),
        ("little faster", FASTER, "DDP", True, "model = DDP(model)"),
        ("little slower", SLOWER, "DP", True, "model = nn.DataParallel(model)"),
        ("open", UNRESOLVED, "DDP", False, ""),
        ("too few", TOO_FEW, "DDP", False, ""),
    ],
)
def test_ddp_or_dp(name, answer, faster, within, paste):
    verdict = wrapper(*ENDS[name], num_rounds=4 if answer == TOO_FEW else 20)
    assert (verdict.answer, verdict.paste) == (answer, paste)
    assert (" within your 5% margin" in verdict.sentence) == (within and answer != EQUAL)
    assert answer == TOO_FEW or f"{faster} is 1." in verdict.sentence
    assert verdict.is_open == (answer in (UNRESOLVED, TOO_FEW))
    decided = answer in (FASTER, SLOWER) and not within
    assert verdict.faster_id == ({"DDP": DDP, "DP": DP}[faster]["case_id"] if decided else "")


def test_a_stand_in_is_not_ranked():
    """On CPU cores nothing is learnt about DP against DDP."""
    single, ddp = case("single", 1, 100.0, **CPU), case("ddp", 2, 160.0, scaling="strong", **CPU)
    dp = case("dp", 2, 190.0, scaling="strong", **CPU, **measured(step_ms=200.0))
    assert list_pairs(map(CaseResult.from_row, [single, dp, ddp])) == []
    verdict = found(single, dp, ddp)[WRAPPER]
    assert verdict.sentence.startswith("DDP on 2 CPU cores is 1.60")
    assert verdict.paste == ""
    assert verdict.sentence.endswith("as fast as one device, 80% of ideal.")
    assert describe_stand_ins(map(CaseResult.from_row, [single, dp]))[1].startswith("Without GPUs, DP cannot")
    assert WRAPPER not in found(single, dp), "nor against one device"


def caps(*by, more=()):
    return found(SINGLE, DDP, CAP_1, CAP_25, *more, by=by)[CAP]


@pytest.mark.parametrize(
    ("cap", "given"), [("0", "bucket_cap_mb=1e-06"), ("1/25/25", "bucket_cap_mb_list=[1, 25, 25]")]
)
def test_the_line_to_paste_is_the_call_that_was_measured(cap, given):
    other = case("ddp", 2, 200.0, case_id="other", bucket_cap_mb=cap)
    verdict = found(SINGLE, DDP, other, by=(over(other, DDP, 1.2, 1.3),))[CAP]
    assert verdict.paste == f"model = DDP(model, {given})"


def test_the_line_to_paste_has_what_the_whole_run_was_measured_with():
    rows = [case("ddp", 2, 200.0, case_id=c, bucket_cap_mb=c, static_graph=True) for c in ("default", "25")]
    verdict = found(SINGLE, *rows, by=(over(rows[1], rows[0], 1.2, 1.3),))[CAP]
    assert verdict.paste == "model = DDP(model, bucket_cap_mb=25, static_graph=True)"


BEGINS = {
    EQUAL: "Keep the default: no other bucket cap is ",
    UNRESOLVED: "Unresolved: the best of ",
    TOO_FEW: "Too few rounds",
}


@pytest.mark.parametrize(
    ("first", "second", "answer", "named"),
    [
        ((0.99, 1.01), (0.98, 1.02), EQUAL, "a gain above 2% is excluded"),
        ((1.01, 1.03), (0.99, 1.01), EQUAL, "a gain above 3% is excluded"),
        ((0.70, 0.72), (0.80, 0.90), EQUAL, "is faster"),
        ((0.92, 1.10), (0.80, 1.30), UNRESOLVED, "2 bucket caps, cap 25 MiB, is 1.02"),
        ((0.90, 1.10), (0.70, 0.80), UNRESOLVED, "2 bucket caps, cap 1 MiB, is 0.99"),
        ((NAN, NAN), (NAN, NAN), TOO_FEW, "cap 1 MiB, cap 25 MiB with"),
        ((0.99, 1.01), (NAN, NAN), TOO_FEW, "compare cap 25 MiB with"),
    ],
)
def test_without_a_winner_it_says_what_the_caps_may_gain_at_most(first, second, answer, named):
    verdict = caps(*(over(c, DDP, *ends) for c, ends in ((CAP_1, first), (CAP_25, second))))
    assert (verdict.answer, verdict.paste, verdict.faster_id) == (answer, "", "")
    assert verdict.sentence.startswith(BEGINS[answer])
    assert named in verdict.sentence


@pytest.mark.parametrize("dp", [DP, None])
@pytest.mark.parametrize(
    ("setting", "ratio", "named"),
    [
        (CAP_1, (1.28, 1.34), True),
        (CAP_1, (1.01, 1.03), False),
        (CAP_1, (0.9, 1.1), False),
        (BF16, (1.4, 1.5), False),
    ],
)
def test_the_first_answer_names_the_cap_with_which_ddp_is_faster(dp, setting, ratio, named):
    """It speaks of DDP's default; one that changes the training is told apart."""
    rows = [SINGLE, DDP, setting, *([dp] if dp else [])]
    by = (over(setting, DDP, *ratio), *([over(DDP, dp, 1.2, 1.3)] if dp else []))
    first = answer_questions(made_run(rows, by))[0]
    assert (first.question, first.answer) == (WRAPPER, FASTER)
    assert first.sentence.count(" is 1.") == 1 + named
    assert (". Cap 1 MiB is 1.31" in first.sentence) == named


@pytest.mark.parametrize(
    ("first", "second", "begins", "left"),
    [
        ((0.9, 1.1), (NAN, NAN), "cap 1 MiB is 0.99", "cap 25 MiB"),  # the one that is known by itself
        ((0.5, 1.5), (0.93, 1.03), "the best of 2 bucket caps, cap 25 MiB, is 0.98", "cap 1 MiB"),
    ],
)
def test_the_best_is_the_one_with_the_best_estimate_however_wide_the_others_are(first, second, begins, left):
    verdict = caps(over(CAP_1, DDP, *first), over(CAP_25, DDP, *second))
    assert verdict.sentence.startswith(f"Unresolved: {begins}")
    assert verdict.notes == (f"Still undecided: {left}",)


@pytest.mark.parametrize(
    ("setting", "paste", "alters"),
    [
        ({"static_graph": True}, "model = DDP(model, static_graph=True)", False),
        ({"gradient_as_bucket_view": True}, "model = DDP(model, gradient_as_bucket_view=True)", False),
        ({"comm_hook": "bf16"}, "", True),
        ({"accumulate": 4, "global_batch": 80}, "", True),
        ({"sync_buffers": False}, "", True),
        ({"zero_optimizer": True}, "", False),
    ],
)
def test_what_alters_the_training_is_said_and_not_to_be_pasted(setting, paste, alters):
    other = case("ddp", 2, 200.0, case_id="other", **setting)
    verdict = found(SINGLE, DDP, other, by=(over(other, DDP, 1.2, 1.3),))[CAP]
    assert verdict.sentence.startswith(next(f"{name}={value} is " for name, value in setting.items()))
    assert verdict.paste == paste
    assert ["check the loss" in note for note in verdict.notes] == [True] * alters


def test_a_setting_that_leaves_the_training_alone_goes_first():
    hook = case("ddp", 2, 200.0, case_id="hook", comm_hook="bf16")
    verdict = caps(over(CAP_1, DDP, 1.1, 1.2), over(hook, DDP, 1.4, 1.5), more=(hook,))
    assert verdict.label == "cap 1 MiB is faster"
    assert verdict.notes[0].startswith("comm_hook=bf16 is 1.45")
    assert verdict.notes[0].endswith("as fast, but changes the training")


def test_another_wrapper_races_with_the_settings_of_ddp_and_wins_if_it_is_proved():
    """What is not proved, or changes the training, is not what the run advises."""
    plain = case("replicate", 2, 200.0, case_id="replicate")
    narrow = case("fsdp", 2, 300.0, case_id="narrow", mp_policy="bf16", reshard_after_forward=False)
    wins = (over(plain, DDP, 1.2, 1.3), over(narrow, DDP, 1.8, 1.9), over(CAP_1, DDP, 1.05, 1.1))
    verdict = caps(*wins, more=(plain, narrow))
    assert (verdict.label, verdict.faster_id, verdict.paste) == ("replicate is faster", "replicate", "")
    assert verdict.notes[0].startswith("FSDP2 with mp_policy=bf16, reshard_after_forward=False is 1.8")
    unproved = plain | {"not_proved": "it draws random numbers"}
    assert caps(*wins, more=(unproved, narrow)).label == "cap 1 MiB is faster"


def test_the_answers_are_those_of_the_largest_count_of_their_own():
    def counts(*cases):
        return {case.num_devices for case in select_headline(read_case_results(make_frame(cases, CASES)))}

    assert counts(*usual_cases()) == {2}
    shared = [row | {"oversubscribed": True} for row in (DP, DDP, case("ddp", 4, 100.0))]
    assert counts(SINGLE, *shared) == set(), "shared GPUs answer nothing"
    assert counts(*(row | {"device_type": "cpu"} for row in (SINGLE, *shared))) == {4}


def test_one_gpu_answers_what_ddp_costs_by_itself():
    one = case("ddp", 1, 880.0) | {"speedup": 0.88, "speedup_low": 0.87, "speedup_high": 0.89}
    one |= measured(step_ms=50.0)
    skipped = [row | {"status": "skipped"} for row in (DP, DDP)]
    blocks = [
        block(row["case_id"], r, ms + (r * step) % 5 / 10)
        for row, ms, step in ((SINGLE, 44.0, 3), (one, 50.0, 2))
        for r in range(10)
    ]
    made = conclude_run(made_run([SINGLE, one, *skipped], blocks=make_frame(blocks, BLOCKS)))
    (answer,), (saving,) = made.verdicts, made.step.savings
    assert saving.ms.low < 6 < saving.ms.high
    ms = format_interval(saving.ms, "ms")
    assert answer.said == f"DDP itself costs {ms}, 12.0% (11.0\N{EN DASH}13.0) of each step on one device."
    assert found(SINGLE) == {}


SKIPPED = {"status": "skipped", "reason": "the plain module"}


@pytest.mark.parametrize(
    ("cases", "said"),
    [
        ([SINGLE, DP, DDP], []),
        ([SINGLE, DP, DDP, CAP_1 | FAILED], []),
        ([SINGLE, DP | SKIPPED, DDP], []),
        ([SINGLE, DP, DDP | FAILED], [f"every case of ddp failed: {FAILED['reason']}"]),
        ([SINGLE, DP, DDP | FAILED, CAP_1 | SKIPPED], [f"every case of ddp failed: {FAILED['reason']}"]),
        (
            [
                SINGLE,
                DP | {"status": "oom", "reason": "out of memory"},
                DDP | {**FAILED, "status": "timeout"},
            ],
            [
                "every case of dp failed: oom: out of memory",
                f"every case of ddp failed: timeout: {FAILED['reason']}",
            ],
        ),
        ([SINGLE, DP | FAILED, DDP | FAILED], [f"every case of dp and ddp failed: {FAILED['reason']}"]),
        ([SINGLE | FAILED, DP, DDP], []),
        (
            [SINGLE | FAILED, DP | SKIPPED, DDP | SKIPPED],
            [f"every case of single failed: {FAILED['reason']}"],
        ),
        ([SINGLE | SKIPPED, DDP | SKIPPED], ["nothing was measured: the plain module"]),
    ],
)
def test_modes_without_a_measured_case(cases, said):
    """What ends a run with status 4; a reference that nobody asked for counts where nothing else is there."""
    assert explain_not_measured(read_case_results(make_frame(cases, CASES)), ("dp", "ddp")) == said


def linked(comm_ms, own_ms=(), **more):
    """Of a DDP case on two ranks; `own_ms` is each round's step under `no_sync` of both ranks."""
    ddp = DDP | measured(comm_ms=comm_ms, exposed_comm_ms=20.0, step_ms=100.0) | {"step_ms_p50": 100.0} | more
    blocks = [
        timed(ddp, r, ms, rank=rank, phase="no_sync", host=f"host{rank}")
        for r, ranks in enumerate(own_ms, 1)
        for rank, ms in enumerate(ranks)
    ]
    ranks = [{"rank": rank, "host": f"host{rank}"} for rank in (0, 1)]
    made = conclude_run(run([SINGLE, ddp], {"ranks": ranks}, timed_blocks=blocks))
    return [note for note in made.notes if "straggler" in note]


@pytest.mark.parametrize(("effect", "warned"), [(1e-4, False), (0.3, True), (None, False)])
def test_modes_that_train_differently_are_a_caution(effect, *, warned):
    made = run([SINGLE, DDP | {"split_effect": effect}])
    kinds = [one.kind for one in find_cautions(made)]
    assert ("unequal weights" in kinds) == warned


APART = ((80.0, 92.0),)
TURNS = ((80.0, 92.0), (92.0, 80.0))


def test_slow_rank_is_named_with_its_host():
    (slow,) = linked(40.0, APART * 6, **measured(rank_skew_ms=12.0))
    assert slow.startswith("Rank 1 on host1 is a straggler: slowest of 2 GPUs in 6 of 6 rounds, by 12.0 (")


def test_ranks_that_take_turns_at_being_slow_are_not_named():
    assert linked(40.0, TURNS * 2, **measured(rank_skew_ms=12.0)) == []
    assert linked(40.0, ((80.0, 81.0),) * 6, **measured(rank_skew_ms=1.0)) == []


def test_skipped_cases_are_a_sentence_for_each_reason_with_their_count():
    few = {"status": "skipped", "reason": "needs 4 GPUs per machine, there are 2"}
    skipped = [case("ddp", 4, bucket_cap_mb=cap, **few) for cap in ("default", "1")]
    plain = case("dp", 1, status="skipped", reason="the \x1b[31mplain module")
    alike = CAP_1 | {"status": "skipped", "reason": "same bucket layout"}
    first, second, third = concluded(SINGLE, DDP, *skipped, plain, alike).notes
    assert first == "2 cases skipped, 4 devices: needs 4 GPUs per machine, there are 2."
    assert second.endswith(r": the \x1b[31mplain module.")
    assert third == "1 case skipped, DDP on 2 GPUs with cap 1 MiB: same bucket layout."
    others = [alike | {"reason": f"reason {i}", "case_id": f"c{i}"} for i in range(5)]
    assert concluded(SINGLE, DDP, *others).notes[-1] == "2 other cases skipped."


OPEN_YET = "Nothing is resolved yet."
DOUBT = "The answers are in doubt: few rounds."


def verdict_of(answer, *comparisons):
    return Verdict(question="", answer=answer, heading="", text="", comparisons=comparisons)


ONE = over(DDP, DP, 1.2, 1.3)


@pytest.mark.parametrize(
    ("kinds", "order", "size", "alone"),
    [
        ([], OPEN_YET, "", ""),
        (["slowed GPUs"], OPEN_YET, " Caution: slowed GPUs.", ""),
        (["few rounds", "scattered rounds"], DOUBT, " Caution: scattered rounds.", ""),
        (["other load", "drift"], OPEN_YET, " Caution: other load.", "drift"),
        (["few rounds", "drift"], DOUBT, "", "drift"),
        (["large drift"], OPEN_YET, " Caution: large drift.", ""),
        (["few rounds", "slow links"], DOUBT, "", "slow links"),
    ],
)
def test_trust_sorts_cautions_by_what_they_weaken(kinds, order, size, alone):
    cautions = [Caution(kind=kind, text="t", advice="a") for kind in kinds]
    verdicts = [verdict_of(UNRESOLVED, ONE), verdict_of(TOO_FEW, ONE)]
    worth = assess_confidence(verdicts, cautions, on_cpu=False, repeats="Others held.")
    assert (worth.order, worth.size) == (
        order,
        f"This run's true values are in their intervals with 95% confidence.{size}",
    )
    more = f" Expect other times and rates than in this run: {alone}." if alone else ""
    assert worth.next_run == f"Others held.{more}"
    assert assess_confidence([], cautions, on_cpu=False) is None
    drift = Caution(kind="large drift", text="t", advice="a", short="the machine became 49% faster")
    assert assess_confidence([verdict_of(FASTER, ONE)], [drift], on_cpu=False).order == (
        "The direction of the answers is certain, their size is not: the machine became 49% faster."
    )
    some = [verdict_of(EQUAL, ONE), verdict_of(UNRESOLVED, ONE)]
    assert assess_confidence(some, [], on_cpu=True, load="load").lines == {
        "which is faster": "1 answer is not resolved. Others are reliable within this run.",
        "by how much": "This run's true values are in their intervals with 95% confidence. Load.",
        "next run": "",
        "other machines": "Measure on GPUs, because a device here is a CPU core.",
    }


@pytest.mark.parametrize(
    ("by", "order", "size"),
    [
        ((0.9, 1.2), OPEN_YET, "This run's true values are in their intervals with 95% confidence."),
        (
            (1.2, 1.3),
            "The answers are reliable within this run.",
            "This run's true values are in their intervals with 95% confidence.",
        ),
        ((NAN, NAN), OPEN_YET, "This is not known: there are too few rounds for intervals."),
    ],
)
def test_confidence_rests_on_the_answers_that_compare(by, order, size):
    """A run that resolves what communication adds, and no comparison, tells nothing of which is faster."""
    added = exposing(*((NAN, NAN) if math.isnan(by[0]) else (11, 13)))
    ddp = DDP | measured(step_ms=100.0) | added
    worth = concluded(SINGLE, DP, ddp, by=(over(ddp, DP, *by),)).trust
    assert (worth.order, worth.size) == (order, size)


def test_the_fastest_is_what_an_answer_says_is_faster():
    slow = case("ddp", 2, 80.0)
    assert concluded(SINGLE, slow).fastest_id == SINGLE["case_id"]
    assert concluded(SINGLE, case("ddp", 1, 80.0)).fastest_id == "", "nobody asks whether to use one device"
    best = concluded(SINGLE, DDP, CAP_1 | {"images_per_s": 170.0}, by=(over(CAP_1, DDP, 1.1, 1.2),))
    assert best.fastest_id == CAP_1["case_id"]
    assert concluded(SINGLE, DP, DDP, by=(over(DDP, DP, 0.9, 1.2),)).fastest_id == ""


@pytest.mark.parametrize(
    ("mode", "title"), [("ddp", "DDP or one device"), ("pipeline", "pipeline or one device")]
)
def test_a_question_is_about_what_was_measured(mode, title):
    (verdict, *_) = concluded(SINGLE, case(mode, 2, 150.0)).verdicts
    assert verdict.title == title


def test_passes_that_were_not_reached_are_said():
    reached = DDP | measured(exposed_comm_ms=20.0, step_ms=100.0)
    other = case("ddp", 2, 150.0, bucket_cap_mb="5")
    said = "Communication was not measured in 2 of 3 DDP cases"
    assert any(said in note for note in concluded(SINGLE, reached, CAP_1, other).notes)
    assert not any("not measured in" in note for note in concluded(SINGLE, DDP, CAP_1).notes)


def test_a_case_that_is_not_proved_is_named_beside_the_answer():
    unproved = CAP_1 | {"not_proved": "it draws", "proved_by": "a seed"}
    for others, sentence in (
        ((), "Keep the default: no other setting is proved to train right."),
        (
            (CAP_25,),
            "Keep the default: cap 25 MiB is 1.00\N{MULTIPLICATION SIGN} (0.99\N{EN DASH}1.01) as fast.",
        ),
    ):
        by = [over(unproved, DDP, 1.5, 1.6), *(over(one, DDP, 0.99, 1.01) for one in others)]
        made = concluded(SINGLE, DDP, unproved, *others, by=by)
        (verdict,) = (one for one in made.verdicts if one.question == CAP)
        assert verdict.sentence == sentence
        assert any("as fast, but not proved" in note for note in made.notes)
        assert verdict.faster_id == ""
