"""Watched training: the same bits, the same collectives, and rows of it."""

import contextlib
import json
import operator
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import psutil
import pytest
from commands import ROOT, eventually, find_free_port, finished, python
from made_project import commit
from rank_pool import run_ranks
from selection import in_campaign
from stand_ins import Patch

from ddp_bench.bench.common.process import make_package_command
from ddp_bench.bench.findings.watched import conclude_watch
from ddp_bench.bench.results.store import load_run
from ddp_bench.bench.watch import launch
from ddp_bench.bench.watch.ranks import buckets
from ddp_bench.bench.watch.result import write_result
from ddp_bench.bench.watch.steps import WARM_UP_STEPS

SCRIPTS = ROOT / "tests" / "watched_scripts.py"
PROBED = (
    *("plain", "default_caps", "caps_by_bucket", "loaders_and_evaluation", "no_sync", "by_flag", "gan"),
    *("every_micro_step", "two_in_one_backward", "skipped_steps", "unused_parameters", "sparse_gradients"),
    *("static_graph", "joined", "joined_by_active_ranks", "siamese", "two_backwards_a_step", "closures"),
    *("sharded_optimizer", "copied", "pickled", "own_group", "raising_backward", "nothing_unused"),
    *("epoch_never_set", "wrapped_by_a_package", "gathers_before_the_forward", "deprecated_option"),
)
HOOK = "a communication hook of its own"
OBSERVED = {
    "collectives_in_the_backward": "other collectives run between its buckets",
    "late_hook_of_the_user": HOOK,
    "group_of_one": "one rank",
    **dict.fromkeys(("hook_of_the_user", "power_sgd", "builtin_hook", "optimizer_in_the_backward"), HOOK),
}
"""Kinds that are observed only, and why."""

VIEWS = ("views", "kept_views")
WITHOUT_DDP = ("by_hand", "sharded", "replicated", "composed", "one_device")
COMPILED = ("compiled_inside", "compiled_outside", "compiled_step", "compiled_collective")
KINDS = (*PROBED, *OBSERVED, *VIEWS, *WITHOUT_DDP)
BUCKETS, HOOK_AT = 3, 4
FAULTS = (
    *(f"plain@buckets.Model.begin_bucket:{n}" for n in range(1, 1 + 5 * BUCKETS)),
    *(f"plain@buckets.Model.note_done:{n}" for n in (1, 11, 12)),
    *(f"plain@clock.PartClock.{end}:{n}" for end in ("enter", "leave") for n in range(21, 25)),
    *(f"plain@buckets.Model.{call}" for call in ("end_sync:2", "__init__:1", "register_hook:6")),
    *(f"plain@private.{call}" for call in ("list_gradient_marks:3", "register_hook:1")),
    *(f"plain@{call}" for call in ("steps.Watch.cut:9", "steps.Watch.write_start:1", "rows.json.dumps:12")),
    "gan@buckets.Model.begin_bucket:13",
    *("joined_by_active_ranks@buckets.Model.begin_bucket:9", "static_graph@buckets.Model.begin_bucket:12"),
)
"""Where the watch's own code raises on rank 1, and at which call; a probe's buckets are among them."""


PLAYED = """
import watched_scripts
if config:
    from ddp_bench.bench.watch import launch
    launch.install(config)
report(watched_scripts.play(kinds))
"""


def play_watched(folder, size, kinds, race=None):
    """Play kinds on watched ranks: their ends and rows, by rank and kind; `race` as in the configuration."""
    (folder / "ranks").mkdir()
    config = {**launch.make_config(folder, 10**6, seed=0), "hook_at": HOOK_AT, "race": race}
    return run_ranks(f"{config=}\n{kinds=}\n{PLAYED}", size, folder, meet=True)


