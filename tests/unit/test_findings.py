"""What a run is said to have found: its three answers, notes below them, and the command to run next."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from report_runs import Row, case, measured, run, timed, usual_cases
from sample_runs import SAMPLES, comparisons, name_of, rebuilt, sample

from bench.findings.answers import CAP, COMMUNICATION, RESOLVED, WRAPPER, Verdict, headline, verdicts
from bench.findings.findings import Conclusion, conclude, notes
from bench.findings.next_step import NextStep, next_step
from bench.findings.numbers import TIMES
from bench.findings.uncertainty import why_not_measured
from bench.gate.__main__ import parser as gate_parser
from bench.resolve import resolve
from bench.results.aggregate import comparisons_of_run
from bench.results.comparisons import EQUAL, FASTER, SLOWER, TOO_FEW, UNRESOLVED, Comparison
from bench.results.schema import BLOCKS, CASES, typed_frame
from bench.run.__main__ import parser as run_parser
from bench.run.__main__ import settings_of
from bench.settings import Settings
from bench.stats import Interval
from bench.tune.__main__ import parser as tune_parser

CPU = {"device_type": "cpu"}
NAN = math.nan

SINGLE, DP, DDP = case("single", 1, 100.0), case("dp", 2, 100.0), case("ddp", 2, 160.0)
CAP_1, CAP_25 = (case("ddp", 2, 160.0, bucket_cap_mb=cap) for cap in ("1", "25"))


def over(
    first: Row, second: Row, low: float, high: float, *, num_rounds: int = 20, margin: float = 0.05
) -> Comparison:
    estimate = 1.0 if math.isnan(low) else math.sqrt(low * high)
    return Comparison(first["case_id"], second["case_id"], Interval(estimate, low, high), margin, num_rounds)


OF_IDEAL = "of ideal scaling: DDP 80% (79-81), DP 50% (50-50)"


def said(verdict: Verdict) -> str:
    """A sentence, with the signs of a keyboard."""
    return verdict.sentence.replace(TIMES, "x").replace("\N{EN DASH}", "-")


def found(*cases: Row, by: tuple[Comparison, ...] = ()) -> dict[str, Verdict]:
    return {one.question: one for one in verdicts(typed_frame(cases, CASES), by)}


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
    assert found(SINGLE, case("ddp", 2, 100.0))[WRAPPER].answer == UNRESOLVED
    few = {"speedup_low": None, "speedup_high": None, "efficiency_low": None, "efficiency_high": None}
    verdict = found(SINGLE, case("ddp", 2, 160.0, **few))[WRAPPER]
    assert verdict.answer == TOO_FEW
    assert "1.60x as fast as one device (too few rounds for an interval), 80% of ideal" in said(verdict)


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


def exposing(low: float, high: float) -> Row:
    return {"exposed_comm_ms": (low + high) / 2, "exposed_comm_ms_low": low, "exposed_comm_ms_high": high}


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


def test_a_schema_1_run_has_the_median_step_alone() -> None:
    row = DDP | exposing(11, 13) | {"step_ms_p50": 100.0}
    assert "12% of the step" in found(SINGLE, row)[COMMUNICATION].sentence


def test_the_answers_are_those_of_the_largest_count_of_their_own() -> None:
    data = run(usual_cases())
    assert set(headline(data.cases)["num_devices"]) == {2}
    shared = [row | {"oversubscribed": True} for row in (DP, DDP, case("ddp", 4, 100.0))]
    assert set(headline(typed_frame([SINGLE, *shared], CASES))["num_devices"]) == {4}
    assert verdicts(typed_frame([SINGLE], CASES), []) == []


def concluded(*cases: Row, by: tuple[Comparison, ...] = (), **settings: Any) -> Conclusion:
    data = run(cases, timed_blocks=[])
    manifest = {"settings": settings, "timing": {"measuring_s": 100.0}}
    return conclude(Path("results/made run"), manifest, data.cases, data.blocks, by)


def test_nothing_measured_gives_the_reasons_and_no_command() -> None:
    made = concluded(case("ddp", 2, status="failed", reason="broke\nhere"))
    assert made.next_step is None
    assert made.sentences == [
        "Nothing was measured: no case ended with status ok.",
        "1 case was not measured: DDP on 2 GPUs: failed (broke here).",
    ]


def test_cases_that_broke_are_named_with_their_reason() -> None:
    broken = [
        case("ddp", 4, status="failed", reason="rank 3 died:\nexit code 9"),
        case("ddp", 8, bucket_cap_mb="25", status="oom", reason="out of memory"),
        case("dp", 1, status="skipped", reason="the plain module"),
    ]
    assert (
        "2 cases were not measured: DDP on 4 GPUs: failed (rank 3 died: exit code 9); "
        "DDP on 8 GPUs with bucket_cap_mb=25: oom (out of memory)."
    ) in concluded(SINGLE, DDP, *broken).notes
    (long,) = concluded(SINGLE, DDP, case("ddp", 4, status="timeout", reason="x" * 500)).notes
    assert len(long) < 250


def test_cases_that_broke_alike_share_their_reason() -> None:
    alike = [case("ddp", 4, bucket_cap_mb=cap, status="failed", reason="late bug") for cap in "1234"]
    (note,) = concluded(SINGLE, DDP, *alike).notes
    assert note == (
        "4 cases were not measured: DDP on 4 GPUs with bucket_cap_mb=1, DDP on 4 GPUs with bucket_cap_mb=2, "
        "DDP on 4 GPUs with bucket_cap_mb=3: failed (late bug); and 1 more."
    )


FAILED = {"status": "failed", "reason": "ValueError: late bug (net.py:6, in late)"}
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
        ([SINGLE | FAILED, DP, DDP], []),
        (
            [SINGLE | FAILED, DP | SKIPPED, DDP | SKIPPED],
            [f"every case of single failed: {FAILED['reason']}"],
        ),
        ([SINGLE | SKIPPED, DDP | SKIPPED], ["nothing was measured: the plain module"]),
    ],
)
def test_modes_without_a_measured_case(cases: list[Row], said: list[str]) -> None:
    """What ends a run with status 4; a reference that nobody asked for counts where nothing else is there."""
    assert why_not_measured(typed_frame(cases, CASES), ("dp", "ddp")) == said


def test_what_others_wrote_reaches_the_terminal_escaped() -> None:
    made = concluded(SINGLE, DDP, case("ddp", 4, status="failed", reason="\x1b[31mred"))
    assert "\x1b" not in "".join(made.sentences)


def test_cases_that_share_devices_are_one_line() -> None:
    shared = [case(mode, 4, rate, oversubscribed=True) for mode, rate in (("dp", 50.0), ("ddp", 60.0))]
    (line,) = concluded(SINGLE, DP, DDP, *shared).notes
    assert line == (
        "On 4 oversubscribed GPUs, which tell nothing about scaling: "
        "DP 50.0 (49.5\N{EN DASH}50.5) images/s; DDP 60.0 (59.4\N{EN DASH}60.6) images/s."
    )


def test_shared_devices_are_no_note_where_there_are_no_others() -> None:
    assert concluded(SINGLE, case("ddp", 4, 60.0, oversubscribed=True)).notes == ()


def linked(comm_ms: float, own_ms: tuple[tuple[float, float], ...] = (), **more: Any) -> list[str]:
    """Notes about a DDP case on two ranks; `own_ms` is each round's step under `no_sync` of both ranks."""
    ddp = DDP | measured(comm_ms=comm_ms, exposed_comm_ms=20.0, step_ms=100.0) | {"step_ms_p50": 100.0} | more
    blocks = [
        timed(ddp, r, ms, rank=rank, phase="no_sync", host=f"host{rank}")
        for r, ranks in enumerate(own_ms, 1)
        for rank, ms in enumerate(ranks)
    ]
    data = run([SINGLE, ddp], timed_blocks=blocks)
    return notes(data.cases, data.blocks)


