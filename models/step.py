"""The ways to compute a step on the same workload: memory format, optimizer, torch.compile, TF32."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..bench.common.errors import USER_EXCEPTIONS
from ..bench.plan.case_settings import StepSettings
from .nested import list_tensors
from .workload import Workload, is_image, make_batch

BACKENDS: Any = torch.backends
"""PyTorch's settings of its libraries; its stubs know only some of them."""

MAX_GRAPHS = 256
"""Graphs that dynamo may hold of one function: every case has its own, where its limit of 8 is for reuse."""


def make_optimizer(
    workload: Workload, settings: StepSettings, parameters: Iterable[nn.Parameter]
) -> Optimizer:
    """Make the workload's optimizer, with the kernels that `settings` ask for."""
    made = workload.optimizer(parameters)
    return _fuse_optimizer(made) if settings.fused_optimizer else made


def move_and_compile(module: nn.Module, settings: StepSettings, device: torch.device) -> nn.Module:
    """Move a module to `device`, compiled as `settings` say."""
    module = module.to(device)
    if settings.compile != "off":
        compile_module(module, settings.compile)
    return module


def has_image_inputs(workload: Workload) -> bool:
    """Tell whether some of the workload's inputs have the four dimensions that channels_last is for."""
    batch = make_batch(workload)
    inputs = batch if workload.batch_loss is not None else batch[0]
    return any(map(is_image, list_tensors(inputs)))


def has_fused_optimizer(workload: Workload) -> bool:
    """Tell whether the workload's optimizer can run fused kernels, as far as one on a parameter tells."""
    try:
        optimizer = workload.optimizer([nn.Parameter(torch.zeros(1))])
        return {"fused", "foreach"} <= inspect.signature(type(optimizer)).parameters.keys()
    except USER_EXCEPTIONS:  # an optimizer that wants the model's own parameters
        return False


def _fuse_optimizer(made: Optimizer) -> Optimizer:
    """Return the optimizer, with what its hooks know of it, set to fused kernels."""
    chosen = {"fused": True, "foreach": False}
    for group in (made.defaults, *made.param_groups):
        group.update(chosen)
    # What a constructor notes of fused kernels: one made for the purpose tells.
    tried = type(made)([nn.Parameter(torch.zeros(1))], **get_defaults(made))
    for name in vars(tried).keys() - vars(made).keys():
        setattr(made, name, getattr(tried, name))
    return made


def get_defaults(optimizer: Optimizer) -> dict[str, Any]:
    """Return the arguments with which the class of an optimizer makes it again."""
    known = inspect.signature(type(optimizer)).parameters
    return {name: value for name, value in optimizer.defaults.items() if name in known}


def compile_module(module: nn.Module, mode: str) -> None:
    """Compile in place, anew if it is, inside of any wrapper, as PyTorch's documentation advises for DDP.

    A backend of its own keeps dynamo from running one case's graph in another: it would take that of `single`
    for DDP, where DDPOptimizer splits the graph at the buckets so that communication can overlap.
    """
    # Importing the compiler takes seconds.
    from torch import _dynamo, _inductor
    from torch._dynamo import pgo

    _dynamo.config.recompile_limit = MAX_GRAPHS
    # A size that differs from an earlier case's would be taken for one that varies, and kernels for any size
    # are slower; a program that trains this case alone has none.
    pgo.reset_code_state()
    patches = {} if mode == "default" else _inductor.list_mode_options(mode)
    module.compile(backend=functools.partial(_compile_graph, config_patches=patches))


def _compile_graph(*arguments: Any, **options: Any) -> Any:
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(*arguments, **options)


@contextlib.contextmanager
def set_float32_precision(precision: str, device: torch.device) -> Iterator[None]:
    """Within, float32 products, convolutions and recurrent layers on a GPU use TF32 for `tf32` alone.

    PyTorch's own default allows TF32 in all of them but the products; a run states one or the other.
    """
    if device.type != "cuda":
        yield
        return
    products, layers = (kind.fp32_precision == "tf32" for kind in (BACKENDS.cuda.matmul, BACKENDS.cudnn.conv))
    _let_use_tf32(products=precision == "tf32", layers=precision == "tf32")
    try:
        yield
    finally:
        _let_use_tf32(products=products, layers=layers)


def _let_use_tf32(*, products: bool, layers: bool) -> None:
    """Through both of PyTorch's interfaces: where one alone is used, reading the other raises."""
    torch.set_float32_matmul_precision("high" if products else "highest")
    BACKENDS.cudnn.allow_tf32 = layers
    # The older one leaves what it forbids to the setting of all backends.
    for kind in (BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn):
        kind.fp32_precision = "tf32" if layers else "ieee"
