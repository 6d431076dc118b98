"""What a gate can see here, from made A/A rounds: the noise that was put in comes out."""

import functools
import json
import math
from itertools import pairwise

import numpy as np
import pytest

from ddp_bench.bench.doctor import main as doctor
from ddp_bench.bench.doctor import noise
from ddp_bench.bench.doctor.noise import FEWEST_ROUNDS, noise_of
from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.gate.compare import FAMILY_CONFIDENCE
from ddp_bench.bench.gate.judge import judge, log_ratios, of_launches
from ddp_bench.bench.gate.main import DEFAULT_THRESHOLD
from ddp_bench.bench.gate.runs import side_by_side


def launches(*, noise, between=0.0, num_rounds=40, seed=0, slower=0.0):
    """Throughputs of eight launches whose sides differ by `between`, `slower` and, in each round, `noise`."""
    rng = np.random.default_rng(seed)
    made = []
    for offset in (-between, between, 0.0, 0.0, -between, between, 0.0, 0.0):
        sides = [200 * np.exp(noise * rng.normal(size=num_rounds)) for _ in range(2)]
        sides[1] *= (1 + offset) / (1 + slower)
        baseline, candidate = (dict(enumerate(map(float, side), start=1)) for side in sides)
        made.append((baseline, candidate))
    return made


@functools.cache
def measured(*, seconds=150.0, **made):
    return noise_of(launches(**made), seconds=seconds, device="made up")


def test_a_gate_fails_beyond_the_threshold_by_normal_theory():
    found = measured(noise=0.03)
    assert found.num_rounds == 320
    assert found.ratio.low < 1 < found.ratio.high
    (minute,) = [one for one in found.resolutions if one.seconds == 60]
    assert minute.num_rounds == 128
    # A ratio scatters sqrt(2) times as much as a side.
    scatter = 0.03 * math.sqrt(2) / math.sqrt(128)
    assert minute.gated == pytest.approx(DEFAULT_THRESHOLD + 1.282 * scatter, rel=0.06)


def test_longer_gates_resolve_more_until_launches_differ():
    steady, lottery = measured(noise=0.03), measured(noise=0.03, between=0.03)
    for found in (steady, lottery):
        resolved = [one.resolves for one in found.resolutions if one.resolves is not None]
        assert all(more < 1.1 * fewer for fewer, more in pairwise(resolved))
    assert steady.resolutions[-1].resolves == pytest.approx(
        steady.resolutions[1].resolves / math.sqrt(20), rel=0.3
    )
    assert lottery.resolutions[-1].resolves > 0.03
    assert lottery.launch_ratios[:3] == pytest.approx((0.97, 1.03, 1.0), abs=0.03)


def test_a_slow_down_of_the_size_named_is_seen_in_nine_of_ten_gates():
    (resolution,) = measured(noise=0.04, num_rounds=500, seconds=1500).resolutions[1:2]
    assert resolution.num_rounds == 80
    for slower, threshold in ((resolution.resolves, 0.0), (resolution.gated, DEFAULT_THRESHOLD)):
        seen = 0
        for seed in range(150):
            gate = launches(noise=0.04, num_rounds=10, seed=seed + 1, slower=slower)
            baseline, candidate = (side_by_side(side) for side in zip(*gate, strict=True))
            ratio = of_launches(log_ratios(candidate, baseline)).interval(FAMILY_CONFIDENCE).exp()
            seen += judge(ratio, higher_is_better=True, threshold=threshold) == "regressed"
        assert seen / 150 == pytest.approx(0.9, abs=0.08), seen


def test_a_gate_too_short_for_an_interval_has_none():
    found = measured(noise=0.02, num_rounds=6, seconds=20)
    short, longer = found.resolutions[:2]
    assert (short.num_rounds, short.resolves, short.gated) == (36, None, None)
    assert longer.num_rounds >= FEWEST_ROUNDS
    assert longer.resolves is not None
    assert "too few rounds" in noise.report(found)
    with pytest.raises(UsageError, match=r"--seconds 2s gave 16 rounds.* needs 40; say --seconds 10s"):
        measured(noise=0.02, num_rounds=2, seconds=2)


def test_equal_sides_that_a_gate_would_tell_apart_are_bad(monkeypatch, capsys):
    def wrong(seconds, *, quiet):
        assert (seconds, quiet) == (2, True)
        return measured(noise=0.01, slower=0.1)

    monkeypatch.setattr(noise, "measure_noise", wrong)
    assert doctor.main(["--noise", "--seconds", "2s", "--quiet"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("bad: a gate at 5% calls A against A")


@pytest.mark.campaign
def test_this_machine_is_measured_by_the_gate(capsys):
    seconds = 6
    while (code := doctor.main(["--noise", "--seconds", f"{seconds}s", "--json"])) == 2:
        error = capsys.readouterr().err.splitlines()[-1]
        assert f"--seconds {seconds}s gave" in error, error
        seconds = int(error.split("say --seconds ")[1].split("s,")[0])  # the machine is busy
    assert code in (0, 1)
    told = json.loads(capsys.readouterr().out)
    assert len(told["launch_ratios"]) == 8
    assert told["num_rounds"] >= FEWEST_ROUNDS
    assert told["device"]
