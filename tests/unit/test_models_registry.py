"""Workloads by name: the built-in models, and what a user's module gives."""

import os
import sys
import textwrap

import pytest
import torch
from selection import in_campaign
from torch import nn
from torchvision.models import get_model_weights

from ddp_bench.bench.common.errors import UsageError, UserCodeError
from ddp_bench.models.profile import count_outputs, profile_workload
from ddp_bench.models.registry import ARCHS, load_workload, make_resnet_workload
from ddp_bench.models.workload import Workload


def of_archs(archs):
    """Those for a parametrisation, the deepest, which take longest, in the campaign."""
    deepest = ("resnet101", "resnet152", "resnext50_32x4d", "wide_resnet50_2")
    return [*(a for a in archs if a not in deepest), *in_campaign(*(a for a in archs if a in deepest))]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write `user/net.py` into the current folder, as a user has it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])

    def write_module(source):
        (tmp_path / "user").mkdir()
        (tmp_path / "user" / "net.py").write_text(
            "import torch\nfrom torch import nn\n" + textwrap.dedent(source)
        )

    yield write_module
    for name in [name for name in sys.modules if name.split(".")[0] == "user"]:
        del sys.modules[name]


@pytest.mark.parametrize("arch", of_archs(ARCHS))
def test_every_architecture_takes_its_own_batches(arch):
    workload = make_resnet_workload(arch, 40)
    inputs, targets = workload.batch(3, torch.Generator().manual_seed(0))
    with torch.device("meta"):
        outputs = workload.module()(inputs.to("meta"))
    assert (workload.name, workload.image_size) == (arch, 40)
    assert inputs.shape == (3, 3, 40, 40)
    assert targets.shape == (3,)
    assert outputs.shape == (3, 10 if arch == "resnet20" else 1000)
    assert int(targets.max()) < outputs.shape[1]


def test_an_unknown_architecture_names_the_nearest_and_all():
    with pytest.raises(UsageError, match=r"'resnet5O'; did you mean 'resnet50'.*known: resnet20, resnet18"):
        make_resnet_workload("resnet5O", 64)
    with pytest.raises(UsageError, match="'zzz'; known:"):
        make_resnet_workload("zzz", 64)


def test_a_function_that_makes_a_module(write):
    write("def make():\n    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 6 * 6, 7))")
    before = torch.get_rng_state()
    workload = load_workload("user.net:make", 6)
    assert torch.equal(torch.get_rng_state(), before), "loading must not move the global random state"
    inputs, targets = workload.batch(64, torch.Generator().manual_seed(0))
    assert (workload.name, workload.image_size) == ("user.net:make", 6)
    assert set(targets.tolist()) == set(range(7)), "targets must cover the seven classes of the module"
    assert workload.loss(workload.module()(inputs), targets).isfinite()
    assert workload.module() is not workload.module()


def test_a_class_that_needs_no_arguments(write):
    write("""
        class Net(nn.Module):
            def __init__(self, classes=5):
                super().__init__()
                self.fc = nn.Linear(3, classes)
            def forward(self, x):
                assert not self.training
                return self.fc(x.mean(dim=(2, 3)))
    """)
    _, targets = load_workload("user.net:Net", 4).batch(64, torch.Generator().manual_seed(0))
    assert int(targets.max()) == 4


WORKLOAD = """
    from ddp_bench import Workload
    def batch(n, generator):
        return torch.randn(n, 4, generator=generator), torch.randn(n, 2, generator=generator)
    def make():
        return Workload(name="mine", module=lambda: nn.Linear(4, 2), batch=batch, loss=nn.functional.mse_loss)
    workload = make()
"""


@pytest.mark.parametrize("name", ["workload", "make"])
def test_a_workload_or_a_function_that_returns_one(write, name):
    write(WORKLOAD)
    workload = load_workload(f"user.net:{name}", 6)
    assert isinstance(workload, Workload)
    assert (workload.name, workload.image_size) == ("mine", None)
    assert workload.batch(5, torch.Generator())[1].shape == (5, 2)


MALFORMED = ("", "user.net", "user.net:", ":make", "user/net.py:make", "user.net:a:b", "1a:b")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        *((spec, r"malformed workload .* write package\.module:name") for spec in MALFORMED),
        ("nowhere.net:make", "no module 'nowhere' found"),
        ("user.nets:make", "no module 'user.nets' found"),
    ],
)
def test_a_spec_that_names_nothing(write, spec, said):
    write("")
    with pytest.raises(UsageError, match=said) as caught:
        load_workload(spec, 6)
    assert not isinstance(caught.value, UserCodeError)


