"""The command that is proposed after a run: why, and that it can be pasted."""

import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from finding_cases import (
    CAP_1,
    CAP_25,
    CPU,
    DDP,
    DP,
    FAILED,
    NAN,
    SINGLE,
    concluded,
    exposing,
    made_run,
    over,
)
from made import made_manifest
from report_runs import case, measured
from sample_runs import EVERY_SAMPLE, comparisons, rebuilt, sample

from ddp_bench.bench.common.cli import TYPED_ENV
from ddp_bench.bench.export.main import make_parser as export_parser
from ddp_bench.bench.findings.findings import conclude_run
from ddp_bench.bench.findings.next_step import TIME_FACTOR, propose_next_step
from ddp_bench.bench.findings.verdicts import WRAPPER
from ddp_bench.bench.lab.main import parse, split_arguments
from ddp_bench.bench.plan.resolve import resolve
from ddp_bench.bench.plan.settings import Settings
from ddp_bench.bench.predict.main import make_parser as predict_parser
from ddp_bench.bench.results.columns import COMPARISONS, make_frame
from ddp_bench.bench.results.commands import write_repeat_command
from ddp_bench.bench.results.comparisons import UNRESOLVED, compare_pairs
from ddp_bench.bench.run.main import make_parser as run_parser
from ddp_bench.bench.run.main import parse_settings
from ddp_bench.bench.stats.fit import FittedSteps


def parsed(step):
    """The module of a command and what its own parser makes of the rest."""
    python, dash_m, module, *rest = shlex.split(step.command)
    assert (python, dash_m) == ("python", "-m")
    if module == "bench.lab":
        _, (python, dash_m, module, *rest) = split_arguments(rest)
    if module == "bench.doctor":
        assert rest == []
        return module, None
    parser = {
        "bench.run": run_parser,
        "bench.tune": run_parser,
        "bench.export": export_parser,
        "bench.predict": predict_parser,
    }[module]
    return module, parser().parse_args(rest)


def following(*by, cases=(), **settings):
    step = concluded(*(cases or (SINGLE, DP, DDP)), by=by, **settings).next_step
    return step, *parsed(step)


UNUSED = {"status": "failed", "reason": "give …", "reason_code": "unused_parameters"}


ROUNDS_20 = {"num_rounds": 20}
MEASURED = SINGLE, DP | ROUNDS_20, DDP | ROUNDS_20
WIDE = over(DDP, DP, 1 / 1.1, 1.1)
EXPOSING = DDP | exposing(11, 13) | measured(step_ms=100.0)
CAPS = CAP_1, CAP_25, case("ddp", 2, 160.0, bucket_cap_mb="100")


def test_a_side_of_an_interleaved_gate_is_not_gone_on_with():
    """Resumed, it would measure the code as it stands, whatever the side's was."""
    told = {"timing": {"measuring_s": 100.0}}
    for more, has_next in (({}, True), ({"interleaved_id": "abc"}, False)):
        made = conclude_run(made_run(MEASURED, (WIDE,), manifest={**told, **more}))
        assert (made.next_step is not None) == has_next


def test_a_mode_that_failed_is_mended_before_anything_is_tried_again():
    by = over(DDP, DP, 1.5, 1.7)
    assert concluded(SINGLE, DP, DDP, by=(by,)).next_step is not None
    made = concluded(SINGLE, DP, DDP, case("fsdp", 2, **FAILED), by=(by,))
    assert made.verdicts
    assert made.next_step is None
    some = concluded(SINGLE, DP, DDP, CAP_1 | FAILED, by=(by,))
    assert some.next_step is None, "a run with a failed case is no baseline"
    open_yet = concluded(*MEASURED, CAP_1 | FAILED, by=(WIDE,))
    assert open_yet.next_step is not None, "DDP itself was measured, its answer is open"


def test_ddp_that_waits_for_unused_parameters_is_measured_again_with_the_search():
    asked = Settings(workload="net:model", modes=("dp", "ddp", "fsdp"), gpus=(2,))
    settings = json.loads(json.dumps(asked.stored()))  # as in a manifest
    for others in ((DP,), (DP, case("fsdp", 2, **FAILED))):
        step, module, options = following(cases=(SINGLE, *others, DDP | UNUSED), **settings)
        assert module == "bench.run"
        assert (options.find_unused_parameters, options.workload) == ("on", "net:model")
        assert "without gradient" in step.why
        assert ("fsdp" in getattr(options, "modes", "")) == (len(others) == 1), "what failed is left out"
    assert concluded(SINGLE, DDP | UNUSED).next_step is not None, "though nothing else was measured"


