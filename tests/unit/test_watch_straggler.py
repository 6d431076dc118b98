"""The rank that others wait for: named where there is one, by its part, and never else."""

import pytest
from watched_folders import ALONE_S, EXPOSED_S, OWN_S, lengthen, trained, training, watched_run, write_rows

from ddp_bench.bench.findings.watched import conclude_watch
from ddp_bench.bench.watch.late import CLOCK_ERROR, WORK_PARTS, find_late_rank
from ddp_bench.bench.watch.steps import read_ranks


def straggler_of(run):
    """The cost of a straggler; None without one."""
    return next((one for one in conclude_watch(run).costs if one.title == "Straggler"), None)


def test_a_rank_that_is_late_counts_as_its_own_work_and_not_as_communication(tmp_path):
    run = trained(tmp_path / "watched", late_s=0.03, late_part="data")
    case = run.results[0]
    assert case.exposed_comm_ms.estimate == pytest.approx(1000 * EXPOSED_S)
    assert case.comm_ms.estimate == pytest.approx(1000 * ALONE_S), "the last one waits for nobody"
    assert case.rank_skew_ms.estimate == pytest.approx(30)
    late = run.manifest.watched.late
    assert late.rank == 1
    assert late.later_ms.estimate == pytest.approx(30)
    found = straggler_of(run)
    assert found.fact.startswith("Rank 1 is a straggler: the others wait 30.0 ")
    assert found.fact.endswith(" ms for it, 20% of each step.")
    assert found.remedy.startswith(
        "On rank 1, data loading takes 30.0 ms longer than on the other ranks. Give the loader of rank 1 "
    )
    assert "look at its storage: a step would take 120 (" in found.remedy
    assert found.remedy.endswith(") ms instead of 150 ms.")
    assert conclude_watch(run).headline == found.fact, "communication adds less"


def test_the_interval_of_a_late_rank_holds_what_equal_ranks_differ_by(tmp_path):
    """Without noise: what a pause does to the parts after it, and what the clock may be off by."""
    made = training(late_s=0.03, late_part="data")
    for step in made:  # on the rank that pauses, cold caches
        lengthen(step[-1], forward=0.0005)
    late = find_late_rank(read_ranks(write_rows(tmp_path / "watched", made) / "ranks").joined)
    step_ms = 1000 * made[-2][-1]["step_s"]  # no probe
    assert late.part == "data"
    assert late.later_ms.estimate == pytest.approx(30.5)
    half_ms = 0.5 + CLOCK_ERROR * step_ms
    assert (late.later_ms.low, late.later_ms.high) == pytest.approx(
        (30.5 - half_ms, 30.5 + half_ms), rel=1e-2
    )


@pytest.mark.parametrize(
    ("gaps", "lines"),
    [
        ([(0.001, "a.py:1", "a.py:2"), (0.015, "a.py:9", "a.py:1"), (0.015, "a.py:9", "a.py:1")], 2),
        ([(0.016, "a.py:1", "a.py:2"), (0.015, "a.py:9", "a.py:1")], 0),
        ([(0.031, "", "a.py:1")], 0),
        ([], 0),
    ],
)
def test_the_lines_around_most_of_a_stragglers_other_work_are_named(tmp_path, gaps, lines):
    made = training(late_s=0.03)
    for step in made[::8]:
        step[-1]["gaps"] = gaps
    run = watched_run(write_rows(tmp_path / "watched", made))
    assert run.manifest.watched.late.lines == ("a.py:9", "a.py:1")[:lines]
    where = "after a.py:9 and before a.py:1 (" if lines else "in each step ("
    assert f"Look at what rank 1 alone does {where}" in straggler_of(run).remedy


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_straggler_is_named_where_there_is_one_and_never_else(num_ranks, tmp_path):
    """With noise of a tenth in each part: the right rank and part in 20 of 20, nobody in 20 of 20."""
    found = {}
    for late_s in (None, 0.03):
        for seed in range(20):
            part = WORK_PARTS[seed % len(WORK_PARTS)] if late_s else "other"
            folder = tmp_path / f"{late_s}-{seed}"
            made = training(num_ranks=num_ranks, noise=0.1, seed=seed, late_s=late_s, late_part=part)
            late = find_late_rank(read_ranks(write_rows(folder, made) / "ranks").joined)
            named = (late.rank, late.part) if late.is_straggler else None
            found.setdefault(late_s, []).append(named == ((num_ranks - 1, part) if late_s else None))
    assert found == {None: [True] * 20, 0.03: [True] * 20}


@pytest.mark.parametrize(("slower", "is_named"), [(1.15, False), (1.4, True)])
def test_a_core_that_is_slower_in_all_parts_is_a_straggler_only_beyond_what_shared_cores_differ(
    slower, is_named, tmp_path
):
    made = training()
    for step in made:
        added_s = (slower - 1) * sum(OWN_S.values())
        lengthen(step[-1], **{part: (slower - 1) * s for part, s in OWN_S.items()})
        for sync in step[-1]["syncs"]:
            sync["end_s"] += added_s
            sync["ready_s"] = [s + added_s for s in sync.get("ready_s", [])]
    late = find_late_rank(read_ranks(write_rows(tmp_path / "watched", made) / "ranks").joined)
    assert (late.rank, late.is_straggler or late.is_straggler is None) == (1, is_named)


def test_a_late_rank_is_named_with_its_host_where_there_are_several(tmp_path):
    hosts = [{"host": "host"}, {"host": "b"}]
    folder = write_rows(tmp_path / "watched", training(late_s=0.03), start=hosts)
    run = watched_run(folder, with_page=True)
    assert straggler_of(run).fact.startswith("Rank 1 on b is a straggler: the others wait 30.0 ")
    page = (folder / "report.html").read_text()
    assert "rank 0 on host" in page
    assert ">1 on b<" in page
    assert run.results[0].num_nodes == 2


def test_a_rank_that_is_not_surely_late_is_told_without_being_named_a_straggler(tmp_path):
    """And one disturbed quarter of the steps hides no straggler."""
    run = trained(tmp_path / "slightly", noise=0.001, late_s=0.002)
    found, late = conclude_watch(run), run.manifest.watched.late
    assert (late.is_straggler, late.rank, straggler_of(run)) == (False, 1, None)
    assert any("No rank is a straggler. Rank 1 works longest, 2" in note for note in found.notes)
    made = training(late_s=0.03)
    for step in made[:20]:  # the other rank is as late there
        lengthen(step[0], other=0.03)
    late = watched_run(write_rows(tmp_path / "disturbed", made)).manifest.watched.late
    assert (late.is_straggler, late.rank) == (True, 1)
