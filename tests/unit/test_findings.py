"""The answers of a run by code and figures, and the notes below them. The words are recorded."""

import math

import pytest
from finding_cases import (
    CAP_1,
    CAP_25,
    COMMUNICATIONS,
    CPU,
    DDP,
    DP,
    ENDS,
    FAILED,
    NAN,
    SINGLE,
    concluded,
    exposing,
    over,
)
from report_runs import case, measured, run, timed, usual_cases

from ddp_bench.bench.findings.answers import headline, verdicts
from ddp_bench.bench.findings.cautions import Caution, trust
from ddp_bench.bench.findings.findings import conclude, run_cautions
from ddp_bench.bench.findings.notes import (
    LeftOut,
    Overlap,
    ScalingLoss,
    notes,
    why_not_measured,
)
from ddp_bench.bench.findings.slow_ranks import SlowRank
from ddp_bench.bench.findings.verdicts import (
    CAP,
    COMMUNICATION,
    NOT_MEASURABLE,
    RESOLVED,
    WRAPPER,
    CommunicationVerdict,
    SettingsVerdict,
    WrapperVerdict,
)
from ddp_bench.bench.results.comparisons import EQUAL, FASTER, SLOWER, TOO_FEW, UNRESOLVED, pairs_of
from ddp_bench.bench.results.round_times import RoundTimes
from ddp_bench.bench.results.schema import BLOCKS, CASES, typed_frame


def found(*cases, by=()):
    return {one.question: one for one in verdicts(typed_frame(cases, CASES), by)}


def wrapper(low, high, *, dp=DP, ddp=DDP, num_rounds=20):
    verdict = found(SINGLE, dp, ddp, by=(over(ddp, dp, low, high, num_rounds=num_rounds),))[WRAPPER]
    assert isinstance(verdict, WrapperVerdict)
    return verdict


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
    assert (verdict.answer, verdict.paste, verdict.within_margin) == (answer, paste, within)
    assert verdict.ratio.faster == faster
    assert verdict.is_open == (answer in (UNRESOLVED, TOO_FEW))
    assert [mode for mode, _ in verdict.of_ideal] == ([] if answer == TOO_FEW else ["DDP", "DP"])


COPIES = {"dp_scatter_ms": 1, "dp_replicate_ms": 2, "dp_gather_ms": 3, "dp_reduce_ms": 14}


def test_a_stand_in_is_not_ranked():
    """On CPU cores nothing is learnt about DP against DDP; what its stages cost is told."""
    single, ddp = case("single", 1, 100.0, **CPU), case("ddp", 2, 160.0, scaling="strong", **CPU)
    dp = case("dp", 2, 190.0, scaling="strong", **CPU, **COPIES, **measured(step_ms=200.0))
    assert pairs_of([single, dp, ddp]) == []
    verdict = found(single, dp, ddp)[WRAPPER]
    assert (verdict.ratio.faster, verdict.ratio.slower, verdict.paste) == ("DDP", "one device", "")
    assert (verdict.is_advice, verdict.strong) == (False, True)
    assert "DP's stages cost its stand-in 20 ms of a step of 200 ms: replicate 2.0 ms" in verdict.sentence
    assert "DP against DDP is not measurable without GPUs" in verdict.sentence
    assert WRAPPER not in found(single, dp), "nor against one device"
    assert NOT_MEASURABLE not in wrapper(1.5, 1.7).sentence


def test_one_cap_of_which_nothing_is_decided_says_both_bounds():
    verdict = found(SINGLE, DDP, CAP_1, by=(over(CAP_1, DDP, 0.79, 1.19),))[CAP]
    assert verdict.sentence == "Undecided: cap 1 is between 21% slower and 19% faster than the default."


def test_devices_that_lose_against_one_are_told():
    slow = wrapper(1.5, 1.7, ddp=case("ddp", 2, 80.0)).one_device
    assert (slow.faster, slow.times.estimate) == ("one device", pytest.approx(1.25))
    assert wrapper(1.5, 1.7).one_device is None
    assert wrapper(1.5, 1.7, ddp=case("ddp", 2, 99.5)).one_device is None, "its interval holds 1"


FEW = {"speedup_low": None, "speedup_high": None, "efficiency_low": None, "efficiency_high": None}


