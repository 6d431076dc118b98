"""Users' projects, by the real command: packages with our names, models of every kind, both proofs.

And `ddp-bench`: one entry for all commands, in a checkout or installed among packages of our names.
"""

import json
import shutil
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import ROOT, bench_run, finished
from made_project import commit

from ddp_bench.__main__ import COMMANDS
from ddp_bench.bench.process import own_command
from ddp_bench.bench.results.store import load_run

OURS = ("bench", "models", "report")
"""Folders of ours whose names a project may have too."""

OWN_PACKAGES = """
import dataclasses
import bench, models, report
from models.layers import activation
assert bench.OWN and models.OWN and report.OWN
"""
NET = """
import bench, models, report
from models.net import Net
def model():
    return Net()
"""
MODELS = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        from models import layers
        self.first, self.last = torch.nn.Linear(48, layers.WIDTH), torch.nn.Linear(layers.WIDTH, 4)
    def forward(self, images):
        import bench, models, report
        from models.layers import activation
        assert bench.OWN and models.OWN and report.OWN
        return self.last(activation(self.first(images.flatten(1))))
"""
LAYERS = """
import torch
WIDTH = 16
activation = torch.relu
"""
SMALL = (
    *("--workload", "net:model", "--image-size", "4", "--batch-size", "8", "--device", "cpu", "--steps", "1"),
)


def project_in(folder):
    """A project whose packages have our names and the attribute OWN, and are imported in every forward."""
    for name in OURS:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("OWN = True\n")
    (folder / "models/net.py").write_text(MODELS)
    (folder / "models/layers.py").write_text(LAYERS)
    (folder / "net.py").write_text(NET)
    return folder


TRANSFORMER = """
import torch
from torch import nn
from torch.nn import functional

from ddp_bench import Workload

VOCAB, SEQ, WIDTH = 50, 12, 16


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=2, dim_feedforward=32, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids, attention_mask, scale=1.0):
        hidden = self.blocks(self.words(input_ids) * scale, src_key_padding_mask=~attention_mask)
        return {"logits": self.head(hidden), "hidden": [hidden, None]}


