"""`ddp-bench`: one entry for all commands, in a checkout or installed among packages of our names.

And a model of another library, by the real command.
"""

import re
import shutil
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from commands import ROOT, bench_run, finished
from made_project import OURS, commit, project_in

from ddp_bench.__main__ import COMMANDS
from ddp_bench.bench.results.store import load_run

SMALL = (
    *("--workload", "net:model", "--image-size", "4", "--batch-size", "8", "--device", "cpu", "--steps", "1"),
)


SHELLS = """
import contextlib, runpy, sys
for command in ("bench.run", "bench.gate", "report"):
    sys.argv = [command, "--help"]
    with contextlib.suppress(SystemExit):
        runpy.run_module(command, run_name="__main__", alter_sys=True)
print(sorted(name for name in sys.modules if name.partition(".")[0] in ("bench", "models", "report")))
"""


def test_python_m_in_a_checkout_loads_ours_by_the_one_name():
    done = finished([sys.executable, "-c", SHELLS], ROOT)
    assert done.stdout.splitlines()[-1] == str(["bench", "bench.gate", "bench.run", "report"]), done.stderr


GPT2 = """
import torch
from ddp_bench import Workload
from transformers import GPT2Config, GPT2LMHeadModel

VOCAB, SEQ = 200, 24


def sentences(batch_size, generator):
    ids = torch.randint(5, VOCAB, (batch_size, SEQ), generator=generator)
    lengths = torch.randint(SEQ // 3, SEQ + 1, (batch_size, 1), generator=generator)
    mask = (torch.arange(SEQ) < lengths).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)}


def make_gpt2():
    shape = dict(n_positions=SEQ, n_embd=64, n_layer=2, n_head=4)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, use_cache=False, **shape))


gpt2 = Workload(
    name="gpt2", module=make_gpt2, batch=sentences,
    batch_loss=lambda model, batch: model(**batch).loss.mean(),
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    unit="tokens", units_per_sample=SEQ,
)
"""


