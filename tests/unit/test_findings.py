from __future__ import annotations

import pytest
from report_runs import Row, case, measured, run, timed, usual_cases

from bench.findings.findings import findings
from bench.stats import paired_ratio

PACE = [1.0, 1.1, 1.2, 1.3, 1.4]
CPU = {"device_type": "cpu"}


def said(*measured: tuple[Row, list[float]], unmeasured: list[Row] | None = None) -> list[str]:
    """Findings of cases with their step times in milliseconds, round by round."""
    cases = [row for row, _ in measured] + (unmeasured or [])
    blocks = [timed(row, r, ms) for row, steps in measured for r, ms in enumerate(steps, 1)]
    data = run(cases, timed_blocks=blocks)
    return findings(data.cases, data.blocks)


def drifting(step_ms: float) -> list[float]:
    """A machine that slows down from round to round, and every case with it."""
    return [step_ms * pace for pace in PACE]


def one(sentences: list[str], start: str) -> str:
    (found,) = (sentence for sentence in sentences if sentence.startswith(start))
    return found


SINGLE = (case("single", 1, 100.0), drifting(100.0))
DDP = (case("ddp", 2, 160.0), drifting(125.0))
DP = (case("dp", 2, 100.0), drifting(200.0))


def test_fastest_mode_at_each_count_the_largest_first() -> None:
    sentences = said(SINGLE, (case("ddp", 1, 99.0), drifting(101.0)), DP, DDP)
    assert sentences[0].startswith("On 2 GPUs, DDP is fastest: 160 [158, 162] images/s")
    assert "1.600x [1.600, 1.600] the rate of DataParallel" in sentences[0]
    assert sentences[1].startswith("On 1 GPU, single is fastest")


def test_ddp_is_never_preferred_by_rule() -> None:
    slow = (case("ddp", 2, 80.0), drifting(300.0))
    assert said(SINGLE, DP, slow)[0].startswith("On 2 GPUs, DataParallel is fastest")


def test_stand_in_is_named() -> None:
    dp = (case("dp", 2, 200.0, impl="cpu_standin", **CPU), drifting(100.0))
    ddp = (case("ddp", 2, 160.0, **CPU), drifting(125.0))
    assert "On 2 CPU cores, DataParallel (CPU stand-in) is fastest" in said(SINGLE, dp, ddp)[0]


def test_devices_that_lose_against_one_are_told_first() -> None:
    slow = case("ddp", 2, 80.0)
    sentence = said(SINGLE, (slow, drifting(250.0)))[0]
    assert "0.800 [0.792, 0.808]x single: slower than one device alone" in sentence


def test_shared_devices_come_last_and_say_so() -> None:
    shared = (case("ddp", 4, 240.0, oversubscribed=True), drifting(160.0))
    sentences = said(SINGLE, DDP, shared)
    assert sentences[2].startswith("On 4 oversubscribed GPUs, which share fewer cores or GPUs, DDP gives")


def test_noise_is_called_noise() -> None:
    sentences = said(
        (case("single", 1, 100.0), [100.0, 100, 100, 100]),
        (case("dp", 2, 170.0), [125.0, 90, 140, 110]),
        (case("ddp", 2, 171.0), [110.0, 130, 95, 120]),
        (case("ddp", 2, 172.0, bucket_cap_mb="1"), [120.0, 110, 105, 115]),
    )
    assert "cannot be told apart" in sentences[0]
    change = one(sentences, "What to change on 2 GPUs")
    assert "nothing, none of 2 alternatives is faster than DDP's defaults beyond the noise" in change
    assert "The noise could hide any gain." in change
    assert "Not told apart from DDP on 2 GPUs: " in one(sentences, "Uncertain")


def test_efficiency_of_every_mode_is_one_sentence() -> None:
    sentence = one(said(SINGLE, DP, DDP), "Scaling efficiency")
    assert "under weak scaling" in sentence
    assert (
        "DataParallel keeps 50.0 [49.5, 50.5]% on 2 GPUs; DDP keeps 80.0 [79.2, 80.8]% on 2 GPUs" in sentence
    )


def test_change_names_the_setting_and_its_gain() -> None:
    sentences = said(SINGLE, DDP, (case("ddp", 2, 172.0, bucket_cap_mb="1"), drifting(125.0 / 1.081)))
    change = one(sentences, "What to change on 2 GPUs")
    assert change == (
        "What to change on 2 GPUs: bucket_cap_mb=1 instead of DDP's defaults, 8.1% [8.1, 8.1] more images/s."
    )


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"static_graph": True}, "static_graph=True instead of DDP's defaults, 25.0% [25.0, 25.0] more"),
        ({"gradient_as_bucket_view": True}, "gradient_as_bucket_view=True instead of DDP's defaults, 25.0%"),
        ({"comm_hook": "bf16"}, "the training itself gains more: comm_hook=bf16, 25.0% [25.0, 25.0] more"),
        (
            {"accumulate": 4, "global_batch": 80},
            "accumulate=4, 400.0% [400.0, 400.0] more images/s (a global batch of 80 images instead of 20)",
        ),
    ],
)
def test_every_axis_of_ddp_is_considered(setting: dict[str, object], words: str) -> None:
    other = (case("ddp", 2, 200.0, case_id="other", **setting), drifting(100.0))
    change = one(said(SINGLE, DDP, other), "What to change on 2 GPUs")
    assert words in change


