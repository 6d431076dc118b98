"""Device state around the measurement: arithmetic precision and peak memory."""

from __future__ import annotations

import torch


def set_precision(precision: str, device: torch.device) -> None:
    """Let matrix products and convolutions use TF32 only where the run asked for it.

    PyTorch's own default allows TF32 in convolutions and not in products; a run states one or the other.
    """
    if device.type == "cuda":
        chosen = "tf32" if precision == "tf32" else "ieee"
        torch.backends.cuda.matmul.fp32_precision = chosen
        torch.backends.cudnn.conv.fp32_precision = chosen  # type: ignore[attr-defined]


def start_peak(device: torch.device) -> int:
    """Start watching peak memory; bytes in use now, which belong to other cases."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak_mib(device: torch.device, before_bytes: int) -> float | None:
    """MiB that tensors took at most since `start_peak`; None on a CPU, which does not keep count."""
    if device.type != "cuda":
        return None
    return (torch.cuda.max_memory_allocated(device) - before_bytes) / 2**20
