import pytest
import torch
from torch import nn

import ddp_bench
from ddp_bench.bench.errors import UsageError, UserCodeError
from ddp_bench.models.workload import Workload, make_batch, make_module, one_line


def _rows(batch_size, generator):
    return torch.randn(batch_size, 4, generator=generator), torch.randint(
        3, (batch_size,), generator=generator
    )


def _fail(*_):
    raise RuntimeError("two\nlines")


def _workload(**changes):
    settings = {"name": "toy", "module": lambda: nn.Linear(4, 3), "batch": _rows}
    return Workload(**settings | changes)


def test_users_write_models_workload():
    assert ddp_bench.Workload is Workload


def test_defaults_train():
    torch.manual_seed(0)
    workload = _workload()
    module = make_module(workload)
    inputs, targets = make_batch(workload, batch_size=8, generator=torch.Generator().manual_seed(0))
    optimizer = workload.optimizer(module.parameters())
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = workload.loss(module(inputs), targets)
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert loss.ndim == 0
    assert losses[-1] < losses[0]


def test_default_loss_is_a_mean_over_the_batch():
    outputs, targets = torch.randn(6, 3), torch.randint(3, (6,))
    loss = _workload().loss
    parts = [loss(outputs[i : i + 1], targets[i : i + 1]) for i in range(6)]
    torch.testing.assert_close(loss(outputs, targets), torch.stack(parts).mean())


def test_what_the_users_code_raises_is_the_cause():
    generator = torch.Generator()
    for call in (
        lambda: make_module(_workload(module=_fail)),
        lambda: make_batch(_workload(batch=_fail), batch_size=2, generator=generator),
    ):
        with pytest.raises(UserCodeError, match=r"toy cannot.*made: |toy cannot make") as caught:
            call()
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert str(caught.value).endswith("RuntimeError: two lines")


def test_a_module_that_is_none_is_refused():
    with pytest.raises(
        UsageError, match=r"returned an int; it is called as module\(\) and returns a new nn\.Module"
    ):
        make_module(_workload(module=lambda: 3))


@pytest.mark.parametrize(
    ("batch", "described"),
    [
        (None, "None"),
        (torch.zeros(2, 4), r"a tensor of shape \(2, 4\)"),
        ((torch.zeros(2, 4),), r"\(a tensor of shape \(2, 4\)\)"),
        ((torch.zeros(2, 4), [0, 1]), r"\(a tensor of shape \(2, 4\), \[an int, an int\]\)"),
        ((torch.zeros(2, 4), torch.zeros(3)), r"\(a tensor of shape \(2, 4\), a tensor of shape \(3,\)\)"),
        ((torch.zeros(2, 4), torch.tensor(1)), r"\(a tensor of shape \(2, 4\), a tensor of shape \(\)\)"),
    ],
)
def test_a_malformed_batch_is_described(batch, described):
    with pytest.raises(UsageError, match=f"returned {described} for batch size 2; it must return"):
        make_batch(_workload(batch=lambda *_: batch), batch_size=2, generator=torch.Generator())


@pytest.mark.parametrize(
    ("exc", "line"), [(ValueError("a\n  b"), "ValueError: a b"), (KeyError(), "KeyError")]
)
def test_one_line(exc, line):
    assert one_line(exc) == line