def test_communication_slower_than_its_link_is_said() -> None:
    """46.8 MB x 1514 / 1448 at 1 Gbit/s take 391 ms."""
    slow, as_fast_as_it_goes = (
        " ".join(linked(comm_ms, link="1gbit", bucket_bytes="46758048")) for comm_ms in (700.0, 395.0)
    )
    assert "391 ms" in slow
    assert "391 ms" not in as_fast_as_it_goes


def test_slow_rank_is_named_with_its_host() -> None:
    (said,) = linked(40.0, ((80.0, 92.0),) * 6, **measured(rank_skew_ms=12.0))
    assert said.startswith("Slow rank: on 2 GPUs rank 1 on host1 was the slowest in 6 of 6 rounds")
    # One of two equal ranks is the slower one in all of five rounds once in 16 times.
    (said,) = linked(40.0, ((80.0, 92.0),) * 5, **measured(rank_skew_ms=12.0))
    assert "in all of 5 rounds: too few to say whether it stays so" in said
    turns = ((80.0, 92.0), (92.0, 80.0)) * 2
    (said,) = linked(40.0, turns, **measured(rank_skew_ms=12.0))
    assert "not always the same rank" in said
    assert linked(40.0, ((80.0, 81.0),) * 4, **measured(rank_skew_ms=1.0)) == []


