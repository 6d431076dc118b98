"""What a watched training's rows become: figures in closed form, the straggler, and what no file may hold."""

import json
import os
import random
import re
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from commands import ROOT
from gate_runs import changed

from ddp_bench.bench.export.main import main as export
from ddp_bench.bench.findings.watched import conclude_watch
from ddp_bench.bench.gate.compare import compare
from ddp_bench.bench.gate.decide import Policy
from ddp_bench.bench.gate.main import main as gate
from ddp_bench.bench.gate.runs import read_run
from ddp_bench.bench.predict.main import main as predict
from ddp_bench.bench.results.case_columns import GATED_METRICS
from ddp_bench.bench.results.store import load_run
from ddp_bench.bench.watch import launch, result
from ddp_bench.bench.watch.late import CLOCK_ERROR, WORK_PARTS, find_late_rank
from ddp_bench.bench.watch.launch import is_joined, list_ranks, make_config
from ddp_bench.bench.watch.ranks.private import keep_traceable
from ddp_bench.bench.watch.ranks.reducer import format_caps
from ddp_bench.bench.watch.ranks.rows import Rows
from ddp_bench.bench.watch.result import write_result
from ddp_bench.bench.watch.steps import read_ranks
from ddp_bench.report.main import main as report

OWN_S = {"data": 0.004, "forward": 0.03, "backward": 0.06, "optimizer": 0.005, "other": 0.001}
EXPOSED_S, ALONE_S, OWN_S_OF_WATCH = 0.02, 0.05, 0.0006
HOOK_AT = 15
EACH = {"forward0": 1, "backward": 1, "sync0": 1, "optimizer0": 1}


def step_rows(own_s, n, *, probe, hooked, num_syncs=1, buffers_s=0.0, k=None):
    """The rows of one step of all ranks, of the own work of each; ranks wait for the last one."""
    longest_s, sent_s = max(sum(own.values()) for own in own_s), ALONE_S if probe else EXPOSED_S
    rows = []
    for rank, own in enumerate(own_s):
        waits_s = longest_s - sum(own.values()) + sent_s
        ready_s = sum(own.values()) - own["optimizer"] + buffers_s
        sync = {"model": 0, "k": k or n, "probe": probe, "bytes": [1000, 3000], "end_s": ready_s + waits_s}
        sync |= {"ready_s": [ready_s / 2, ready_s]} if hooked else {}
        sync |= {"alone_s": waits_s} if probe else {}
        others = [sync | {"k": (k or n) - 1, "probe": False, "alone_s": None, "end_s": ready_s}] * (
            num_syncs - 1
        )
        parts = own | {"backward": own["backward"] + waits_s, "buffers": buffers_s}
        row = {"kind": "step", "rank": rank, "n": n, "parts": parts, "signature": EACH}
        row |= {"step_s": sum(parts.values()), "hooked": hooked, "probe": probe, "syncs": [*others, sync]}
        row |= {"overhead_s": OWN_S_OF_WATCH * (1 + rank)}
        rows.append(row)
    return rows


def write_rows(folder, steps, *, num_ranks=2, notes=(), host="host"):
    """A watched folder of these steps."""
    (folder / "ranks").mkdir(parents=True)
    for rank in range(num_ranks):
        start = {
            "kind": "start",
            "rank": rank,
            "local_rank": rank,
            "host": host,
            "pid": rank,
            "world_size": num_ranks,
            "torch": "2.14.1",
        }
        start |= {"python": "3.11.7", "backend": "gloo", "device": "cpu", "time_s": 1.8e9, "threads": 1}
        model = {
            "kind": "model",
            "rank": rank,
            "model": 0,
            "parameters": 1000,
            "num_bytes": 4000,
            "why": None,
        }
        rows = [start, model, *({"kind": "note", "rank": rank, "text": text} for text in notes)]
        rows += [row for step in steps for row in step if row["rank"] == rank]
        text = "".join(f"{json.dumps(row)}\n" for row in [*rows, {"kind": "end", "rank": rank}])
        (folder / "ranks" / f"{host}-{rank}.jsonl").write_text(text)
    return folder