@pytest.mark.parametrize(
    ("row", "answer", "faster"),
    [
        (DDP, FASTER, "DDP"),
        (case("dp", 2, 150.0), FASTER, "DP"),
        (case("ddp", 2, 80.0), SLOWER, "one device"),
        (case("ddp", 2, 100.0), EQUAL, "DDP"),
        (case("ddp", 2, 160.0, **FEW), TOO_FEW, "DDP"),
        (case("ddp", 2, 100.0, speedup=1.01, speedup_low=0.97, speedup_high=1.06), UNRESOLVED, "DDP"),
    ],
)
def test_a_mode_alone_is_compared_with_one_device(row, answer, faster):
    verdict = found(SINGLE, row)[WRAPPER]
    assert isinstance(verdict, WrapperVerdict)
    assert (verdict.answer, verdict.ratio.faster, verdict.paste) == (answer, faster, "")


def caps(*by, more=()):
    verdict = found(SINGLE, DDP, CAP_1, CAP_25, *more, by=by)[CAP]
    assert isinstance(verdict, SettingsVerdict)
    return verdict


def test_the_best_cap_is_named_with_its_gain():
    verdict = caps(over(CAP_1, DDP, 1.07, 1.09), over(CAP_25, DDP, 1.17, 1.19))
    assert (verdict.best.faster, verdict.best.slower) == ("cap 25", "the default")
    assert (verdict.answer, verdict.paste) == (FASTER, "model = DDP(model, bucket_cap_mb=25)")


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


@pytest.mark.parametrize(
    ("first", "second", "answer", "nearest", "open_ones", "worst"),
    [
        ((0.99, 1.01), (0.98, 1.02), EQUAL, ("cap 25", 1.02), ((), ()), None),
        ((1.01, 1.03), (0.99, 1.01), EQUAL, ("cap 1", 1.03), ((), ()), None),
        ((0.70, 0.72), (0.80, 0.90), EQUAL, ("cap 25", 0.90), ((), ()), "cap 1"),
        ((0.90, 1.10), (0.80, 1.30), UNRESOLVED, ("cap 25", 1.30), (("cap 1", "cap 25"), ()), None),
        ((0.90, 1.10), (0.70, 0.80), UNRESOLVED, ("cap 1", 1.10), (("cap 1",), ()), "cap 25"),
        ((NAN, NAN), (NAN, NAN), TOO_FEW, None, ((), ("cap 1", "cap 25")), None),
        ((0.99, 1.01), (NAN, NAN), TOO_FEW, ("cap 1", 1.01), ((), ("cap 25",)), None),
        ((0.90, 1.10), (NAN, NAN), UNRESOLVED, ("cap 1", 1.10), (("cap 1",), ("cap 25",)), None),
    ],
)
def test_without_a_winner_it_says_what_the_caps_may_gain_at_most(
    first, second, answer, nearest, open_ones, worst
):
    verdict = caps(*(over(c, DDP, *ends) for c, ends in ((CAP_1, first), (CAP_25, second))))
    assert (verdict.answer, verdict.paste, verdict.best) == (answer, "", None)
    assert (verdict.nearest and (verdict.nearest[0], verdict.nearest[1].high)) == nearest
    assert (verdict.unresolved, verdict.few) == open_ones
    assert (verdict.worst and verdict.worst.slower) == worst
    undecided = answer == UNRESOLVED or verdict.nearest is None
    assert verdict.sentence.startswith("Undecided: " if undecided else "Keep the default: ")


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
    assert isinstance(verdict, SettingsVerdict)
    assert verdict.best.faster == next(f"{name}={value}" for name, value in setting.items())
    assert (verdict.alters, verdict.paste) == (alters, paste)
    assert ("check the loss" in verdict.sentence) == alters


def test_a_setting_that_leaves_the_training_alone_goes_first():
    hook = case("ddp", 2, 200.0, case_id="hook", comm_hook="bf16")
    verdict = caps(over(CAP_1, DDP, 1.1, 1.2), over(hook, DDP, 1.4, 1.5), more=(hook,))
    assert verdict.best.faster == "cap 1"


@pytest.mark.parametrize(
    ("name", "answer", "hidden", "vague", "excess"),
    [
        ("hidden", RESOLVED, 71, False, None),
        ("alone unknown", RESOLVED, None, False, None),
        ("vague", RESOLVED, None, True, None),
        ("little", EQUAL, None, False, 3 / 4),
        ("open", UNRESOLVED, None, False, 3.0),
        ("none hidden", RESOLVED, -20, False, None),
        ("hardly hidden", RESOLVED, -5, False, None),
        ("too few", TOO_FEW, None, False, math.inf),
    ],
)
def test_what_communication_adds(name, answer, hidden, vague, excess):
    verdict = found(SINGLE, DDP | measured(step_ms=100.0) | COMMUNICATIONS[name])[COMMUNICATION]
    assert isinstance(verdict, CommunicationVerdict)
    assert (verdict.answer, verdict.is_vague) == (answer, vague)
    assert (verdict.hidden_pct and verdict.hidden_pct.estimate) == hidden
    assert verdict.excess == (excess if excess is None else pytest.approx(excess))


