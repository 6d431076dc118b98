"""The three answers of a run: DP or DDP, its settings, what communication adds."""

from __future__ import annotations

from typing import Any

import pytest
from finding_cases import CAP_1, CAP_25, CPU, DDP, DP, NAN, SINGLE, exposing, over
from report_runs import Row, case, measured, run, usual_cases

from ddp_bench.bench.findings.answers import (
    CAP,
    COMMUNICATION,
    RESOLVED,
    WRAPPER,
    Verdict,
    headline,
    verdicts,
)
from ddp_bench.bench.findings.numbers import TIMES
from ddp_bench.bench.results.comparisons import EQUAL, FASTER, SLOWER, TOO_FEW, UNRESOLVED, Comparison
from ddp_bench.bench.results.schema import CASES, typed_frame


def said(verdict: Verdict) -> str:
    """A sentence, with the signs of a keyboard."""
    return verdict.sentence.replace(TIMES, "x").replace("\N{EN DASH}", "-")


def found(*cases: Row, by: tuple[Comparison, ...] = ()) -> dict[str, Verdict]:
    return {one.question: one for one in verdicts(typed_frame(cases, CASES), by)}


OF_IDEAL = "of ideal scaling: DDP 80% (79-81), DP 50% (50-50)"


def wrapper(low: float, high: float, *, dp: Row = DP, ddp: Row = DDP, num_rounds: int = 20) -> Verdict:
    return found(SINGLE, dp, ddp, by=(over(ddp, dp, low, high, num_rounds=num_rounds),))[WRAPPER]


@pytest.mark.parametrize(
    ("low", "high", "answer", "sentence", "paste"),
    [
        (
            1.28,
            1.34,
            FASTER,
            f"Use DDP on 2 GPUs: DDP has 1.31x the rate of DP (1.28-1.34); {OF_IDEAL}.",
            "model = DDP(model)",
        ),
        (
            0.75,
            0.84,
            SLOWER,
            f"Use DP on 2 GPUs: DDP has 0.79x the rate of DP (0.75-0.84); {OF_IDEAL}.",
            "model = nn.DataParallel(model)",
        ),
        (
            0.98,
            1.02,
            EQUAL,
            "Either on 2 GPUs: no difference above 5%; DDP has 1.00x the rate of DP (0.98-1.02).",
            "",
        ),
        (
            1.01,
            1.03,
            FASTER,
            "Either on 2 GPUs: DDP is faster, but by less than 5%; DDP has 1.02x the rate of DP (1.01-1.03).",
            "model = DDP(model)",
        ),
        (
            0.97,
            0.99,
            SLOWER,
            "Either on 2 GPUs: DP is faster, but by less than 5%; DDP has 0.98x the rate of DP (0.97-0.99).",
            "model = nn.DataParallel(model)",
        ),
        (
            0.37,
            1.49,
            UNRESOLVED,
            "Unresolved on 2 GPUs: DDP 0.74x DP, anywhere from 0.37x to 1.49x.",
            "",
        ),
    ],
)
def test_ddp_or_dp(low: float, high: float, answer: str, sentence: str, paste: str) -> None:
    verdict = wrapper(low, high)
    assert (verdict.answer, verdict.paste) == (answer, paste)
    assert said(verdict) == sentence
    assert verdict.is_open == (answer == UNRESOLVED)


def test_too_few_rounds_name_no_winner() -> None:
    verdict = wrapper(NAN, NAN, num_rounds=4)
    assert said(verdict) == "Too few rounds on 2 GPUs to compare DDP with DP: 4, 5 at least."
    assert (verdict.answer, verdict.paste, verdict.is_open) == (TOO_FEW, "", True)


def test_a_stand_in_is_named_and_strong_scaling_said() -> None:
    dp = case("dp", 2, 100.0, impl="cpu_standin", scaling="strong", **CPU)
    ddp = case("ddp", 2, 160.0, scaling="strong", **CPU)
    sentence = said(wrapper(1.5, 1.7, dp=dp, ddp=ddp))
    assert sentence.startswith("DDP is faster on 2 CPU cores: DDP has 1.60x the rate of DP (CPU stand-in) (")
    assert sentence.endswith("; of ideal scaling (strong scaling): DDP 80% (79-81), DP 50% (50-50).")