def test_an_open_answer_goes_on_for_as_long_as_its_width_needs():
    """A half-width of log(1.1) has to become log(1.05) / 2: four times, so 15 times as long, and some."""
    step, module, given = following(WIDE, cases=MEASURED)
    assert module == "bench.run"
    assert given.resume == Path("results/made run")
    needed_s = TIME_FACTOR * 100 * (math.log(1.1) / (math.log(1.05) / 2)) ** 2
    assert needed_s <= 60 * int(given.max_time.rstrip("m")) < needed_s + 60
    assert step.why == "about 31 min more would decide what is open, at a margin of 5%"


def test_an_open_communication_takes_the_time_that_its_own_interval_needs():
    """Exposed 1 (-5 to 7) ms of a step of 100: half of 6 has to become 4, for it to end below 5."""
    ddp = DDP | ROUNDS_20 | exposing(-5, 7) | measured(step_ms=100.0)
    known = over(DDP, DP, 1.5, 1.51)
    _, module, given = following(known, cases=(SINGLE, DP | ROUNDS_20, ddp))
    assert module == "bench.run"
    assert given.max_time == f"{math.ceil(TIME_FACTOR * 100 * (6 / 4) ** 2 / 60)}m"


def test_a_folder_without_its_journal_begins_anew():
    manifest = {"settings": {"batch_size": 8}}
    made = made_run(MEASURED, (WIDE,), manifest=manifest, resumable=False)
    module, given = parsed(conclude_run(made).next_step)
    assert module == "bench.run"
    assert given.batch_size == "8"
    assert given.resume is None


def test_with_fixed_rounds_it_names_rounds():
    _, _, given = following(WIDE, cases=MEASURED, rounds=20)
    assert int(given.rounds) == math.ceil(TIME_FACTOR * 20 * (math.log(1.1) / (math.log(1.05) / 2)) ** 2)
    assert not hasattr(given, "max_time")


def test_too_few_rounds_ask_for_ten():
    few = over(DDP, DP, NAN, NAN, num_rounds=2)
    two = {"num_rounds": 2}
    step, _, given = following(few, cases=(SINGLE, DP | two, DDP | two), rounds=2)
    assert (given.rounds, step.why) == ("10", "10 rounds give intervals")
    _, _, given = following(few, cases=(SINGLE, DP | two, DDP | two))
    assert given.max_time == "9m", "100 s gave two rounds"


def test_a_noise_that_would_take_hours_is_a_case_for_the_doctor():
    step, module, _ = following(over(DDP, DP, 0.3, 3.0))
    assert module == "bench.doctor"
    assert "telling 5% apart would take" in step.why


def test_exposed_communication_is_worth_tuning():
    of_training = {"arch": "resnet34", "batch_size": "8", "seed": "3", "find_unused_parameters": "on"}
    settings = resolve({**of_training, "margin": "2%"}).stored()
    _, module, given = following(over(EXPOSING, DP, 1.2, 1.3), cases=(SINGLE, DP, EXPOSING), **settings)
    assert module == "bench.tune"
    assert given.gpus == "2"
    assert {name: getattr(given, name) for name in of_training} == of_training


TYPED = "--gradient-as-bucket-view on --batch-size=8 --bucket-cap-mb default,1,25,100 --out there"


@pytest.mark.parametrize(
    ("head", "tune"),
    [
        ("python -m bench.run", "python -m bench.tune"),
        ("ddp-bench run", "ddp-bench tune"),
        ("python -m ddp_bench run", "python -m ddp_bench tune"),
        ("torchrun --nproc-per-node 2 -m bench.run", "torchrun --nproc-per-node 2 -m bench.tune"),
        (
            "srun --ntasks=2 --ntasks-per-node=2 ddp-bench run",
            "srun --ntasks=2 --ntasks-per-node=2 ddp-bench tune",
        ),
    ],
)
def test_the_search_is_typed_as_the_run_was_and_keeps_its_settings(head, tune, monkeypatch):
    forms = [form for form in ("ddp-bench", "python -m ddp_bench") if f"{form} run" in head]
    monkeypatch.setenv(TYPED_ENV, "".join(forms))
    by = (over(EXPOSING, DP, 1.2, 1.3),)
    for typed in (f"{head} {TYPED}", f"{head} --preset full {TYPED}"):
        made = made_run((SINGLE, DP, EXPOSING), by, manifest={"command": typed})
        step = conclude_run(made).next_step
        assert step.command == f"{tune} --gradient-as-bucket-view on --batch-size 8 --gpus 2"


