"""Every command that a run, a gate or an error prints works, and every branch that writes one was taken."""

import ast
import contextlib
import json
import shlex
import sys
from functools import partial
from pathlib import Path

import coverage
import pytest
from commands import ROOT
from doctor_machines import found_in, laptop
from documented import behind_a_launcher, own
from finding_cases import CAP_1, CAP_25, CPU, DDP, DP, FAILED, NAN, SINGLE, exposing, made_run, over
from made import made_manifest
from made_project import commit
from report_runs import case, measured
from tried_commands import put_run, stop_at_processes, tried
from watched_folders import training, write_rows

from ddp_bench.__main__ import COMMANDS, load_main
from ddp_bench.bench.common.cli import TYPED_ENV, NextStep
from ddp_bench.bench.findings.findings import conclude_run
from ddp_bench.bench.findings.next_step import propose_next_step
from ddp_bench.bench.gate.decide import Decision, Policy
from ddp_bench.bench.gate.judge import Change, EndErrors
from ddp_bench.bench.gate.more import is_interleaved, propose_command, write_interleave_command
from ddp_bench.bench.gate.result import Gate
from ddp_bench.bench.gate.runs import GateRun
from ddp_bench.bench.machine.conditions import Difference
from ddp_bench.bench.machine.launch import write_launched_command
from ddp_bench.bench.machine.watched import Watched
from ddp_bench.bench.results.commands import (
    name_training,
    write_repeat_command,
    write_resume_command,
    write_watch_comparison,
)
from ddp_bench.bench.results.store import read_manifest
from ddp_bench.bench.stats.interval import Interval
from ddp_bench.bench.watch.result import write_result
from ddp_bench.report.build import write_page

WRITERS = [ROOT / "bench" / name for name in ("findings/next_step.py", "gate/more.py", "results/commands.py")]
"""Modules of which every branch writes a part of a command."""

NOT_HERE = (
    ROOT / "bench/run/job.py",  # repeats what was typed
    *(ROOT / "bench" / name / "main.py" for name in ("predict", "run")),  # in help, read by the other test
)
"""Modules whose commands no situation writes."""

RUN = "results/made run"
PLACE = Path(RUN)
SAMPLE = "predictions/resnet18-2hosts/1gbit"
UNUSED = {"status": "failed", "reason": "give …", "reason_code": "unused_parameters"}
EXPOSED = DDP | exposing(11, 13) | measured(step_ms=100.0)
CAPS = CAP_1, CAP_25, case("ddp", 2, 160.0, bucket_cap_mb="100")
ROUNDS_20 = {"num_rounds": 20}
OPEN = over(DDP, DP, 1 / 1.1, 1.1)
KNOWN = over(EXPOSED, DP, 1.2, 1.3)
NO_CAP = KNOWN, *(over(cap, EXPOSED, 0.97, 1.01) for cap in CAPS)
H200 = case("ddp", 1, 98.0, device_name="NVIDIA H200")
TUNED = {"gradient_as_bucket_view": [True], "static_graph": [True], "batch_size": 8, "device": "cpu"}


def following(*cases, by=(), folder=PLACE, manifest=None, resumable=True, **settings):
    told = {"settings": settings, "timing": {"measuring_s": 100.0}, **(manifest or {})}
    step = conclude_run(made_run(cases, by, manifest=told, folder=folder, resumable=resumable)).next_step
    return [step.command] if step else []


def ranks(*hosts):
    return [{"rank": rank, "host": host} for rank, host in enumerate(hosts)]


def in_lab_of(*hosts, **more):
    return {"link": "1gbit", "ranks": ranks(*hosts), **more}


