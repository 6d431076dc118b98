"""Size and arithmetic of a model, counted without training it.

User's code may keep what it sees here, such as tensors on the meta device: no process that trains looks.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..bench.common.errors import USER_EXCEPTIONS
from ..bench.machine.manifest import Model
from .nested import map_tensors
from .workload import Batch, Workload, make_batch, make_module, split_arguments

DTYPES = {torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}


def profile_workload(workload: Workload) -> Model:
    """Count parameters, gradient bytes and forward FLOPs, at no cost where the model runs on the meta device.

    FLOPs are those of matrix products, convolutions and attention, as `torch.utils.flop_counter` counts them:
    twice the multiply-adds that torchvision publishes. Raises UserCodeError where the module cannot be made.
    """
    module, _, counter = _forward(workload)
    flops = 0 if counter is None else counter.get_total_flops()
    params = list(module.parameters())
    dtypes = {param.dtype for param in params}
    return Model(
        arch=workload.name,
        num_params=sum(param.numel() for param in params),
        dtype=DTYPES.get(dtypes.pop()) if len(dtypes) == 1 else None,
        gradient_bytes=sum(num_bytes for _, num_bytes, _ in list_trainable(module)),
        # of one of two rows; a count of zero means that the counter knows none of the model's operators
        forward_flops_per_image=flops // 2 if flops else None,
        in_evaluation=not module.training,
    )


@dataclass(frozen=True)
class Gradient:
    """One trainable parameter: bytes of its gradient, FLOPs of its module's forward, 0 where none are known.

    A module's FLOPs stand at the first of its parameters.
    """

    name: str
    num_bytes: int
    forward_flops: float


def list_trainable(module: nn.Module) -> list[tuple[str, int, str]]:
    """Name, bytes and kind of the trainable parameters as registered.

    The kind is the dtype where there are several: DDP never mixes them in a bucket.
    """
    found = [(name, one) for name, one in module.named_parameters() if one.requires_grad]
    mixed = len({one.dtype for _, one in found}) > 1
    return [(name, one.nbytes, str(one.dtype) if mixed else "") for name, one in found]


def list_gradients(workload: Workload) -> list[Gradient]:
    """List the trainable parameters of a workload, last registered first, as a backward reaches them."""
    module, _, counter = _forward(workload)
    by_module = {} if counter is None else counter.get_flop_counts()
    # Names in the counter begin with the model's class.
    flops = {name.partition(".")[2]: sum(ops.values()) for name, ops in by_module.items()}
    found, counted = [], set[str]()
    for name, num_bytes, _ in reversed(list_trainable(module)):
        owner = name.rpartition(".")[0]
        found.append(Gradient(name, num_bytes, 0 if owner in counted else flops.get(owner, 0)))
        counted.add(owner)
    return found


def count_outputs(workload: Workload) -> int | None:
    """Classes of a classifier, the second dimension of its outputs (N, classes); None for other outputs."""
    _, outputs, _ = _forward(workload)
    return outputs.shape[1] if isinstance(outputs, Tensor) and outputs.ndim == 2 else None


def _forward(workload: Workload) -> tuple[nn.Module, object, FlopCounterMode | None]:
    """Return the module, and outputs and FLOPs of one forward in eval mode, on meta, or else on the CPU.

    Both are None where it runs on neither.
    """
    with torch.random.fork_rng(devices=[]):
        batch = make_batch(workload)
        try:
            with warnings.catch_warnings(action="ignore"), torch.device("meta"):
                on_meta = map_tensors(lambda tensor: tensor.to("meta"), batch)
                return _count(workload, workload.module(), on_meta)
        except USER_EXCEPTIONS:  # a user's model may refuse the meta device in any way
            module = make_module(workload)
        try:
            return _count(workload, module, batch)
        except USER_EXCEPTIONS:  # training will show the user's error; the sizes are still known
            return module, None, None


def _count(workload: Workload, module: nn.Module, batch: Batch) -> tuple[nn.Module, object, FlopCounterMode]:
    counter, outputs = FlopCounterMode(display=False), None
    training, fused = module.training, torch.backends.mha.get_fastpath_enabled()
    module.eval()
    # Transformer encoders would be one operator for each layer, without known FLOPs or a meta kernel.
    torch.backends.mha.set_fastpath_enabled(value=False)
    try:
        with torch.no_grad(), counter:
            if workload.batch_loss is not None:
                workload.batch_loss(module, batch)
            else:
                arguments, named = split_arguments(batch[0])
                outputs = module(*arguments, **named)
    finally:
        module.training = training  # it says of itself what it did before
        torch.backends.mha.set_fastpath_enabled(value=fused)
    return module, outputs, counter
