"""Two sides in turns, for real: their rounds pair up, and what cannot be measured is refused."""

from pathlib import Path

import pytest
from commands import ROOT, SMALL

from bench.errors import UsageError
from bench.gate import main
from bench.gating.interleave import checkout_of
from bench.records.store import load_run


def test_two_sides_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sides"
    run = [*SMALL, "--modes", "ddp", "--gpus", "1", "--steps", "1", "--rounds", "4"]
    code = main(["--interleave", ".", "--launches", "2", "--out", str(out), "--", *run])
    text = capsys.readouterr().out
    assert code in (0, 1, 3), "four rounds decide little; what they decide is not this test's matter"
    assert "rounds compared in pairs" in text
    sides = [
        load_run(out / launch / name)
        for launch in ("launch1", "launch2")
        for name in ("baseline", "candidate")
    ]
    for side in sides:
        timed = side.blocks[side.blocks["phase"] == "timed"]
        assert set(timed["round"]) == {1, 2, 3, 4}
    assert len({side.manifest["plan_hash"] for side in sides}) == 1


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
