"""A workload: its defaults, and what is said of functions that take or return something else."""

import collections
import copy
import dataclasses
import weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_sequence
from torch.optim import SGD, Adam, AdamW

from ddp_bench.bench.common.errors import UsageError, UserCodeError
from ddp_bench.bench.plan.case_settings import StepSettings
from ddp_bench.models import step
from ddp_bench.models.checks import check_workload
from ddp_bench.models.nested import list_objects, list_tensors, map_tensors, split_rows
from ddp_bench.models.registry import make_resnet_workload
from ddp_bench.models.step import (
    has_fused_optimizer,
    has_image_inputs,
    make_optimizer,
    move_and_compile,
)
from ddp_bench.models.workload import Workload, has_rows, make_batch, make_loss_function, make_module


def rows(batch_size, generator):
    return torch.randn(batch_size, 4, generator=generator), torch.zeros(batch_size, 3)


def workload(**changes):
    given = {"module": lambda: nn.Linear(4, 3), "batch": rows, "loss": functional.mse_loss}
    return Workload(**{"name": "mine"} | given | changes)


def by_batch(model, batch):
    return model(batch["x"]).mean()


def nothing(*_):
    return None


class Margin(nn.Module):
    """A loss that learns, or else does not."""

    def __init__(self):
        super().__init__()
        self.centre = nn.Parameter(torch.zeros(3))

    def forward(self, outputs, targets):
        return functional.mse_loss(outputs - self.centre, targets)


class Silent(Margin):
    def forward(self, outputs, targets):
        with torch.no_grad():
            known = outputs + self.centre
        return functional.mse_loss(outputs + known, targets)


class Closes(torch.optim.Optimizer):
    work = staticmethod(lambda closure: closure())

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        self.work(closure)


class Steps(Closes):
    work = staticmethod(lambda _: None)


class Broken(Closes):
    work = staticmethod(lambda _: torch.zeros(1).cuda(99))