def training(num_steps=80, *, num_ranks=2, noise=0.0, seed=0, late_s=None, late_part="other", **more):
    """Steps of a training, every fourth a probe from `HOOK_AT` on."""
    draw = random.Random(seed)
    steps = []
    for n in range(1, num_steps + 1):
        own = [{k: s * draw.lognormvariate(0, noise) for k, s in OWN_S.items()} for _ in range(num_ranks)]
        if late_s:
            own[-1][late_part] = own[-1].get(late_part, 0.0) + late_s
        hooked = n > HOOK_AT
        steps.append(step_rows(own, n, probe=hooked and n % 4 == 0, hooked=hooked, **more))
    return steps


def watched_run(folder, *, command=("torchrun", "train.py"), quiet=True):
    write_result(folder, 0, quiet, command)
    return load_run(folder)


def straggler_of(run):
    """The cost of a straggler; None without one."""
    return next((one for one in conclude_watch(run).costs if one.title == "Straggler"), None)


def test_backwards_before_the_optimizer_is_known_are_no_steps(tmp_path):
    """Synchronised micro-steps of an accumulation: the first three were taken for a step each."""
    made = training()
    for row in (row for step in made[:3] for row in step):
        row["signature"] = {"forward0": 1, "backward": 1, "sync0": 1}
    assert watched_run(write_rows(tmp_path / "watched", made)).manifest.watched.num_steps == len(made) - 3


@pytest.mark.parametrize("buffers_s", [0.0, 0.003])
def test_communication_is_measured_as_the_rows_were_made(tmp_path, buffers_s):
    run = watched_run(write_rows(tmp_path / "watched", training(buffers_s=buffers_s)))
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
    run = watched_run(write_rows(tmp_path / "watched", training(num_syncs=2)))
    assert run.results[0].exposed_comm_ms.estimate == pytest.approx(2000 * EXPOSED_S)
    assert run.results[0].comm_ms.estimate == pytest.approx(2000 * ALONE_S)


def test_a_rank_that_is_late_counts_as_its_own_work_and_not_as_communication(tmp_path):
    run = watched_run(write_rows(tmp_path / "watched", training(late_s=0.03, late_part="data")))
    case = run.results[0]
    assert case.exposed_comm_ms.estimate == pytest.approx(1000 * EXPOSED_S)
    assert case.comm_ms.estimate == pytest.approx(1000 * ALONE_S), "the last one waits for nobody"
    assert case.rank_skew_ms.estimate == pytest.approx(30)
    late = run.manifest.watched.late
    assert (late.rank, late.last_pct) == (1, 100)
    assert late.later_ms.estimate == pytest.approx(30)
    found = straggler_of(run)
    assert found.fact.startswith("Rank 1 is a straggler: the others wait 30.0 ")
    assert found.fact.endswith(" ms for it, 20% of each step.")
    assert found.remedy.startswith("Data loading takes 30.0 ms longer. Give the loader of rank 1 more ")
    assert "look at its storage: a step would take 120 (" in found.remedy
    assert found.remedy.endswith(") ms instead of 150 ms.")
    assert conclude_watch(run).headline == found.fact, "communication adds less"


