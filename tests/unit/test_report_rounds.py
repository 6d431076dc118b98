import math

import pytest
from report_runs import Drawn, case, drawn, run, ticks, timed

from ddp_bench.bench.results.store import failure_file
from ddp_bench.report.cases import workloads
from ddp_bench.report.figures import drift
from ddp_bench.report.page import Files, page
from ddp_bench.report.tables import Link

SINGLE, DP, DDP = case("single", 1, 100.0), case("dp", 2, 150.0), case("ddp", 2, 180.0)


def test_every_column_leads_to_a_cases_traces():
    traces = tuple(Link(f"rank {rank}", f"./traces/a-rank{rank}.json.gz") for rank in (0, 1))
    shown = page([run([SINGLE, DDP])], [Files(traces={DDP["case_id"]: traces})]).runs[0]
    every = shown.tables[1]
    at = [column.name for column in every.columns].index("Traces")
    assert [row[at] for row in every.rows] == [(), traces]


def test_run_in_the_pages_folder_offers_its_traces_by_rank(tmp_path):
    folder = tmp_path / "a run"
    (folder / "traces").mkdir(parents=True)
    for name in ("c#1-rank10.json.gz", "c#1-rank2.json.gz", "notes.txt", "odd.json.gz"):
        (folder / "traces" / name).touch()
    beside, above, elsewhere = (
        Files.of(folder, page_folder).traces for page_folder in (folder, tmp_path, tmp_path / "pages")
    )
    assert beside == {
        "c#1": (
            Link("rank 2", "./traces/c%231-rank2.json.gz"),
            Link("rank 10", "./traces/c%231-rank10.json.gz"),
        )
    }
    assert above["c#1"][0].href == "./a%20run/traces/c%231-rank2.json.gz"
    assert elsewhere == {}


def test_a_failed_case_leads_to_its_tracebacks(tmp_path):
    folder = tmp_path / "a run"
    (folder / "failures").mkdir(parents=True)
    failed = case("ddp", 2, status="failed", reason="ValueError: late bug")
    skipped = case("dp", 1, status="skipped", reason="the plain module")
    for row in (failed, skipped, SINGLE):  # of those that are measured now, an earlier attempt failed
        (folder / failure_file(row["case_id"])).touch()
    name = failure_file(failed["case_id"])
    above, elsewhere = (
        page([run([SINGLE, failed, skipped])], [Files.of(folder, page_folder)]).runs[0].unmeasured
        for page_folder in (tmp_path, tmp_path / "pages")
    )
    at = [column.name for column in above.columns].index("Tracebacks")
    assert [row[at] for row in above.rows] == [(Link(name, f"./a%20run/{name}"),)]
    assert [row[at] for row in elsewhere.rows] == [(Link(name, ""),)]


def test_files_of_a_run_are_linked_where_the_page_lies_above_them(tmp_path):
    folder = tmp_path / "a run"
    folder.mkdir()
    for name in ("manifest.json", "cases.csv", "other.txt"):
        (folder / name).touch()
    beside, above, elsewhere = (
        Files.of(folder, page_folder).tables for page_folder in (folder, tmp_path, tmp_path / "pages")
    )
    assert beside == tuple(Link(name, f"./{name}") for name in ("cases.csv", "manifest.json"))
    assert [link.href for link in above] == ["./a%20run/cases.csv", "./a%20run/manifest.json"]
    assert [link.href for link in elsewhere] == ["", ""]


def paces(blocks):
    data = run([SINGLE, DP, DDP], timed_blocks=blocks)
    return drift(workloads(data.cases)[0], data.blocks, key="k")


def test_rounds_are_shown_against_the_cases_own_median():
    blocks = [timed(SINGLE, r, 100.0) for r in (1, 2, 3)]
    blocks += [timed(DDP, r, ms, rank=k) for k in (0, 1) for r, ms in ((1, 50.0), (2, 100.0), (3, 200.0))]
    figure = paces(blocks)
    ((_, lines),) = drawn(figure)
    assert {mark.y for mark in lines["single, 1 GPU"]} == {100.0}
    assert lines["DDP, 2 GPUs"] == [Drawn(1.0, 200.0), Drawn(2.0, 100.0), Drawn(3.0, 50.0)]
    assert [mark.y for mark in lines["median of 2 cases"]] == [150.0, 100.0, 75.0]
    assert figure.caption == (
        "Over 3 rounds the median case ran between 75.0% (round 3) and 150% (round 1) of its own median."
    )


def test_round_that_was_broken_off_does_not_speak_for_all_cases():
    blocks = [timed(row, r, 100.0) for row in (SINGLE, DP, DDP) for r in (1, 2, 3)] + [
        timed(SINGLE, 4, 900.0)
    ]
    figure = paces(blocks)
    ((_, lines),) = drawn(figure)
    assert [mark.x for mark in lines["median of 3 cases"]] == [1.0, 2.0, 3.0]
    assert lines["single, 1 GPU"][-1].y == pytest.approx(100 / 9)


def test_two_rounds_show_no_drift():
    assert paces([timed(row, r, 100.0) for row in (SINGLE, DDP) for r in (1, 2)]) is None


def test_ticks_of_many_rounds_are_few_and_reach_both_ends():
    figure = paces([timed(SINGLE, r, 100.0 + math.sin(r)) for r in range(1, 301)])
    places = ticks(figure)
    assert (places[0], places[-1], len(places)) == ("1", "300", 9)
