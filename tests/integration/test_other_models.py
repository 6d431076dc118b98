"""Models of timm and transformers with random weights, as their users train them: proven and timed."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import bench_run
from own_models import are_proven

from ddp_bench.bench.results.store import load_run

pytestmark = pytest.mark.campaign

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


@pytest.mark.parametrize(
    ("package", "name"),
    [("timm", "convnext"), ("timm", "ghostnet"), ("transformers", "gpt2"), ("transformers", "bert")],
)
def test_it_is_proven_and_timed(package: str, name: str, tmp_path: Path) -> None:
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