def test_mode_is_a_change_too_and_a_tie_for_the_best_is_said() -> None:
    twin = [ms * (1.001 if r % 2 else 0.999) for r, ms in enumerate(drifting(100.0))]
    rivals = (case("dp", 2, 200.0), drifting(100.0)), (case("ddp", 2, 201.0, bucket_cap_mb="5"), twin)
    change = one(said(SINGLE, DDP, *rivals), "What to change on 2 GPUs")
    assert "instead of DDP's defaults" in change
    assert "cannot be told apart from it" in change
    assert "DataParallel" in change


def test_best_of_many_is_held_to_a_stricter_interval() -> None:
    """Bonferroni over the two caps and the single device, against the interval by hand."""
    base, best = [100.0, 101, 99, 100, 102, 98], [90.0, 97, 88, 96, 91, 93]
    rivals = [(case("ddp", 2, 200.0 + cap, bucket_cap_mb=str(cap)), best) for cap in (1, 5)]
    change = one(said(SINGLE, (case("ddp", 2, 190.0), base), *rivals), "What to change on 2 GPUs")
    rates = [{r: 1 / ms for r, ms in enumerate(steps)} for steps in (best, base)]
    strict = paired_ratio(*rates, confidence=1 - 0.05 / 3)
    assert f"[{100 * (strict.low - 1):.1f}, {100 * (strict.high - 1):.1f}] more" in change
    assert strict.low < paired_ratio(*rates).low


def test_one_measured_setting_leaves_the_change_unknown() -> None:
    assert "unknown, only DDP's defaults was measured" in one(said(SINGLE, DDP), "What to change on 2 GPUs")


def test_cases_that_broke_are_named_with_their_reason() -> None:
    broken = [
        case("ddp", 4, status="failed", reason="rank 3 died:\nexit code 9"),
        case("ddp", 8, bucket_cap_mb="25", status="oom", reason="out of memory"),
        case("dp", 1, status="skipped", reason="the plain module"),
    ]
    assert (
        "2 cases were not measured: DDP on 4 GPUs: failed (rank 3 died: exit code 9); "
        "DDP on 8 GPUs with bucket_cap_mb=25: oom (out of memory)."
    ) in said(SINGLE, DDP, unmeasured=broken)
    timeout = [case("ddp", 4, status="timeout", reason="x" * 500)]
    assert len(one(said(SINGLE, DDP, unmeasured=timeout), "1 case was not measured")) < 250


def test_nothing_measured_gives_the_reasons() -> None:
    assert said(unmeasured=[case("ddp", 2, status="failed", reason="broke")]) == [
        "Nothing was measured: no case ended with status ok.",
        "1 case was not measured: DDP on 2 GPUs: failed (broke).",
    ]


def test_what_was_not_tried_is_said() -> None:
    sentence = said(SINGLE, DDP, (case("ddp", 2, 170.0, bucket_cap_mb="1"), drifting(120.0)))[-1]
    assert sentence.startswith("Not tried in this run: DataParallel; other values of gradient_as_bucket_view")
    assert "bucket_cap_mb" not in sentence
    assert said(SINGLE)[-1] == "Not tried in this run: several devices, --gpus 1,2."


def test_settling_costs_the_square_of_the_width() -> None:
    """An interval of ±10% has to become five times narrower: 25 times the rounds and the time."""
    wide = case("ddp", 2, 100.0, images_per_s_low=90.0, images_per_s_high=110.0)
    cases = [case("single", 1, 100.0), wide, case("ddp", 2, 150.0, bucket_cap_mb="1")]
    blocks = [
        timed(row, r, 100.0 / (1 + i), started_s=60.0 * (r - 1))
        for i, row in enumerate(cases)
        for r in range(1, 5)
    ]
    data = run(cases, timed_blocks=blocks)
    uncertain = one(findings(data.cases, data.blocks), "Uncertain")
    assert "DDP on 2 GPUs, 100 [90, 110] images/s (±10.0%), after 4 rounds" in uncertain
    assert "--rounds 100 instead of 4: 75.0 min instead of 3.0 min" in uncertain


def test_a_precise_run_says_what_it_would_see() -> None:
    assert "A difference of 2% would be seen." in one(said(SINGLE, DDP), "Uncertain")


