"""What a workload counts: its declaration, the arithmetic of rates by hand, and what may be compared."""

import json
import re
from dataclasses import replace

import pytest
from gate_runs import STEADY, changed, gated, made_run
from msgspec import structs
from recorded_pages import text_of
from token_runs import language_model, token_plan, token_run

from ddp_bench.bench.common.errors import ExitCode, UsageError
from ddp_bench.bench.findings.cautions import check_rounds
from ddp_bench.bench.findings.confidence import assess_confidence
from ddp_bench.bench.findings.findings import conclude_run
from ddp_bench.bench.gate import main as gate_command
from ddp_bench.bench.machine.manifest import Timing
from ddp_bench.bench.page import terminal
from ddp_bench.bench.page.render import render_html
from ddp_bench.bench.results.store import load_run
from ddp_bench.models.registry import load_workload, make_resnet_workload
from ddp_bench.models.workload import check_unit
from ddp_bench.report.main import main as report_command
from ddp_bench.report.page import make_page


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return token_run(tmp_path_factory.mktemp("units") / "tokens")


def by_mode(cases):
    return {row["mode"]: row for row in cases.to_dict("records") if row["status"] == "ok"}


def test_rates_count_units_by_hand(tokens):
    rows = by_mode(load_run(tokens).cases)
    single, ddp = rows["single"], rows["ddp"]
    assert (single["unit"], single["units_per_sample"]) == ("tokens", 512)
    assert (single["global_batch"], ddp["global_batch"]) == (8, 16), "samples, not tokens"
    # Half of the steps take 100 ms, half 120: the fit is of logs, so sqrt(100 x 120) ms.
    assert single["images_per_s"] == pytest.approx(8 * 512 / 0.1 / 1.2**0.5, rel=0.03)
    assert single["images_per_s_sustained"] == pytest.approx(8 * 512 / 0.11)
    # 2 devices x 8 x 512 tokens in 125 or 150 ms, 137.5 at the mean
    assert ddp["images_per_s_sustained"] == pytest.approx(2 * 8 * 512 / 0.1375)
    assert ddp["speedup"] == pytest.approx(2 * 100 / 125)
    # 2 GPUs x 50 W x 137.5 ms / 8192 tokens, at the median
    assert ddp["joules_per_image"] == pytest.approx(100 * 0.1375 / 8192, rel=1e-3)
    assert ddp["step_ms"] == pytest.approx(1000 * 2 * 8 * 512 / ddp["images_per_s"])


def counting(steps, unit):
    made = made_run(steps)
    return replace(made, cases=tuple(changed(c, unit=unit) for c in made.cases))


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_gate_never_compares_rates_of_different_units(*, interleaved):
    ours, theirs = made_run(STEADY), counting(STEADY, "tokens")
    gate = gated(ours, theirs, interleaved=interleaved)
    assert gate.exit_code == ExitCode.UNDECIDED
    assert {c.verdict for c in gate.comparisons} == {"not comparable"}
    assert {c.reason for c in gate.comparisons} == {"the baseline counts images, the candidate tokens"}
    same = gated(counting(STEADY, "tokens"), theirs, interleaved=interleaved)
    assert same.exit_code == ExitCode.OK
    assert gated(ours, theirs, ratios_only=True).exit_code == ExitCode.OK


def test_a_case_is_stored_with_its_unit_and_named_without():
    case = token_plan()[0].case
    assert case.to_row()["unit"] == "tokens"
    assert replace(case, unit="words").case_id == case.case_id, "a name for people"
    assert replace(case, units_per_sample=256).case_id != case.case_id, "another length is another case"


@pytest.mark.parametrize("unit", ["", "two words", "tokens/s", "a,b", "tab\tbed", "\x1b[31m", "bell\x07", 3])
def test_a_unit_is_one_printable_word(unit):
    with pytest.raises(UsageError, match=r"^`unit` of workload lm is .*; give a plural noun in one word"):
        check_unit(language_model(unit=unit))


@pytest.mark.parametrize("how_many", [0, -1, 1.5, True, "128", 10**9 + 1, None])
def test_units_per_sample_is_a_count(how_many):
    with pytest.raises(UsageError, match=r"^`units_per_sample` of workload lm is .*; give a whole number"):
        check_unit(language_model(units_per_sample=how_many))


def test_image_models_count_images_and_a_workload_what_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_net.py").write_text(
        "from torch import nn\n"
        "from ddp_bench import Workload\n"
        "from token_runs import language_model\n"
        "def model(): return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 4))\n"
        "plain, bad = language_model(), language_model(unit='to kens')\n"
    )
    assert make_resnet_workload("resnet20", 32).unit == "images"
    assert load_workload("own_net:model", 8).unit == "images"
    assert load_workload("own_net:plain", 8).unit == "samples"
    with pytest.raises(UsageError, match="`unit` of workload lm is 'to kens'"):
        load_workload("own_net:bad", 8)


TIMING = Timing(
    rounds=12, total_s=9.0, measuring_s=7.0, startup_s=1.0, timed_share_pct=90.0, stopped_because="done"
)


def test_nothing_that_people_read_of_tokens_speaks_of_images(tokens, tmp_path, capsys):
    slower, found = token_run(tmp_path / "slower", scale=4), load_run(tokens)
    said = {"page": "".join(f"{line} " for line in text_of(render_html(make_page(found))))}
    conclusion = conclude_run(found)
    warned = [*check_rounds(conclusion.cases, found.times)]
    conclusion = replace(
        conclusion,
        cautions=tuple(warned),
        trust=assess_confidence(conclusion.verdicts, warned, on_cpu=False),
    )
    timed = replace(found, manifest=structs.replace(found.manifest, timing=TIMING))
    terminal.print_page(make_page(timed, conclusion=conclusion), place=str(tokens / "report.html"))
    said["terminal"] = capsys.readouterr().out
    for command, given, code in (
        (report_command, [tokens, "--markdown"], 0),
        (gate_command.main, [tokens, slower], 1),
        (gate_command.main, [tokens, slower, "--markdown"], 1),
    ):
        assert command([*map(str, given)]) == code
        said[str(given)] = capsys.readouterr().out
    for where, text in said.items():
        assert "tokens/s" in text, where
        assert re.search(r".{0,60}\bimages?.{0,30}", text, re.IGNORECASE) is None, where
    assert gate_command.main([str(tokens), str(slower), "--json"]) == 1
    compared = json.loads(capsys.readouterr().out)["comparisons"]
    assert {tuple(one["units"]) for one in compared} == {("tokens", "tokens")}