def test_how_far_ranks_are_apart_is_told_where_communication_hides_nothing():
    row = DDP | measured(step_ms=100.0) | COMMUNICATIONS["none hidden"]
    ends = {"rank_skew_ms": 17.0, "rank_skew_ms_high": 22.0}
    known, unknown = (
        found(SINGLE, row | ends | {"rank_skew_ms_low": low})[COMMUNICATION].sentence for low in (12, -1)
    )
    assert known.endswith("makes ranks wait, whose own work is 17 (12\N{EN DASH}22) ms apart.")
    assert unknown.endswith("makes ranks wait.")


def test_communication_was_not_measured():
    assert COMMUNICATION not in found(SINGLE, DDP)
    assert COMMUNICATION not in found(SINGLE, DP | exposing(1, 2) | measured(step_ms=100.0))


def test_the_answers_are_those_of_the_largest_count_of_their_own():
    data = run(usual_cases())
    assert set(headline(data.cases)["num_devices"]) == {2}
    shared = [row | {"oversubscribed": True} for row in (DP, DDP, case("ddp", 4, 100.0))]
    assert headline(typed_frame([SINGLE, *shared], CASES)).empty, "shared GPUs answer nothing"
    cores = [row | {"device_type": "cpu"} for row in (SINGLE, *shared)]
    assert set(headline(typed_frame(cores, CASES))["num_devices"]) == {4}


def test_one_gpu_answers_what_ddp_costs_by_itself():
    one = case("ddp", 1, 978.0) | {"speedup": 0.978, "speedup_low": 0.977, "speedup_high": 0.979}
    cases = typed_frame([SINGLE, one, *(row | {"status": "skipped"} for row in (DP, DDP))], CASES)
    (answer,) = verdicts(cases, [], margin=0.01)
    assert answer.said == (
        "One device is 1.02 times as fast as DDP on 1 GPU (1.02\N{EN DASH}1.02). That is DDP's own cost: on "
        "one device nothing is communicated."
    )
    assert verdicts(typed_frame([SINGLE], CASES), []) == []


def test_cases_that_broke_are_one_note_by_reason():
    broken = [
        case("ddp", 4, status="failed", reason="rank 3 died:\n\x1b[31mexit code 9"),
        *(case("ddp", 8, bucket_cap_mb=cap, status="oom", reason="x" * 500) for cap in "1234"),
    ]
    (note,) = concluded(SINGLE, DDP, *broken).notes
    assert note.startswith(
        r"5 cases not measured: DDP on 4 GPUs: failed (rank 3 died: \x1b[31mexit code 9); "
    )
    assert "cap 3 and 1 more: oom (" in note
    assert len(note) < 400


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
    assert why_not_measured(typed_frame(cases, CASES), ("dp", "ddp")) == said


def linked(comm_ms, own_ms=(), **more):
    """Of a DDP case on two ranks; `own_ms` is each round's step under `no_sync` of both ranks."""
    ddp = DDP | measured(comm_ms=comm_ms, exposed_comm_ms=20.0, step_ms=100.0) | {"step_ms_p50": 100.0} | more
    blocks = [
        timed(ddp, r, ms, rank=rank, phase="no_sync", host=f"host{rank}")
        for r, ranks in enumerate(own_ms, 1)
        for rank, ms in enumerate(ranks)
    ]
    ranks = [{"rank": rank, "host": f"host{rank}"} for rank in (0, 1)]
    data = run([SINGLE, ddp], {"ranks": ranks}, timed_blocks=blocks)
    return conclude(data.path, data.manifest, data.cases, data.times, [])


@pytest.mark.parametrize(("effect", "warned"), [(1e-4, False), (0.3, True), (None, False)])
def test_modes_that_train_differently_are_a_caution(effect, *, warned):
    made = run([SINGLE, DDP | {"split_effect": effect}])
    kinds = [one.kind for one in run_cautions(made.manifest, made.cases, made.times)]
    assert ("unequal weights" in kinds) == warned


APART = ((80.0, 92.0),)
TURNS = ((80.0, 92.0), (92.0, 80.0))


