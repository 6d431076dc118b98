"""What a sampler makes of its samples, by hand."""

import subprocess
import sys

import pytest

from ddp_bench.bench.gpus import ClockReason
from ddp_bench.bench.measure import sampler
from ddp_bench.bench.measure.sampler import Sample, SampledGpu, answer, power_w, summary

CAP, HOT, IDLE = ClockReason.POWER_CAP, ClockReason.HARDWARE_HEAT, ClockReason.IDLE


def test_a_summary_by_hand():
    reasons = [{IDLE}, {CAP}, {CAP, HOT}, {ClockReason.APPLICATION}]
    samples = [
        Sample(
            moment_s=10 + 0.1 * i,
            sm_clock_mhz=clock,
            energy_j=5000 + 40.0 * i,
            temperature_c=degrees,
            reasons=frozenset(why),
        )
        for i, (clock, degrees, why) in enumerate(
            zip([600, 1800, 1700, 1900], [50, 61, 64, 63], reasons, strict=True)
        )
    ]
    assert summary(samples) == {
        "sm_clock_mhz": 1500,
        "power_w": 400,
        "temperature_c": 64,
        "throttled_pct": 50,
        "throttled_by_pct": {"hardware thermal slow-down": 25, "power cap": 50},
    }
    assert summary([]) == {}
    assert summary([Sample(moment_s=1), Sample(moment_s=2, sm_clock_mhz=1000)]) == {"sm_clock_mhz": 1000}


def test_power_of_a_counter_that_moves_in_steps():
    """250 W, counted every 0.1 s: between first and last sample alone there are 10% too few."""
    samples = [Sample(moment_s=t / 20, energy_j=25.0 * (t // 2)) for t in range(20)]
    assert power_w(samples) == pytest.approx(250, rel=0.01)
    ends = samples[-1].energy_j or 0, samples[-1].moment_s
    assert ends[0] / ends[1] < 240


@pytest.mark.parametrize(
    ("samples", "watts"),
    [
        ([Sample(moment_s=t / 10, power_w=w) for t, w in enumerate([100, 200, 240])], 180),
        ([Sample(moment_s=t / 20, energy_j=50.0 * t) for t in range(3)], None),
        ([Sample(moment_s=float(t), energy_j=7.0) for t in range(3)], None),
        ([Sample(moment_s=1.0)], None),
    ],
    ids=["readings", "too short to count", "a counter that stands still", "unknown"],
)
def test_power_without_a_usable_counter(samples, watts):
    assert power_w(samples) == (None if watts is None else pytest.approx(watts))


def test_only_samples_between_start_and_end_count():
    gpu = SampledGpu(None)
    gpu.samples.extend(
        Sample(moment_s=t, sm_clock_mhz=mhz)
        for t, mhz in ((0.9, 100), (1.0, 1000), (1.5, 1100), (2.0, 1200), (2.1, 100))
    )
    question = {"start_s": 1.0, "end_s": 2.0, "gpus": ["abcdefgh-1"]}
    assert answer(question, {"abcdefgh-1": gpu}) == {"gpus": {"abcdefgh": {"sm_clock_mhz": 1100}}}


def test_samples_are_kept_within_bounds():
    gpu = SampledGpu(None)
    gpu.samples.extend(Sample(moment_s=float(i)) for i in range(100_000))
    assert len(gpu.samples) == sampler.KEPT_S / sampler.INTERVAL_S


def test_the_sampler_imports_no_torch():
    code = "import sys, bench.measure.sampler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