@cache
def play_unwatched(size, kinds):
    """Play kinds on ranks that nobody watches."""
    with TemporaryDirectory() as folder:
        return run_ranks(f"config=None\n{kinds=}\n{PLAYED}", size, Path(folder), meet=True)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Kinds of so many ranks, unwatched and watched."""

    @cache
    def both(size, kinds):
        unwatched = play_unwatched(size, COMPILED if kinds == COMPILED else KINDS)
        return unwatched, play_watched(tmp_path_factory.mktemp("watched"), size, kinds)

    return both


def rows_of(rank, kind):
    """The rows of this kind."""
    return [row for row in rank["rows"] if row["kind"] == kind]


def has_probe(step):
    return any(sync["probe"] for sync in step["syncs"])


def assert_same(played, size, kinds, kind):
    """It trained to the same bits with as many collectives; the watched ranks' rows."""
    unwatched, watched = played(size, kinds)
    name = kind.partition("@")[0]
    for one, other in zip(unwatched, watched, strict=True):
        assert (one[name]["end"], one[name]["sent"]) == (other[kind]["end"], other[kind]["sent"]), kind
    return [rank[kind] for rank in watched]


def check_kind(played, size, kinds, kind):
    for rank in assert_same(played, size, kinds, kind):
        steps = rows_of(rank, "step")
        assert len(steps) > 10
        assert not rows_of(rank, "note")
        assert all(sum(one["parts"].values()) == pytest.approx(one["step_s"], abs=1e-5) for one in steps)
        probes = [one for one in steps if has_probe(one)]
        reasons = {row["why"] for row in rows_of(rank, "model")} - {None}
        rounds = kind in VIEWS and size == 3
        assert bool(probes) == (
            kind in PROBED or (kind in VIEWS and not rounds) or kind == "late_hook_of_the_user"
        )
        assert reasons == ({OBSERVED[kind]} if kind in OBSERVED else reasons if rounds else set())
        for one in (sync for step in probes for sync in step["syncs"] if "alone_s" in sync):
            held_s = one["end_s"] - max(one["ready_s"])
            assert 0 < one["alone_s"] <= held_s + 1e-6 or kind == "raising_backward"


@pytest.mark.parametrize("kind", KINDS)
def test_watched_training_ends_with_the_same_bits_and_as_many_collectives(played, kind):
    check_kind(played, 2, (*KINDS, *FAULTS), kind)


@pytest.mark.parametrize("kind", in_campaign(*KINDS))
def test_so_it_does_on_three_ranks(played, kind):
    check_kind(played, 3, KINDS, kind)


@pytest.mark.parametrize("kind", in_campaign(*COMPILED))
def test_so_it_does_where_models_are_compiled(played, kind):
    for rank in assert_same(played, 2, COMPILED, kind):
        assert not rows_of(rank, "note")
        assert any(map(has_probe, rows_of(rank, "step")))


@pytest.mark.parametrize("kind", FAULTS)
def test_an_exception_of_the_watch_on_one_rank_changes_nothing(played, kind):
    ranks = assert_same(played, 2, (*KINDS, *FAULTS), kind)
    notes = [[row["text"] for row in rows_of(rank, "note")] for rank in ranks]
    assert notes[0] == []
    assert [text.partition(", in ")[0] for text in notes[1]] == ["the watch ended after an error of its own"]
    assert rows_of(ranks[0], "step")[-1]["n"] > HOOK_AT


def test_both_ranks_draw_the_same_probes_and_know_the_same_buckets(played):
    watched = played(2, (*KINDS, *FAULTS))[1]
    for kind in ("plain", "gan", "no_sync"):
        syncs = [[sync for row in rows_of(rank[kind], "step") for sync in row["syncs"]] for rank in watched]
        probes = [[(sync["model"], sync["k"]) for sync in own if sync["probe"]] for own in syncs]
        assert probes[0] == probes[1] != []
    sizes = {tuple(rows_of(rank["plain"], "step")[-1]["syncs"][-1]["bytes"]) for rank in watched}
    parameters = rows_of(watched[0]["plain"], "model")[-1]["num_bytes"]
    assert [(len(one), sum(one)) for one in sizes] == [(BUCKETS, parameters)]


def test_caps_are_those_of_the_script(played):
    watched = played(2, (*KINDS, *FAULTS))[1]
    caps = {"plain": "0.001", "default_caps": "default", "caps_by_bucket": "0.001/0.002"}
    for kind, text in caps.items():
        assert {row["bucket_cap_mb"] for rank in watched for row in rows_of(rank[kind], "model")} == {text}