ARGUMENTS = ("--modes", "ddp", "--gpus", "2", "--device", "cpu")
AGENT = ("/env/bin/python", "/env/bin/torchrun", "--standalone", "--nproc-per-node", "2")
OF_SRUN = {"TORCHELASTIC_RUN_ID": "slurm-7.0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
LAUNCHERS = {
    "by hand": ({}, ["bash"], *ARGUMENTS),
    "torchrun": ({}, [*AGENT, "-m", "bench.run", *ARGUMENTS], *ARGUMENTS),
    "torchrun of a tune": (
        *({}, [*AGENT, "-m", "ddp_bench", "tune", "--gpus", "2"]),
        *("--preset", "tune", "--gpus", "2"),
    ),
    "torchrun as a module": (
        {},
        ["python", "-m", "torch.distributed.run", *AGENT[2:], "-m", "bench.run", *ARGUMENTS],
        *ARGUMENTS,
    ),
    "srun": (OF_SRUN, ["slurmstepd: [7.0]"], *ARGUMENTS),
}
LAUNCHED = {name: write_launched_command(*how) for name, how in LAUNCHERS.items()}
"""Commands as manifests hold them, by what started them."""

ONE_GPU = case("ddp", 1, 98.0) | measured(speedup=0.98)

OPEN_RUN = partial(following, SINGLE, DP | ROUNDS_20, DDP | ROUNDS_20, by=(OPEN,))
EXPOSED_RUN = partial(following, SINGLE, DP, EXPOSED, by=(KNOWN,))
ON_ONE = partial(following, SINGLE, calibrate=True, folder=Path("ONE"))
DECIDED = partial(following, SINGLE, DP, DDP, by=(over(DDP, DP, 1.2, 1.3),))

NEXT = {
    "unused parameters": partial(following, SINGLE, DP, DDP | UNUSED, gpus=[2], modes=["dp", "ddp"]),
    "forecast, NVLink": partial(ON_ONE, H200),
    "forecast, PCIe": partial(ON_ONE, H200 | {"device_name": "H100 PCIe"}),
    "no forecast of several": partial(following, SINGLE, H200, DDP, calibrate=True),
    "nothing compared": partial(following, SINGLE),
    "shared GPUs": partial(following, SINGLE, DDP | {"oversubscribed": True}, share_gpus=True, gpus=[2]),
    "one GPU": partial(following, SINGLE, ONE_GPU),
    "one GPU, costly": partial(following, SINGLE, ONE_GPU | measured(speedup=0.8)),
    "a side of a gate": partial(following, SINGLE, DP, DDP, by=(OPEN,), manifest={"interleaved_id": "abc"}),
    "open": OPEN_RUN,
    "open, with a margin": partial(OPEN_RUN, margin=0.049),
    "open, anew": partial(OPEN_RUN, resumable=False, **TUNED),
    "open, anew on GPUs": partial(OPEN_RUN, resumable=False, gpus=[2], device="cuda", precision="bf16"),
    "open, in a lab": partial(OPEN_RUN, manifest=in_lab_of("host0", "host1")),
    **{
        f"open, by {name}": partial(OPEN_RUN, manifest={"command": typed}) for name, typed in LAUNCHED.items()
    },
    **{
        f"tune, by {name}": partial(EXPOSED_RUN, manifest={"command": typed})
        for name, typed in LAUNCHED.items()
    },
    "anew, of a preset": partial(
        OPEN_RUN, resumable=False, manifest={"command": "ddp-bench run --preset=full --device cpu --json"}
    ),
    "tune, of a preset with a model": partial(
        EXPOSED_RUN, manifest={"command": "ddp-bench run --preset quick --workload net:make --device cpu"}
    ),
    "of a file of settings": partial(
        OPEN_RUN,
        resumable=False,
        manifest={"command": "ddp-bench run --config gone.toml"},
        least_block_s=1.0,
        steps=2,
    ),
    "under torchrun in a lab": partial(
        OPEN_RUN, manifest=in_lab_of("host0", "host0", command="torchrun --nproc-per-node 2 -m bench.run")
    ),
    "beside other programs": partial(
        following, SINGLE | CPU, DDP | CPU, manifest={"load": [{"cores": 2, "others": 1.7}]}
    ),
    "open, in a lab of two ranks": partial(OPEN_RUN, manifest=in_lab_of("host0", "host0", "host1", "host1")),
    "open, of fixed rounds": partial(OPEN_RUN, rounds=20),
    "too few rounds": partial(following, SINGLE, DP, DDP, by=(over(DDP, DP, NAN, NAN, num_rounds=2),)),
    "too noisy": partial(following, SINGLE, DP, DDP, by=(over(DDP, DP, 0.3, 3.0),)),
    "tune": partial(EXPOSED_RUN, **TUNED),
    "tune in a lab": partial(EXPOSED_RUN, manifest=in_lab_of("host0", "host1"), **TUNED),
    "tune of one bucket": partial(following, SINGLE, DP, EXPOSED | {"num_buckets": 1}, by=(KNOWN,)),
    "a cap exposes little": partial(
        following, SINGLE, DP, EXPOSED, CAP_1 | exposing(1, 2) | measured(step_ms=100.0), by=(KNOWN,)
    ),
    "no cap helps": partial(following, SINGLE, DP, EXPOSED, *CAPS, by=NO_CAP, gpus=[2], device="cpu"),
    "no cap helps, with comm": partial(
        following, SINGLE, DP, EXPOSED | measured(comm_ms=40.0), *CAPS, by=NO_CAP, gpus=[2], device="cpu"
    ),
    "several sizes": partial(EXPOSED_RUN, batch_size=[10, 20]),
    "no cap nor hook helps": partial(following, SINGLE, DP, EXPOSED, *CAPS, by=NO_CAP, comm_hook=["bf16"]),
    "a baseline": DECIDED,
    "a baseline here": partial(DECIDED, folder=Path("ONE/inner/..")),
    "no baseline of failures": partial(DECIDED, CAP_1 | FAILED),
    "an archive": partial(DECIDED, folder=Path("a.zip")),
}

TYPED = "python -m bench.run --modes ddp --gpus 2 --device cpu --out 'results/over there' --rounds 9"
SETTINGS = {"modes": ["ddp"], "gpus": [2], "device": "cpu", "gradient_as_bucket_view": [True]}
OF_LIB = {"settings": {**SETTINGS, "workload": "net:make"}}


def change(ratio=1.0, error=0.001):
    interval = None if ratio is None else Interval(ratio, ratio * 0.9, ratio * 1.1)
    told = dict.fromkeys(("case_id", "name", "label"), "x")
    told |= {"verdict": "undecided", "metric": "images_per_s", "stand_in": False}
    return Change(**told, ratio=interval, threshold=0.05, error=error, decides=True)


def proposed(*changes, side=None, verdict="undecided", looks=(), **told):
    """What a gate of two sides that are alike proposes."""
    run = GateRun(Path("after"), made_manifest(command=TYPED, **{**OF_LIB, **(side or {})}), ())
    decided = {"policy": Policy(looks=looks), "decision": Decision(verdict, changes)}
    gate = Gate(
        baseline=run, candidate=run, comparisons=changes, errors=EndErrors(0.01, 0.01), **decided, **told
    )
    found = propose_command(gate)
    return (
        [found.command.replace(" REF ", " HEAD ").replace(" PYTHON ", f" {sys.executable} ")] if found else []
    )


def deciding(*changes, side=None, launches=0, lacking=0, asked=None, total_s=20.0):
    timing = {"timing": {"total_s": total_s}} if total_s else {}
    how = {"interleaved": launches > 0, "num_launches": max(launches, 1), "asked": asked}
    return proposed(*changes, side={**(side or {}), **timing}, looks=(lacking,) if lacking else (), **how)


def alike(*differing, **side):
    blocking = tuple(Difference(name=name, then="a", now="b", blocking=True) for name in differing)
    return proposed(side=side, verdict="not comparable", obstacle="other conditions", differences=blocking)


def distinguish(**side):
    return proposed(side=side, verdict="regression")


IN_TURNS = (
    *("--interleave", "HEAD", "--strict", "--launches", "6", "--junit", "out.xml", "--json", "--"),
    *("--workload", "net:make", "--rounds", "6", "--device", "cpu"),
)
KNOWN_COMMIT = {"settings": SETTINGS, "git": {"commit": "HEAD"}}
LOADED = {"settings": SETTINGS, "load": [{"cores": 2, "others": 1.0, "seconds": 9.0}]}
GATES = {
    "folders": partial(deciding, change()),
    "folders, of a known commit": partial(deciding, change(), side=KNOWN_COMMIT),
    "folders of a lab": partial(deciding, change(), side=in_lab_of("host0", "host1", settings=SETTINGS)),
    "in turns": partial(deciding, change(), launches=6, asked=IN_TURNS),
    "in turns, once": partial(deciding, change(0.8), launches=1, asked=IN_TURNS),
    "in turns, too short a time": partial(
        deciding, change(), launches=1, lacking=6, asked=("--max-time", "45s", *IN_TURNS)
    ),
    "in turns, without times": partial(deciding, change(), launches=6, asked=IN_TURNS, total_s=None),
    "in turns, unknown": partial(deciding, change(None), launches=6, asked=IN_TURNS),
    "in turns, too noisy": partial(deciding, change(error=1.0), launches=6, asked=IN_TURNS),
    "in turns, under load": partial(deciding, change(), side=LOADED, launches=6, asked=IN_TURNS),
    "folders, under load": partial(deciding, change(), side=LOADED),
    "other options": partial(alike, "batch_per_device", settings=SETTINGS),
    "another link": partial(alike, "link", **in_lab_of("host0", "host1", settings=SETTINGS)),
    "another torch": partial(alike, "torch"),
    "another CPU": partial(alike, "CPU"),
    "another CPU, in a lab": partial(alike, "CPU", **in_lab_of("host0", "host1", settings=SETTINGS)),
    "other watched trainings": partial(alike, "CPU", watched={"num_steps": 80}),
    "code or machine": distinguish,
    "code or machine, in a lab": partial(distinguish, **in_lab_of("host0", "host1")),
    "script or machine": partial(distinguish, watched={"num_steps": 80}),
    "nothing open": partial(proposed, verdict="pass"),
}


def test_the_launcher_is_part_of_what_was_typed():
    mine, agent = "--modes ddp --gpus 2 --device cpu", "torchrun --standalone --nproc-per-node 2"
    assert {
        "by hand": f"python -m bench.run {mine}",
        "torchrun": f"{agent} -m bench.run {mine}",
        "torchrun of a tune": f"{agent} -m ddp_bench run --preset tune --gpus 2",
        "torchrun as a module": f"{agent} -m bench.run {mine}",
        "srun": f"srun --ntasks=4 --ntasks-per-node=2 python -m bench.run {mine}",
    } == LAUNCHED


def of_manifest():
    manifest = made_manifest(command=TYPED)
    assert not is_interleaved([manifest, manifest])
    assert propose_next_step(made_run([SINGLE]), []) is None
    assert write_interleave_command(*[made_manifest(**in_lab_of("host0"))] * 2) == ""
    assert write_repeat_command(made_manifest(command="python 'unclosed")) == "python -m bench.run"
    with_equals = write_repeat_command(made_manifest(command=TYPED.replace("--out ", "--out=")))
    assert "--out" not in with_equals
    return [
        write_repeat_command(manifest),
        with_equals,
        write_repeat_command(made_manifest(command=TYPED, **in_lab_of("host0", "host1"))),
    ]


@pytest.mark.parametrize("typed", ["", "ddp-bench"])
def test_every_command_has_the_form_that_is_typed_now(typed, monkeypatch):
    """A run of the one form, looked at by the other; what torchrun starts keeps its form."""
    monkeypatch.setenv(TYPED_ENV, typed)
    ours = f"{typed} run" if typed else "python -m bench.run"
    for form in ("python -m bench.run", "ddp-bench run", "python -m ddp_bench run"):
        for before in ("", "srun --ntasks=2 "):
            assert (
                write_repeat_command(made_manifest(command=f"{before}{form} --gpus 2"))
                == f"{before}{ours} --gpus 2"
            )
    launched = "torchrun --nproc-per-node 2 -m bench.run --gpus 2"
    assert write_repeat_command(made_manifest(command=launched)) == launched


def of_errors(capsys):
    """Commands that follow a colon or "then" in what errors say."""
    assert load_main("gate")(["--interleave", "HEAD", "--device", "cpu"]) == 2
    assert load_main("report")([RUN, "ONE", "--html"]) == load_main("report")([RUN, "ONE"]) == 2
    (Path(RUN) / "cases.csv").rename("cases.csv")
    assert write_page(PLACE) is None
    Path("cases.csv").rename(Path(RUN) / "cases.csv")
    write_result(write_rows(Path("watched"), training()), 0, quiet=False, with_page=False)
    said = capsys.readouterr().err
    found = [line.rpartition("python -m ")[2].partition(" makes the page")[0] for line in said.splitlines()]
    found = [f"python -m {words}" for words in found if not words.endswith("--help")]
    assert len(found) == 4
    return [words.replace(" --device …", " --device cpu") for words in found]


def of_folders():
    put_run(SAMPLE, Path("of mine"))
    kept = json.loads(Path("of mine/manifest.json").read_text())
    kept["settings"] |= {"workload": "net:make", "arch": None}
    Path("of mine/manifest.json").write_text(json.dumps(kept))
    return [write_resume_command(read_manifest(folder), folder) for folder in (Path("of mine"), PLACE)]


def of_watched():
    """The user's command in place of COMMAND, where it is known and starts the training by itself."""
    step = NextStep("", write_watch_comparison("again", candidate=RUN))
    typed = ("torchrun", "train.py", "--name=a b"), ("train.py",), ("-m", "train"), ()
    named = [name_training(step, Watched(command=words)) for words in typed]
    assert [one == step for one in named] == [False, True, True, True]
    assert " -- torchrun train.py '--name=a b' && " in named[0].command
    assert name_training(step, None) == step
    return [named[0].command]


def of_doctor(folder):
    """The way to keep two devices from sharing a core, on four cores of two hardware threads."""
    return [
        found_in(laptop(), folder / "laptop")["cores"].advice.removesuffix(" takes one thread of each core")
    ]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A repository with a model, and with runs under the names of the situations."""
    commit(tmp_path, {"net.py": "from torchvision.models import resnet18 as make\n"})
    put_run(SAMPLE, tmp_path / RUN)
    put_run("h200-calibrated", tmp_path / "ONE")
    (tmp_path / "ONE/inner").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "net", raising=False)
    stop_at_processes(monkeypatch)


def calls(path):
    """Calls of `format_command` in a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("format_command", "cli.format_command"):
            yield node


def sources():
    return [path for folder in ("bench", "report") for path in sorted((ROOT / folder).rglob("*.py"))]


def within_functions(path):
    """Lines of the bodies of functions: what else there is ran with the import."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {line for node in functions for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1)}


@pytest.mark.usefixtures("in_process", "here")
def test_every_command_that_is_printed_works(tmp_path, capsys):
    lines = {path: {call.lineno for call in calls(path) if len(call.args) > 1} for path in sources()}
    written = {path: found for path, found in lines.items() if found and path not in NOT_HERE}
    watched = coverage.Coverage(data_file=None, config_file=False, branch=True, include=[*map(str, written)])
    with watched.collect():
        found = [command for situation in (*NEXT.values(), *GATES.values()) for command in situation()]
        found += [*of_manifest(), *of_errors(capsys), *of_folders(), *of_watched(), *of_doctor(tmp_path)]
        found += [write_launched_command(*how) for how in LAUNCHERS.values()]
    watched.json_report(outfile=str(tmp_path / "covered.json"))
    files = json.loads((tmp_path / "covered.json").read_text())["files"]
    by_path = {Path(name).resolve(): one for name, one in files.items()}
    assert by_path.keys() == written.keys(), "modules that write commands, and no situation is theirs"
    missing = []
    for path, of_file in by_path.items():
        inside = within_functions(path) if path in WRITERS else written[path]
        missing += [(path.name, line) for line in of_file["missing_lines"] if line in inside]
        missing += [(path.name, arc) for arc in of_file["missing_branches"] if arc[0] in inside]
    assert not missing, "no situation above leads there"
    for one in dict.fromkeys(found):
        words = shlex.split(one)
        if words[0] in ("torchrun", "srun"):
            words = behind_a_launcher(words)
        assert own(words), one
        is_of_suite = "--interleave" in words and "--workload" not in words
        with contextlib.chdir(ROOT if is_of_suite else "."):
            tried(words)


def test_a_command_that_is_only_named_is_one_of_ours():
    named = [call.args[0] for path in sources() for call in calls(path) if call.args]
    assert len(named) > 20
    for name in named:
        assert not isinstance(name, ast.Constant) or name.value in COMMANDS
