"""Checks a user's workload before anything starts: how its functions are called, and what they return."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..bench.common.errors import USER_EXCEPTIONS, UsageError
from .nested import describe, list_tensors, map_tensors
from .workload import (
    EXPECTED,
    TRIAL_SIZES,
    Batch,
    Workload,
    check_loss,
    check_unit,
    make_batch,
    make_loss_function,
    make_module,
    make_result_error,
    split_arguments,
)

NUM_ARGUMENTS = {"module": 0, "batch": 2, "loss": 2, "batch_loss": 2, "optimizer": 1, "layers": 1}
"""Positional arguments that each function of a workload is called with."""


def check_workload(workload: Workload, *, looks: bool = True) -> Workload:
    """Return the workload once each of its functions has been looked at; model and loss run if it `looks`.

    Raises UserCodeError where module or batch cannot be made and UsageError where a function takes other
    arguments, or returns something else, than it should.
    """
    check_unit(workload)
    for field in NUM_ARGUMENTS:
        _check_signature(workload, field)
    with torch.random.fork_rng(devices=[]):
        module = make_module(workload)
        _check_module(workload, module)
        batch, again = make_batch(workload), make_batch(workload)
        _check_repeated(workload, batch, again)
        _check_size(workload, batch)
        _check_forward(workload, module, batch)
        _check_loss_module(workload, module, batch)
        _check_optimizer(workload, module)
        if looks:
            _try_loss(workload, module, batch)
    return workload


def _check_signature(workload: Workload, field: str) -> None:
    function = getattr(workload, field)
    missing = ("layers", "batch_loss") if workload.batch_loss is None else ("layers", "loss")
    if function is None and field in missing:
        return
    if not callable(function):
        raise UsageError(
            f"`{field}` of workload {workload.name} is {describe(function)}; give a function, which is called"
            f" as {EXPECTED[field]}"
        )
    if taken := _describe_parameters(function, (None,) * NUM_ARGUMENTS[field], {}):
        raise UsageError(
            f"`{field}` of workload {workload.name} takes {taken}; it is called as {EXPECTED[field]}"
        )


def _check_module(workload: Workload, module: nn.Module) -> None:
    what = f"the module of workload {workload.name}"
    if any(map(nn.parameter.is_lazy, (*module.parameters(), *module.buffers()))):
        raise UsageError(f"{what} has lazy layers; give their sizes, or call it once in module()")
    for name, one in (*module.named_parameters(), *module.named_buffers()):
        shared = one.layout == torch.strided and any(
            size > 1 and not step for size, step in zip(one.shape, one.stride(), strict=True)
        )
        if shared:
            raise UsageError(
                f"{what} has {name} expanded: its elements share memory, and DDP cannot write there what it"
                f" receives; register a clone() of {name}"
            )
    for part in module.modules():
        if isinstance(part, (nn.DataParallel, DistributedDataParallel)):
            name = type(part).__name__
            raise UsageError(
                f"{what} holds a {name}, which is what is measured; return the module inside of it"
            )


def _check_repeated(workload: Workload, batch: Batch, again: Batch) -> None:
    """Raise UsageError where equal generators gave two batches: no two ranks would make the same."""
    if _list_bytes(batch) != _list_bytes(again):
        raise UsageError(
            f"`batch` of workload {workload.name} returns other numbers for a generator in the same state; "
            "draw from the generator that it is given alone"
        )


def _list_bytes(batch: Batch) -> list[bytes]:
    """Return what the tensors of a batch hold, for any layout and type."""
    flat = [one.resolve_conj().resolve_neg().contiguous().reshape(-1) for one in _list_dense(batch)]
    return [one.view(torch.uint8).numpy().tobytes() for one in flat]


def _list_dense(batch: Batch) -> list[Tensor]:
    """Return the dense tensors that make up those of a batch."""
    return [part for tensor in list_tensors(batch) for part in _split_dense(tensor.detach())]


def _split_dense(tensor: Tensor) -> Sequence[Tensor]:
    if tensor.is_nested:
        return tensor.unbind()
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def _check_size(workload: Workload, batch: Batch) -> None:
    """Raise UsageError where a batch of another size is as large: throughput would count samples wrongly."""
    other = make_batch(workload, batch_size=TRIAL_SIZES[-1])
    if [one.shape for one in _list_dense(other)] == [one.shape for one in _list_dense(batch)]:
        raise UsageError(
            f"`batch` of workload {workload.name} returned {describe(batch)} for batch size "
            f"{TRIAL_SIZES[0]} and for {TRIAL_SIZES[-1]}; it must return as many samples as it is asked for"
        )


def _check_forward(workload: Workload, module: nn.Module, batch: Batch) -> None:
    if workload.batch_loss is not None:
        return
    inputs, _ = batch
    if taken := _describe_parameters(module.forward, *split_arguments(inputs)):
        raise UsageError(
            f"the module of workload {workload.name} takes {taken}; `batch` gives it {describe(inputs)}:"
            " a tensor is one argument, a tuple is positional arguments, a dict is keyword arguments"
        )


def _check_optimizer(workload: Workload, module: nn.Module) -> None:
    try:
        made = workload.optimizer(list(module.parameters()))
    except USER_EXCEPTIONS:  # it may want parameters on a GPU; training will show its error
        return
    if not isinstance(made, Optimizer):
        raise make_result_error(workload, "optimizer", made)
    closure = inspect.signature(type(made).step).parameters.get("closure")
    is_torchs = type(made).step.__module__.startswith("torch.")
    if closure is not None and (
        closure.default is closure.empty or not (is_torchs or _can_step_alone(workload, module))
    ):
        raise UsageError(
            f"`optimizer` of workload {workload.name} returned a {type(made).__name__}, whose step calls the"
            " loss again; give an optimizer whose step() needs no closure"
        )


def _can_step_alone(workload: Workload, module: nn.Module) -> bool:
    """Tell whether an optimizer of a user's class takes a step without a closure, or else with none."""

    def can_step(*closure: Callable[[], float]) -> bool:
        for one in module.parameters():
            one.grad = torch.zeros_like(one) if one.requires_grad else None
        try:
            workload.optimizer(list(module.parameters())).step(*closure)
        except USER_EXCEPTIONS:
            return False
        return True

    found = can_step() or not can_step(lambda: 0.0)
    module.zero_grad()
    return found