def test_a_stand_in_that_wins_is_not_advised() -> None:
    dp, ddp = (case(mode, 2, rate, **CPU) for mode, rate in (("dp", 200.0), ("ddp", 160.0)))
    verdict = wrapper(0.75, 0.84, dp=dp, ddp=ddp)
    assert verdict.sentence.startswith("DP (CPU stand-in) is faster on 2 CPU cores: ")
    assert verdict.paste == ""


def test_devices_that_lose_against_one_are_told() -> None:
    slow = case("ddp", 2, 80.0)
    sentence = said(wrapper(1.5, 1.7, ddp=slow))
    assert sentence.endswith("One device alone is faster: DDP has 0.80x its rate (0.79-0.81).")
    assert "One device alone" not in wrapper(1.5, 1.7).sentence
    close = case("ddp", 2, 99.5)
    assert "One device alone" not in wrapper(1.5, 1.7, ddp=close).sentence, "its interval holds 1"


def test_without_dp_it_is_compared_with_one_device() -> None:
    verdict = found(SINGLE, DDP)[WRAPPER]
    assert said(verdict) == (
        "DDP on 2 GPUs trains 1.60x as fast as one device (1.58-1.62), 80% (79-81) of ideal scaling."
    )
    assert verdict.answer == FASTER
    slow = found(SINGLE, case("ddp", 2, 80.0))[WRAPPER]
    assert slow.answer == SLOWER
    assert slow.sentence.endswith("of ideal scaling: one device alone is faster.")
    assert found(SINGLE, case("ddp", 2, 100.0))[WRAPPER].answer == EQUAL
    few = {"speedup_low": None, "speedup_high": None, "efficiency_low": None, "efficiency_high": None}
    verdict = found(SINGLE, case("ddp", 2, 160.0, **few))[WRAPPER]
    assert verdict.answer == TOO_FEW
    assert "1.60x as fast as one device (too few rounds for an interval), 80% of ideal" in said(verdict)


@pytest.mark.parametrize(
    ("low", "high", "answer"), [(0.97, 1.03, EQUAL), (0.97, 1.06, UNRESOLVED), (1.01, 1.03, FASTER)]
)
def test_a_mode_alone_is_equal_to_one_device_within_the_margin(low: float, high: float, answer: str) -> None:
    alone = case("ddp", 2, 100.0, speedup=(low + high) / 2, speedup_low=low, speedup_high=high)
    (found,) = [one for one in verdicts(typed_frame([SINGLE, alone], CASES), []) if one.question == WRAPPER]
    assert found.answer == answer


def test_dp_alone_is_compared_with_one_device_too() -> None:
    assert (
        found(SINGLE, case("dp", 2, 150.0))[WRAPPER]
        .sentence.replace(TIMES, "x")
        .startswith("DataParallel on 2 GPUs trains 1.50x as fast as one device")
    )


def caps(*by: Comparison, more: tuple[Row, ...] = ()) -> Verdict:
    return found(SINGLE, DDP, CAP_1, CAP_25, *more, by=by)[CAP]


def test_the_best_cap_is_named_with_its_gain() -> None:
    verdict = caps(over(CAP_1, DDP, 1.07, 1.09), over(CAP_25, DDP, 1.17, 1.19))
    assert said(verdict) == "bucket_cap_mb=25: 1.18x the rate of the default (1.17-1.19)."
    assert (verdict.answer, verdict.paste) == (FASTER, "model = DDP(model, bucket_cap_mb=25)")


@pytest.mark.parametrize(
    ("cap", "given"), [("0", "bucket_cap_mb=1e-06"), ("1/25/25", "bucket_cap_mb_list=[1, 25, 25]")]
)
def test_the_line_to_paste_is_the_call_that_was_measured(cap: str, given: str) -> None:
    other = case("ddp", 2, 200.0, case_id="other", bucket_cap_mb=cap)
    verdict = found(SINGLE, DDP, other, by=(over(other, DDP, 1.2, 1.3),))[CAP]
    assert verdict.paste == f"model = DDP(model, {given})"


def test_the_line_to_paste_has_what_the_whole_run_was_measured_with() -> None:
    rows = [case("ddp", 2, 200.0, case_id=c, bucket_cap_mb=c, static_graph=True) for c in ("default", "25")]
    verdict = found(SINGLE, *rows, by=(over(rows[1], rows[0], 1.2, 1.3),))[CAP]
    assert verdict.paste == "model = DDP(model, bucket_cap_mb=25, static_graph=True)"


