"""Tensors by name: parameters, what was added to them, their gradients, or buffers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

Weights = dict[str, Tensor]
"""Tensors by the names of parameters or buffers."""


def raise_precision(tensor: Tensor) -> Tensor:
    """Return the tensor in float32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def compute_tensor_norm(tensor: Tensor) -> Tensor:
    """Compute the 2-norm of a tensor of real or complex numbers."""
    # Squares of float32 overflow and vanish.
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    found: Tensor = torch.linalg.vector_norm(tensor.to(wide))
    return found


def get_gradient(parameter: nn.Parameter) -> Tensor:
    """Return the gradient of a parameter, dense; zeros where there is none."""
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad


def copy_to_host(named: Weights) -> Weights:
    """Copy tensors to the host."""
    return {name: one.detach().to("cpu", copy=True) for name, one in named.items()}


def subtract_weights(one: Weights, other: Weights) -> Weights:
    """`one` - `other`, in float32 at least."""
    return {name: raise_precision(one[name]) - raise_precision(start) for name, start in other.items()}


def compute_norm(weights: Mapping[str, Tensor]) -> float:
    """Compute the 2-norm over all tensors."""
    return float(
        torch.stack([compute_tensor_norm(one).cpu() for one in weights.values()] or [torch.zeros(())]).norm()
    )