def test_which_steps_are_probes_depends_on_the_seed_and_on_nothing_of_a_rank():
    """And a quarter of them are: of 10,000 draws within five standard deviations."""

    def drawn(seed, number=0):
        watch = SimpleNamespace(config={"seed": seed})
        made = (SimpleNamespace(watch=watch, number=number, count=k) for k in range(10_000))
        return [buckets.Model.draw(one) < buckets.PROBE_SHARE for one in made]

    assert drawn(0) == drawn(0)
    for one, other in ((drawn(0), drawn(1)), (drawn(0), drawn(0, number=1))):
        assert sum(one) == pytest.approx(2500, abs=5 * (10_000 * 0.25 * 0.75) ** 0.5)
        assert sum(map(operator.ne, one, other)) > 3000, "independent draws differ in 3 of 8"


def last_rows(rank, kind):
    """The last row of each model or loader."""
    return list({row[kind]: row for row in rows_of(rank, kind)}.values())


def line_at(place):
    """The line of the script that FILE:LINE names."""
    name, _, number = place.rpartition(":")
    assert name == SCRIPTS.name
    return SCRIPTS.read_text().splitlines()[int(number) - 1]


def test_what_is_configured_badly_is_recorded_with_its_line(played):
    """And nothing of trainings that are not: gradients that were zeroed in between are no accumulation."""
    for rank in played(2, (*KINDS, *FAULTS))[1]:
        added = {
            kind: {row["accumulated"] for row in rows_of(rank[kind], "step") if row["n"] > WARM_UP_STEPS}
            for kind in KINDS
            if kind not in ("gan", "raising_backward")
        }
        (model,) = last_rows(rank["every_micro_step"], "model")
        assert added.pop("every_micro_step") == {2}
        assert "backward()" in line_at(model["kept_at"])
        assert set().union(*added.values()) == {0}
        of_gan = [row["accumulated"] for row in rows_of(rank["gan"], "step") if row["n"] > WARM_UP_STEPS]
        assert sorted(of_gan) == [*[0] * 14, *[1] * 14], "the discriminator backs up twice a step"
        unused = {kind: last_rows(rank[kind], "model")[0].get("unused") for kind in PROBED}
        assert {kind: found for kind, found in unused.items() if found is not None} == {
            "unused_parameters": True,
            "nothing_unused": False,
        }
        searching = {kind for kind in KINDS if any(row["search_s"] for row in rows_of(rank[kind], "step"))}
        assert searching == {"unused_parameters", "nothing_unused"}
        assert "DistributedDataParallel(" in line_at(last_rows(rank["plain"], "model")[0]["line"])
        (model,) = last_rows(rank["wrapped_by_a_package"], "model")
        assert (model["made_by"], "wrap(" in line_at(model["line"])) == ("transformers", True)
        loaders = {kind: last_rows(rank[kind], "loader") for kind in KINDS}
        found = {
            kind: [(one["passes"], one["epochs"]) for one in rows] for kind, rows in loaders.items() if rows
        }
        assert found == {"loaders_and_evaluation": [(2, 2)], "epoch_never_set": [(2, 1)]}
        for kind, workers in (("loaders_and_evaluation", 1), ("epoch_never_set", 0)):
            (loader,) = loaders[kind]
            assert (loader["workers"], loader["pinned"]) == (workers, False)
            assert "DataLoader(" in line_at(loader["line"])


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("by_hand", "collectives between the parts (10 of the default group in a step)"),
        ("sharded", "Its parameters are distributed (FSDP2, replicate)"),
        ("replicated", "Its parameters are distributed (FSDP2, replicate)"),
        ("composed", "collectives between the parts ("),
        ("one_device", "collectives between the parts (0 of the default group in a step)"),
    ],
)
def test_of_training_without_ddp_parts_are_shown_and_what_is_not_known_is_said(played, tmp_path, kind, said):
    for number, rank in enumerate(played(2, (*KINDS, *FAULTS))[1]):
        (tmp_path / "ranks").mkdir(exist_ok=True)
        text = "".join(f"{json.dumps(row)}\n" for row in rank[kind]["rows"])
        (tmp_path / "ranks" / f"host-{number}.jsonl").write_text(text)
    write_result(tmp_path, 0, quiet=True)
    run = load_run(tmp_path)
    (note,) = [note for note in conclude_watch(run).notes if "No forward of DistributedDataParallel" in note]
    assert said in note
    assert note.endswith("What communication adds is not known.")
    (rank, *_) = run.manifest.watched.ranks
    taken = {part for part, ms in rank.parts.items() if ms.estimate > 0}
    assert taken - {"collectives"} == {"backward", "optimizer", "other"}
    if kind in ("by_hand", "one_device"):  # those of FSDP2 and replicate differ between versions of torch
        assert ("collectives" in taken) == (kind == "by_hand")
    assert run.results[0].exposed_comm_ms is None