def test_the_interval_of_a_late_rank_holds_what_equal_ranks_differ_by(tmp_path):
    """Without noise: what a pause does to the parts after it, and what the clock may be off by."""
    made = training(late_s=0.03, late_part="data")
    for step in made:  # on the rank that pauses, cold caches
        step[-1]["parts"]["forward"] += 0.0005
        step[-1]["step_s"] += 0.0005
    late = find_late_rank(read_ranks(write_rows(tmp_path / "watched", made) / "ranks").joined)
    step_ms = 1000 * made[-2][-1]["step_s"]  # no probe
    assert late.part == "data"
    assert late.later_ms.estimate == pytest.approx(30.5)
    half_ms = 0.5 + CLOCK_ERROR * step_ms
    assert (late.later_ms.low, late.later_ms.high) == pytest.approx(
        (30.5 - half_ms, 30.5 + half_ms), rel=1e-2
    )


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_straggler_is_named_where_there_is_one_and_never_else(num_ranks, tmp_path):
    """With noise of a tenth in each part: the right rank and part in 20 of 20, nobody in 20 of 20."""
    found = {}
    for late_s in (None, 0.03):
        for seed in range(20):
            part = WORK_PARTS[seed % len(WORK_PARTS)] if late_s else "other"
            folder = tmp_path / f"{late_s}-{seed}"
            made = training(num_ranks=num_ranks, noise=0.1, seed=seed, late_s=late_s, late_part=part)
            late = find_late_rank(read_ranks(write_rows(folder, made, num_ranks=num_ranks) / "ranks").joined)
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
        step[-1]["parts"] = {
            part: s + (slower - 1) * OWN_S.get(part, 0.0) for part, s in step[-1]["parts"].items()
        }
        step[-1]["step_s"] += added_s
        for sync in step[-1]["syncs"]:
            sync["end_s"] += added_s
            sync["ready_s"] = [s + added_s for s in sync.get("ready_s", [])]
    late = find_late_rank(read_ranks(write_rows(tmp_path / "watched", made) / "ranks").joined)
    assert (late.rank, late.is_straggler or late.is_straggler is None) == (1, is_named)


def test_the_end_says_in_one_sentence_what_watching_took_by_its_own_clock(tmp_path, capsys):
    """Of the rank on which it took most: 1.2 ms of a step of 120 ms, which probes do not change."""
    run = watched_run(write_rows(tmp_path / "watched", training()), quiet=False)
    watched, step_s = run.manifest.watched, sum(OWN_S.values()) + EXPOSED_S
    assert watched.own_ms == pytest.approx(2 * 1000 * OWN_S_OF_WATCH)
    probes_s = 17 * (ALONE_S - EXPOSED_S) / 80
    assert watched.own_pct == pytest.approx(100 * 2 * OWN_S_OF_WATCH / (step_s + probes_s), rel=0.01)
    said = "Watching itself took 1.2 ms of each step (0.95%) by its own clock; 17 probes gave up overlap."
    assert said in " ".join(capsys.readouterr().err.split())
    assert said in (tmp_path / "watched" / "report.html").read_text()


def test_steps_of_other_parts_are_counted_and_not_compared(tmp_path):
    made = training()
    for step in made[20::10]:
        for row in step:
            row["signature"] = EACH | {"evaluation": 1}
            row["step_s"] = row["parts"]["evaluation"] = 5.0
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


def test_a_late_rank_is_named_with_its_host_where_there_are_several(tmp_path):
    folder = write_rows(tmp_path / "watched", training(late_s=0.03))
    second = folder / "ranks" / "host-1.jsonl"
    second.write_text(second.read_text().replace('"host": "host"', '"host": "b"'))
    run = watched_run(folder)
    assert straggler_of(run).fact.startswith("Rank 1 on b is a straggler: the others wait 30.0 ")
    page = (folder / "report.html").read_text()
    assert "rank 0 on host" in page
    assert ">1 on b<" in page
    assert run.results[0].num_nodes == 2


def test_hosts_of_one_name_whose_processes_have_one_number_write_files_of_their_own(tmp_path, monkeypatch):
    """As containers on one machine; another host joins a folder until a rank has begun."""
    monkeypatch.setenv("BENCH_HOST", "rack/node")
    folder = tmp_path / "watched"
    assert not is_joined(folder)
    (folder / "ranks").mkdir(parents=True)
    assert is_joined(folder)
    launches = [make_config(folder, 5) for _ in range(2)]
    for rank, config in enumerate(launches):
        Rows(config).write(kind="start", rank=rank, host="rack/node")
    assert len([*(folder / "ranks").iterdir()]) == 2
    assert [list_ranks(config) for config in launches] == [{0}, {1}]
    assert not is_joined(folder)