def test_cases_that_share_one_round_cannot_be_told_apart() -> None:
    cases = [case("single", 1, 100.0), case("ddp", 2, 160.0), case("ddp", 2, 170.0, bucket_cap_mb="1")]
    rounds = {0: (1, 2, 3), 1: (1, 2), 2: (2, 3)}
    blocks = [timed(row, r, 100.0) for i, row in enumerate(cases) for r in rounds[i]]
    data = run(cases, timed_blocks=blocks)
    assert "Not told apart from DDP on 2 GPUs: " in one(findings(data.cases, data.blocks), "Uncertain")


def test_one_round_gives_no_interval() -> None:
    bare = {"images_per_s_low": None, "images_per_s_high": None}
    sentences = said(
        (case("single", 1, 100.0, **bare), [100.0]),
        (case("ddp", 2, 160.0, **bare), [125.0]),
        (case("ddp", 2, 170.0, bucket_cap_mb="1", **bare), [120.0]),
    )
    assert "one round gives no interval" in one(sentences, "Uncertain")
    assert "(one round gives no interval)" in one(sentences, "What to change on 2 GPUs")


def test_findings_of_the_usual_run_name_no_missing_value() -> None:
    data = run(usual_cases())
    text = " ".join(findings(data.cases, data.blocks))
    assert not [word for word in ("nan", "None", "<NA>") if word in text]


def exposed(
    comm_ms: float,
    exposed_ms: float,
    own_ms: tuple[tuple[float, float], ...] = ((80.0, 80.0),),
    **more: object,
) -> list[str]:
    """Findings about a DDP case on two ranks; `own_ms` is each round's step under `no_sync` of both ranks."""
    ddp: Row = case("ddp", 2, 200.0, step_ms_p50=100.0) | measured(
        comm_ms=comm_ms, exposed_comm_ms=exposed_ms
    )
    ddp |= measured(hidden_pct=50.0) | more
    single = case("single", 1, 100.0)
    blocks = [timed(row, r, 100.0) for row in (single, ddp) for r in (1, 2, 3)]
    blocks += [
        timed(ddp, r, ms, rank=rank, phase="no_sync", host=f"host{rank}")
        for r, ranks in enumerate(own_ms, 1)
        for rank, ms in enumerate(ranks)
    ]
    data = run([single, ddp], timed_blocks=blocks)
    return findings(data.cases, data.blocks)


def test_exposed_communication_with_its_link() -> None:
    assert one(exposed(40.0, 20.0, link="1gbit"), "Exposed") == (
        "Exposed: 2 GPUs over 1 Gbit/s, DDP with its defaults: communication adds 20.0 [19.8, 20.2] ms to "
        "the step, 20% of it; alone it would take 40.0 [39.6, 40.4] ms, so 50.0 [49.5, 50.5]% of it is "
        "hidden."
    )


def test_exposed_time_within_the_noise_is_not_claimed() -> None:
    noisy = exposed(40.0, 2.0, exposed_comm_ms_low=-3.0, exposed_comm_ms_high=7.0)
    assert "adds nothing to the step that can be told from noise (2 [-3, 7] ms)" in one(
        noisy, "Exposed"
    ).replace(".00", "")


def test_communication_that_slows_the_compute_is_said() -> None:
    assert "also slows the compute" in one(exposed(20.0, 40.0), "Exposed")
    assert "also slows the compute" not in one(exposed(40.0, 20.0), "Exposed")


def test_communication_slower_than_its_link_is_said() -> None:
    """46.8 MB x 1514 / 1448 at 1 Gbit/s take 391 ms."""
    slow, as_fast_as_it_goes = (
        one(exposed(comm_ms, 300.0, link="1gbit", bucket_bytes="46758048"), "Exposed")
        for comm_ms in (700.0, 395.0)
    )
    assert "The link would allow 391 ms: here the cores limit communication." in slow
    assert "would allow" not in as_fast_as_it_goes


def test_slow_rank_is_named_with_its_host() -> None:
    sentences = exposed(40.0, 20.0, ((80.0, 92.0),) * 4, **measured(rank_skew_ms=12.0))
    assert one(sentences, "Slow rank") == (
        "Slow rank: on 2 GPUs rank 1 on host1 was the slowest in 4 of 4 rounds; its own work "
        "takes 12.0 [11.9, 12.1] ms per step (12% of it) longer than the fastest rank's, and the others wait "
        "for it."
    )


def test_ranks_that_take_turns_are_an_unsteady_machine() -> None:
    turns = ((80.0, 92.0), (92.0, 80.0)) * 2
    assert "not always the same rank" in one(
        exposed(40.0, 20.0, turns, **measured(rank_skew_ms=12.0)), "Ranks"
    )


def test_ranks_of_one_pace_are_not_mentioned() -> None:
    sentences = exposed(40.0, 20.0, ((80.0, 81.0),) * 4, **measured(rank_skew_ms=1.0))
    assert not [sentence for sentence in sentences if sentence.startswith(("Slow rank", "Ranks"))]
