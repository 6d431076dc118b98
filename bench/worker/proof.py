"""The first proof before timing: every mode computes the gradients that one device would.

One seeded global batch, batch-norm statistics frozen and random numbers off, in float64 where the model
allows: the averaged gradients of the mode must equal the mean of those that the plain module has of the same
parts of the batch, and its state dict must load into one. `bench/worker/update_proof.py` has the second one,
of the steps that are timed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from ...models.nested import chunk, map_tensors, tensors_of
from ...models.workload import Batch, Workload, check_loss, loss_function, make_batch
from ..case import Case, Split, split_of
from ..errors import RAISED_BY_USERS, UsageError
from ..measure.clock import float32_precision
from ..modes import Mode, Place, Stages, build_mode
from ..modes.base import UnusedParametersError, gradients_of
from ..modes.ddp import why_ddp_waits
from .outcome import report_of
from .reference import Reference, Weights, drawing_kinds, losses, norm, switch_off
from .stages import Splitter

ROWS_PER_DEVICE = 1
"""Batch of the proof: the gradients of one row tell as much as those of many, in less time."""

TOLERANCES = {"none": 1e-9, "powersgd": 1e-9, "fp16": 2e-3, "bf16": 2e-2}
"""Largest relative gradient error by communication hook, in float64; fp16 and bf16 hooks round what they
send (half their last mantissa bit is 2^-11 and 2^-8), PowerSGD compresses only from its third step."""

BF16_TOLERANCE = 0.25
"""The same where DDP or the model computes in 16 bits: bf16's 8 cost 3% on ResNet-20 and 13% on ResNet-50, in
eval mode."""

TOLERANCES_BY_DTYPE = {torch.float64: 0.0, torch.float32: 1e-3}
"""What a model's own arithmetic may cost, by the coarsest type in it: float32 has 7 digits, of which long
sums cost some. Of 16 bits it is `BF16_TOLERANCE`."""


class ProofError(RuntimeError):
    """A mode's gradients, parameters or state dict differ from the plain module's."""


@dataclass
class Prover:
    """Proves one case after another for one workload; keeps the reference gradients it has computed."""

    workload: Workload
    template: nn.Module
    """A freshly initialised module, the same on every rank; never trained."""
    place: Place
    seed: int
    equal_replicas: bool = False
    """Whether every rank's template was found to be the same, so that nothing has to be broadcast."""

    data_workers: int = 0
    """Loader processes of every rank, with a folder of images."""

    why_float32: str = ""
    """What the model raised in float64; empty where it runs in it."""

    def __post_init__(self) -> None:
        self._loss = loss_function(self.workload)
        self._references: dict[Split, Weights] = {}
        self.splitter = Splitter(self.workload, self.template, self.place, self.seed)

    @functools.cached_property
    def reference(self) -> Reference:
        """What a case's parameters have to be after its first steps."""
        return Reference(
            self.workload,
            self.template,
            self.place.device,
            self.seed,
            self.data_workers,
            self.switched_off,
        )

    @functools.cached_property
    def dtype(self) -> torch.dtype | None:
        """Float64, or float32 for a model that does not run in it; None, as it was made, for one in neither.

        Raises what the model raises in all, and what is no matter of the dtype: full memory, which float32
        would hide, and a broken device.
        """
        for dtype in (torch.float64, torch.float32):
            try:
                self._loss_in(dtype).backward()
                return dtype
            except RAISED_BY_USERS as error:
                found = report_of(error)
                if isinstance(error, UsageError) or found.status == "oom" or found.restart:
                    raise
                self.why_float32 = self.why_float32 or found.reason
        self._loss_in(None).backward()
        return None

    @functools.cached_property
    def switched_off(self) -> tuple[type[nn.Module], ...]:
        """Types of the modules that draw random numbers, beside those for dropout; off in both proofs."""
        return drawing_kinds(lambda: self._loss_in(self.dtype))

    def prove(self, case: Case, group: dist.ProcessGroup | None, stages: Stages | None = None) -> float:
        """Relative gradient error ‖g - g_single‖ / ‖g_single‖ of this case.

        Every rank of the case calls it together; rank 0 compares (DDP's gradients are the same on all ranks),
        the others return 0. Raises ProofError where the error exceeds the tolerance, UnusedParametersError
        where DDP would wait for ever. A model that does not run in float64 is proven in float32 without TF32,
        whose 10 bits would use up the tolerance.
        """
        with float32_precision("fp32", self.place.device):
            batch = self._batch(_proven_split(case).num_rows, self.dtype)
            module, equal = self._module(self.dtype), self.equal_replicas
            mode = build_mode(case, module, self.place, group, equal_replicas=equal, stages=stages)
            try:
                # The wrapper may swap modules (SyncBatchNorm), so freeze what it holds now.
                self._freeze(mode.module)
                self._backward(case, mode, batch)
                if waits := why_ddp_waits(case, mode.module):
                    raise UnusedParametersError(waits)
                gradients, state = mode.gradients(), mode.state_dict()
            finally:
                mode.close()
            if self.place.rank:
                return 0.0
            loaded(self.template, state)
            return self._compare(case, gradients, batch)

    def _compare(self, case: Case, gradients: Weights, batch: Batch) -> float:
        error = _off(gradients, self._plain_gradients(_proven_split(case), batch))
        allowed = TOLERANCES[case.comm_hook]
        if self.dtype != torch.float64 or not error <= allowed:
            allowed = max(allowed, TOLERANCES_BY_DTYPE.get(self._coarsest_dtype, BF16_TOLERANCE))
        if not error <= allowed:
            raise ProofError(
                f"gradients differ from those of single by {error:.2g} (relative; at most {allowed:.0e}"
                f"{self._less()})"
            )
        return error

    def forget(self) -> None:
        """Give back the memory of what cases are compared with: copies of the model, some in float64."""
        self._references.clear()
        self.__dict__.pop("reference", None)

    def split_effect(self, case: Case) -> float:
        """How far the gradient of the case's parts of a batch is from that of all rows at once, relative.

        Of a loss that is a mean over rows of equal weight it is rounding. To be asked where `prove` compared.
        One row for each part would not show what differs between the rows of a part. All rows pass the model
        at once, so there are as many as a device trains on, but one for each part at least.
        """
        num_parts = _proven_split(case, 1).num_rows
        split = _proven_split(case, max(case.batch_per_device // num_parts, 1))
        whole = Split(1, split.num_rows)
        with float32_precision("fp32", self.place.device):
            batch = self._batch(split.num_rows, self.dtype)
            return _off(*(self._plain_gradients(one, batch) for one in (split, whole)))

    def _less(self) -> str:
        """Why the tolerance is not that of float64."""
        if not self.why_float32:
            return ""
        return f"; in {'float32' if self.dtype else 'its own dtype'}, for in float64: {self.why_float32}"

    @functools.cached_property
    def _coarsest_dtype(self) -> torch.dtype:
        """The coarsest type that the model computes in, where gradients pass: it may round to one inside."""
        module = self._module(self.dtype)
        with _DtypesSeen() as seen:
            self._loss(module, self._batch(ROWS_PER_DEVICE, self.dtype))
        coarsest: torch.dtype = max(
            seen.dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64
        )
        return coarsest

    def _backward(self, case: Case, mode: Mode, batch: Batch) -> None:
        def loss(model: Any, batch: Batch) -> Tensor:
            found = self._loss(model, batch)
            check_loss(self.workload, found)
            return found / case.accumulate

        micro_batches = chunk(batch, case.accumulate)
        for i, micro_batch in enumerate(micro_batches):
            own = micro_batch
            if case.num_batches > 1:
                own = chunk(micro_batch, case.num_devices)[self.place.rank]
            with mode.no_sync() if i < case.accumulate - 1 else contextlib.nullcontext():
                mode.train(own, loss)

    def _plain_gradients(self, split: Split, batch: Batch) -> Weights:
        """The mean of the plain module's gradients over the parts that `split` makes of the batch."""
        if split not in self._references:
            module = self._module(self.dtype)
            self._freeze(module)
            for micro_batch in chunk(batch, split.accumulate):
                batches = chunk(micro_batch, split.num_sources)
                for loss in losses(self._loss, module, batches, split):
                    check_loss(self.workload, loss)
                    (loss / (split.num_losses * split.accumulate)).backward()
            self._references[split] = gradients_of(module)
        return self._references[split]

    def _loss_in(self, dtype: torch.dtype | None) -> Tensor:
        module = self._module(dtype)
        switch_off(module, _BatchNorm)
        loss = self._loss(module, self._batch(ROWS_PER_DEVICE, dtype))
        check_loss(self.workload, loss)
        return loss

    def _freeze(self, module: nn.Module) -> None:
        switch_off(module, _BatchNorm, *self.switched_off)

    def _module(self, dtype: torch.dtype | None) -> nn.Module:
        return copy.deepcopy(self.template).to(device=self.place.device, dtype=dtype)

    def _batch(self, size: int, dtype: torch.dtype | None) -> Batch:
        """One global batch on the device, floating tensors as `dtype`, integers and masks as they are."""
        generator = torch.Generator().manual_seed(self.seed)
        batch = make_batch(self.workload, batch_size=size, generator=generator)

        def placed(tensor: Tensor) -> Tensor:
            return tensor.to(self.place.device, dtype if tensor.is_floating_point() else None)

        return map_tensors(placed, batch)


class _DtypesSeen(TorchFunctionMode):
    """Notes within it of which floating types results are that have gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.dtypes |= {one.dtype for one in tensors_of(result) if one.requires_grad}
        return result


def _proven_split(case: Case, num_rows: int = ROWS_PER_DEVICE) -> Split:
    """How a case splits the batch of its proof, `num_rows` for each part."""
    split = split_of(case)
    whole = num_rows * case.num_devices * case.num_micro_batches
    return replace(split, batch_size=whole // split.num_sources)


def _off(gradients: Weights, reference: Weights) -> float:
    """How far gradients are off, relatively; NaN where the reference is 0."""
    length = norm(reference)
    off = norm({name: gradients[name] - right for name, right in reference.items()})
    return off / length if length else math.nan


def loaded(template: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the plain module with the weights in `state`. Raises ProofError where they do not fit."""
    module = copy.deepcopy(template)
    try:
        module.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise ProofError(f"its state dict does not load into the plain module: {error}") from error
    return module


def fingerprint(module: nn.Module) -> str:
    """A hash of all parameters and buffers; empty where they cannot be read (a lazy module's)."""
    found = hashlib.sha256()
    try:
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().data)
    except (RuntimeError, ValueError):
        return ""
    return found.hexdigest()