def test_ranks_without_rows_are_counted(tmp_path):
    """As where hosts share no folder; one process that was alone is told as such."""
    folder = write_rows(tmp_path / "watched", training())
    (folder / "ranks" / "host-1.jsonl").unlink()
    found = conclude_watch(watched_run(folder))
    notes = found.notes
    assert not found.run.verdicts, "waiting for a rank that nobody sees is no communication"
    said = "1 of 2 ranks left no steps here, rank 1 for one, so what communication adds is not"
    assert any(note.startswith(said) for note in notes), notes
    alone = watched_run(write_rows(tmp_path / "alone", training(num_ranks=1), num_ranks=1))
    assert any(note.startswith("Only one process trained") for note in conclude_watch(alone).notes)


def test_ranks_that_were_started_again_are_told_by_their_longest_life(tmp_path):
    folder = write_rows(tmp_path / "watched", training(7))
    again = write_rows(tmp_path / "again", training(60, late_s=0.05), host="again")
    for file in (again / "ranks").iterdir():
        file.write_text(file.read_text().replace("1800000000.0", "1800000100.0"))
        file.rename(folder / "ranks" / file.name)
    assert watched_run(folder).manifest.watched.num_compared == 55


def test_steps_without_probes_are_told_by_parts_alone(tmp_path):
    made = [step_rows([OWN_S] * 2, n, probe=False, hooked=False) for n in range(1, 30)]
    run = watched_run(write_rows(tmp_path / "watched", made, notes=["own comm hook: no probes"]))
    assert run.results[0].step_ms.estimate == pytest.approx(1000 * (sum(OWN_S.values()) + EXPOSED_S))
    assert run.results[0].exposed_comm_ms is None
    assert conclude_watch(run).notes[-1] == "own comm hook: no probes"


@pytest.mark.parametrize("num_steps", [0, 5])
def test_too_few_steps_are_told_in_a_line(tmp_path, capsys, num_steps):
    write_result(write_rows(tmp_path / "watched", training(num_steps)), 1, quiet=False)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].endswith(f"{num_steps} steps seen, too few to compare: 5 are warm-up; let it train longer")
    assert not (tmp_path / "watched" / "cases.csv").exists()


def test_the_end_says_what_was_found_with_units_and_intervals(tmp_path, capsys):
    watched_run(write_rows(tmp_path / "watched", training(noise=0.02, late_s=0.03)), quiet=False)
    said = " ".join(capsys.readouterr().err.split())
    for words in (
        "Communication ",
        " ms, ",
        "Straggler Rank 1 is a straggler: ",
        "75 of 80 optimizer steps compared · 17 of them held gradients back (probes) · ",
        "Next step Look at ",
    ):
        assert words in said
    assert said.endswith("watched/report.html")
    write_result(write_rows(tmp_path / "quiet", training()), 0, quiet=True)
    assert capsys.readouterr().err == ""


def gated(capsys, *arguments):
    """The gate's exit code, and what it says."""
    code = gate([*map(str, arguments)])
    return code, " ".join(capsys.readouterr().out.split())


def test_two_watched_folders_are_compared_like_two_runs(tmp_path, capsys):
    """A script that became slower is a regression, though ddp-bench is of one commit."""
    for name, seed in (("one", 1), ("two", 2)):
        watched_run(write_rows(tmp_path / name, training(noise=0.001, seed=seed)))
    slower = write_rows(tmp_path / "slower", training(noise=0.001, late_s=0.03))
    watched_run(slower)
    for name in ("one", "slower"):
        file = tmp_path / name / "manifest.json"
        manifest = json.loads(file.read_text()) | {"git": {"commit": "a" * 40, "dirty": False}}
        file.write_text(json.dumps(manifest))
    code, said = gated(capsys, tmp_path / "one", tmp_path / "two")
    assert (code, "steps/s" in said) == (0, True), said
    assert "The runs were not interleaved" in said
    assert "Intervals are of these launches" in said
    code, said = gated(capsys, tmp_path / "one", slower)
    assert code == 1, said
    again = "watch --steps 80 --out again -- COMMAND && python -m bench.gate again"
    assert f"{again} {slower}" in said
    assert f"Baseline train.py in {tmp_path / 'one'}, torch 2.14.1 → candidate train.py in {slower}, " in said
    assert "--interleave" not in said, "a gate cannot start the user's training"
    noisy = [tmp_path / f"noisy{seed}" for seed in (3, 4)]
    for seed, folder in enumerate(noisy):
        watched_run(write_rows(folder, training(noise=0.4, seed=seed)))
    code, said = gated(capsys, *noisy)
    assert code == 3, said
    assert "Undecided: steps/s of DDP on 2 CPU cores changed by " in said
    assert "watch the baseline again, COMMAND being what trained it" in said
    assert f"{again} {noisy[1]}" in said


