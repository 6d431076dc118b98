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

HANDED_ON = (bool, int, float, complex, str, type(None))
"""Types that a batch may hold beside tensors: their values are the same on every device."""

CLOSED = (type, FunctionType, MethodType, ModuleType, nn.Module)
"""Objects whose attributes are no part of a batch."""

MOST_DESCRIBED = 4
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
    return value if isinstance(value, HANDED_ON) else _map_object(function, value)


def _map_object(function: Callable[[Tensor], Any], value: Any) -> Any:
    if _maps_itself(value):
        return copy.copy(value).apply(lambda one: function(one) if isinstance(one, Tensor) else one)
    if not tensors_of(value):
        return value
    made = copy.copy(value)
    for name, part in _attributes(value).items():
        object.__setattr__(made, name, map_tensors(function, part))  # a dataclass may be frozen
    return made


def _maps_itself(value: Any) -> bool:
    """Tell whether an object has PyTorch Geometric's methods: its `apply` maps a copy's tensors in place."""
    return not isinstance(value, CLOSED) and all(hasattr(value, name) for name in ("apply", "clone", "to"))


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object by name, those in slots too; none of what is `CLOSED`."""
    if isinstance(value, CLOSED):
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


def tensors_of(value: Any) -> list[Tensor]:
    """List the tensors of a nesting, in the order of `map_tensors`."""
    found: list[Tensor] = []
    for leaf in leaves_of(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif isinstance(leaf, PackedSequence) or _maps_itself(leaf):
            map_tensors(partial(_noted, found), leaf)
        elif not isinstance(leaf, HANDED_ON):
            found += tensors_of(list(_attributes(leaf).values()))
    return found


def _noted(found: list[Tensor], tensor: Tensor) -> Tensor:
    found.append(tensor)
    return tensor


def leaves_of(value: Any) -> list[Any]:
    """List whatever a nesting holds that is no tuple, list or dict."""
    parts = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | tuple | list) and not isinstance(value, PackedSequence):
        return [leaf for part in parts for leaf in leaves_of(part)]
    return [value]


def objects_of(value: Any) -> list[Any]:
    """List what of a nesting is no tensor, tuple, list or dict, and holds tensors."""
    return [leaf for leaf in leaves_of(value) if not isinstance(leaf, Tensor) and tensors_of(leaf)]


def with_tensors(value: Any, tensors: Iterable[Tensor]) -> Any:
    """Return `value` with other tensors in the place of its own, in the order of `tensors_of`."""
    others = iter(tensors)
    return map_tensors(lambda _: next(others), value)


def chunk(value: Any, number: int) -> list[Any]:
    """Split dimension 0 of every tensor into `number` parts, as `nn.DataParallel` scatters its inputs.

    There are as many parts as the tensor with the fewest rows gives; one where there is no tensor.
    """
    if number == 1:
        return [value]
    parts = zip(*(tensor.chunk(number) for tensor in tensors_of(value)), strict=False)
    return [with_tensors(value, part) for part in parts] or [value]


def cut(batch: Any, number: int) -> list[Any]:
    """Split a batch as `chunk` does, and with its tensors the lists that have an entry for each row."""
    if number == 1:
        return [batch]
    num_rows = max(map(len, tensors_of(batch)), default=0)
    places = torch.arange(num_rows).chunk(number)

    def rows_of(value: Any, chosen: list[int]) -> Any:
        if isinstance(value, list) and len(value) == num_rows and not tensors_of(value):
            return [value[i] for i in chosen]
        if isinstance(value, dict):
            return type(value)((key, rows_of(part, chosen)) for key, part in value.items())
        if type(value) in (tuple, list):
            return type(value)(rows_of(part, chosen) for part in value)
        for name, part in _attributes(value).items() if objects_of(value) else ():
            object.__setattr__(value, name, rows_of(part, chosen))  # `chunk` has made it anew
        return value

    parts = chunk(batch, number)
    return [rows_of(part, chosen.tolist()) for part, chosen in zip(parts, places, strict=False)] or parts


def join(values: Sequence[Any]) -> Any:
    """Concatenate tensors at the same place along dimension 0, as `nn.DataParallel` gathers outputs.

    Scalars become a vector. What is no tensor is that of the first value.
    """
    columns = zip(*(tensors_of(value) for value in values), strict=True)
    return with_tensors(values[0], [torch.cat([rows(tensor) for tensor in column]) for column in columns])


def rows(tensor: Tensor) -> Tensor:
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
        shown = [f"{key!r}: {describe(value[key])}" for key in list(value)[:MOST_DESCRIBED]]
    elif kind in (tuple, list):
        shown = [describe(part) for part in value[:MOST_DESCRIBED]]
    else:
        return f"{'an' if kind.__name__[0] in 'AEIOUaeiou' else 'a'} {kind.__name__}"
    if len(value) > MOST_DESCRIBED:
        shown.append("…")
    brackets = "()" if kind is tuple else "[]" if kind is list else "{}"
    return f"{brackets[0]}{', '.join(shown)}{brackets[1]}"
