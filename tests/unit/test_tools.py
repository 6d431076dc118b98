"""The stages on a GPU: each command is one that the suite takes, and runs on CPU cores."""

import json
import time

import pytest
from on_gpu import PYTHON, STAGES, main

from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.run.main import settings_of

RUNS = [item for items in STAGES.values() for item in items if "bench.run" in item.command]


@pytest.mark.parametrize("planned", RUNS, ids=lambda planned: planned.name)
def test_every_run_of_a_stage_is_a_command_line_that_the_suite_takes(planned):
    arguments = planned.command[3:]
    assert planned.command[:3] == (PYTHON, "-m", "bench.run")
    asked = settings_of(arguments)
    assert asked.max_time is not None or asked.rounds is not None
    with pytest.raises(UsageError):
        settings_of([*arguments, "--no-such-option"])


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stage", STAGES)
def test_a_rehearsal_on_cpu_cores_runs_every_command(stage, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    began_s = time.monotonic()
    assert main([str(stage), "--rehearse"]) == 0
    print(capsys.readouterr().out, f"{time.monotonic() - began_s:.0f} s")
    rows = [json.loads(line) for line in (tmp_path / "out" / f"stage{stage}.jsonl").read_text().splitlines()]
    by_name = {row.pop("item"): row for row in rows}
    # Beside load the doctor objects; few rounds decide nothing, or by chance; either case may be hit.
    others = {"doctor": (0, 1), "gate": (0, 1, 3), "assert": (0, 4)}
    others |= dict.fromkeys(("killed", "stopped", "full", "asserting"), (0, 4))
    for one in STAGES[stage]:
        expected = (None,) if one.rehearsal is None else others.get(one.name, (0,))
        assert by_name[one.name]["rc"] in expected, by_name[one.name]
    assert not [row["last"] for row in rows if '"raised"' in " ".join(row["last"])]
    if stage == 1:
        assert by_name["first"]["cases"] == {"ok": 3, "skipped": 1}
        assert by_name["assert"]["cases"] == {"ok": 1, "failed": 1}