def _check_loss_module(workload: Workload, module: nn.Module, batch: Batch) -> None:
    """Raise UsageError for a loss that is a module with parameters of its own that it learns."""
    loss = workload.batch_loss or workload.loss
    while isinstance(loss, functools.partial):
        loss = loss.func
    owner = getattr(loss, "__self__", loss)
    if not isinstance(owner, nn.Module) or not any(one.requires_grad for one in owner.parameters()):
        return
    try:
        with warnings.catch_warnings(action="ignore"):
            found: Any = make_loss_function(workload)(module, batch)
    except USER_EXCEPTIONS:  # it may want a GPU; the proof looks too
        return
    check_learned(workload, module, found, dict(owner.named_parameters()))


def check_learned(
    workload: Workload, module: nn.Module, loss: object, named: Mapping[str, nn.Parameter] | None = None
) -> None:
    """Raise UsageError where a loss gives gradients to parameters that the module does not hold.

    No optimizer steps them, and DDP does not send them. `named` are known by their names.
    """
    own = {id(one) for one in module.parameters()}
    leaves = [getattr(node, "variable", None) for node in list_graph_nodes(loss)]
    strange = [one for one in leaves if isinstance(one, nn.Parameter) and id(one) not in own]
    if strange:
        names = {id(one): name for name, one in (named or {}).items()}
        first = names.get(id(strange[0])) or f"one of shape {tuple(strange[0].shape)}"
        raise UsageError(
            f"the loss of workload {workload.name} has parameters ({first}) that module() does not hold, and"
            " nothing trains them: move them into module(), or freeze them by requires_grad_(False)"
        )


def list_graph_nodes(loss: object) -> list[Any]:
    """List the nodes of autograd that a backward of the loss would reach; of parameters their `variable`."""
    nodes, found = [getattr(loss, "grad_fn", None)], dict[Any, None]()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in found:
            found[node] = None
            nodes += [following for following, _ in node.next_functions]
    return list(found)


def _try_loss(workload: Workload, module: nn.Module, batch: Batch) -> None:
    """Look at what the loss returns, on the meta device, where both run on it; moves the module there."""
    try:
        with warnings.catch_warnings(action="ignore"), torch.device("meta"):
            on_meta = map_tensors(lambda tensor: tensor.to("meta"), batch)
            loss: Any = make_loss_function(workload)(module.to("meta"), on_meta)
    except USER_EXCEPTIONS:  # a user's model may refuse the meta device in any way; the proof looks too
        return
    check_loss(workload, loss)


def _describe_parameters(function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> str:
    """Its parameters where it takes others, without types; empty also where Python cannot tell, as of C."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*arguments, **named)
    except TypeError:
        bare = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
        return str(inspect.Signature(bare))
    return ""