NET = "make = lambda: nn.Sequential(nn.Flatten(), nn.Linear(108, 4))"
PARSES = f"""
    import argparse
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", default=0.1)
    parser.parse_args()
    {NET}
"""
JOINS = f"""
    import torch.distributed as dist
    dist.init_process_group(GIVEN)
    {NET}
"""


@pytest.mark.parametrize("argv", [["forks.py", "6", "numpy"], ["bench.run", "--workload", "user.net:make"]])
def test_a_script_that_parses_its_arguments_on_import_sees_none(write, monkeypatch, argv):
    monkeypatch.setattr(sys, "argv", argv)
    write(PARSES)
    assert load_workload("user.net:make", 6).name == "user.net:make"
    assert sys.argv is argv


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            PARSES.replace("default=0.1", "required=True"),
            "user/net.py:7 ends the process on import (net.py: ",
        ),
        ("raise SystemExit(2)", "user/net.py:3 ends the process on import (code 2); put what is not the mod"),
        (
            JOINS.replace("GIVEN", "'gloo'"),
            "user/net.py:5 uses a process group on import (ValueError: E",
        ),
        (
            JOINS.replace("GIVEN", "'gloo', store=dist.HashStore(), rank=0, world_size=1"),
            "module user.net makes a process group on import, as each mode does; put what is not the model",
        ),
    ],
)
def test_a_script_that_does_more_on_import_is_told_where(write, capsys, monkeypatch, source, said):
    """Also where a launcher says how to meet the other ranks, which do something else."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    write(source)
    with pytest.raises(UsageError) as caught:
        load_workload("user.net:make", 6)
    assert said in str(caught.value)
    assert str(caught.value).endswith('under `if __name__ == "__main__":`')
    assert not isinstance(caught.value, UserCodeError), "it comes without a traceback"
    assert capsys.readouterr().err == ""
    assert not torch.distributed.is_initialized()
    assert os.environ["MASTER_PORT"] == "1"


def test_what_a_script_writes_on_import_is_passed_on_and_its_handlers_go_on(write, capsys):
    write(f"""
        import logging
        logger = logging.getLogger("user.net")
        logger.addHandler(logging.StreamHandler())
        logger.warning("on import")
        {NET}
    """)
    load_workload("user.net:make", 6)
    sys.modules["user.net"].logger.warning("later")
    assert capsys.readouterr().err == "on import\nlater\n"


REFUSED = [
    ("def make_net(): ...", "has no 'make'; did you mean 'make_net'"),
    ("make = 3", "is an int; it must be a models.Workload or a function"),
    ("make = None", "is None; it must be"),
    ("make = nn.Linear(3, 3)", "is one module; every mode needs a fresh one"),
    ("def make(classes): ...", r"needs arguments \(missing a required argument: 'classes'\)"),
    ("def make(): ...", "returned None; it must return an nn.Module or a models.Workload"),
    ("def make(): return [1]", r"returned \[an int\]; it must"),
    ("def make(): return nn.Identity()", r"to shape \(2, 3, 6, 6\); it must return logits"),
    ("def make(): return nn.Flatten(0)", r"to shape \(216,\); it must return logits"),
    ("def make(): return nn.Sequential(nn.Flatten(0), nn.Unflatten(0, (4, 54)))", r"shape \(4, 54\); it"),
    ("def make(): return nn.AdaptiveMaxPool2d(1, return_indices=True)", r"returned \(a tensor of shape "),
]


@pytest.mark.parametrize(
    ("source", "message", "cause"),
    [
        *((*row, None) for row in REFUSED),
        ("1 / 0", "module user.net cannot be imported: ZeroDivisionError", ZeroDivisionError),
        ("import not_here", "module user.net cannot be imported: ModuleNotFoundError", ModuleNotFoundError),
        ("def broken(:", "module user.net cannot be imported: SyntaxError", SyntaxError),
        ("def make(): raise KeyError('x')", "user.net:make cannot be called: KeyError: 'x'", KeyError),
        ("def make(): raise SystemExit(0)", "user.net:make cannot be called: SystemExit: 0", SystemExit),
        ("def make(): return nn.Linear(5, 2)", r"raised on images of shape \(2, 3, 6, 6\): ", RuntimeError),
        (WORKLOAD.replace("nn.Linear(4, 2)", "nn.Linear(4)"), "mine cannot be made: TypeError", TypeError),
        (WORKLOAD.replace("(n, 4,", "(n, 4, 1j,"), "mine cannot make a batch of 2: TypeError", TypeError),
    ],
)
def test_what_gives_no_workload_is_said_in_a_line_with_its_cause(write, source, message, cause):
    write(source)
    with pytest.raises(UsageError, match=message) as caught:
        load_workload("user.net:make", 6)
    assert isinstance(caught.value, UserCodeError) == (cause is not None)
    assert cause is None or isinstance(caught.value.__cause__, cause)
    assert "\n" not in str(caught.value)


# What a model is made of: parameters, bytes of gradients, arithmetic.


def _rows(batch_size, generator):
    return torch.randn(batch_size, 4, generator=generator), torch.zeros(batch_size, dtype=torch.long)


def _frozen_half():
    module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    module[0].requires_grad_(requires_grad=False)
    return module


class NeedsRealNumbers(nn.Module):
    """Branches on a value, which the meta device has not."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(x) if x.sum().item() < float("inf") else x


