"""What a race of bucket caps within a training says, from rows whose steps are known."""

import random

import pytest
from watched_folders import OWN_S, step_rows, trained, training, watched_run, write_rows

from ddp_bench.bench.common.errors import UsageError
from ddp_bench.bench.findings.verdicts import CAP, COMMUNICATION
from ddp_bench.bench.findings.watched import conclude_watch
from ddp_bench.bench.watch.launch import MIN_RACE_ROUNDS, plan_race

WATCHED, BLOCK, SKIPPED = 60, 8, 3
DISTURBED_S = 0.5
"""What the first steps of a turn take, which do not count."""


def race(added_s, *, rounds=10, noise=0.01, seed=0, missing=()):
    """Steps of a race: caps and what each adds to a step; turns in `missing` were refused."""
    draw, rows = random.Random(seed), []
    for number in range(rounds):
        for cap in draw.sample([*added_s], len(added_s)):
            pace = draw.lognormvariate(0, 0.05)  # of the machine, in this turn
            for place in range(0 if (number, cap) in missing else BLOCK):
                own = {part: s * pace * draw.lognormvariate(0, noise) for part, s in OWN_S.items()}
                own["backward"] += added_s[cap] + DISTURBED_S * (place < SKIPPED)
                step = step_rows([own] * 2, WATCHED + 1 + len(rows))
                for row in step:
                    row["syncs"][0] |= {"cap": "" if place < SKIPPED else cap, "round": number}
                rows.append(step)
    return rows


def raced_run(folder, added_s, *, own="default", **more):
    """The loaded run of a training whose script has the cap `own`, with a race at its end."""
    steps = [*training(WATCHED, noise=0.01), *race(added_s, **more)]
    return watched_run(write_rows(folder, steps, model={"bucket_cap_mb": own}))


def verdict_of(run, question=CAP):
    return next((one for one in conclude_watch(run).run.verdicts if one.question == question), None)


@pytest.mark.parametrize("own", ["default", "25"])
def test_the_cap_that_is_faster_is_named_with_its_interval_and_what_to_write(tmp_path, own):
    caps = {"default": 0.03, "1": 0.0, "25": 0.03, "100": 0.05}
    run = raced_run(tmp_path / "watched", caps, own=own)
    found, whole_s = verdict_of(run), sum(OWN_S.values()) + 0.02
    assert found.answer == "faster"
    assert found.paste == "model = DDP(model, bucket_cap_mb=1)"
    assert found.text.endswith(f"as fast as {'the default' if own == 'default' else 'cap 25 MiB'}")
    best = next(one for one in run.compared if "cap1-" in one.case_id)
    assert best.ratio.low < (whole_s + 0.03) / whole_s < best.ratio.high
    assert {one.reference_id for one in run.compared} == {run.results[0].case_id}
    assert run.results[0].get_setting("bucket_cap_mb") == own
    assert verdict_of(run, COMMUNICATION).answer == "resolved", "the script's own cap still has its probes"
    assert (
        conclude_watch(run).advice
        == f"Write {found.paste} in your script; then watch again and compare (COMMAND starts your training)"
    )
    assert "which is faster" in conclude_watch(run).trust


def test_that_no_cap_matters_is_said_with_how_much_it_may_matter(tmp_path):
    run = raced_run(tmp_path / "watched", dict.fromkeys(("default", "1", "25", "100"), 0.0), rounds=40)
    found = verdict_of(run)
    assert (found.answer, found.in_words, found.no_cap_helps) == ("no difference", "keep the default", True)
    assert "95%" in found.text


def test_at_most_one_of_8_races_of_equal_caps_names_one(tmp_path):
    caps = dict.fromkeys(("default", "1", "25", "100"), 0.0)
    answers = [verdict_of(raced_run(tmp_path / f"{seed}", caps, seed=seed)).answer for seed in range(8)]
    assert answers.count("faster") <= 1


def test_few_rounds_answer_nothing(tmp_path):
    run = raced_run(tmp_path / "watched", {"default": 0.05, "1": 0.0}, rounds=3)
    assert verdict_of(run).answer == "too few rounds"


def test_rounds_without_the_scripts_own_cap_say_nothing(tmp_path):
    missing = [(number, "default") for number in range(6)]
    run = raced_run(tmp_path / "watched", {"default": 0.02, "1": 0.0}, missing=missing)
    assert [one.num_rounds for one in run.compared] == [4]
    run = raced_run(tmp_path / "never", {"default": 0.02, "1": 0.0}, rounds=6, missing=missing)
    assert (len(run.results), verdict_of(run)) == (1, None)
    assert any("bucket caps were raced, but" in note for note in conclude_watch(run).notes)


@pytest.mark.parametrize(("rounds", "num_notes"), [(0, 1), (7, 1), (8, 0)])
def test_a_training_that_ends_before_the_race_says_how_long_it_should_be(tmp_path, rounds, num_notes):
    needed = WATCHED + 8 * 2 * BLOCK
    steps = [*training(WATCHED), *race({"default": 0.02, "1": 0.0}, rounds=rounds)]
    run = watched_run(write_rows(tmp_path / "watched", steps, model={"race_ends_at": needed}))
    taken = WATCHED + rounds * 2 * BLOCK
    said = f"the race of bucket caps needs {needed} synchronized backwards, and the watch saw {taken}: train"
    assert sum(said in note for note in conclude_watch(run).notes) == num_notes


def test_raced_steps_are_no_part_of_what_is_told_of_the_training(tmp_path):
    plain = trained(tmp_path / "plain", WATCHED, noise=0.01)
    raced = raced_run(tmp_path / "raced", {"default": 0.5, "1": 0.9})
    assert raced.manifest.watched.ranks == plain.manifest.watched.ranks
    assert raced.manifest.watched.num_probes == plain.manifest.watched.num_probes
    assert raced.manifest.watched.num_compared == plain.manifest.watched.num_compared
    rows = (tmp_path / "raced" / "steps.csv").read_text().splitlines()
    assert sum(",raced," in row for row in rows) == 2 * 10 * 2 * BLOCK


def test_the_plan_of_a_race_is_fixed_by_what_was_typed():
    plan = plan_race("default,1,1/25", 300, 30)
    assert plan["caps"] == {
        "default": {},
        "1": {"bucket_cap_mb": 1},
        "1/25": {"bucket_cap_mb_list": [1, 25]},
    }
    assert (plan["at"], plan["rounds"]) == (304, 12)
    assert plan_race("1,2,3,4", 5, 8)["rounds"] == MIN_RACE_ROUNDS
    assert "bit-equal on 2 ranks" in plan["note"]
    with pytest.raises(UsageError, match=r"--bucket-cap-mb: .*'x'"):
        plan_race("x", 5, 8)