def test_two_watches_of_a_script_are_compared_whatever_its_settings_and_raced_caps(tmp_path, capsys):
    """As where the first watch said which setting costs time, and the user changed it."""
    for name, told in (
        ("before", {"find_unused_parameters": True, "bucket_cap_mb": "100"}),
        ("after", {"broadcast_buffers": False}),
        ("four", {}),
    ):
        num_ranks = 4 if name == "four" else 2
        made = training(noise=0.001, num_ranks=num_ranks)
        folder = write_rows(tmp_path / name, made, num_ranks=num_ranks)
        for file in (folder / "ranks").iterdir():
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            rows = [row | told if row["kind"] == "model" else row for row in rows]
            file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        watched_run(folder)
    sides = [read_run(tmp_path / name) for name in ("before", "after")]
    (own,) = sides[0].cases
    sides[0] = replace(sides[0], cases=(own, changed(own, case_id="raced", bucket_cap_mb="1")))
    policy = Policy(thresholds=dict.fromkeys(GATED_METRICS, 0.05))
    found = compare(*sides, policy=policy)
    assert found.decision.verdict == "pass"
    assert [c.name for c in found.comparisons if c.metric == "images_per_s"] == ["DDP on 2 CPU cores"]
    assert {(d.name, d.then, d.now, d.blocking) for d in found.differences} == {
        ("find_unused_parameters", "True", "False", False),
        ("bucket_cap_mb", "100", "default", False),
        ("sync_buffers", "True", "False", False),
    }
    code, said = gated(capsys, tmp_path / "before", tmp_path / "after")
    assert (code, "What differs between the sides" in said) == (0, True), said
    assert gate([str(tmp_path / "before"), str(tmp_path / "four")]) == 3
    assert "watch the same training on as many ranks" in capsys.readouterr().err


def test_exposed_communication_of_another_estimator_is_not_compared_while_the_rate_decides(tmp_path, capsys):
    """As of a run whose workload is the script."""
    one, other = (tmp_path / name for name in ("one", "other"))
    for folder in (one, other):
        watched_run(write_rows(folder, training(noise=0.001)))
    cases = (other / "cases.csv").read_text()
    assert cases.count("probes") == 1
    (other / "cases.csv").write_text(cases.replace("probes", "no_sync"))
    code, said = gated(capsys, one, other)
    assert code == 0, said
    reason = "exposed communication is estimated by probes in the baseline, by no_sync in the candidate"
    assert said.count(reason) == 1
    code, said = gated(capsys, one, other, "--strict")
    assert (code, said.count("Not comparable: " + reason)) == (3, 1), said
    before = load_run(ROOT / "results" / "samples" / "cpu-lab-1gbit-2hosts").results
    assert {case.exposed_by for case in before if case.exposed_comm_ms} == {"no_sync"}