@pytest.mark.campaign
def test_a_model_of_transformers_is_proven_and_timed(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "gpt.py").write_text(GPT2)
    done = bench_run(
        *("--workload", "gpt:gpt2", "--modes", "dp,ddp", "--gpus", "2", "--batch-size", "4"),
        *("--device", "cpu", "--bucket-cap-mb", "default", "--rounds", "2"),
        *("--passes", "none", "--quiet", "--out", str(tmp_path / "run")),
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    cases = load_run(tmp_path / "run").cases
    assert set(cases["mode"]) == {"single", "dp", "ddp"}
    assert (cases["status"] == "ok").all(), cases["reason"].tolist()
    assert (cases["gradient_error"] < 1e-9).all()
    assert (cases["update_error"] < 1e-3).all()
    assert (cases["images_per_s"] > 0).all()


EACH = """
import sys
from ddp_bench.__main__ import console  # what the console script of an installed package calls
for line in sys.argv[1:]:
    sys.argv = ["ddp-bench", *line.split()]
    try:
        console()
    except SystemExit as end:
        print(end.code, flush=True)
"""
MISTAKES = {
    "rum": "ddp-bench: error: unknown command 'rum'; did you mean 'run'? known: run, watch, tune, ",
    "": "ddp-bench: error: name a command: run, watch, tune, ",
    "--verson": "ddp-bench: error: unrecognized arguments: --verson; did you mean --version?",
    "run --gpu x": "ddp-bench run: error: ",
    "tune --gpuz 2": "ddp-bench tune: error: unrecognized arguments",
    "report nowhere": "ddp-bench report: error: nowhere",
}


def test_help_versions_and_a_line_for_each_mistake_before_torch_is_imported(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')\n")
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = finished([sys.executable, "-c", EACH, *MISTAKES, "--version", "--help"], env=env)
    lines = done.stdout.splitlines()
    assert lines[: len(MISTAKES)] == ["2"] * len(MISTAKES)
    for line, said in zip(done.stderr.splitlines(), MISTAKES.values(), strict=True):
        assert line.startswith(said)
    assert re.match(r"ddp-bench \S+, torch \d", lines[len(MISTAKES)])
    helped = lines[lines.index("0", len(MISTAKES)) + 1 :]
    assert helped[0].startswith("usage: ddp-bench COMMAND")
    assert {(name, *what.split()) for name, what in COMMANDS.items()} <= {
        tuple(line.split()) for line in helped
    }


def ended(*command, folder=ROOT):
    return finished(command, folder, {"PYTHONPATH": None})


def pip(*arguments):
    done = ended(sys.executable, "-m", "pip", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Of a copy of the sources: building leaves files in them."""
    folder = tmp_path_factory.mktemp("sources")
    for name in (*OURS, "ddp_bench"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    pip("wheel", str(folder), "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder / "wheels"))
    (found,) = (folder / "wheels").glob("ddp_bench-*.whl")
    return found


@pytest.fixture(scope="module")
def programs(wheel, tmp_path_factory):
    """The folder of programs of a fresh environment, which takes what we depend on from this one."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip("--python", str(folder / "bin" / "python"), "install", "--no-deps", "--no-index", str(wheel))
    return folder / "bin"


@pytest.mark.campaign
def test_the_wheel_holds_what_the_page_needs_and_the_types(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    templates = {
        f"ddp_bench/bench/page/templates/{path.name}" for path in (ROOT / "bench/page/templates").iterdir()
    }
    others = ("py.typed", "bench/run/main.py", "bench/results/published.csv")
    assert templates | {f"ddp_bench/{name}" for name in others} <= names
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == {"ddp_bench"}


@pytest.mark.campaign
def test_every_command_works_in_a_project_with_the_same_names(programs, tmp_path):
    project = project_in(tmp_path / "project")
    command, runs = str(programs / "ddp-bench"), [str(tmp_path / name) for name in ("first", "second")]
    run = ("run", "--modes", "single,ddp", "--gpus", "1,2", *SMALL, "--rounds", "5")
    for out in runs:
        done = ended(command, *run, "--out", out, folder=project)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "ddp-bench" in done.stdout, "the next command is in the form that was typed"
        assert "python -m bench" not in done.stdout + done.stderr
        assert (Path(out) / "report.html").exists()
    page = ended(command, "report", runs[0], "--out", str(tmp_path / "page.html"), folder=project)
    assert page.returncode == 0, page.stderr
    gate = ended(command, "gate", *runs, "--html", str(tmp_path / "gate.html"), folder=project)
    assert gate.returncode in (0, 1, 3), gate.stderr
    assert (tmp_path / "gate.html").exists()
    assert "images/s" in gate.stdout
    commit(project, {})
    with (project / "net.py").open("a") as file:
        file.write("# changed: the same file on both sides is refused\n")
    turns = ("--interleave", "HEAD", "--out", str(tmp_path / "sides"), "--launches", "1", "--")
    gate = ended(command, "gate", *turns, *run[1:], "--passes", "none", folder=project)
    assert gate.returncode in (0, 1, 3), gate.stderr[-3000:]
    assert "images/s" in gate.stdout
    doctor = ended(command, "doctor", "--json", folder=project)
    assert doctor.returncode in (0, 1), doctor.stderr
    assert doctor.stdout.startswith("{")


@pytest.mark.campaign
def test_torchrun_starts_ours_in_a_project_with_the_same_names(programs, tmp_path):
    project = project_in(tmp_path / "project")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ddp_bench")
    run = ("run", "--modes", "ddp", "--gpus", "2", *SMALL, "--rounds", "1", "--passes", "none")
    done = ended(str(programs / "python"), *torchrun, *run, "--out", str(tmp_path / "run"), folder=project)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "run/report.html").exists()