class Refuses(NeedsRealNumbers):
    def forward(self, x):
        raise NotImplementedError


class Shift(nn.Module):
    """Has a parameter, and no operator that a FLOP counter knows."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4, dtype=torch.float64))

    def forward(self, x):
        return x + self.shift


@pytest.mark.parametrize("arch", of_archs(a for a in ARCHS if a != "resnet20"))
def test_sizes_and_flops_are_those_torchvision_publishes(arch):
    published = get_model_weights(arch).IMAGENET1K_V1.meta
    profile = profile_workload(make_resnet_workload(arch, 224))
    assert profile.num_params == published["num_params"]
    assert profile.gradient_bytes == 4 * published["num_params"]
    assert profile.forward_flops_per_image == pytest.approx(2e9 * published["_ops"], abs=1.1e6)


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float64, "fp64"), (torch.bfloat16, "bf16"), (torch.float32, "fp32")]
)
def test_the_type_of_the_parameters_is_their_own(dtype, name):
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        assert profile_workload(make_resnet_workload("resnet20", 32)).dtype == name
    finally:
        torch.set_default_dtype(before)


def test_resnet20_flops_are_those_of_its_layers():
    stem = 3 * 3 * 3 * 16 * 32 * 32
    stage1 = 6 * (3 * 3 * 16 * 16 * 32 * 32)
    stage2 = 3 * 3 * 16 * 32 * 16 * 16 + 5 * (3 * 3 * 32 * 32 * 16 * 16)
    stage3 = 3 * 3 * 32 * 64 * 8 * 8 + 5 * (3 * 3 * 64 * 64 * 8 * 8)
    flops = profile_workload(make_resnet_workload("resnet20", 32)).forward_flops_per_image
    assert flops == 2 * (stem + stage1 + stage2 + stage3 + 64 * 10)


def test_frozen_parameters_have_no_gradient_bytes():
    profile = profile_workload(Workload(name="frozen", module=_frozen_half, batch=_rows))
    assert profile.num_params == 4 * 8 + 8 + 8 * 3 + 3
    assert profile.gradient_bytes == 4 * (8 * 3 + 3)
    assert profile.forward_flops_per_image == 2 * (4 * 8 + 8 * 3)


def test_a_model_that_refuses_the_meta_device_is_counted_on_the_cpu():
    workload, before = Workload(name="real", module=NeedsRealNumbers, batch=_rows), torch.get_rng_state()
    assert profile_workload(workload).forward_flops_per_image == 2 * 4 * 3
    assert count_outputs(workload) == 3
    assert torch.equal(torch.get_rng_state(), before)


def test_flops_that_cannot_be_counted_are_none_and_the_sizes_stay():
    shift = profile_workload(Workload(name="shift", module=Shift, batch=_rows))
    assert (shift.num_params, shift.gradient_bytes, shift.forward_flops_per_image) == (4, 32, None)
    refuses = Workload(name="refuses", module=Refuses, batch=_rows)
    assert profile_workload(refuses).num_params == 15
    assert profile_workload(refuses).forward_flops_per_image is None
    assert count_outputs(refuses) is None


def test_num_outputs_is_known_for_classifiers_only():
    assert count_outputs(make_resnet_workload("resnet18", 32)) == 1000
    flat = Workload(name="flat", module=lambda: nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), batch=_rows)
    assert count_outputs(flat) is None
