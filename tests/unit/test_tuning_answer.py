"""The decision, on rounds whose truth is known."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_bench.bench.layout import BucketCaps
from ddp_bench.bench.results.round_times import ByRound
from ddp_bench.bench.tune.answer import Answer, decide
from ddp_bench.bench.tune.candidates import Candidate
from ddp_bench.bench.tune.output import as_json, name, paste, rows, sentence, show

DEFAULT = Candidate(bucket_cap_mb=BucketCaps(), kind="default", bound_ms=400.0, predicted_ms=500.0)
FOUR = Candidate(bucket_cap_mb=BucketCaps((4.0,)), kind="uniform", bound_ms=400.0, predicted_ms=500.0)
ZERO = Candidate(bucket_cap_mb=BucketCaps((0.0,)), kind="uniform", bound_ms=400.0, predicted_ms=500.0)
TEN = Candidate(bucket_cap_mb=BucketCaps((10.0,)), kind="uniform", bound_ms=400.0, predicted_ms=500.0)
VIEW = Candidate(
    bucket_cap_mb=BucketCaps((4.0,)),
    kind="uniform",
    gradient_as_bucket_view=True,
    bound_ms=400.0,
    predicted_ms=500.0,
)
HALF = Candidate(
    bucket_cap_mb=BucketCaps((4.0,)), kind="uniform", comm_hook="fp16", bound_ms=300.0, predicted_ms=500.0
)

GLOBAL_BATCH = 32


def measured(
    gains: Mapping[Candidate, float], *, num_rounds: int = 12, noise: float = 0.004, seed: int = 0
) -> Answer:
    """Rounds of a machine that becomes a third slower on the way, the default taking 500 ms at first."""
    chance = random.Random(seed)

    def rates(gain: float) -> ByRound:
        base = GLOBAL_BATCH * 1000 / 500
        return {
            r: base * gain * (1 - r / num_rounds / 3) * chance.gauss(1, noise)
            for r in range(1, num_rounds + 1)
        }

    every = {candidate: rates(gain) for candidate, gain in gains.items()}
    return decide(list(gains), every, dict.fromkeys(gains, GLOBAL_BATCH))


def test_the_best_is_chosen_and_its_gain_told_although_the_machine_drifts() -> None:
    answer = measured({DEFAULT: 1.0, ZERO: 0.97, FOUR: 1.08})
    assert answer.chosen.candidate is FOUR
    assert answer.changes
    assert answer.chosen.ratio.low < 1.08 < answer.chosen.ratio.high
    assert answer.chosen.ratio.high - answer.chosen.ratio.low < 0.02, "drift cancels in a round"
    said = sentence(answer)
    assert said.startswith(("use bucket_cap_mb=4: 8.", "use bucket_cap_mb=4: 7."))
    assert "% faster than the default" not in said.split("[", maxsplit=1)[0], "an interval stands before it"
    assert f"above the bound of {400 * answer.pace:.4g} ms" in said
    assert paste(answer) == "model = DistributedDataParallel(model, bucket_cap_mb=4)"


@pytest.mark.parametrize("slower", [0.7, 1.0, 1.4])
def test_a_machine_that_is_slower_than_calibrated_is_no_further_from_the_bound(slower: float) -> None:
    """The bound goes with it; a candidate measured in other rounds is judged in those that it shares."""
    step_ms = {DEFAULT: 500 * slower, FOUR: 440 * slower, HALF: 330 * slower}
    rates = {c: dict.fromkeys(range(1, 9), GLOBAL_BATCH * 1000 / step_ms[c]) for c in step_ms}
    for early in (1, 2):  # before it became half as slow again, HALF's only rounds
        rates[HALF][early] /= 1.5
        rates[DEFAULT][early] /= 1.5
        rates[FOUR][early] /= 1.5
    rates[HALF] = {r: rates[HALF][r] for r in (1, 2)}
    answer = decide(list(step_ms), rates, dict.fromkeys(step_ms, GLOBAL_BATCH))
    assert answer.pace == pytest.approx(slower)
    bounds_ms = [answer.bound_ms(m) for m in answer.measured]
    assert bounds_ms == pytest.approx([400 * slower, 400 * slower, 300 * slower])
    assert [m.above_bound for m in answer.measured] == pytest.approx([0.25, 0.1, 0.1])


def test_the_bound_of_a_step_of_more_images_is_held_against_that_step() -> None:
    twice = replace(FOUR, accumulate=2, bound_ms=700.0)
    rates = {DEFAULT: {1: 64.0, 2: 64.0}, twice: {1: 80.0, 2: 80.0}}
    answer = decide(list(rates), rates, {DEFAULT: 32, twice: 64})
    assert answer.measured[1].step_ms.estimate == pytest.approx(800)
    assert answer.measured[1].above_bound == pytest.approx(800 / 700 - 1)


def test_no_change_where_the_best_is_within_noise() -> None:
    answer = measured({DEFAULT: 1.0, FOUR: 1.01, TEN: 0.99}, noise=0.03)
    assert not answer.changes
    assert "within noise" in sentence(answer)
    assert "change nothing" in sentence(answer)
    assert paste(answer) == ""


@pytest.mark.parametrize("gain", [1.01, 0.99])
def test_it_tells_how_many_rounds_would_tell_one_percent(gain: float) -> None:
    said = sentence(measured({DEFAULT: 1.0, FOUR: gain}, num_rounds=20, noise=0.03))
    told = re.search(r"±1% takes some (\d+) rounds, this had 20", said)
    assert told, said
    assert "bucket_cap_mb=4, " in said
    many = measured({DEFAULT: 1.0, FOUR: gain}, num_rounds=int(told[1]), noise=0.03)
    assert 0.6 < many.measured[1].ratio.half_width / 0.01 < 1.5


@pytest.mark.parametrize(("gain", "noise"), [(1.0005, 0.002), (0.9, 0.03)])
def test_it_asks_for_no_more_rounds_where_a_gain_of_one_percent_is_ruled_out(
    gain: float, noise: float
) -> None:
    said = sentence(measured({DEFAULT: 1.0, FOUR: gain}, noise=noise))
    assert "change nothing" in said
    assert "rounds" not in said


def test_no_change_for_a_gain_that_is_real_but_tiny() -> None:
    answer = measured({DEFAULT: 1.0, FOUR: 1.004}, noise=0.0005)
    assert answer.best.ratio.low > 1
    assert not answer.changes
    assert "less than 1%" in sentence(answer)


def test_no_change_where_the_default_is_the_best() -> None:
    answer = measured({DEFAULT: 1.0, FOUR: 0.9, ZERO: 0.8})
    assert not answer.changes
    assert "nothing measured is faster than the default (next: bucket_cap_mb=4, -" in sentence(answer)
    bound = f"the bound of {400 * answer.pace:.4g} ms"
    assert f"]): change nothing; the default is 25% above {bound}" in sentence(answer)
    assert not measured({DEFAULT: 1.0}).changes


@pytest.mark.parametrize(("view_gain", "chosen"), [(1.082, FOUR), (1.15, VIEW)])
def test_a_further_setting_has_to_beat_the_cap_alone_by_more_than_noise(
    view_gain: float, chosen: Candidate
) -> None:
    answer = measured({DEFAULT: 1.0, FOUR: 1.08, VIEW: view_gain}, noise=0.01)
    assert answer.chosen.candidate is chosen


def test_the_best_of_several_further_settings_is_told_and_what_to_paste() -> None:
    assert measured({DEFAULT: 1.0, FOUR: 1.08, VIEW: 1.081, HALF: 1.08}).chosen.candidate is FOUR
    answer = measured({DEFAULT: 1.0, FOUR: 1.08, VIEW: 1.12, HALF: 1.3})
    assert answer.chosen.candidate is HALF
    assert name(HALF, DEFAULT) == "bucket_cap_mb=4 with the fp16 hook"
    assert "register_comm_hook(None, default_hooks.fp16_compress_hook)" in paste(answer)
    assert f"the bound of {300 * answer.pace:.4g} ms" in sentence(answer)


def test_two_rounds_decide_nothing() -> None:
    answer = measured({DEFAULT: 1.0, FOUR: 1.3}, num_rounds=2, noise=0.05)
    assert not answer.changes
    assert "too few rounds" in sentence(answer)
    assert "[unknown]" in sentence(answer)


def test_a_candidate_that_was_not_measured_is_left_out() -> None:
    rates = {DEFAULT: {1: 10.0, 2: 10.0}, FOUR: {1: 9.0, 2: 9.0}}
    answer = decide([DEFAULT, TEN, FOUR], rates, dict.fromkeys(rates, GLOBAL_BATCH))
    assert [m.candidate for m in answer.measured] == [DEFAULT, FOUR]


def test_equal_layouts_are_rarely_told_apart() -> None:
    """Five equal candidates, 200 times: all intervals together cover the truth in at least 95%."""
    wrong = 0
    for seed in range(200):
        answer = measured({DEFAULT: 1.0, FOUR: 1.0, ZERO: 1.0, TEN: 1.0, VIEW: 1.0}, noise=0.02, seed=seed)
        wrong += answer.changes
    assert wrong <= 10


def test_lines_to_paste() -> None:
    answer = measured({DEFAULT: 1.0, TEN: 1.2})
    assert paste(answer) == "model = DistributedDataParallel(model, bucket_cap_mb=10)"
    assert "bucket_cap_mb=1e-06" in paste(measured({DEFAULT: 1.0, ZERO: 1.2}))
    assert "gradient_as_bucket_view=True" in paste(measured({DEFAULT: 1.0, VIEW: 1.2}))
    found = as_json(answer)
    assert found["change"] is True
    assert found["chosen"]["bucket_cap_mb"] == "10"
    assert [c["name"] for c in found["candidates"]] == [row[0] for row in rows(answer)]


def test_the_screen_has_every_candidate_and_the_line_to_paste(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = measured({DEFAULT: 1.0, ZERO: 0.97, FOUR: 1.08})
    show(answer, tmp_path, device_type="cpu")
    said = capsys.readouterr().out
    for cells in rows(answer):
        assert all(cell in said for cell in cells)
    assert f"Answer: {sentence(answer)}." in said
    assert f"Paste:\n{paste(answer)}\n" in said
    assert "one CPU core standing in for a GPU" in said
    assert said.splitlines()[-1] == f"Results: {tmp_path}"
