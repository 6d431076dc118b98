from __future__ import annotations

import json
from dataclasses import replace

import pytest
from doctor_machines import container, h100_box, laptop, virtual_gpu

from ddp_bench.bench.doctor import main as doctor
from ddp_bench.bench.doctor.readings import HostReadings


def run(
    machine: HostReadings, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *options: str
) -> tuple[int, str]:
    monkeypatch.setattr(doctor, "read_machine", lambda: machine)
    code = doctor.main(options)
    return code, capsys.readouterr().out


def test_exit_code_is_one_only_where_something_is_bad(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = [run(make(), capsys, monkeypatch)[0] for make in (h100_box, laptop, virtual_gpu, container)]
    assert codes == [0, 0, 0, 1]
    assert run(HostReadings(), capsys, monkeypatch)[0] == 0


def test_every_finding_is_on_the_screen_with_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, out = run(container(), capsys, monkeypatch)
    for finding in doctor.diagnose(container()):
        (row,) = [row for row in out.splitlines() if row[9:].startswith(f"{finding.name}  ")]
        assert row.startswith(finding.status)
        assert finding.text[:40] in row
        assert finding.advice[:40] in out
    assert "not fit to measure on" in out.splitlines()[-1]


def test_quiet_shows_only_what_needs_attention(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, out = run(laptop(), capsys, monkeypatch, "--quiet")
    shown = [row.split()[0] for row in out.splitlines() if not row.startswith(" ")]
    assert set(shown) == {"caution"}
    assert run(h100_box(), capsys, monkeypatch, "--quiet") == (0, "")


def test_json_tells_unlimited_from_unknown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, out = run(h100_box(), capsys, monkeypatch, "--json")
    found = json.loads(out)
    assert found["status"] == "ok"
    assert found["readings"]["cpu"]["quota"] == "unlimited"
    assert found["readings"]["gpus"][0]["clock_reasons"] == ["idle"]
    assert len(found["findings"]) == len(doctor.diagnose(h100_box()))
    _, out = run(replace(h100_box(), gpus=None), capsys, monkeypatch, "--json", "--quiet")
    assert json.loads(out)["readings"]["gpus"] is None
    assert json.loads(out)["status"] == "unknown"


def test_help_groups_options_by_what_they_are_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--help"])
    assert ended.value.code == 0
    heads = [line for line in capsys.readouterr().out.splitlines() if line.endswith(":") and line[0] != " "]
    assert heads[-3:] == ["reading the machine:", "noise:", "output:"]


def test_a_wrong_command_line_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--repair"]) == 2
    assert "--repair" in capsys.readouterr().err