TRAINING = """
import os, signal, sys, time

def train(rank, mode):
    import torch
    torch.manual_seed(rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    begin = time.monotonic()
    for step in range(10**9 if mode == "forever" else 30):
        if time.monotonic() - begin > 120:
            break  # should nobody end it
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        if (mode, step) == ("killed", 10):
            time.sleep(1.1)  # rows of one second may be lost
        if (mode, step, rank) == ("killed", 20, 1):
            os.kill(os.getpid(), signal.SIGKILL)
    return model.module.weight.double().sum().item().hex()
"""
TRAIN = f"""{TRAINING}
import bench, models, report
assert bench.OWN and models.OWN and report.OWN
assert not any(path.endswith("site") for path in sys.path)

def work(rank, size, mode, port):
    import torch.distributed as dist
    ours = [name for name in sys.modules if name.split(".")[0] in ("ddp_bench", "msgspec", "pandas", "rich")]
    assert not ours or mode == "inside", ours
    os.environ |= {{"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_PORT": port}}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    dist.init_process_group("gloo")
    print(f"END {{train(rank, mode)}}\\n", end="", flush=True)
    dist.destroy_process_group()
    time.sleep(0.2)  # torch aborts where a thread of gloo holds an all-reduce as Python ends
    sys.exit(7 if mode == "code" else None)

if __name__ == "__main__":
    mode, port = sys.argv[1:]
    if "RANK" in os.environ:
        work(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), mode, os.environ["MASTER_PORT"])
    else:
        import torch.multiprocessing as mp
        import torch._dynamo  # so that no fork has to import it
        mp.start_processes(work, (2, mode, port), 2, start_method="spawn" if mode == "plain" else "fork")
"""
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project with packages of our names, and an environment that finds no ddp-bench."""
    folder = tmp_path_factory.mktemp("project")
    files = {f"{name}/__init__.py": "OWN = True\n" for name in ("bench", "models", "report")}
    commit(folder, {**files, "train.py": TRAIN, "mine/__init__.py": "", "mine/train.py": TRAIN})
    with Patch.context() as patched:
        patched.chdir(folder)
        patched.delenv("PYTHONPATH", raising=False)
        patched.setenv("OMP_NUM_THREADS", "1")
        yield folder


def rows_in(folder):
    files = (folder / "ranks").glob("*.jsonl")
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def watch(project, out, *words, options=("--steps", "20")):
    """The user's command, watched: as it ended, and its rows."""
    command = make_package_command("watch", "--out", str(project / out), *options, "--", *words)
    return finished(command, project), rows_in(project / out)


def make_training(way):
    """Make the command of a training of two ranks that `way` starts; they meet at a port of its own."""
    port = find_free_port()
    if way == "spawn":
        return sys.executable, "train.py", "plain", port
    return sys.executable, *TORCHRUN, port, "-m", "mine.train", "plain", port


@pytest.mark.parametrize("way", ["spawn", *in_campaign("module")])
def test_the_prefix_reaches_ranks_however_they_are_started(project, ranks, way):
    unwatched = ranks(f"{TRAINING}\nreport(train(cluster.rank, 'plain'))")
    done, rows = watch(project, way, *make_training(way))
    assert (done.returncode, done.stdout) == (0, "".join(f"END {end}\n" for end in unwatched)), done.stderr
    assert {(row["rank"], row["n"]) for row in rows if row["kind"] == "step"} == {
        (rank, n) for rank in (0, 1) for n in range(1, 21)
    }
    assert sorted(row["rank"] for row in rows if row["kind"] == "end") == [0, 1]
    assert {row["world_size"] for row in rows if row["kind"] == "start"} == {2}
    assert not any(row["kind"] == "note" for row in rows)