class Expanded(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
        self.register_buffer("position_ids", torch.arange(4).expand(1, -1))
        self.register_buffer("first", self.position_ids[:, 1:])
        self.register_buffer("scale", torch.ones(4).expand(2, -1))


def refused(size=2, **changes):
    with pytest.raises(UsageError) as caught:
        make_batch(check_workload(workload(**changes)), batch_size=size)
    assert not isinstance(caught.value, UserCodeError)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class Knot:
    def __init__(self, x):
        self.x, self.own = x, self


def careless(size, _):
    return torch.rand(size, 4), torch.rand(size, 3)


def counted(size, generator):
    more = collections.defaultdict(list, x=torch.rand(size, 4, generator=generator))
    return more, torch.rand(size, 3, generator=generator)


AS_ASKED = {
    "SGD": lambda parameters: SGD(parameters, lr=0.3, momentum=0.7, weight_decay=1e-3, nesterov=True),
    "Adam": lambda parameters: Adam(parameters, lr=0.3, amsgrad=True),
    "AdamW": lambda parameters: AdamW([{"params": [*parameters], "lr": 0.2}], lr=0.3, betas=(0.8, 0.9)),
}


@pytest.mark.parametrize("make", AS_ASKED.values(), ids=AS_ASKED)
def test_fused_kernels_leave_the_optimizer_what_the_user_set_its_hooks_and_its_results(make):
    called, weights = [], []

    def hooked(parameters):
        made = make(parameters)
        made.register_step_post_hook(lambda *_: called.append(made))
        return made

    for fused in (False, True):
        parameter = nn.Parameter(torch.ones(3))
        settings = StepSettings(fused_optimizer=fused)
        optimizer = make_optimizer(workload(optimizer=hooked), settings, [parameter])
        for _ in range(2):
            parameter.grad = torch.tensor([1.0, -2.0, 0.5])
            optimizer.step()
        weights.append(parameter.detach())
    assert len(called) == 4
    torch.testing.assert_close(*weights)
    plain = make([parameter])
    assert type(optimizer) is type(plain)
    assert optimizer.param_groups == [g | {"fused": True, "foreach": False} for g in plain.param_groups]
    asked = type(plain)([nn.Parameter(torch.ones(1))], fused=True)
    assert vars(asked).keys() <= vars(optimizer).keys(), "what a constructor notes of fused kernels"
    assert has_fused_optimizer(workload(optimizer=make))


def one(x):
    return x


def three(x, y, z):
    return x, y, z


def typed(n, /, *, generator):
    return torch.zeros(n).normal_(generator=generator)


def returning(make):
    """A batch of what `make` makes of the usual inputs and targets."""
    return {"batch": lambda n, generator: make(*rows(n, generator))}


BATCH = "it is called as batch(batch_size, generator) and returns (inputs, targets)"
LOSS = "it is called as loss(outputs, targets) and returns a scalar tensor, the mean over the rows"
PAIR = "must return (inputs, targets), or the workload needs batch_loss(model, batch)"


@pytest.mark.parametrize(
    ("field", "function", "said"),
    [
        ("batch", one, f"takes (x); {BATCH}"),
        ("batch", three, f"takes (x, y, z); {BATCH}"),
        ("batch", typed, f"takes (n, /, *, generator); {BATCH}"),
        ("batch", torch.zeros(1, 4), "is a tensor of shape (1, 4); give a function, which is called as"),
        ("module", one, "takes (x); it is called as module() and returns a new nn.Module"),
        ("module", nn.Linear, "takes (in_features, out_features, bias=True, device=None, dtype=None); it is"),
        ("loss", one, f"takes (x); {LOSS}"),
        ("loss", None, "is None; give a function, which is called as loss(outputs, targets)"),
        ("optimizer", three, "takes (x, y, z); it is called as optimizer(parameters)"),
        ("layers", three, "takes (x, y, z); it is called as layers(module)"),
        ("batch_loss", one, "takes (x); it is called as batch_loss(model, batch)"),
    ],
)
def test_a_signature_that_does_not_fit_is_shown_beside_the_expected_one(field, function, said):
    own = {"loss": functional.cross_entropy, field: function}
    assert f"`{field}` of workload mine {said}" in refused(**own)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizer": nothing}, "`optimizer` of workload mine returned None; it is called as optimizer(par"),
        ({"loss": nothing}, f"`loss` of workload mine returned None; {LOSS}"),
        ({"loss": lambda *_: 3.5}, f"`loss` of workload mine returned a float; {LOSS}"),
        ({"loss": partial(functional.mse_loss, reduction="none")}, "a tensor of shape (2, 3); it is"),
        ({"loss": lambda x, _: x.detach().mean()}, "`loss` of workload mine returned a tensor without"),
        ({"batch": nothing}, f"`batch` of workload mine returned None for batch size 2; it {PAIR}"),
        (returning(lambda x, _: {"x": x}), f"{{'x': a tensor of shape (2, 4)}} for batch size 2; it {PAIR}"),
        (returning(lambda x, y: (x, y, 3)), PAIR),
        (returning(lambda x, y: ((x, set()), y)), "; a set can be neither split nor moved to a device"),
        (
            {"batch": lambda n, g: rows(min(n, 5), g), "size": 6},
            "tensors with 6 rows each, in dimension 0, as",
        ),
        ({"batch": lambda _, g: rows(2, g)}, "for batch size 2 and for 4; it must return as many samples as"),
        (returning(lambda x, _: (x, [0.0, 1.0])), "it must return targets as tensors"),
        (returning(lambda x, y: (Knot(x), y)), "cannot be made anew (it refers to itself): return plain"),
        ({"module": lambda: 3}, "returned an int; it is called as module() and returns a new nn.Module"),
        ({"module": lambda: nn.LazyLinear(3)}, "has lazy layers; give their sizes"),
        ({"module": lambda: nn.Sequential(nn.DataParallel(nn.Linear(4, 3)))}, "holds a DataParallel"),
        ({"optimizer": torch.optim.LBFGS}, "returned a LBFGS, whose step calls the loss"),
        (
            {"optimizer": Closes},
            "returned a Closes, whose step calls the loss again; give an optimizer whose",
        ),
        ({"loss": Margin()}, "the loss of workload mine has parameters (centre) that module() does not hold"),
        (
            {"loss": partial(Margin().forward)},
            "(centre) that module() does not hold, and nothing trains them",
        ),
        ({"module": Expanded}, "the module of workload mine has scale expanded: its elements share memory"),
        ({"batch": careless}, "returns other numbers for a generator in the same state; draw from"),
        ({"batch": counted}, "inputs in these containers cannot be made anew (first argument must be call"),
        (returning(lambda x, y: ({"x": x}, y)), "takes (input); `batch` gives it {'x': a tensor of"),
        (returning(lambda x, y: ((x, x), y)), "takes (input); `batch` gives it (a tensor of shape"),
    ],
)
def test_a_result_that_does_not_fit_is_described(changes, said):
    assert said in refused(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": Silent()},
        {"loss": Margin().requires_grad_(False)},
        {"optimizer": Steps},
        {"optimizer": Broken},
        {"loss": lambda outputs, _: outputs.mean().item()},
        {"batch": rows, "loss": nn.MSELoss(), "optimizer": Adam},
        {"batch": partial(rows)},
        {"batch": lambda *given: rows(given[0], given[1])},
    ],
    ids=[
        "silent",
        "frozen",
        "steps alone",
        "steps elsewhere",
        "not on meta",
        "usual",
        "partial",
        "any arguments",
    ],
)
def test_what_only_looks_like_a_mistake_is_taken(changes):
    assert check_workload(workload(**changes)).name == "mine"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"name": "mine", "module": nothing}, f"workload mine has no `batch`: {BATCH}"),
        ({"name": "mine", "batch": rows}, "workload mine has no `module`: it is called as module() and"),
        ({"module": nothing, "batch": rows}, "a Workload has no name; give it one"),
        (
            {"name": "mine", "module": nothing, "batch": rows, "loss": nothing, "batch_loss": by_batch},
            "workload mine has `loss` and `batch_loss`; keep loss(outputs, targets) for a batch (inputs,",
        ),
    ],
)
def test_a_workload_that_lacks_a_function_or_has_one_too_many(given, said):
    with pytest.raises(UsageError) as caught:
        Workload(**given)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("inputs", "called"),
    [
        (torch.zeros(2), ((torch.zeros(2),), {})),
        ((torch.zeros(2), 3), ((torch.zeros(2), 3), {})),
        ({"x": torch.zeros(2), "y": None}, ((), {"x": torch.zeros(2), "y": None})),
        ([torch.zeros(2)], (([torch.zeros(2)],), {})),
    ],
)
def test_inputs_go_to_the_module_as_arguments(inputs, called):
    def model(*arguments, **named):
        assert str((arguments, named)) == str(called)
        return torch.ones(())

    found = make_loss_function(workload(loss=lambda outputs, targets: outputs + targets))(model, (inputs, 2))
    assert found.item() == 3