def test_no_line_to_paste_says_what_is_no_argument_of_ddp() -> None:
    zero = case("ddp", 2, 200.0, case_id="zero", zero_optimizer=True)
    verdict = found(SINGLE, DDP, zero, by=(over(zero, DDP, 1.2, 1.3),))[CAP]
    assert (verdict.answer, verdict.paste) == (FASTER, "")
    assert said(verdict).startswith("zero_optimizer=True: 1.25x the rate of the default (1.20-1.30)")
    assert "changes the training" not in said(verdict)


def test_what_is_open_beside_the_best_is_said() -> None:
    verdict = caps(over(CAP_1, DDP, 0.8, 1.3), over(CAP_25, DDP, 1.17, 1.19))
    assert said(verdict).endswith(" Unresolved: bucket_cap_mb=1.")


def test_no_cap_is_worth_a_change() -> None:
    verdict = caps(over(CAP_1, DDP, 0.99, 1.01), over(CAP_25, DDP, 0.98, 1.02))
    assert said(verdict) == ("bucket_cap_mb: leave the default; no value tried is faster by more than 2%.")
    assert (verdict.answer, verdict.paste) == (EQUAL, "")


def test_a_gain_below_the_margin_is_no_reason_to_change() -> None:
    verdict = caps(over(CAP_1, DDP, 1.01, 1.03), over(CAP_25, DDP, 0.99, 1.01))
    assert verdict.answer == EQUAL
    assert said(verdict).endswith("faster by more than 3%.")


def test_a_cap_that_costs_is_named() -> None:
    verdict = caps(over(CAP_1, DDP, 0.70, 0.72), over(CAP_25, DDP, 0.8, 0.9))
    assert verdict.answer == EQUAL
    assert "no value tried is faster by more than 0.1%; bucket_cap_mb=1 is slower, 0.71x (0.70-0.72)." in (
        said(verdict)
    )


def test_an_open_cap_is_unresolved_with_the_widest_interval() -> None:
    verdict = caps(over(CAP_1, DDP, 0.9, 1.1), over(CAP_25, DDP, 0.8, 1.3))
    assert verdict.answer == UNRESOLVED
    assert said(verdict) == (
        "bucket_cap_mb: unresolved, so keep the default; bucket_cap_mb=25 has 1.02x its rate, anywhere from "
        "0.80x to 1.30x. Unresolved too: bucket_cap_mb=1."
    )


def test_a_cap_that_is_slower_is_named_beside_one_that_is_open() -> None:
    verdict = caps(over(CAP_1, DDP, 0.9, 1.1), over(CAP_25, DDP, 0.7, 0.8))
    assert verdict.answer == UNRESOLVED
    assert said(verdict).endswith("anywhere from 0.90x to 1.10x. Slower: bucket_cap_mb=25.")


def test_caps_of_too_few_rounds() -> None:
    few = [over(row, DDP, NAN, NAN, num_rounds=3) for row in (CAP_1, CAP_25)]
    verdict = caps(*few)
    assert (verdict.answer, said(verdict)) == (
        TOO_FEW,
        "bucket_cap_mb: too few rounds to compare bucket_cap_mb=1, bucket_cap_mb=25.",
    )


def test_a_cap_of_too_few_rounds_beside_others_has_no_number_it_has_not() -> None:
    verdict = caps(over(CAP_1, DDP, 0.99, 1.01), over(CAP_25, DDP, NAN, NAN, num_rounds=3))
    assert verdict.answer == TOO_FEW
    assert said(verdict) == "bucket_cap_mb: too few rounds to compare bucket_cap_mb=25."
    verdict = caps(over(CAP_1, DDP, 0.9, 1.1), over(CAP_25, DDP, NAN, NAN, num_rounds=3))
    assert said(verdict).startswith(
        "bucket_cap_mb: unresolved, so keep the default; bucket_cap_mb=1 has 0.99x"
    )