def test_a_preset_stays_unless_what_it_says_is_replaced(monkeypatch):
    monkeypatch.setenv(TYPED_ENV, "ddp-bench")
    for typed in ("ddp-bench run --preset quick", "ddp-bench run --preset quick --max-time 9m"):
        told = {"command": typed, "timing": {"measuring_s": 100.0}}
        command = conclude_run(made_run(MEASURED, (WIDE,), manifest=told, resumable=False)).next_step.command
        assert re.sub(r"\d+m", "26m", command) == "ddp-bench run --preset quick --max-time 26m"
        again = parse_settings(shlex.split(command)[2:])
        assert (again.arch, again.preset) == ("resnet20", "quick")


def test_halving_bytes_saves_no_more_than_is_exposed_and_changes_training():
    for comm_ms, buffers_ms, most in ((40.0, 1.0, "13 ms"), (22.0, 2.0, "10 ms")):
        row = EXPOSING | measured(comm_ms=comm_ms, buffers_ms=buffers_ms)
        by = over(row, DP, 1.2, 1.3), *(over(cap, row, 0.97, 1.01) for cap in CAPS)
        step = concluded(SINGLE, DP, row, *CAPS, by=by, bucket_cap_mb=["default", "1", "25", "100"]).next_step
        assert f"at most {most} of" in step.why
        assert "change the training" in step.why


def on_one_gpu(rate, **settings):
    cost = {"speedup": rate / 100, "speedup_low": rate / 100 - 0.01, "speedup_high": rate / 100 + 0.01}
    return concluded(SINGLE, case("ddp", 1, rate) | cost, **settings).next_step


def test_one_gpu_without_anything_to_save_of_ddp_tries_to_compile():
    step = on_one_gpu(98.0)
    assert step.why.startswith("Nothing about DDP to save (2% of a step). For the step itself try")
    module, given = parsed(step)
    assert (module, given.compile) == ("bench.run", "off,on")
    others = on_one_gpu(80.0), on_one_gpu(98.0, compile=("off", "default"))
    assert [parsed(other)[0] for other in others] == ["bench.export"] * 2


def test_shared_gpus_are_followed_by_a_run_on_real_ones():
    shared = [row | {"oversubscribed": True} for row in (DP, DDP)]
    step, module, given = following(cases=(SINGLE, *shared), share_gpus=True, gpus=(1, 2))
    assert (module, given.gpus, step.why) == ("bench.run", "1,2", "measure speed on a machine with 2 GPUs")
    assert "share-gpus" not in step.command


def test_a_run_beside_other_programs_is_no_baseline():
    cpu = [row | CPU for row in (SINGLE, DDP)]
    load = {"load": [{"cores": 2, "others": 1.7, "steal": 0.0}]}
    step = conclude_run(made_run(cpu, manifest=load)).next_step
    assert "background load" in step.why
    assert parsed(step)[0] == "bench.doctor"
    assert parsed(conclude_run(made_run(cpu)).next_step)[0] == "bench.export"


def test_where_no_cap_helps_fewer_bytes_are_tried_and_not_other_buckets():
    by = over(EXPOSING, DP, 1.2, 1.3), *(over(cap, EXPOSING, 0.97, 1.01) for cap in CAPS)
    asked = {"bucket_cap_mb": ["default", "1", "25", "100"], "gpus": [1, 2], "modes": ["dp", "ddp"]}
    for settings, command, options in (
        ({}, "bench.run", {"modes": "ddp", "gpus": "2", "comm_hook": "none,bf16"}),
        ({"comm_hook": ["bf16"]}, "bench.run", {"modes": "ddp", "gpus": "2", "batch_size": "10,20,40"}),
        ({"comm_hook": ["bf16"], "batch_size": [10, 20]}, "bench.export", {}),
    ):
        step, module, given = following(*by, cases=(SINGLE, DP, EXPOSING, *CAPS), **asked, **settings)
        assert module == command
        assert ("No bucket cap helps" in step.why) == ("comm_hook" in options)
        assert {name: getattr(given, name) for name in options} == options
    _, module, _ = following(*by[:3], cases=(SINGLE, DP, EXPOSING, *CAPS[:2]), **asked)
    assert module == "bench.tune", "two caps are no search"
    gains = *by[:3], over(CAPS[2], EXPOSING, 1.1, 1.2)
    assert following(*gains, cases=(SINGLE, DP, EXPOSING, *CAPS), **asked)[1] == "bench.tune"