@pytest.mark.parametrize(
    ("own_ms", "often", "is_chance"),
    # One of two equal ranks is the slower one in all of five rounds once in 16 times.
    [(APART * 6, 6, False), (APART * 5, 5, True)],
)
def test_slow_rank_is_named_with_its_host(own_ms, often, *, is_chance):
    made = linked(40.0, own_ms, **measured(rank_skew_ms=12.0))
    (slow,) = made.found
    assert isinstance(slow, SlowRank)
    assert (slow.rank, slow.host, slow.often, slow.num_rounds) == (1, "host1", often, len(own_ms))
    assert slow.is_chance == is_chance
    assert ("too few to say" in slow.sentence) == is_chance
    assert "uneven ranks" not in [one.kind for one in made.cautions]


def test_ranks_that_take_turns_at_being_slow_are_uneven():
    made = linked(40.0, TURNS * 2, **measured(rank_skew_ms=12.0))
    assert made.found == ()
    assert "only roughly (uneven ranks)" in made.trust
    assert linked(40.0, ((80.0, 81.0),) * 4, **measured(rank_skew_ms=1.0)).found == ()


def test_skipped_cases_are_one_line_with_their_count():
    few = {"status": "skipped", "reason": "needs 4 GPUs per machine, there are 2"}
    skipped = [case("ddp", 4, bucket_cap_mb=cap, **few) for cap in ("default", "1")]
    plain = case("dp", 1, status="skipped", reason="the plain module")
    alike = CAP_1 | {"status": "skipped", "reason": "same bucket layout"}
    (note,) = concluded(SINGLE, DDP, *skipped, plain, alike).found
    assert isinstance(note, LeftOut)
    assert note.num_cases == 4


def test_overlapping_rates_of_which_one_is_faster_are_explained():
    near = DDP | {"images_per_s_low": 99.0}
    assert [type(one) for one in concluded(SINGLE, DP, near, by=(over(near, DP, 1.1, 1.2),)).found] == [
        Overlap
    ]
    assert concluded(SINGLE, DP, near, by=(over(near, DP, 0.9, 1.2),)).found == ()
    assert concluded(SINGLE, DP, DDP, by=(over(DDP, DP, 1.1, 1.2),)).found == ()


@pytest.mark.parametrize(
    ("kinds", "bounds", "alone"),
    [
        ([], "hold", ""),
        (["two levels"], "hold only roughly (two levels)", ""),
        (["few rounds", "two levels"], "are in doubt (few rounds)", ""),
        (["other load", "drift"], "hold only roughly (other load)", "(drift)"),
        (["few rounds", "slow links"], "are in doubt (few rounds)", "(slow links)"),
    ],
)
def test_trust_sorts_cautions_by_what_they_weaken(kinds, bounds, alone):
    cautions = [Caution(kind=kind, text="t", advice="a") for kind in kinds]
    found = trust(cautions, [UNRESOLVED, TOO_FEW], on_cpu=False, evidence="Others held")
    where = f"; ms and rates do not carry over {alone}" if alone else ""
    wanted = f"nothing is resolved, either may be faster; the bounds of that {bounds}{where}. Others held."
    assert found == f"Trust, of this run: {wanted}"
    assert trust(cautions, [], on_cpu=False) == ""
    equal = trust(cautions, [EQUAL, UNRESOLVED], on_cpu=True)
    assert equal.startswith("Trust, of this run: what is resolved ")
    assert equal.endswith(" on GPUs: measure there.")


def test_why_ddp_scales_as_it_does_in_parts_that_add_up():
    """Steps of 100 ms alone, 110 in DDP on one device, 115 under no_sync beside another, 150 with it."""
    single, one, two = case("single", 1, 100.0), case("ddp", 1, 90.9), case("ddp", 2, 133.3)
    noise = [1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01, 0.99]
    steps = ((single, "timed", 100.0), (one, "timed", 110.0), (two, "no_sync", 115.0), (two, "timed", 150.0))
    rows = [
        timed(row, r, ms * factor, phase=phase)
        for row, phase, ms in steps
        for r, factor in enumerate(noise, 1)
    ]
    (loss, *_) = notes(typed_frame([single, one, two], CASES), RoundTimes.of(typed_frame(rows, BLOCKS)))
    assert isinstance(loss, ScalingLoss)
    assert (loss.step_ms, loss.single_ms) == pytest.approx((150, 100), rel=0.01)
    parts = (loss.own_work_ms, loss.beside_others_ms, loss.communication_ms)
    assert [part.estimate for part in parts] == pytest.approx([10, 5, 35], rel=0.01)