@pytest.mark.parametrize(
    ("setting", "paste", "alters"),
    [
        ({"static_graph": True}, "model = DDP(model, static_graph=True)", False),
        ({"gradient_as_bucket_view": True}, "model = DDP(model, gradient_as_bucket_view=True)", False),
        ({"comm_hook": "bf16"}, "", True),
        ({"accumulate": 4, "global_batch": 80}, "", True),
        ({"sync_buffers": False}, "", True),
    ],
)
def test_what_alters_the_training_is_said_and_not_to_be_pasted(
    setting: dict[str, Any], paste: str, *, alters: bool
) -> None:
    other = case("ddp", 2, 200.0, case_id="other", **setting)
    verdict = found(SINGLE, DDP, other, by=(over(other, DDP, 1.2, 1.3),))[CAP]
    named = next(f"{name}={value}" for name, value in setting.items())
    assert said(verdict).startswith(f"{named}: 1.25x the rate of the default (1.20-1.30)")
    assert ("check the loss" in said(verdict)) == alters
    assert verdict.paste == paste


def test_a_setting_that_leaves_the_training_alone_goes_first() -> None:
    hook = case("ddp", 2, 200.0, case_id="hook", comm_hook="bf16")
    verdict = caps(over(CAP_1, DDP, 1.1, 1.2), over(hook, DDP, 1.4, 1.5), more=(hook,))
    assert said(verdict).startswith("bucket_cap_mb=1: ")


def test_settings_other_than_caps_are_called_ddp() -> None:
    static = case("ddp", 2, 160.0, case_id="static", static_graph=True)
    verdict = caps(over(CAP_1, DDP, 0.99, 1.01), over(static, DDP, 0.99, 1.01), more=(static,))
    assert said(verdict).startswith("DDP: leave the default; ")


def communication(**values: Any) -> Verdict:
    row = DDP | measured(step_ms=100.0) | values
    return found(SINGLE, row)[COMMUNICATION]


def hiding(low: float, high: float) -> Row:
    return {"hidden_pct": (low + high) / 2, "hidden_pct_low": low, "hidden_pct_high": high}


UNTOLD = ", about what it takes alone: whether any is hidden is unresolved."


@pytest.mark.parametrize(
    ("values", "answer", "sentence"),
    [
        (
            exposing(11, 13) | hiding(66, 76),
            RESOLVED,
            "Communication adds 12 ms (11-13), 12% of the step; 71% (66-76) of it is hidden.",
        ),
        (exposing(11, 13), RESOLVED, "Communication adds 12 ms (11-13), 12% of the step."),
        (
            exposing(11, 13) | hiding(-40, 120),
            RESOLVED,
            (
                "Communication adds 12 ms (11-13), 12% of the step; how much of it is hidden is not known to "
                "50 percentage points."
            ),
        ),
        (
            exposing(-2, 4),
            EQUAL,
            "Communication adds 1.0 ms (-2.0 to 4.0) to the step of DDP on 2 GPUs: not told from nothing.",
        ),
        (
            exposing(-20, 40),
            UNRESOLVED,
            "Communication adds 10 ms (-20 to 40) to the step of DDP on 2 GPUs: not told from nothing.",
        ),
        (
            exposing(60, 70) | hiding(-30, -10),
            RESOLVED,
            (
                "Communication adds 65 ms (60-70), 65% of the step, more than it takes alone: none is "
                "hidden, and it slows the compute or makes ranks wait."
            ),
        ),
        (
            exposing(60, 70) | hiding(-20, 10),
            RESOLVED,
            f"Communication adds 65 ms (60-70), 65% of the step{UNTOLD}",
        ),
        (
            exposing(NAN, NAN) | {"exposed_comm_ms": 12.0},
            TOO_FEW,
            "Communication: too few rounds to tell what it adds.",
        ),
    ],
)
def test_what_communication_adds(values: Row, answer: str, sentence: str) -> None:
    verdict = communication(**values)
    assert verdict.answer == answer
    assert said(verdict) == sentence


def test_communication_was_not_measured() -> None:
    assert COMMUNICATION not in found(SINGLE, DDP)
    assert COMMUNICATION not in found(SINGLE, DP | exposing(1, 2) | measured(step_ms=100.0))


def test_the_answers_are_those_of_the_largest_count_of_their_own() -> None:
    data = run(usual_cases())
    assert set(headline(data.cases)["num_devices"]) == {2}
    shared = [row | {"oversubscribed": True} for row in (DP, DDP, case("ddp", 4, 100.0))]
    assert set(headline(typed_frame([SINGLE, *shared], CASES))["num_devices"]) == {4}
    assert verdicts(typed_frame([SINGLE], CASES), []) == []