def test_a_run_and_a_watched_folder_are_not_compared_and_say_why_in_a_line(tmp_path, capsys):
    watched = watched_run(write_rows(tmp_path / "watched", training())).path
    recorded = ROOT / "results" / "samples" / "tune" / "resnet18-2hosts-1gbit.zip"
    for sides in ((recorded, watched), (watched, recorded)):
        assert gate([*map(str, sides)]) == 3
        said = capsys.readouterr().out
        assert "Not comparable" in said.splitlines()[0]
        assert re.search(r"^unit +.*blocks the comparison", said, re.MULTILINE)
        assert "--interleave" not in said


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ((predict, "WATCHED", "--gpus", "8"), "no probe tells how much"),
        ((predict, "CALIBRATED", "--gpus", "8", "--network", "WATCHED"), "not an all-reduce by its size"),
        ((predict, "CALIBRATED", "--validate", "WATCHED", "--accept"), "whose batch is not known"),
        ((report, "WATCHED", "--predictions", "PREDICTIONS"), "its page draws no predictions"),
    ],
)
def test_what_a_watched_folder_cannot_tell_is_refused_in_a_line(tmp_path, capsys, command, reason):
    calibrated = ROOT / "results" / "samples" / "predictions" / "resnet18-2hosts" / "1gbit"
    assert predict([str(calibrated), "--gpus", "8", "--json"]) == 0
    (tmp_path / "predictions.json").write_text(capsys.readouterr().out)
    watched = watched_run(write_rows(tmp_path / "watched", training())).path
    places = {"WATCHED": watched, "CALIBRATED": calibrated, "PREDICTIONS": tmp_path / "predictions.json"}
    run, *words = command
    assert run([str(places.get(word, word)) for word in words]) == 2
    said = capsys.readouterr().err
    assert (said.count("\n"), reason in said) == (1, True), said


