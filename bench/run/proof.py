"""The first proof before timing: every mode computes the gradients that one device would.

One seeded global batch, batch-norm statistics frozen and dropout off, in float64 where the model allows:
the averaged gradients of the mode must equal those of the plain module, and its state dict must load into
one. `bench/run/update_proof.py` has the second one, of the steps that are timed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bench.cluster.ranks import Cluster
from bench.measure.clock import float32_precision
from bench.modes import Mode, Place, Stages, build_mode
from bench.modes.base import gradients_of
from bench.modes.ddp import why_ddp_waits
from bench.plan import Case
from bench.recovery.attempt import report_of
from bench.run.reference import Reference, switch_off
from bench.run.stages import Splitter
from bench.run.together import together
from models.workload import Workload, make_batch

SAMPLES_PER_DEVICE = 1
"""Batch of the proof: the gradients of one sample tell as much as those of many, in less time."""

TOLERANCES = {"none": 1e-9, "powersgd": 1e-9, "fp16": 2e-3, "bf16": 2e-2}
"""Largest relative gradient error by communication hook, in float64; fp16 and bf16 hooks round what they
send (half their last mantissa bit is 2^-11 and 2^-8), PowerSGD compresses only from its third step."""

BF16_TOLERANCE = 0.25
"""The same where DDP computes in bf16: 8 bits cost 3% on ResNet-20 and 13% on ResNet-50, in eval mode."""

FLOAT32_TOLERANCE = 1e-3
"""The same for models that do not run in float64: float32 has 7 digits, of which long sums cost some."""


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
        """Nothing is known yet."""
        self._references: dict[int, Tensor] = {}
        self.splitter = Splitter(self.workload, self.template, self.place, self.seed)

    @functools.cached_property
    def reference(self) -> Reference:
        """What a case's parameters have to be after its first steps."""
        return Reference(self.workload, self.template, self.place.device, self.seed, self.data_workers)

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """Float64, or float32 for a model that runs in float32 alone.

        Raises what the model raises in both, and what is no matter of the dtype: full memory, which float32
        would hide, and a broken device.
        """
        try:
            self._gradient(self._module(torch.float64), *self._batch(SAMPLES_PER_DEVICE, torch.float64))
        except Exception as error:
            found = report_of(error)
            if found.status == "oom" or found.restart:
                raise
            self._gradient(self._module(torch.float32), *self._batch(SAMPLES_PER_DEVICE, torch.float32))
            self.why_float32 = found.reason
            return torch.float32
        return torch.float64

    def prove(self, case: Case, group: dist.ProcessGroup | None, stages: Stages | None = None) -> float:
        """Relative gradient error ‖g - g_single‖ / ‖g_single‖ of this case.

        Every rank of the case calls it together; rank 0 compares (DDP's gradients are the same on all ranks),
        the others return 0. Raises ProofError, on all of them, where the error exceeds the tolerance. A model
        that does not run in float64 is proven in float32 without TF32, whose 10 bits would use up the
        tolerance.
        """
        with float32_precision("fp32", self.place.device):
            return self._prove(case, group, stages)

    def _prove(self, case: Case, group: dist.ProcessGroup | None, stages: Stages | None) -> float:
        total = SAMPLES_PER_DEVICE * case.num_devices * case.accumulate * case.num_micro_batches
        inputs, targets = self._batch(total, self.dtype)
        module, equal = self._module(self.dtype), self.equal_replicas
        mode = build_mode(case, module, self.place, group, equal_replicas=equal, stages=stages)
        try:
            # The wrapper may swap modules (SyncBatchNorm), so freeze what it holds now.
            switch_off(mode.module, _BatchNorm)
            self._backward(case, mode, inputs, targets)
            if waits := why_ddp_waits(case, mode.module):
                raise ProofError(waits)
            gradients, state = mode.gradients(), mode.state_dict()
        finally:
            mode.close()

        def compare() -> float:
            loaded(self.template, state)
            return self._compare(case, gradients, inputs, targets)

        return together(self.place, group, compare, elsewhere=0.0, error=ProofError)

    def _compare(self, case: Case, gradients: Mapping[str, Tensor], inputs: Tensor, targets: Tensor) -> float:
        reference = self._references.get(len(inputs))
        if reference is None:
            reference = self._gradient(self._module(self.dtype), inputs, targets)
            self._references[len(inputs)] = reference
        error = float((_flat(gradients) - reference).norm() / reference.norm())
        stated = TOLERANCES[case.comm_hook] if case.ddp_mixed_precision == "none" else BF16_TOLERANCE
        tolerance = stated if self.dtype == torch.float64 else FLOAT32_TOLERANCE
        if not error <= max(tolerance, stated):
            less = f"; in float32, for in float64: {self.why_float32}" if self.why_float32 else ""
            at_most = f"(relative; at most {tolerance:.0e}{less})"
            raise ProofError(f"gradients differ from those of single by {error:.2g} {at_most}")
        return error

    def _backward(self, case: Case, mode: Mode, inputs: Tensor, targets: Tensor) -> None:
        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            return self.workload.loss(outputs, targets) / case.accumulate

        micro_inputs, micro_targets = inputs.chunk(case.accumulate), targets.chunk(case.accumulate)
        for i in range(case.accumulate):
            x, y = micro_inputs[i], micro_targets[i]
            if case.num_batches > 1:
                x, y = x.chunk(case.num_devices)[self.place.rank], y.chunk(case.num_devices)[self.place.rank]
            with mode.no_sync() if i < case.accumulate - 1 else contextlib.nullcontext():
                mode.train(x, y, loss)

    def _gradient(self, module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        switch_off(module, _BatchNorm)
        self.workload.loss(module(inputs), targets).backward()
        return _flat(gradients_of(module))

    def _module(self, dtype: torch.dtype) -> nn.Module:
        return copy.deepcopy(self.template).to(device=self.place.device, dtype=dtype)

    def _batch(self, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        inputs, targets = make_batch(self.workload, batch_size=size, generator=generator)
        if inputs.is_floating_point():
            inputs = inputs.to(dtype)
        if targets.is_floating_point():
            targets = targets.to(dtype)
        return inputs.to(self.place.device), targets.to(self.place.device)


def loaded(template: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the plain module with the weights in `state`. Raises ProofError where they do not fit."""
    module = copy.deepcopy(template)
    try:
        module.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise ProofError(f"its state dict does not load into the plain module: {error}") from error
    return module


def equal_replicas(module: nn.Module, cluster: Cluster) -> bool:
    """Whether all ranks of `cluster` built the same; False where that cannot be told."""
    if cluster.world_size == 1:
        return True
    found = set(cluster.gather(fingerprint(module)))
    return len(found) == 1 and found != {""}


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


def _flat(gradients: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([gradients[name].flatten() for name in sorted(gradients)])