def test_what_a_killed_rank_saw_is_kept_and_the_exit_code_is_the_users(project):
    words = (sys.executable, "train.py", "killed", find_free_port())
    done, rows = watch(project, "killed", *words, options=("--steps", "200"))
    assert done.returncode == 1
    assert {row["kind"] for row in rows if row["rank"] == 1} >= {"start", "model"}
    assert [row["rank"] for row in rows if row["kind"] == "end"] in ([0], [])
    assert max(row["n"] for row in rows if row["kind"] == "step" and row["rank"] == 0) > 1


@pytest.mark.campaign
def test_stop_ends_the_command_with_0_after_its_steps(project):
    words = (sys.executable, "train.py", "forever", find_free_port())
    done, rows = watch(project, "stop", *words, options=("--steps", "40", "--stop"))
    assert done.returncode == 0, done.stderr
    ranks = {int(file.stem.rpartition("-")[2]) for file in (project / "stop" / "ranks").iterdir()}
    assert not [pid for pid in ranks if psutil.pid_exists(pid)], "what the command started goes on"
    assert {row["n"] for row in rows if row["kind"] == "step"} == {*range(1, 41)}


def test_a_signal_is_passed_on_and_the_exit_code_is_the_users(project):
    words = ("--", sys.executable, "train.py", "forever", find_free_port())
    command = make_package_command("watch", "--out", "signal", *words)
    process = subprocess.Popen(command, cwd=project, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        eventually(lambda: any(row["kind"] == "step" for row in rows_in(project / "signal")), within_s=150)
        process.send_signal(signal.SIGTERM)
        assert process.wait(100) == 128 + signal.SIGTERM
    finally:  # without us too, what mp.spawn has started often lives on
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_the_code_of_a_script_within_a_launchers_rank_is_its_own(project):
    port = find_free_port()
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": port, "LOCAL_RANK": "0"}
    command = make_package_command("watch", "--out", "inside", "--steps", "20", "train.py", "inside", port)
    done = finished(command, project, rank)
    assert (done.returncode, done.stdout.count("END")) == (0, 1), done.stderr
    rows = rows_in(project / "inside")
    assert [row["n"] for row in rows if row["kind"] == "step"] == [*range(1, 21)]
    assert {row["why"] for row in rows if row["kind"] == "model"} == {"one rank"}


IN_CODE = """
import os
import ddp_bench
folder = ddp_bench.watch("in-code", steps=5)
import torch
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(8):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).mean().backward()
    optimizer.step()
"""


def test_a_script_or_notebook_watches_itself(project):
    done = finished([sys.executable, "-c", IN_CODE], project, {"PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert [row["n"] for row in rows_in(project / "in-code") if row["kind"] == "step"] == [*range(1, 6)]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("-I", "-c", "print('theirs'); raise SystemExit(5)"), 5, "option -E or -I keeps it from reading"),
        (("-c", "print('theirs')"), 0, "it ended before its first step, or runs elsewhere"),
    ],
)
def test_where_no_process_was_reached_it_says_why(project, words, code, said):
    done, _ = watch(project, f"none{code}", sys.executable, *words)
    assert (done.returncode, done.stdout) == (code, "theirs\n")
    assert said in done.stderr


def test_a_hidden_sitecustomize_runs_as_before(project):
    (project / "theirs").mkdir()
    (project / "theirs" / "sitecustomize.py").write_text("import sys\nsys.theirs = __file__\n")
    theirs = str(project / "theirs")
    config = launch.make_config(project, 5)
    environment = launch.make_environment(config, {**os.environ, "PYTHONPATH": theirs})
    done = python("-c", "import sys; print(sys.theirs, *sys.path[1:2])", env=environment)
    assert done.stdout.split() == [str(Path(theirs) / "sitecustomize.py"), theirs]


@pytest.mark.parametrize(
    "words", ["", "train.py", "--steps 0 -- x", "--bucket-cap-mb 1,1 -- x", "-- no-such-program"]
)
def test_a_mistake_is_one_line(project, words):
    done = finished(make_package_command("watch", *words.split()), project)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
