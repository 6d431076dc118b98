from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from report_runs import case, run, timed, usual_cases

from ddp_bench.bench.results.store import failure_file
from ddp_bench.report import files, rounds
from ddp_bench.report.drawings import Chart, Point
from ddp_bench.report.model import Hyperlink, RunFiles
from ddp_bench.report.select import workloads
from ddp_bench.report.view import page

SINGLE, DP, DDP = case("single", 1, 100.0), case("dp", 2, 150.0), case("ddp", 2, 180.0)


def test_each_case_lists_its_rounds_by_rank_and_a_missing_rank_is_blank() -> None:
    blocks = [timed(SINGLE, 1, 90.0, 110.0), timed(SINGLE, 2, 120.0)]
    blocks += [timed(DDP, 1, 200.0), timed(DDP, 1, 210.0, rank=1), timed(DDP, 2, 1234.5)]
    blocks += [timed(DDP, 1, 5.0, phase="no_sync")]
    single, ddp = page([run([SINGLE, DDP], timed_blocks=blocks)]).runs[0].rounds
    assert (single.label, single.case_id) == ("single, 1 GPU", SINGLE["case_id"])
    assert (single.columns, single.rows) == (("round", "rank 0"), (("1", "100.0"), ("2", "120.0")))
    assert ddp.columns == ("round", "rank 0", "rank 1")
    assert ddp.rows == (("1", "200.0", "210.0"), ("2", "1,234", ""))


def test_results_lead_to_rounds_and_trace() -> None:
    traces = (
        Hyperlink("rank 0", "./traces/a-rank0.json.gz"),
        Hyperlink("rank 1", "./traces/a-rank1.json.gz"),
    )
    files_of_run = RunFiles(traces={DDP["case_id"]: traces})
    shown = page([run([SINGLE, DDP])], [files_of_run]).runs[0]
    results = shown.tables[0]
    assert results.links == (
        (Hyperlink("2 rounds", "#run1-case-1"),),
        (Hyperlink("2 rounds", "#run1-case-2"), Hyperlink("trace", "./traces/a-rank0.json.gz")),
    )
    assert [c.key for c in shown.rounds] == ["run1-case-1", "run1-case-2"]
    assert shown.rounds[1].traces == traces


def test_count_of_rounds_stands_where_their_blocks_are_lost() -> None:
    shown = page([run([case("single", 1, 100.0, num_rounds=7)], timed_blocks=[])]).runs[0]
    results, _ = shown.tables
    assert results.rows[0][[c.name for c in results.columns].index("Rounds")] == "7"
    assert results.links == ((),)
    assert shown.rounds == ()


def test_many_blocks_leave_the_longest_rank_of_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [timed(DDP, r, 100.0 * r + rank, rank=rank) for r in (1, 2, 3) for rank in (0, 1)]
    monkeypatch.setattr(rounds, "MOST_CELLS", 5)
    (ddp,) = page([run([DDP], timed_blocks=blocks)]).runs[0].rounds
    assert ddp.line == "1 to 3: 101.0 201.0 301.0 ms"
    assert (ddp.columns, ddp.rows) == ((), ())


