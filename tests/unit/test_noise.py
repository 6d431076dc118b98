"""What a gate can see here, from made A/A rounds: the noise that was put in comes out."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import numpy as np
import pytest

from ddp_bench.bench.doctor import main as doctor
from ddp_bench.bench.gate import noise, trials
from ddp_bench.bench.gate.compare import FAMILY_CONFIDENCE
from ddp_bench.bench.gate.judge import judge
from ddp_bench.bench.gate.launches import LAUNCH, launch_ratio
from ddp_bench.bench.gate.noise import FEWEST_ROUNDS, Noise, noise_of
from ddp_bench.bench.gate.options import DEFAULT_THRESHOLD
from ddp_bench.bench.gate.power import Launch, TrialStep


def launches(
    *, noise: float, between: float = 0.0, num_rounds: int = 100, seed: int = 0, drift: float = 0.0
) -> list[Launch]:
    """Three launches whose sides differ by `between`; blocks scatter by `noise` and drift over all rounds."""
    rng = np.random.default_rng(seed)
    made = []
    for i, offset in enumerate((-between, between, 0.0)):
        pace = 40 * (1 + drift * (i + np.arange(num_rounds) / num_rounds) / 3)
        sides = [pace * np.exp(noise * rng.normal(size=num_rounds)) for _ in range(2)]
        sides[1] *= 1 + offset
        baseline, candidate = (dict(enumerate(map(float, side), start=1)) for side in sides)
        made.append(Launch(slow_down=0.0, baseline_ms=baseline, candidate_ms=candidate))
    return made


def measured(**made: float) -> Noise:
    return noise_of(launches(**made), round_s=0.5, device="made up")  # type: ignore[arg-type]


def test_the_spread_that_was_put_in_comes_out() -> None:
    found = measured(noise=0.03)
    assert found.block_spread == pytest.approx(0.03, rel=0.15)
    assert found.ratio.low < 1 < found.ratio.high
    assert found.step_ms == pytest.approx(40, rel=0.01)
    assert found.num_rounds == 300
    assert found.sub_run_half_width == pytest.approx(found.expected_half_width, rel=0.35)


@pytest.mark.campaign
def test_half_intervals_follow_the_normal_theory_of_the_median() -> None:
    found = measured(noise=0.03)
    (minute,) = [one for one in found.resolutions if one.seconds == 60]
    assert minute.num_rounds == 120
    # A ratio scatters sqrt(2) times as much as a side, a median sqrt(pi / 2) times as much as a mean.
    expected = 2.326 * math.sqrt(math.pi / 2) * 0.03 * math.sqrt(2) / math.sqrt(120)
    assert minute.half_width == pytest.approx(expected, rel=0.25)


@pytest.mark.campaign
def test_longer_runs_resolve_more_until_launches_differ() -> None:
    steady, lottery = measured(noise=0.03), measured(noise=0.03, between=0.03)
    for found in (steady, lottery):
        resolved = [one.resolves for one in found.resolutions if one.resolves is not None]
        assert all(more < 1.05 * fewer for fewer, more in pairwise(resolved))
        assert all(one.gated >= DEFAULT_THRESHOLD for one in found.resolutions if one.gated is not None)
    assert steady.resolutions[-1].resolves == pytest.approx(steady.resolutions[0].resolves / 6.3, rel=0.25)
    assert lottery.resolutions[-1].resolves > 0.03
    assert lottery.launch_ratios == pytest.approx((0.97, 1.03, 1.0), abs=0.015)


def test_a_slow_down_of_the_size_named_is_seen_in_nine_of_ten_runs() -> None:
    resolution = noise_of(launches(noise=0.04, num_rounds=500), round_s=1.0, device="made up").resolutions[1]
    assert resolution.resolves is not None
    assert resolution.gated is not None
    for slow_down, threshold in ((resolution.resolves, 0.0), (resolution.gated, DEFAULT_THRESHOLD)):
        seen = 0
        for seed in range(300):
            made = launches(noise=0.04, num_rounds=10, seed=seed + 1)
            sides: tuple[dict[int, float], dict[int, float]] = ({}, {})
            for i, one in enumerate(made):
                for side, step_ms in zip(sides, (one.baseline_ms, one.candidate_ms), strict=True):
                    side.update({i * LAUNCH + r: ms for r, ms in step_ms.items()})
            slower = {r: ms * (1 + slow_down) for r, ms in sides[1].items()}
            ratio = launch_ratio(slower, sides[0], confidence=FAMILY_CONFIDENCE)
            seen += judge(ratio, higher_is_better=False, threshold=threshold) == "regressed"
        assert seen / 300 == pytest.approx(0.9, abs=0.07)


def test_drift_is_measured_over_all_launches() -> None:
    found = measured(noise=0.01, drift=0.2)
    assert found.drift.low < 0.2 < found.drift.high
    assert found.ratio.high - found.ratio.low < 0.02, "it meets both sides of a round"


def test_runs_too_short_for_an_interval_have_none() -> None:
    found = noise_of(launches(noise=0.02, num_rounds=3), round_s=2.0, device="made up")
    short, longer = found.resolutions[:2]
    assert (short.num_rounds, short.half_width, short.resolves, short.gated) == (7, None, None, None)
    assert longer.num_rounds >= FEWEST_ROUNDS
    assert longer.half_width is not None
    assert "too few rounds" in noise.report(found, TrialStep())


def test_the_screen_has_every_number_with_its_unit_and_interval() -> None:
    found = measured(noise=0.03, between=0.01)
    said = noise.report(found, TrialStep())
    assert f"{found.ratio.estimate:.4f} [{found.ratio.low:.4f}, {found.ratio.high:.4f}]" in said
    assert said.count("resolves a slow-down") == len(found.resolutions)
    assert "resnet20, 8 images" in said
    assert "bad:" not in said
    assert not noise.is_bad(found)


def test_json_is_strict_and_complete() -> None:
    found = json.loads(noise.as_json(measured(noise=0.03), TrialStep()))
    assert found["step"]["arch"] == "resnet20"
    assert len(found["resolutions"]) == 5
    assert found["ratio"]["low"] < found["ratio"]["estimate"] < found["ratio"]["high"]


def wrong(seconds: float, *, quiet: bool) -> Noise:
    """Two sides that differ by 10%, which equal ones should not."""
    assert seconds == 2
    assert quiet
    made = [
        Launch(
            slow_down=0.0,
            baseline_ms=one.baseline_ms,
            candidate_ms={r: 1.1 * ms for r, ms in one.candidate_ms.items()},
        )
        for one in launches(noise=0.01)
    ]
    return noise_of(made, round_s=1.0, device="made up")


def test_equal_sides_that_a_gate_would_tell_apart_are_bad(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trials, "measure_noise", wrong)
    assert doctor.main(["--noise", "--seconds", "2s", "--quiet"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("bad: a gate at 5% would call A against A")


@pytest.mark.parametrize(
    "options",
    [
        *(["--seconds", "9s"], ["--noise", "--seconds", "soon"], ["--noise", "--power", "x.csv"]),
        *(["--noise", "--trials", "3"], ["--power", "x.csv", "--seconds", "9s"]),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.main(options) == 2
    assert "error: " in capsys.readouterr().err
