"""The answers of a run: which wrapper, which settings, what communication adds; the words are recorded."""

import math

import pytest
from finding_cases import CAP_1, CAP_25, CPU, DDP, DP, NAN, SINGLE, exposing, hiding, over
from report_runs import case, measured, run, usual_cases

from ddp_bench.bench.findings.answers import headline, verdicts
from ddp_bench.bench.findings.verdicts import (
    CAP,
    COMMUNICATION,
    RESOLVED,
    WRAPPER,
    CommunicationVerdict,
    Ratio,
    SettingsVerdict,
    WrapperVerdict,
)
from ddp_bench.bench.results.comparisons import EQUAL, FASTER, SLOWER, TOO_FEW, UNRESOLVED
from ddp_bench.bench.results.schema import CASES, typed_frame
from ddp_bench.bench.stats import Interval


def found(*cases, by=()):
    return {one.question: one for one in verdicts(typed_frame(cases, CASES), by)}


def wrapper(low, high, *, dp=DP, ddp=DDP, num_rounds=20):
    verdict = found(SINGLE, dp, ddp, by=(over(ddp, dp, low, high, num_rounds=num_rounds),))[WRAPPER]
    assert isinstance(verdict, WrapperVerdict)
    return verdict


@pytest.mark.parametrize(
    ("low", "high", "answer", "faster", "within", "paste"),
    [
        (1.28, 1.34, FASTER, "DDP", False, "model = DDP(model)"),
        (0.75, 0.84, SLOWER, "DP", False, "model = nn.DataParallel(model)"),
        (0.98, 1.02, EQUAL, "DP", True, ""),
        (1.01, 1.03, FASTER, "DDP", True, "model = DDP(model)"),
        (0.97, 0.99, SLOWER, "DP", True, "model = nn.DataParallel(model)"),
        (0.37, 1.49, UNRESOLVED, "DP", False, ""),
        (NAN, NAN, TOO_FEW, "DDP", False, ""),
    ],
)
def test_ddp_or_dp(low, high, answer, faster, within, paste):
    verdict = wrapper(low, high, num_rounds=4 if answer == TOO_FEW else 20)
    assert (verdict.answer, verdict.paste, verdict.within_margin) == (answer, paste, within)
    assert verdict.ratio.faster == faster
    assert verdict.is_open == (answer in (UNRESOLVED, TOO_FEW))
    assert [mode for mode, _ in verdict.of_ideal] == ([] if answer == TOO_FEW else ["DDP", "DP"])


@pytest.mark.parametrize(("low", "high"), [(1.07, 1.25), (0.80, 0.93)])
def test_every_ratio_has_the_faster_one_first(low, high):
    ratio = Ratio.of("a", "b", Interval((low * high) ** 0.5, low, high))
    assert ratio.faster == ("a" if low > 1 else "b")
    assert ratio.times.estimate > 1
    assert ratio.times.low == pytest.approx(low if low > 1 else 1 / high)
    assert ratio.times.high == pytest.approx(high if low > 1 else 1 / low)


def test_a_stand_in_is_named_and_never_advised():
    dp, ddp = (case(mode, 2, 160.0, scaling="strong", **CPU) for mode in ("dp", "ddp"))
    for ends in ((1.5, 1.7), (0.75, 0.84)):
        verdict = wrapper(*ends, dp=dp, ddp=ddp)
        assert {verdict.ratio.faster, verdict.ratio.slower} == {"DDP", "DP stand-in (CPU)"}
        assert "DP stand-in (CPU)" in verdict.sentence
        assert (verdict.is_advice, verdict.strong) == (False, True)
    assert verdict.paste == ""


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
        (case("ddp", 2, 100.0, speedup=1.0, speedup_low=0.97, speedup_high=1.03), EQUAL, "DDP"),
        (case("ddp", 2, 100.0, speedup=1.01, speedup_low=0.97, speedup_high=1.06), UNRESOLVED, "DDP"),
        (case("ddp", 2, 100.0, speedup=1.02, speedup_low=1.01, speedup_high=1.03), FASTER, "DDP"),
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


def test_what_is_open_beside_the_best_is_said():
    verdict = caps(over(CAP_1, DDP, 0.8, 1.3), over(CAP_25, DDP, 1.17, 1.19))
    assert (verdict.answer, verdict.unresolved) == (FASTER, ("cap 1",))
    assert verdict.sentence.endswith(" Unresolved: cap 1.")


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
    assert verdict.sentence.startswith("Keep the default: ")


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


def test_settings_other_than_caps_are_called_settings():
    static = case("ddp", 2, 160.0, case_id="static", static_graph=True)
    verdict = caps(over(CAP_1, DDP, 0.99, 1.01), over(static, DDP, 0.99, 1.01), more=(static,))
    assert verdict.noun == "setting"
    assert caps(over(CAP_1, DDP, 0.99, 1.01)).noun == "cap"


@pytest.mark.parametrize(
    ("values", "answer", "hidden", "vague", "excess"),
    [
        (exposing(11, 13) | hiding(66, 76), RESOLVED, 71, False, None),
        (exposing(11, 13), RESOLVED, None, False, None),
        (exposing(11, 13) | hiding(-40, 120), RESOLVED, None, True, None),
        (exposing(-2, 4), EQUAL, None, False, 3 / 4),
        (exposing(-20, 40), UNRESOLVED, None, False, 3.0),
        (exposing(60, 70) | hiding(-30, -10), RESOLVED, -20, False, None),
        (exposing(60, 70) | hiding(-20, 10), RESOLVED, -5, False, None),
        (exposing(NAN, NAN) | {"exposed_comm_ms": 12.0}, TOO_FEW, None, False, math.inf),
    ],
)
def test_what_communication_adds(values, answer, hidden, vague, excess):
    verdict = found(SINGLE, DDP | measured(step_ms=100.0) | values)[COMMUNICATION]
    assert isinstance(verdict, CommunicationVerdict)
    assert (verdict.answer, verdict.is_vague) == (answer, vague)
    assert (verdict.hidden_pct and verdict.hidden_pct.estimate) == hidden
    assert verdict.excess == (excess if excess is None else pytest.approx(excess))


def test_communication_was_not_measured():
    assert COMMUNICATION not in found(SINGLE, DDP)
    assert COMMUNICATION not in found(SINGLE, DP | exposing(1, 2) | measured(step_ms=100.0))


def test_the_answers_are_those_of_the_largest_count_of_their_own():
    data = run(usual_cases())
    assert set(headline(data.cases)["num_devices"]) == {2}
    shared = [row | {"oversubscribed": True} for row in (DP, DDP, case("ddp", 4, 100.0))]
    assert set(headline(typed_frame([SINGLE, *shared], CASES))["num_devices"]) == {4}
    assert verdicts(typed_frame([SINGLE], CASES), []) == []
