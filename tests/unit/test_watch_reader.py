"""Rows of a watched training, read as steps: figures in closed form, and steps and ranks that are missing."""

import pytest
from watched_folders import (
    ALONE_S,
    EACH,
    EXPOSED_S,
    OWN_S,
    lengthen,
    list_rows,
    trained,
    training,
    watched_run,
    write_rows,
)

from ddp_bench.bench.findings.watched import conclude_watch
from ddp_bench.bench.watch.result import write_result


def test_backwards_before_the_optimizer_is_known_are_no_steps(tmp_path):
    """Synchronised micro-steps of an accumulation: the first three were taken for a step each."""
    made = training()
    for row in list_rows(made[:3]):
        row["signature"] = {"forward0": 1, "backward": 1, "sync0": 1}
    assert watched_run(write_rows(tmp_path / "watched", made)).manifest.watched.num_steps == len(made) - 3


@pytest.mark.parametrize("buffers_s", [0.0, 0.003])
def test_communication_is_measured_as_the_rows_were_made(tmp_path, buffers_s):
    run = trained(tmp_path / "watched", buffers_s=buffers_s)
    (case,) = run.results
    own_ms = 1000 * sum(OWN_S.values())
    assert case.step_ms.estimate == pytest.approx(own_ms + 1000 * (EXPOSED_S + buffers_s))
    assert case.get_interval("no_sync_step_ms").estimate == pytest.approx(own_ms)
    assert case.exposed_comm_ms.estimate == pytest.approx(1000 * (EXPOSED_S + buffers_s))
    assert case.comm_ms.estimate == pytest.approx(1000 * (ALONE_S + buffers_s))
    assert case.hidden_pct.estimate == pytest.approx(
        100 * (1 - (EXPOSED_S + buffers_s) / (ALONE_S + buffers_s))
    )
    assert (case.num_buckets, case.bucket_bytes, case.unit) == (2, "1000/3000", "steps")
    assert case.images_per_s.estimate == pytest.approx(1000 / case.step_ms.estimate), "a step is one unit"
    parts = {part: ms.estimate for part, ms in run.manifest.watched.ranks[0].parts.items()}
    whole = {part: 1000 * s for part, s in OWN_S.items()} | {"waits": 1000 * EXPOSED_S}
    assert parts == pytest.approx({**dict.fromkeys(parts, 0.0), **whole, "buffers": 1000 * buffers_s})
    assert sum(parts.values()) == pytest.approx(case.step_ms.estimate)


def test_backwards_that_were_not_held_back_are_taken_to_add_as_much(tmp_path):
    """Of two synchronised backwards each probe holds one back; of what a step adds each makes half."""
    run = trained(tmp_path / "watched", num_syncs=2)
    assert run.results[0].exposed_comm_ms.estimate == pytest.approx(2000 * EXPOSED_S)
    assert run.results[0].comm_ms.estimate == pytest.approx(2000 * ALONE_S)


def test_steps_of_other_parts_are_counted_and_not_compared(tmp_path):
    made = training()
    for row in list_rows(made[20::10]):
        row["signature"] = EACH | {"evaluation": 1}
        lengthen(row, evaluation=5.0)
    run = watched_run(write_rows(tmp_path / "watched", made))
    assert run.manifest.watched.num_others == 6
    assert run.manifest.watched.num_compared == 80 - 5 - 6
    assert run.results[0].exposed_comm_ms.estimate == pytest.approx(1000 * EXPOSED_S)


def test_what_was_measured_before_a_rank_was_killed_is_told(tmp_path):
    folder = write_rows(tmp_path / "watched", training())
    killed = folder / "ranks" / "host-1.jsonl"
    killed.write_bytes(killed.read_bytes()[:-9000] + b"\xff{")
    whole = folder / "ranks" / "host-0.jsonl"
    whole.write_text(f'{whole.read_text()}{{"kind":"step","rank":0}}\nnothing\n[1]\n{{"kind":"new"}}\n')
    run = watched_run(folder)
    assert 40 < run.manifest.watched.num_compared < 75
    assert run.results[0].exposed_comm_ms.estimate == pytest.approx(1000 * EXPOSED_S)


def test_ranks_without_rows_are_counted(tmp_path):
    """As where hosts share no folder; one process that was alone is told as such."""
    folder = write_rows(tmp_path / "watched", training())
    (folder / "ranks" / "host-1.jsonl").unlink()
    found = conclude_watch(watched_run(folder))
    notes = found.notes
    assert not found.run.verdicts, "waiting for a rank that nobody sees is no communication"
    said = "1 of 2 ranks left no steps here, rank 1 for one, so what communication adds is not"
    assert any(note.startswith(said) for note in notes), notes
    alone = trained(tmp_path / "alone", num_ranks=1)
    assert any(note.startswith("Only one process trained") for note in conclude_watch(alone).notes)


def test_ranks_that_were_started_again_are_told_by_their_longest_life(tmp_path):
    folder = write_rows(tmp_path / "watched", training(7))
    start = {"time_s": 1.8e9 + 100}
    again = write_rows(tmp_path / "again", training(60, late_s=0.05), host="again", start=start)
    for file in (again / "ranks").iterdir():
        file.rename(folder / "ranks" / file.name)
    assert watched_run(folder).manifest.watched.num_compared == 55


def test_steps_without_probes_are_told_by_parts_alone(tmp_path):
    note = {"kind": "note", "text": "own comm hook: no probes"}
    run = watched_run(write_rows(tmp_path / "watched", training(29, hook_at=99), note))
    assert run.results[0].step_ms.estimate == pytest.approx(1000 * (sum(OWN_S.values()) + EXPOSED_S))
    assert run.results[0].exposed_comm_ms is None
    assert conclude_watch(run).notes[-1] == note["text"]


@pytest.mark.parametrize("num_steps", [0, 5])
def test_too_few_steps_are_told_in_a_line(tmp_path, capsys, num_steps):
    write_result(write_rows(tmp_path / "watched", training(num_steps)), 1, quiet=False)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].endswith(f"{num_steps} steps seen, too few to compare: 5 are warm-up; let it train longer")
    assert not (tmp_path / "watched" / "cases.csv").exists()
