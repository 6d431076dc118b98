"""Two sides in turns, for real: their rounds pair up, and what cannot be measured is refused."""

import itertools
import json
from pathlib import Path

import pytest
from commands import ROOT

from bench.errors import ExitCode, UsageError
from bench.gate.__main__ import main
from bench.gate.interleave import checkout_of
from bench.results.store import load_run

SLOW = """
import os, time, torch
LOG = os.environ["FORWARDS"]
class Model(torch.nn.Linear):
    def forward(self, x):
        began = time.monotonic()
        if torch.is_grad_enabled() and x.dtype == torch.float32:
            time.sleep(0.005)
            with open(LOG, "a") as log:
                log.write(f"{os.getpid()} {began} {time.monotonic()}\\n")
        return super().forward(x.flatten(1))
def model(): return Model(3 * 8 * 8, 4)
"""
"""Says when it trains; it sleeps, so that two that train at once are seen to."""


@pytest.mark.parametrize("num_launches", [1, pytest.param(3, marks=pytest.mark.campaign)])
def test_two_sides_take_turns(
    num_launches: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_forward.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FORWARDS", str(tmp_path / "forwards"))
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "sides"
    workload = ["--workload", "slow_forward:model", "--image-size", "8", "--batch-size", "4"]
    run = [*workload, "--device", "cpu", "--modes", "ddp", "--gpus", "1", "--steps", "2", "--rounds", "4"]
    run += ["--passes", "none"]
    gate = ["--interleave", ".", "--launches", str(num_launches), "--json", "--out", str(out)]
    code = main([*gate, "--", *run])
    assert json.loads(capsys.readouterr().out)["exit_code"] == code != ExitCode.USAGE
    sides = [load_run(folder) for folder in sorted(out.glob("launch*/*"))]
    assert len(sides) == 2 * num_launches
    for side in sides:
        timed = side.blocks[side.blocks["phase"] == "timed"]
        assert set(timed["round"]) == {1, 2, 3, 4}
    assert len({side.manifest["plan_hash"] for side in sides}) == 1
    lines = [line.split() for line in (tmp_path / "forwards").read_text().splitlines()]
    forwards = sorted((float(began), float(ended), pid) for pid, began, ended in lines)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(forwards)), "two trained at once"
    changes = sum(one[2] != other[2] for one, other in itertools.pairwise(forwards))
    assert changes >= 4 * num_launches, "each round has a turn of either"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--interleave", "no-such-reference"], "git knows no 'no-such-reference'"),
        (["--interleave", ".", "a", "b"], "leave the results folders out"),
        (["only-one"], "name two results folders"),
        (["a", "b", "--python", "python3"], "name two results folders"),
        (["--interleave", ".", "--", "--modes", "fsdp"], "unknown value 'fsdp'"),
    ],
)
def test_bad_use_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error


def test_a_reference_is_checked_out_and_gone_again() -> None:
    try:
        with checkout_of("HEAD") as place:
            assert (place / "bench" / "run.py").exists()
            assert place != ROOT
    except UsageError as error:  # a source archive has no git
        pytest.skip(str(error))
    assert not place.exists()