def test_run_in_the_pages_folder_offers_its_traces_by_rank(tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    (folder / "traces").mkdir(parents=True)
    for name in ("c#1-rank10.json.gz", "c#1-rank2.json.gz", "notes.txt", "odd.json.gz"):
        (folder / "traces" / name).touch()
    beside, above, elsewhere = (
        files.offered([folder], page_folder)[0].traces
        for page_folder in (folder, tmp_path, tmp_path / "pages")
    )
    assert beside == {
        "c#1": (
            Hyperlink("rank 2", "./traces/c%231-rank2.json.gz"),
            Hyperlink("rank 10", "./traces/c%231-rank10.json.gz"),
        )
    }
    assert above["c#1"][0].href == "./a%20run/traces/c%231-rank2.json.gz"
    assert elsewhere == {}


def test_a_failed_case_leads_to_its_tracebacks(tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    (folder / "failures").mkdir(parents=True)
    failed = case("ddp", 2, status="failed", reason="ValueError: late bug")
    skipped = case("dp", 1, status="skipped", reason="the plain module")
    for row in (failed, skipped, SINGLE):  # of those that are measured now, an earlier attempt failed
        (folder / failure_file(row["case_id"])).touch()
    name = failure_file(failed["case_id"])
    above, elsewhere = (
        page([run([SINGLE, failed, skipped])], files.offered([folder], page_folder)).runs[0].unmeasured
        for page_folder in (tmp_path, tmp_path / "pages")
    )
    assert above is not None
    assert elsewhere is not None
    at = [column.name for column in above.columns].index("Tracebacks")
    assert [row[at] for row in above.rows] == [row[at] for row in elsewhere.rows] == [name, ""]
    assert above.links == ((Hyperlink(name, f"./a%20run/{name}"),), ())
    assert elsewhere.links == ((), ())


def test_files_are_carried_made_safe_and_large_ones_named(tmp_path: Path) -> None:
    given = 'case_id,"a\r\n</script>",=1+1\n火'
    safe = "case_id,a\\x0d\\x0a</script>,'=1+1\n火\n"
    (tmp_path / "cases.csv").write_bytes(given.encode())
    (tmp_path / "blocks.csv").write_bytes(b"x" * (files.MOST_BYTES + 1))
    (tmp_path / "manifest.json").write_text(json.dumps({"name": "a"}), encoding="utf-8")
    (offered,) = files.offered([tmp_path], tmp_path)
    assert [(d.key, d.name, d.text) for d in offered.downloads] == [
        ("run1-cases-csv", "cases.csv", safe),
        ("run1-manifest-json", "manifest.json", '{"name": "a"}'),
    ]
    (left_out,) = offered.left_out
    assert left_out.startswith("blocks.csv is not carried by this page: it has 2.00 MiB")


def test_cases_that_were_not_measured_have_no_rounds() -> None:
    shown = page([run(usual_cases())]).runs[0]
    measured = [row["case_id"] for row in usual_cases() if row["status"] == "ok"]
    assert [c.case_id for c in shown.rounds] == measured


def paces(blocks: list[dict[str, Any]]) -> Chart | None:
    data = run([SINGLE, DP, DDP], timed_blocks=blocks)
    return rounds.drift(workloads(data.cases)[0], data.blocks, key="k")


def test_rounds_are_shown_against_the_cases_own_median() -> None:
    blocks = [timed(SINGLE, r, 100.0) for r in (1, 2, 3)]
    blocks += [timed(DDP, r, ms, rank=k) for k in (0, 1) for r, ms in ((1, 50.0), (2, 100.0), (3, 200.0))]
    figure = paces(blocks)
    assert figure is not None
    single, ddp, overall = figure.panels[0].series
    assert {p.y for p in single.points} == {100.0}
    assert ddp.points == (Point(1.0, 200.0), Point(2.0, 100.0), Point(3.0, 50.0))
    assert [p.y for p in overall.points] == [150.0, 100.0, 75.0]
    assert overall.label == "median of 2 cases"
    assert figure.caption == (
        "Over 3 rounds the median case ran between 75.0% (round 3) and 150% (round 1) of its own median."
    )


def test_round_that_was_broken_off_does_not_speak_for_all_cases() -> None:
    blocks = [timed(row, r, 100.0) for row in (SINGLE, DP, DDP) for r in (1, 2, 3)] + [
        timed(SINGLE, 4, 900.0)
    ]
    figure = paces(blocks)
    assert figure is not None
    *_, overall = figure.panels[0].series
    assert [p.x for p in overall.points] == [1.0, 2.0, 3.0]
    assert figure.panels[0].series[0].points[-1].y == pytest.approx(100 / 9)


def test_two_rounds_show_no_drift() -> None:
    assert paces([timed(row, r, 100.0) for row in (SINGLE, DDP) for r in (1, 2)]) is None


def test_ticks_of_many_rounds_are_few_and_reach_both_ends() -> None:
    figure = paces([timed(SINGLE, r, 100.0 + math.sin(r)) for r in range(1, 301)])
    assert figure is not None
    places = [tick.x for tick in figure.ticks]
    assert (places[0], places[-1], len(places)) == (1.0, 300.0, 9)