# What has no rows, and objects that hold tensors.


class Slotted:
    __slots__ = ("__hidden", "x")

    def __init__(self, x):
        self.x, self.__hidden = x, x + 1


class Geometric:
    """Keeps its tensors as PyTorch Geometric's graphs do, in a store that knows its graph."""

    def __init__(self, **stored):
        self.store = SimpleNamespace(graph=weakref.ref(self), stored=stored)

    def __copy__(self):
        return Geometric(**self.store.stored)

    def apply(self, function):
        stored = self.store.graph().store.stored
        stored.update({name: function(value) for name, value in stored.items()})
        return self

    def clone(self):
        return copy.copy(self)

    to = clone


Frozen = dataclasses.make_dataclass("Frozen", ["x", "texts", "deep"], frozen=True)
X = torch.arange(6.0).reshape(2, 3)
HOLDING = {
    "a dataclass": Frozen(X, ["a", "b"], {"x": [X + 1]}),
    "slots": Slotted(X),
    "a user's dict": collections.UserDict(x=X, n=2),
    "a graph": Geometric(x=X, num_nodes=2),
    "packed rows": pack_sequence([torch.ones(1), torch.zeros(2)], enforce_sorted=False),
}


@pytest.mark.parametrize("value", HOLDING.values(), ids=HOLDING)
def test_tensors_of_objects_are_found_and_mapped_and_the_object_stays(value):
    before = [one.clone() for one in list_tensors(value)]
    made = map_tensors(lambda one: one * 2, value)
    assert type(made) is type(value)
    assert made is not value
    assert before
    for was, now, twice in zip(before, list_tensors(value), list_tensors(made), strict=True):
        torch.testing.assert_close(now, was)
        torch.testing.assert_close(twice, was * 2)
    assert list_objects([value, X, "a"]) == [value]
    if isinstance(made, Geometric):
        assert made.store.graph() is made