def sentences(batch_size, generator):
    ids = torch.randint(VOCAB, (batch_size, SEQ), generator=generator)
    lengths = torch.randint(SEQ // 2, SEQ + 1, (batch_size, 1), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.arange(SEQ) < lengths, "labels": ids, "scale": 2.0}


def of_tokens(model, batch):
    named = {name: batch[name] for name in ("attention_mask", "scale")}
    logits = model(batch["input_ids"], **named)["logits"]
    losses = functional.cross_entropy(logits.mT, batch["labels"], reduction="none")
    mask = batch["attention_mask"]
    return ((losses * mask).sum(1) / mask.sum(1)).mean()


transformer = Workload(
    name="transformer",
    module=Transformer,
    batch=sentences,
    batch_loss=of_tokens,
    optimizer=torch.optim.AdamW,
    unit="tokens",
    units_per_sample=SEQ,
)
"""


def are_proven(cases, modes):
    """Every mode was measured after both proofs."""
    assert set(cases["mode"]) == modes
    assert (cases["status"] == "ok").all(), cases["reason"].tolist()
    assert (cases["gradient_error"] < 1e-9).all()
    assert (cases["update_error"] < 1e-3).all()


WITHIN_A_STEP = """
class Own(Transformer):
    def forward(self, *arguments, **named):
        import bench, models, report
        from models.layers import activation
        assert bench.OWN and models.OWN and report.OWN
        return super().forward(*arguments, **named)


own = dataclasses.replace(transformer, module=Own)
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    project = project_in(folder / "project")
    (project / "own.py").write_text(OWN_PACKAGES + TRANSFORMER + WITHIN_A_STEP)
    command = own_command(
        *("run", "--workload", "own:own", "--device", "cpu", "--gpus", "2", "--batch-size", "4"),
        *("--modes", "dp,ddp,fsdp,pipeline", "--data", "host", "--accumulate", "2", "--rounds", "1"),
        *("--steps", "1", "--bucket-cap-mb", "default", "--out", str(folder / "run")),
    )
    ended = finished(command, project, {"PYTHONPATH": str(ROOT)})
    assert ended.returncode == 0, ended.stderr[-4000:]
    cases = load_run(folder / "run").cases
    return SimpleNamespace(project=project, run=folder / "run", said=ended.stdout, cases=cases)


def test_a_batch_of_names_and_a_mask_is_proven_in_every_mode_and_pass(done):
    split = done.cases[done.cases["mode"] == "pipeline"]
    assert split["reason"].str.contains("has batch_loss, which calls the whole model").all()
    cases = done.cases.drop(split.index)
    are_proven(cases, {"single", "dp", "ddp", "fsdp"})
    assert (cases.loc[cases["mode"] == "dp", ["dp_scatter_ms", "dp_gather_ms"]] > 0).all(axis=None)


def test_it_counts_what_its_workload_says(done):
    assert "tokens/s (95%)" in done.said
    assert "4 samples of 12 tokens per device" in done.said
    assert "image" not in done.said
    cases = done.cases[done.cases["status"] == "ok"].set_index("mode")
    assert set(cases["unit"]) == {"tokens"}
    assert cases["global_batch"].to_dict() == {"single": 4, "dp": 8, "ddp": 16, "fsdp": 8}
    for _, row in cases.iterrows():
        assert row["images_per_s"] == pytest.approx(row["global_batch"] * 12 * 1000 / row["step_ms"])


def test_its_packages_are_trained_and_our_page_is_written(done):
    assert "<html" in (done.run / "report.html").read_text()
    command = json.loads((done.run / "manifest.json").read_text())["command"]
    assert command.count("--out") == 1
    page = done.run.parent / "page.html"
    again = own_command("report", str(done.run), "--out", str(page))
    assert finished(again, done.project, {"PYTHONPATH": str(ROOT)}).returncode == 0
    assert page.exists()


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


OWN = """
import torch
from torch import nn
from torch.nn import functional

from ddp_bench import Workload

def rows(batch_size, generator):
    return torch.randn(batch_size, 6, generator=generator), torch.randn(batch_size, 2, generator=generator)


def adam(parameters):
    weights = [p for p in parameters if p.ndim > 1]
    others = [p for p in parameters if p.ndim < 2]
    groups = [{"params": weights, "name": "weights"}, {"params": others, "name": "others", "lr": 1e-3}]
    return torch.optim.Adam(groups, lr=1e-2)


mlp = Workload(
    name="mlp",
    module=lambda: nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2)),
    batch=rows,
    loss=functional.mse_loss,
    optimizer=adam,
)
"""


def cases_of(folder, name, *settings):
    (folder / "own.py").write_text(OWN + TRANSFORMER)
    done = bench_run(
        *("--workload", f"own:{name}", "--device", "cpu", "--gpus", "2", "--batch-size", "4"),
        *("--rounds", "1", "--steps", "1", "--bucket-cap-mb", "default", "--out", str(folder / "run")),
        *settings,
        env={"PYTHONPATH": str(folder)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return load_run(folder / "run").cases


@pytest.mark.campaign
def test_an_mlp_with_named_groups_of_adam_in_every_form(tmp_path):
    """Its second group would be empty if the parameters could be gone through but once."""
    modes = ("--modes", "dp,ddp,fsdp,pipeline,partition", "--zero-optimizer", "off,on")
    cases = cases_of(tmp_path, "mlp", *modes, "--fused-optimizer", "on")
    are_proven(cases, {"single", "dp", "ddp", "fsdp", "pipeline", "partition"})
    two = cases[cases["mode"] != "single"]
    assert set(two["global_batch"]) == {8}
    assert set(two.loc[two["layers_by_device"].notna(), "mode"]) == {"partition", "pipeline"}
    assert cases.set_index("mode").loc["partition", "bubble_pct"] >= 50
    ranks = load_run(tmp_path / "run").blocks.groupby("case_id")["rank"].nunique()[two["case_id"]]
    assert [*ranks] == [1 if mode == "dp" else 2 for mode in two["mode"]]
    assert "Forms of parallel training" in (tmp_path / "run/report.html").read_text()


ZOO = """
import torch
from ddp_bench import Workload

SIZE, VOCAB, SEQ = 64, 200, 24


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def images(batch_size, generator):
    pixels = torch.randn(batch_size, 3, SIZE, SIZE, generator=generator)
    return pixels, torch.randint(10, (batch_size,), generator=generator)


def of_timm(name, **more):
    def module():
        import timm
        return timm.create_model(name, pretrained=False, num_classes=10, **more)
    return Workload(name=name, module=module, batch=images, optimizer=adamw, image_size=SIZE, unit="images")


convnext = of_timm("convnext_atto", drop_path_rate=0.2, drop_rate=0.1)


def sentences(batch_size, generator):
    ids = torch.randint(5, VOCAB, (batch_size, SEQ), generator=generator)
    lengths = torch.randint(SEQ // 3, SEQ + 1, (batch_size, 1), generator=generator)
    mask = (torch.arange(SEQ) < lengths).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)}


def make_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel
    shape = dict(n_positions=SEQ, n_embd=64, n_layer=2, n_head=4)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, use_cache=False, **shape))


gpt2 = Workload(
    name="gpt2", module=make_gpt2, batch=sentences,
    batch_loss=lambda model, batch: model(**batch).loss.mean(), optimizer=adamw,
    unit="tokens", units_per_sample=SEQ,
)
"""


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("package", "name"),
    [("timm", "convnext"), ("transformers", "gpt2")],
)
def test_it_is_proven_and_timed(package, name, tmp_path):
    pytest.importorskip(package)
    (tmp_path / "zoo.py").write_text(ZOO)
    done = bench_run(
        *("--workload", f"zoo:{name}", "--modes", "dp,ddp", "--gpus", "2", "--batch-size", "4"),
        *("--image-size", "64", "--device", "cpu", "--bucket-cap-mb", "default", "--rounds", "2"),
        *("--passes", "none", "--quiet", "--out", str(tmp_path / "run")),
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    cases = load_run(tmp_path / "run").cases
    are_proven(cases, {"single", "dp", "ddp"})
    assert (cases["images_per_s"] > 0).all()


SCRIPT = "import sys; from ddp_bench.__main__ import console; sys.argv[0] = 'ddp-bench'; console()"
"""What the console script of an installed package does."""


@pytest.fixture
def without_torch(tmp_path):
    """An environment in which whatever imports torch fails."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')\n")
    return {"PYTHONPATH": f"{tmp_path}:{ROOT}"}


def entered(argument, env):
    return finished([sys.executable, "-c", SCRIPT, argument], env=env)


def test_help_names_every_command_on_a_line_of_its_own(without_torch):
    done = entered("--help", without_torch)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ddp-bench COMMAND")
    lines = done.stdout.splitlines()
    assert all(
        any(line.split() == [name, *what.split()] for line in lines) for name, what in COMMANDS.items()
    )


MISTAKES = {
    "rum": "ddp-bench: error: unknown command 'rum'; did you mean 'run'? known: run, tune, ",
    "": "ddp-bench: error: name a command: run, tune, ",
    "--verson": "ddp-bench: error: unrecognized arguments: --verson; did you mean --version?",
    "run --gpu x": "ddp-bench run: error: ",
    "tune --gpuz 2": "ddp-bench tune: error: unrecognized arguments",
    "report nowhere": "ddp-bench report: error: nowhere",
}

EACH = """
import sys
from ddp_bench.__main__ import console
for line in sys.argv[1:]:
    sys.argv = ["ddp-bench", *line.split()]
    try:
        console()
    except SystemExit as end:
        print(end.code)
"""


def test_a_mistake_is_one_line_before_torch_is_imported(without_torch):
    command = [sys.executable, "-c", EACH, *MISTAKES]
    done = finished(command, env=without_torch)
    assert done.stdout == "2\n" * len(MISTAKES)
    for line, said in zip(done.stderr.splitlines(), MISTAKES.values(), strict=True):
        assert line.startswith(said)


def test_versions_come_from_what_is_installed(without_torch):
    done = entered("--version", without_torch)
    assert done.returncode == 0
    assert done.stdout.startswith("ddp-bench ")
    assert ", torch " in done.stdout


def test_our_own_processes_start_in_any_folder(tmp_path):
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench/__init__.py").write_text("raise SystemExit('theirs')\n")
    for safe in ("", "1"):
        env = {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": safe}
        done = finished(own_command("report", "nowhere"), tmp_path, env)
        assert done.stderr.startswith("report: error: nowhere"), done.stderr


def ended(*command, folder):
    return finished(command, folder, {"PYTHONPATH": None})


def pip(*arguments):
    done = ended(sys.executable, "-m", "pip", *arguments, folder=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A copy of the sources: building leaves files in them."""
    folder = tmp_path_factory.mktemp("sources")
    ignored = shutil.ignore_patterns("__pycache__")
    for name in (*OURS, "ddp_bench"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(sources):
    out = sources.parent / "wheels"
    pip("wheel", str(sources), "--no-deps", "--no-build-isolation", "--wheel-dir", str(out))
    (found,) = out.glob("ddp_bench-*.whl")
    return found


@pytest.fixture(scope="module", params=["wheel", "editable"])
def programs(request, sources, wheel, tmp_path_factory):
    """The folder of programs of a fresh environment, which takes what we depend on from this one."""
    folder = tmp_path_factory.mktemp(request.param)
    venv.create(folder, with_pip=False)
    programs = folder / "bin"
    what = [str(wheel)] if request.param == "wheel" else ["--no-build-isolation", "--editable", str(sources)]
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip("--python", str(programs / "python"), "install", "--no-deps", "--no-index", *what)
    return programs


@pytest.mark.campaign
def test_the_wheel_holds_what_the_page_needs_and_the_types(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    templates = {f"ddp_bench/report/templates/{path.name}" for path in (ROOT / "report/templates").iterdir()}
    assert templates | {"ddp_bench/py.typed", "ddp_bench/bench/run/main.py"} <= names
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
    doctor = ended(command, "doctor", "--json", folder=project)
    assert doctor.returncode in (0, 1), doctor.stderr
    assert doctor.stdout.startswith("{")


@pytest.mark.campaign
def test_the_gate_in_turns_works_in_a_project_with_the_same_names(programs, tmp_path):
    project = project_in(tmp_path / "project")
    commit(project, {})
    # Another content, for the same file on both sides is refused.
    for name in ("net.py", "models/net.py"):
        (project / name).write_text((project / name).read_text() + "\n# changed\n")
    of_run = ("--modes", "ddp", "--gpus", "1", *SMALL, "--rounds", "5", "--passes", "none")
    where = ("--out", str(tmp_path / "sides"), "--launches", "1")
    gate = ended(
        str(programs / "ddp-bench"), "gate", "--interleave", "HEAD", *where, "--", *of_run, folder=project
    )
    assert gate.returncode in (0, 1, 3), gate.stderr[-3000:]
    assert "images/s" in gate.stdout


@pytest.mark.campaign
@pytest.mark.parametrize("command", [["ddp_bench", "run"], ["ddp_bench.bench.run"]], ids=" ".join)
def test_torchrun_starts_ours_in_a_project_with_the_same_names(programs, command, tmp_path):
    project = project_in(tmp_path / "project")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", *command)
    run = ("--modes", "ddp", "--gpus", "2", *SMALL, "--rounds", "1", "--passes", "none")
    done = ended(str(programs / "python"), *torchrun, *run, "--out", str(tmp_path / "run"), folder=project)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "run/report.html").exists()