def test_the_page_tells_which_step_time_is_which_and_how_exposed_communication_was_estimated(tmp_path):
    watched_run(write_rows(tmp_path / "watched", training()))
    assert report([str(tmp_path / "watched"), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    for words in ("Step of any rank, median", "without communication, from probes", "Exposed by", "(step "):
        assert words in page
    for words in ("1 of 1 case", "steps/s", "(round ", "All cases", "median of", "of all modes"):
        assert words not in page


@pytest.mark.parametrize(
    ("num_bytes", "cap"),
    [
        ([], "default"),
        ([25 * 2**20], "25"),
        ([int(0.001 * 2**20)], "0.001"),
        ([100 * 2**20], "100"),
        ([3 * 2**19, int(0.1 * 2**20)], "1.5/0.1"),
    ],
)
def test_the_cap_is_that_of_the_script(num_bytes, cap):
    one, several = (num_bytes or [25 * 2**20])[0], num_bytes if len(num_bytes) > 1 else None
    ddp = SimpleNamespace(
        bucket_bytes_cap=one, bucket_bytes_cap_list=several, bucket_bytes_cap_default=len(num_bytes) != 1
    )
    assert format_caps(ddp) == cap


def test_a_rank_that_is_not_surely_late_is_told_without_being_named_a_straggler(tmp_path):
    """And one disturbed quarter of the steps hides no straggler."""
    run = watched_run(write_rows(tmp_path / "slightly", training(noise=0.001, late_s=0.002)))
    found, late = conclude_watch(run), run.manifest.watched.late
    assert (late.is_straggler, late.rank, straggler_of(run)) == (False, 1, None)
    assert any("No rank is a straggler. Rank 1 works longest, 2" in note for note in found.notes)
    made = training(late_s=0.03)
    for step in made[:20]:  # the other rank is as late there
        step[0]["parts"]["other"] += 0.03
        step[0]["step_s"] += 0.03
    late = watched_run(write_rows(tmp_path / "disturbed", made)).manifest.watched.late
    assert (late.is_straggler, late.rank) == (True, 1)


PLANTED = "PLANTED-4711"


def test_what_the_user_typed_and_has_in_the_environment_stays_in_the_manifest(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", PLANTED)
    folder = write_rows(tmp_path / "watched", training())
    run = watched_run(folder, command=("torchrun", "train.py", f"--name={PLANTED}"))
    assert run.manifest.watched.command[-1] == f"--name={PLANTED}"
    assert run.manifest.watched.env["NCCL_SOCKET_IFNAME"] == PLANTED
    archive, json_file = tmp_path / "run.zip", tmp_path / "benchmark.json"
    assert export([str(folder), "--format", "zip", "--out", str(archive)]) == 0
    assert export([str(folder), "--format", "pytest-benchmark", "--out", str(json_file)]) == 0
    assert report([str(folder), "--markdown"]) == 0
    assert report([str(archive), "--out", str(tmp_path / "of-archive.html")]) == 0
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "another")
    watched_run(write_rows(tmp_path / "other", training()))
    gate([str(folder), str(tmp_path / "other"), "--html", str(tmp_path / "gate.html")])
    of_archive = load_run(archive).manifest
    assert of_archive.watched.command == ()
    assert of_archive.watched.ranks == run.manifest.watched.ranks, "its figures are there"
    assert [case.exposed_by for case in load_run(archive).results] == ["probes"]
    assert PLANTED not in capsys.readouterr().out
    assert PLANTED.encode() not in of_archive.to_json()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    holding = {path.name for path in files if PLANTED.encode() in path.read_bytes()}
    assert holding == {"manifest.json"}
    assert {"report.html", "of-archive.html", "benchmark.json", "run.zip", "steps.csv"} <= {
        p.name for p in files
    }


def test_the_page_shows_a_step_by_part_and_rank(tmp_path):
    watched_run(write_rows(tmp_path / "watched", training(late_s=0.03, late_part="forward")))
    page = (tmp_path / "watched" / "report.html").read_text()
    for words in (
        "Where a step goes, by rank",
        "Where a step goes, in ms",
        "Rank 1 is a straggler",
        "rank 1 · ",
    ):
        assert words in page
    assert "Environment variables" not in page


def test_torchs_compiler_rewrites_a_wrapped_collective_as_it_does_the_original():
    """Where torch was compiling before the watch came, as in a notebook."""
    from torch._dynamo.variables.functions import CollectiveFunctionRewriteVariable
    from torch.distributed import _functional_collectives, all_reduce

    def wrapped(*arguments, **named):
        return all_reduce(*arguments, **named)

    assert not CollectiveFunctionRewriteVariable.can_rewrite(wrapped)
    keep_traceable(all_reduce, wrapped)
    try:
        assert CollectiveFunctionRewriteVariable.can_rewrite(wrapped)
    finally:
        _functional_collectives.traceable_collective_remaps.pop(wrapped, None)


def test_the_page_and_the_terminal_name_the_script_and_not_its_folder(tmp_path, capsys):
    command = ("torchrun", "--nproc-per-node", "2", "/home/somebody/train.py", "--config", "x.py")
    run = watched_run(write_rows(tmp_path / "watched", training()), command=command, quiet=False)
    assert capsys.readouterr().err.startswith(
        "train.py, 2 CPU cores: 120 ms per step · 0.00381 MiB of gradients\n"
    )
    page = (run.path / "report.html").read_text()
    assert "<title>train.py, watched" in page
    assert "somebody" not in page
    assert {case.arch for case in run.results} == {"watched script"}, "a gate compares scripts of two names"


def test_communication_that_is_not_told_from_none_is_said_with_its_upper_end(tmp_path):
    made = training(noise=0.05)
    for step in made:
        for row in step:
            for sync in row["syncs"]:
                sync["end_s"] -= EXPOSED_S * (not sync["probe"])
            row["parts"]["backward"] -= EXPOSED_S * (not row["probe"])
            row["step_s"] -= EXPOSED_S * (not row["probe"])
    run = watched_run(write_rows(tmp_path / "watched", made))
    exposed = run.results[0].exposed_comm_ms
    assert exposed.low < 0 < exposed.high
    found = conclude_watch(run)
    [said] = [one.sentence for one in found.others]
    assert f"ommunication adds 0 to {exposed.high:.1f} ms to each DDP step, " in said
    assert not found.costs


@pytest.mark.parametrize("when", ["await_rows", "build_page"])
def test_a_signal_while_the_report_is_made_ends_in_the_command_that_makes_it(
    tmp_path, monkeypatch, capsys, when
):
    def interrupt(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)  # the handler raises here

    folder = write_rows(tmp_path / "watched", training())
    monkeypatch.setattr(launch if when == "await_rows" else result, when, interrupt)
    assert launch.report(folder, {0, 1}, 0, False, ["train.py"], ()) == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    [said] = capsys.readouterr().err.splitlines()
    assert said.endswith(f"report {folder} makes the page")
    assert not (folder / "report.html").exists()
    monkeypatch.undo()
    assert report([str(folder)]) == 0
    assert "Communication" in (folder / "report.html").read_text()
