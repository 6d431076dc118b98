"""Several launches as one comparison: rounds kept apart, the spread between launches inside the interval."""

from pathlib import Path

import numpy as np
import pytest

from bench.gate.launches import LAUNCH, launch_ratio, merged
from bench.gate.runs import GateCase, GateRun
from bench.stats import paired_ratio


def run_of(images_per_s: dict[int, float], *, status: str = "ok", memory: float | None = None) -> GateRun:
    row = {"status": status, "mode": "ddp", "num_devices": "2", "case_id": "ddp-n2"}
    case = GateCase(
        case_id="ddp-n2",
        row=row,
        images_per_s=images_per_s,
        speedup=images_per_s,
        exposed_comm_ms={r: -value for r, value in images_per_s.items()},
        peak_mem_mib=memory,
    )
    return GateRun(Path("run"), {}, (case,))


def test_rounds_of_launches_stay_apart() -> None:
    (case,) = merged([run_of({1: 5.0, 2: 6.0}, memory=10.0), run_of({1: 7.0}, memory=12.0)]).cases
    assert case.images_per_s == {1: 5.0, 2: 6.0, LAUNCH + 1: 7.0}
    assert case.speedup == case.images_per_s
    assert case.exposed_comm_ms == {1: -5.0, 2: -6.0, LAUNCH + 1: -7.0}
    assert case.peak_mem_mib == 12.0


def test_a_case_that_failed_once_has_failed() -> None:
    (case,) = merged([run_of({1: 5.0}), run_of({}, status="timeout")]).cases
    assert not case.ok
    assert case.row["status"] == "timeout"


def test_one_launch_is_the_paired_ratio() -> None:
    left, right = {r: 10.0 + r for r in range(9)}, {r: 11.0 + r * r for r in range(9)}
    assert launch_ratio(left, right, confidence=0.98) == paired_ratio(left, right, confidence=0.98)


@pytest.mark.parametrize(("num_launches", "covered"), [(3, 0.85), (5, 0.88)])
def test_the_interval_holds_the_spread_between_launches(num_launches: int, covered: float) -> None:
    """Launches that differ by 2% (sd): the truth is 1, and rounds alone claim to know better."""
    rng = np.random.default_rng(7)
    inside, inside_rounds_alone, trials = 0, 0, 400
    for _ in range(trials):
        candidate, baseline = {}, {}
        for launch in range(num_launches):
            bias = rng.normal(0, 0.02)
            for r in range(30):
                candidate[launch * LAUNCH + r] = float(np.exp(bias + rng.normal(0, 0.05)))
                baseline[launch * LAUNCH + r] = 1.0
        whole = launch_ratio(candidate, baseline, confidence=0.95)
        rounds = paired_ratio(candidate, baseline, confidence=0.95)
        inside += whole.low <= 1 <= whole.high
        inside_rounds_alone += rounds.low <= 1 <= rounds.high
    assert inside / trials >= covered, "few launches know their spread roughly"
    assert inside_rounds_alone / trials <= 0.75