def test_no_missing_value_is_written() -> None:
    data = run(usual_cases())
    by = comparisons_of_run(data)
    made = conclude(Path("x"), {}, data.cases, data.blocks, by)
    assert not re.search(r"nan|None|<NA>|inf\b", " ".join(made.sentences))


# The command to run next.


def parsed(step: NextStep | None) -> tuple[str, Any]:
    """The module of a command and what its own parser makes of the rest."""
    assert step is not None
    python, dash_m, module, *rest = shlex.split(step.command)
    assert (python, dash_m) == ("python", "-m")
    if module == "bench.doctor":
        assert rest == []
        return module, None
    parser = {"bench.run": run_parser, "bench.tune": tune_parser, "bench.gate": gate_parser}[module]
    return module, parser().parse_args(rest)


def following(*by: Comparison, cases: tuple[Row, ...] = (), **settings: Any) -> tuple[NextStep, str, Any]:
    step = concluded(*(cases or (SINGLE, DP, DDP)), by=by, **settings).next_step
    assert step is not None
    return step, *parsed(step)


UNUSED = {"status": "failed", "reason": "ProofError: give --find-unused-parameters on, which searches …"}


ROUNDS_20 = {"num_rounds": 20}


def test_a_side_of_an_interleaved_gate_is_not_gone_on_with() -> None:
    """Resumed, it would measure the code as it stands, whatever the side's was."""
    data = run((SINGLE, DP, DDP), timed_blocks=[])
    wide = (over(DDP, DP, 1 / 1.1, 1.1),)
    alone = {"settings": {}, "timing": {"measuring_s": 100.0}}
    proposed = [
        conclude(Path("x"), manifest, data.cases, data.blocks, wide).next_step
        for manifest in (alone, alone | {"interleaved_id": "abc"})
    ]
    assert proposed[0] is not None
    assert proposed[1] is None


def test_a_mode_that_failed_is_mended_before_anything_is_tried_again() -> None:
    by = over(DDP, DP, 1.5, 1.7)
    assert concluded(SINGLE, DP, DDP, by=(by,)).next_step is not None
    made = concluded(SINGLE, DP, DDP, case("fsdp", 2, **FAILED), by=(by,))
    assert made.verdicts
    assert made.next_step is None
    some = concluded(SINGLE, DP, DDP, CAP_1 | FAILED, by=(by,))
    assert some.next_step is None, "a run with a failed case is no baseline"
    wide = over(DDP, DP, 1 / 1.1, 1.1)
    open_yet = concluded(SINGLE, DP | ROUNDS_20, DDP | ROUNDS_20, CAP_1 | FAILED, by=(wide,))
    assert open_yet.next_step is not None, "DDP itself was measured, its answer is open"