def test_a_run_with_an_answer_is_worth_keeping():
    _, module, given = following(over(DDP, DP, 1.2, 1.3))
    assert module == "bench.export"
    assert (given.run, given.format) == (Path("results/made run"), "zip")
    row = DDP | exposing(1, 2) | measured(step_ms=100.0)
    assert following(over(row, DP, 1.2, 1.3), cases=(SINGLE, DP, row))[1] == "bench.export"


@pytest.mark.parametrize("path", EVERY_SAMPLE)
@pytest.mark.parametrize("as_of", ["then", "now"])
def test_every_sample_is_concluded_and_its_next_command_runs_when_pasted(path, as_of):
    run = sample(path)
    cases = run.cases if as_of == "then" else rebuilt(path)
    by = make_frame([one.to_row() for one in comparisons(path)], COMPARISONS)
    run = replace(run, path=path, cases=cases, comparisons=by)
    made = conclude_run(run)
    on_one = run.cases["num_devices"].max() == 1
    assert {verdict.question for verdict in made.verdicts} >= (set() if on_one else {WRAPPER})
    trust = made.trust.lines.values() if made.trust else ()
    following = (made.next_step.why, made.next_step.command) if made.next_step else ()
    said = [*made.notes, *(one.sentence for one in made.verdicts), *trust, *following]
    assert not re.search(r"nan|None|<NA>|\binf\b", " ".join(said))
    assert len(said) <= 13
    module, given = parsed(made.next_step)
    if module == "bench.run":
        assert given.resume == (None if hasattr(given, "comm_hook") else path)
        assert parse_settings(shlex.split(made.next_step.command)[3:])
    assert (module == "bench.predict") == on_one
    if on_one:
        assert (given.run, given.gpus) == (path, "2,4,8")
        assert given.intra == "nvlink-h200"
    else:
        assert propose_next_step(run, []) is None


@pytest.mark.parametrize(
    ("link", "ranks", "lab"),
    [
        ("1gbit", ("host0", "host1"), "--hosts 2 --rate 1gbit"),
        ("1gbit", ("host0", "host0", "host1", "host1"), "--hosts 2 --rate 1gbit --ranks-per-host 2"),
    ],
)
def test_a_labs_commands_stay_in_the_lab(link, ranks, lab):
    """Outside of it the same command measures loopback. Oracle: the lab's parser."""
    places = [{"rank": i, "host": host} for i, host in enumerate(ranks)]
    typed = "python -m bench.run --modes ddp --out results/there --rounds 9"
    manifest = made_manifest(link=link, ranks=places, command=typed)
    assert (
        write_repeat_command(manifest)
        == f"python -m bench.lab {lab} -- python -m bench.run --modes ddp --rounds 9"
    )
    options = parse([*shlex.split(write_repeat_command(manifest))[3:]])
    assert options.link.label == link
    assert write_repeat_command(made_manifest(command=typed)) == "python -m bench.run --modes ddp --rounds 9"
    wide = (over(CAP_1, DDP, 1 / 1.1, 1.1),)
    told = {"link": link, "ranks": places, "timing": {"measuring_s": 100.0}}
    step = conclude_run(made_run((SINGLE, DDP, CAP_1), wide, manifest=told, folder="x")).next_step
    assert step.command.startswith(f"python -m bench.lab {lab} -- python -m bench.run --resume x ")


def test_most_comparisons_are_decided_after_the_time_that_was_said():
    """Runs of 8 rounds and noise; those left open go on for as long as the command says."""
    rng, decided = np.random.default_rng(3), []
    while len(decided) < 50:
        truth, sd = rng.normal(0, 0.03, 4), rng.uniform(0.02, 0.08)

        def measured_in(rounds, truth=truth, sd=sd):
            log_ms = truth + sd * rng.standard_normal((rounds, 4)) + 0.05 * rng.standard_normal((rounds, 1))
            steps = {(str(i), "timed"): dict(enumerate(np.exp(log_ms[:, i]))) for i in range(4)}
            units = dict.fromkeys("0123", 1)
            pairs = [(c, "0") for c in "123"]
            return compare_pairs(pairs, FittedSteps(steps), units=units, margin=0.05)

        first = measured_in(8)
        open_ones = [one for one in first if one.answer == UNRESOLVED]
        if not open_ones:
            continue
        factor = max(
            TIME_FACTOR * (max(one.half_width for one in open_ones) / (math.log1p(0.05) / 2)) ** 2, 1.1
        )
        later = measured_in(min(math.ceil(8 * factor), 1500))
        names = [one.case_id for one in open_ones]
        decided.append(all(one.answer != UNRESOLVED for one in later if one.case_id in names))
    assert np.mean(decided) >= 0.7
