"""Tensors in any nesting of tuples, lists, dicts and objects: the one place that looks into batches.

The containers are those that `nn.DataParallel` scatters and gathers. Objects, such as graphs, go whole to
each replica. What is no tensor stays as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

CONSTANT_TYPES = (bool, int, float, complex, str, type(None))
"""Types that a batch may hold beside tensors: their values are the same on every device."""

OPAQUE_TYPES = (type, FunctionType, MethodType, ModuleType, nn.Module)
"""Objects whose attributes are no part of a batch."""

MAX_DESCRIBED = 4
"""Parts of a container that an error message names; a list may have thousands."""


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return `value` with `function` of every tensor in the place of it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return type(value)((key, map_tensors(function, part)) for key, part in value.items())
    if isinstance(value, PackedSequence):  # its batch_sizes stay on the host
        packed = (value.data, value.sorted_indices, value.unsorted_indices)
        data, *orders = map_tensors(function, packed)
        return PackedSequence(data, value.batch_sizes, *orders)
    if isinstance(value, tuple | list):
        parts = [map_tensors(function, part) for part in value]
        is_named = isinstance(value, tuple) and hasattr(value, "_fields")
        return type(value)(*parts) if is_named else type(value)(parts)
    return value if isinstance(value, CONSTANT_TYPES) else _map_object(function, value)


def _map_object(function: Callable[[Tensor], Any], value: Any) -> Any:
    if _can_map(value):
        return copy.copy(value).apply(lambda one: function(one) if isinstance(one, Tensor) else one)
    if not list_tensors(value):
        return value
    made = copy.copy(value)
    for name, part in _get_attributes(value).items():
        object.__setattr__(made, name, map_tensors(function, part))  # a dataclass may be frozen
    return made


def _can_map(value: Any) -> bool:
    """Tell whether an object has PyTorch Geometric's methods: its `apply` maps a copy's tensors in place."""
    return not isinstance(value, OPAQUE_TYPES) and all(
        hasattr(value, name) for name in ("apply", "clone", "to")
    )


def _get_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object by name, those in slots too; none of what is `OPAQUE_TYPES`."""
    if isinstance(value, OPAQUE_TYPES):
        return {}
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            is_private = slot.startswith("__") and not slot.endswith("__")
            name = f"_{kind.__name__.lstrip('_')}{slot}" if is_private else slot
            if slot not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def list_tensors(value: Any) -> list[Tensor]:
    """List the tensors of a nesting, in the order of `map_tensors`."""
    found: list[Tensor] = []
    for leaf in list_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif isinstance(leaf, PackedSequence) or _can_map(leaf):
            map_tensors(partial(_note_tensor, found), leaf)
        elif not isinstance(leaf, CONSTANT_TYPES):
            found += list_tensors(list(_get_attributes(leaf).values()))
    return found


def _note_tensor(found: list[Tensor], tensor: Tensor) -> Tensor:
    found.append(tensor)
    return tensor


def list_leaves(value: Any) -> list[Any]:
    """List whatever a nesting holds that is no tuple, list or dict."""
    parts = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | tuple | list) and not isinstance(value, PackedSequence):
        return [leaf for part in parts for leaf in list_leaves(part)]
    return [value]


def list_objects(value: Any) -> list[Any]:
    """List what of a nesting is no tensor, tuple, list or dict, and holds tensors."""
    return [leaf for leaf in list_leaves(value) if not isinstance(leaf, Tensor) and list_tensors(leaf)]


def replace_tensors(value: Any, tensors: Iterable[Tensor]) -> Any:
    """Return `value` with other tensors in the place of its own, in the order of `list_tensors`."""
    others = iter(tensors)
    return map_tensors(lambda _: next(others), value)


def split_tensors(value: Any, number: int) -> list[Any]:
    """Split dimension 0 of every tensor into `number` parts, as `nn.DataParallel` scatters its inputs.

    There are as many parts as the tensor with the fewest rows gives; one where there is no tensor.
    """
    if number == 1:
        return [value]
    parts = zip(*(tensor.chunk(number) for tensor in list_tensors(value)), strict=False)
    return [replace_tensors(value, part) for part in parts] or [value]


def split_rows(batch: Any, number: int) -> list[Any]:
    """Split a batch as `split_tensors` does, and with its tensors the lists with an entry for each row."""
    if number == 1:
        return [batch]
    num_rows = max(map(len, list_tensors(batch)), default=0)
    places = torch.arange(num_rows).chunk(number)

    def select_rows(value: Any, chosen: list[int]) -> Any:
        if isinstance(value, list) and len(value) == num_rows and not list_tensors(value):
            return [value[i] for i in chosen]
        if isinstance(value, dict):
            return type(value)((key, select_rows(part, chosen)) for key, part in value.items())
        if type(value) in (tuple, list):
            return type(value)(select_rows(part, chosen) for part in value)
        for name, part in _get_attributes(value).items() if list_objects(value) else ():
            object.__setattr__(value, name, select_rows(part, chosen))  # `split_tensors` has made it anew
        return value

    parts = split_tensors(batch, number)
    return [select_rows(part, chosen.tolist()) for part, chosen in zip(parts, places, strict=False)] or parts


def join(values: Sequence[Any]) -> Any:
    """Concatenate tensors at the same place along dimension 0, as `nn.DataParallel` gathers outputs.

    Scalars become a vector. What is no tensor is that of the first value.
    """
    columns = zip(*(list_tensors(value) for value in values), strict=True)
    return replace_tensors(
        values[0], [torch.cat([add_row_dimension(tensor) for tensor in column]) for column in columns]
    )


def add_row_dimension(tensor: Tensor) -> Tensor:
    """Return the tensor with a dimension 0, which a scalar lacks."""
    return tensor if tensor.ndim else tensor.reshape(1)


def describe(value: Any) -> str:
    """Say what a value is, for an error message: its type, and of tensors the shapes."""
    if value is None:
        return "None"
    if isinstance(value, Tensor):
        return "a nested tensor" if value.is_nested else f"a tensor of shape {tuple(value.shape)}"
    kind = type(value)
    if kind is dict:
        shown = [f"{key!r}: {describe(value[key])}" for key in list(value)[:MAX_DESCRIBED]]
    elif kind in (tuple, list):
        shown = [describe(part) for part in value[:MAX_DESCRIBED]]
    else:
        return f"{'an' if kind.__name__[0] in 'AEIOUaeiou' else 'a'} {kind.__name__}"
    if len(value) > MAX_DESCRIBED:
        shown.append("…")
    brackets = "()" if kind is tuple else "[]" if kind is list else "{}"
    return f"{brackets[0]}{', '.join(shown)}{brackets[1]}"