def test_ddp_that_waits_for_unused_parameters_is_measured_again_with_the_search() -> None:
    asked = Settings(workload="net:model", modes=("dp", "ddp", "fsdp"), gpus=(2,))
    settings: dict[str, Any] = json.loads(json.dumps(asked.stored()))  # as in a manifest
    for others in ((DP,), (DP, case("fsdp", 2, **FAILED))):
        step, module, options = following(cases=(SINGLE, *others, DDP | UNUSED), **settings)
        assert module == "bench.run"
        assert (options.find_unused_parameters, options.workload) == ("on", "net:model")
        assert "without gradient" in step.why
        assert ("fsdp" in getattr(options, "modes", "")) == (len(others) == 1), "what failed is left out"
    assert concluded(SINGLE, DDP | UNUSED).next_step is not None, "though nothing else was measured"


def test_an_open_answer_goes_on_for_as_long_as_its_width_needs() -> None:
    """A half-width of log(1.1) has to become log(1.05) / 2: four times, so 15 times as long."""
    wide = over(DDP, DP, 1 / 1.1, 1.1)
    step, module, given = following(wide, cases=(SINGLE, DP | ROUNDS_20, DDP | ROUNDS_20))
    assert module == "bench.run"
    assert given.resume == Path("results/made run")
    needed_s = 100 * (math.log(1.1) / (math.log(1.05) / 2)) ** 2
    assert needed_s <= 60 * int(given.max_time.rstrip("m")) < needed_s + 60
    assert step.why.endswith(" in all, would settle what is unresolved, to 5%")


def test_with_fixed_rounds_it_names_rounds() -> None:
    wide = over(DDP, DP, 1 / 1.1, 1.1)
    _, _, given = following(wide, cases=(SINGLE, DP | ROUNDS_20, DDP | ROUNDS_20), rounds=20)
    assert int(given.rounds) == math.ceil(20 * (math.log(1.1) / (math.log(1.05) / 2)) ** 2)
    assert not hasattr(given, "max_time")


def test_too_few_rounds_ask_for_ten() -> None:
    few = over(DDP, DP, NAN, NAN, num_rounds=2)
    two = {"num_rounds": 2}
    step, _, given = following(few, cases=(SINGLE, DP | two, DDP | two), rounds=2)
    assert (given.rounds, step.why) == ("10", "10 rounds give intervals")
    _, _, given = following(few, cases=(SINGLE, DP | two, DDP | two))
    assert given.max_time == "9m", "100 s gave two rounds"


def test_a_noise_that_would_take_hours_is_a_case_for_the_doctor() -> None:
    step, module, _ = following(over(DDP, DP, 0.3, 3.0))
    assert module == "bench.doctor"
    assert "telling 5% apart would take" in step.why


def test_exposed_communication_is_worth_tuning() -> None:
    row = DDP | exposing(11, 13) | measured(step_ms=100.0)
    of_training = {"arch": "resnet34", "batch_size": "8", "seed": "3", "find_unused_parameters": "on"}
    settings = resolve({**of_training, "margin": "2%"}).stored()
    _, module, given = following(over(row, DP, 1.2, 1.3), cases=(SINGLE, DP, row), **settings)
    assert module == "bench.tune"
    assert given.gpus == "2"
    assert {name: getattr(given, name) for name in of_training} == of_training