def test_rows_in_objects_are_cut_with_the_lists_beside_them():
    first, second = split_rows({"views": HOLDING["a dataclass"]}, 2)
    assert (first["views"].texts, second["views"].texts) == (["a"], ["b"])
    torch.testing.assert_close(second["views"].deep["x"][0], X[1:] + 1)
    assert HOLDING["a dataclass"].texts == ["a", "b"]


def sparse(n, generator):
    return (torch.rand(n, 4, generator=generator) > 0.5).float().to_sparse(), torch.zeros(n, 3)


def channels(n, generator):
    return [torch.rand(4, 2, generator=generator) for _ in range(n)], torch.zeros(n, 3)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize(
    ("batch", "splits"),
    [
        (rows, True),
        (lambda n, g: (Slotted(rows(n, g)[0]), torch.zeros(n, 3)), True),
        (sparse, False),
        (lambda n, g: (sparse(n, g)[0].to_sparse_csr(), torch.zeros(n, 3)), False),
        (channels, False),
        (lambda n, g: (torch.rand(3, n, 4, generator=g), torch.zeros(n, 3)), False),
    ],
)
def test_a_batch_is_checked_whatever_its_layout_and_known_to_have_rows_or_none(batch, splits):
    made = check_workload(
        workload(module=nn.Identity, batch=batch, loss=lambda *_: torch.zeros((), requires_grad=True))
    )
    assert has_rows(made) == splits
    for size in (2, 3, 4):
        make_batch(made, batch_size=size)
    with pytest.raises(UsageError, match="draw from the generator"):
        check_workload(replace(made, batch=lambda n, _: batch(n, torch.default_generator)))


# How a step is computed changes its speed and nothing of its result.

CPU = torch.device("cpu")
IMAGES = make_resnet_workload("resnet20", 32)


def test_channels_last_reaches_weights_and_images():
    made = replace(IMAGES, channels_last=True)
    inputs, _ = make_batch(made, batch_size=2, generator=torch.Generator())
    convolution = next(
        m for m in make_module(made).modules() if isinstance(m, nn.Conv2d) and m.in_channels > 3
    )
    for tensor in (inputs, convolution.weight, copy.deepcopy(convolution).weight):
        assert tensor.is_contiguous(memory_format=torch.channels_last)
        assert not tensor.is_contiguous()


def test_an_optimizer_without_fused_kernels_is_seen():
    assert not has_fused_optimizer(workload(optimizer=torch.optim.RMSprop))
    assert not has_fused_optimizer(workload(optimizer=lambda _: SGD([])))


def test_images_are_found_and_laid_out_wherever_a_batch_has_them():
    def named(n, _):
        return {"images": [torch.zeros(n, 3, 8, 8)], "mask": torch.ones(n, 1, 8, 8) > 0}

    made = Workload(name="own", module=nn.Identity, batch=named, batch_loss=lambda model, _: model(0))
    assert has_image_inputs(made)
    assert has_image_inputs(IMAGES)
    batch = make_batch(replace(made, channels_last=True), batch_size=2, generator=torch.Generator())
    assert batch["images"][0].is_contiguous(memory_format=torch.channels_last)
    masks = replace(made, batch=lambda n, g: {"mask": named(n, g)["mask"]})
    assert not has_image_inputs(masks)
    flat = replace(IMAGES, batch=lambda n, _: (torch.zeros(n, 7), torch.zeros(n, dtype=torch.long)))
    assert not has_image_inputs(flat)


@pytest.mark.campaign
def test_every_case_is_compiled_by_itself(monkeypatch):
    """Dynamo would run the graph of the first in all: DDP's would not be split at its buckets then."""
    graphs = []

    def backend(graph, _, *, config_patches):
        graphs.append(len(config_patches))
        return graph.forward

    monkeypatch.setattr(step, "_compile_graph", backend)
    modes = ["default"] * 10 + ["reduce-overhead"]
    made = [move_and_compile(make_module(IMAGES), StepSettings(compile=mode), CPU) for mode in modes]
    for _ in range(2):
        for module in made:
            module(torch.zeros(2, 3, 32, 32)).sum().backward()
    assert len(graphs) == len(made), "each once, beyond dynamo's usual limit of 8"
    assert graphs[-1] > 0, "reduce-overhead changes the compiler's settings"
