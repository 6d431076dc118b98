"""Projects of users, by the real command: packages with our names, models of every kind, both proofs."""

import json
import sys
from typing import NamedTuple

import pytest
from commands import ROOT, bench_run, finished
from own_project import OURS, SMALL, TRANSFORMER, are_proven, project_with

from ddp_bench.bench.package import own_command
from ddp_bench.bench.results.store import load_run

OWN_PACKAGES = """
import dataclasses
import bench, models, report
from models.layers import activation
assert bench.OWN and models.OWN and report.OWN
"""

WITHIN_A_STEP = """
class Own(Transformer):
    def forward(self, *arguments, **named):
        import bench, models, report
        from models.layers import activation
        assert bench.OWN and models.OWN and report.OWN
        return super().forward(*arguments, **named)


own = dataclasses.replace(transformer, module=Own)
"""


class Done(NamedTuple):
    project: object
    run: object
    said: str
    cases: object


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    project = project_with(OURS, folder / "project")
    (project / "own.py").write_text(OWN_PACKAGES + TRANSFORMER + WITHIN_A_STEP)
    command = own_command(
        *("run", "--workload", "own:own", "--device", "cpu", "--gpus", "2", "--batch-size", "4"),
        *("--modes", "dp,ddp,fsdp,pipeline", "--data", "host", "--accumulate", "2", "--rounds", "1"),
        *("--steps", "1", "--bucket-cap-mb", "default", "--out", str(folder / "run")),
    )
    ended = finished(command, project, {"PYTHONPATH": str(ROOT)})
    assert ended.returncode == 0, ended.stderr[-4000:]
    return Done(project, folder / "run", ended.stdout, load_run(folder / "run").cases)


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


@pytest.mark.campaign
def test_packages_on_the_path_are_trained_too(tmp_path):
    project = project_with(OURS, tmp_path / "project")
    run = ("run", *SMALL, "--modes", "ddp", "--gpus", "1", "--rounds", "3", "--compile", "off,on")
    done = finished(
        own_command(*run, "--out", str(tmp_path / "run")), project, {"PYTHONPATH": f"{project}:{ROOT}"}
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.campaign
def test_a_project_that_wants_our_workload_from_its_own_models_is_told_what_lacks(tmp_path):
    project = project_with(OURS, tmp_path / "project")
    (project / "net.py").write_text("from models import Workload\n")
    done = finished(own_command("run", *SMALL, "--dry-run"), project)
    assert done.returncode == 2
    assert "cannot import name 'Workload' from 'models'" in done.stderr


ONE_NAME = """
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
for name, *arguments in {commands}:
    try:
        import_module(f"ddp_bench.{{name}}.main").main(arguments)
    except SystemExit:
        pass
files = [(name, Path(module.__file__).resolve()) for name, module in list(sys.modules.items())
         if getattr(module, "__file__", None) and name != "__main__"]
ours = [(name, file) for name, file in files if file.is_relative_to({root!r})]
assert {{name.partition(".")[0] for name, _ in ours}} == {{"ddp_bench"}}, ours
twice = [file for file, times in Counter(file for _, file in ours).items() if times > 1]
assert not twice, twice
"""


@pytest.mark.campaign
@pytest.mark.smoke
def test_no_module_of_ours_is_loaded_under_two_names(tmp_path):
    run = str(ROOT / "results/samples/predictions/resnet18-2hosts/1gbit")
    commands = [
        ["bench.run", "--modes", "ddp", "--gpus", "2", "--dry-run", "--device", "cpu"],
        ["bench.gate", run, run],
        ["bench.export", run, "--format", "bencher"],
        ["bench.predict", run, "--gpus", "2"],
        ["report", run, "--out", str(tmp_path / "page.html")],
        ["bench.doctor", "--quiet"],
        *([f"bench.{name}", "--help"] for name in ("tune", "lab")),
    ]
    code = ONE_NAME.format(commands=commands, root=str(ROOT))
    done = finished([sys.executable, "-c", code], tmp_path, {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr


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

def cnn():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(8 * 36, 5)
    )


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
def test_a_cnn_of_a_callable(tmp_path):
    cases = cases_of(tmp_path, "cnn", "--modes", "dp,ddp,fsdp", "--image-size", "8", "--passes", "none")
    are_proven(cases, {"single", "dp", "ddp", "fsdp"})


@pytest.mark.campaign
@pytest.mark.smoke
def test_an_mlp_with_named_groups_of_adam_in_every_form(tmp_path):
    """Its second group would be empty if the parameters could be gone through but once."""
    modes = ("--modes", "dp,ddp,fsdp,pipeline,partition", "--zero-optimizer", "off,on")
    cases = cases_of(tmp_path, "mlp", *modes, "--fused-optimizer", "on")
    are_proven(cases, {"single", "dp", "ddp", "fsdp", "pipeline", "partition"})
    two = cases[cases["mode"] != "single"]
    assert set(two["global_batch"]) == {8}
    assert set(two.loc[two["layers_by_device"].notna(), "mode"]) == {"partition", "pipeline"}
    assert cases.set_index("mode").loc["partition", "bubble_of_stages_pct"] == pytest.approx(50)
    ranks = load_run(tmp_path / "run").blocks.groupby("case_id")["rank"].nunique()[two["case_id"]]
    assert [*ranks] == [1 if mode == "dp" else 2 for mode in two["mode"]]
    assert "Forms of parallel training" in (tmp_path / "run/report.html").read_text()


@pytest.mark.campaign
def test_a_transformer_compiled(tmp_path):
    settings = ("--modes", "single", "--compile", "off,on", "--passes", "none")
    cases = cases_of(tmp_path, "transformer", *settings)
    assert cases["compile"].tolist() == ["off", "default"]
    assert (cases["status"] == "ok").all(), cases["reason"].tolist()
    assert (cases["gradient_error"] < 1e-9).all()
    assert (cases["update_error"] < 1e-2).all(), "the compiler rounds in another order"


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
ghostnet = of_timm("ghostnet_050")


def sentences(batch_size, generator, masked):
    ids = torch.randint(5, VOCAB, (batch_size, SEQ), generator=generator)
    lengths = torch.randint(SEQ // 3, SEQ + 1, (batch_size, 1), generator=generator)
    mask = (torch.arange(SEQ) < lengths).long()
    chosen = mask.bool()
    if masked:
        chosen &= torch.rand(batch_size, SEQ, generator=generator) < 0.4
        chosen[:, 0] = True
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(chosen, ids, -100)}


def of_transformers(name, module, masked):
    return Workload(
        name=name, module=module, batch=lambda n, generator: sentences(n, generator, masked),
        batch_loss=lambda model, batch: model(**batch).loss.mean(), optimizer=adamw,
        unit="tokens", units_per_sample=SEQ,
    )


def make_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel
    shape = dict(n_positions=SEQ, n_embd=64, n_layer=2, n_head=4)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, use_cache=False, **shape))


def make_bert():
    from transformers import BertConfig, BertForMaskedLM
    shape = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
    return BertForMaskedLM(BertConfig(vocab_size=VOCAB, **shape))


gpt2 = of_transformers("gpt2", make_gpt2, False)
bert = of_transformers("bert", make_bert, True)
"""


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("package", "name"),
    [("timm", "convnext"), ("timm", "ghostnet"), ("transformers", "gpt2"), ("transformers", "bert")],
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