def test_a_run_with_an_answer_is_worth_keeping() -> None:
    _, module, given = following(over(DDP, DP, 1.2, 1.3))
    assert module == "bench.gate"
    assert given.save_baseline == Path("results/made run")
    row = DDP | exposing(1, 2) | measured(step_ms=100.0)
    assert following(over(row, DP, 1.2, 1.3), cases=(SINGLE, DP, row))[1] == "bench.gate"


def test_the_step_of_a_schema_1_run_is_known_too() -> None:
    row = DDP | exposing(11, 13) | {"step_ms_p50": 100.0}
    assert following(over(row, DP, 1.2, 1.3), cases=(SINGLE, DP, row))[1] == "bench.tune"


def test_with_nothing_to_compare_the_speed_up_says_how_much_more() -> None:
    """Known to ±1%, and a margin of 1%: the half-width has to be halved."""
    close = case("ddp", 2, 100.0, num_rounds=20)
    step, module, given = following(cases=(SINGLE, close), margin=0.01)
    assert module == "bench.run"
    factor = (math.log(1.01 / 0.99) / math.log(1.01)) ** 2
    assert given.max_time == f"{math.ceil(factor * 100 / 60)}m"
    assert step.why.endswith(" in all, would settle what is unresolved, to 1%")


def test_a_case_that_came_late_asks_for_ten_rounds_of_its_own() -> None:
    few = over(DDP, DP, NAN, NAN, num_rounds=2)
    _, _, given = following(few, cases=(SINGLE | {"num_rounds": 40}, DP | ROUNDS_20, DDP | {"num_rounds": 2}))
    assert given.max_time == "9m"


def test_ten_rounds_that_take_hours_are_still_the_next_step() -> None:
    data = run([SINGLE, DP, DDP], timed_blocks=[])
    few = over(DDP, DP, NAN, NAN, num_rounds=2)
    manifest = {"settings": {}, "timing": {"measuring_s": 3600.0}}
    made = conclude(Path("x"), manifest, data.cases, data.blocks, [few])
    assert parsed(made.next_step)[1].max_time == "300m"


@pytest.mark.parametrize("path", SAMPLES, ids=name_of)
@pytest.mark.parametrize("as_of", ["then", "now"])
def test_every_sample_is_concluded_and_its_next_command_runs_when_pasted(path: Path, as_of: str) -> None:
    run_, by = sample(path), comparisons(path)
    cases = run_.cases if as_of == "then" else rebuilt(path)
    made = conclude(path, run_.manifest, cases, run_.blocks, by)
    assert {verdict.question for verdict in made.verdicts} >= {WRAPPER}
    assert not re.search(r"nan|None|<NA>|\binf\b", " ".join(made.sentences))
    assert len(made.sentences) <= 10
    module, given = parsed(made.next_step)
    if module == "bench.run":
        assert given.resume == path
        arguments = shlex.split(made.next_step.command)[3:] if made.next_step else []
        assert settings_of(arguments)
    assert next_step(path, run_.manifest, cases, by, []) is None


def test_why_ddp_scales_as_it_does_in_parts_that_add_up() -> None:
    """Steps of 100 ms alone, 110 in DDP on one device, 115 under no_sync beside another, 150 with it."""
    single, one, two = case("single", 1, 100.0), case("ddp", 1, 90.9), case("ddp", 2, 133.3)
    noise = [1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01, 0.99]
    steps = ((single, "timed", 100.0), (one, "timed", 110.0), (two, "no_sync", 115.0), (two, "timed", 150.0))
    rows = [
        timed(row, r, ms * factor, phase=phase)
        for row, phase, ms in steps
        for r, factor in enumerate(noise, 1)
    ]
    (sentence, *_) = notes(typed_frame([single, one, two], CASES), typed_frame(rows, BLOCKS))
    assert sentence.startswith("A step of DDP on 2 GPUs takes 150 ms, of single 100.0 ms: ")
    added = [float(found) for found in re.findall(r"([+-][0-9.]+) ms", sentence)]
    assert added == pytest.approx([10, 5, 35], rel=0.01)
