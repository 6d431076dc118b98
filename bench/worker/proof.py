"""The first proof before timing: every mode computes the gradients that one device would.

One seeded global batch, in training and in float64 where the model allows: the averaged gradients of the mode
must equal the mean of those that the plain module has of the same parts of the batch, from the same random
numbers, and its state dict must be such as the plain module's. `bench/worker/update_proof.py` has the second
one, of the steps that are timed.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from ...models.nested import cut, map_tensors, tensors_of
from ...models.workload import Batch, Workload, check_loss, loss_function, make_batch, one_line
from ..case import STAND_IN, Case, Split, split_of
from ..errors import RAISED_BY_USERS, UsageError
from ..measure.clock import float32_precision
from ..modes import Mode, Place, Stages, Unsupported, build_mode
from ..modes.base import UnusedParametersError, gradients_of
from ..modes.ddp import why_ddp_waits
from .distance import CANCELLED, Off, difference, larger, off_by, off_by_buffers
from .making import Maker, begin_draws, generators, precise
from .outcome import is_out_of_gpu_memory, report_of
from .peers import Peers, Weights, as_default, norm
from .reference import Computed, Reference, Subject, buffers_of, on_host, shapes_of, sign_of
from .stages import Splitter

LEAST_ROWS = 2
"""Rows of each part at least, if the case trains on as many: losses between rows need two."""

LEAST_VALUES = 8
"""Values of a channel that batch norm sees at least: of two it makes 1 and -1, whatever they are."""

TOLERANCES = {"none": 1e-9, "powersgd": 1e-9, "fp16": 2e-3, "bf16": 2e-2}
"""Largest relative gradient error by communication hook, in float64; fp16 and bf16 hooks round what they
send (half their last mantissa bit is 2^-11 and 2^-8), PowerSGD compresses only from its third step."""

BF16_TOLERANCE = 0.25
"""The same where DDP or the model computes in 16 bits: bf16's 8 cost 3% on ResNet-20 and 13% on ResNet-50, in
eval mode."""

TOLERANCES_BY_DTYPE = {torch.float64: 0.0, torch.float32: 1e-3}
"""What a model's own arithmetic may cost, by the coarsest type in it: float32 has 7 digits, of which long
sums cost some. Of 16 bits it is `BF16_TOLERANCE`."""

OF_LIMIT = 0.1
"""Two runs of the plain module that differ by more of the limit prove nothing."""

_DTYPES = (torch.float64, torch.float32, None)


class ProofError(RuntimeError):
    """A mode's gradients, parameters, buffers or state dict differ from the plain module's."""


def two_runs_differ(off: float) -> str:
    """Why a case is not proved whose model draws or computes otherwise each time, and what mends it."""
    return (
        f"two runs of the plain module under equal seeds differ by {off:.2g}; draw from torch's, Python's or "
        "numpy's global generators alone, and keep nothing between runs"
    )


NO_SEED = (
    "it draws random numbers, and with SyncBatchNorm one device draws others; --sync-batchnorm off proves it"
)
NOT_STOOD_IN = "the DP stand-in of CPU cores does not take this model, which nn.DataParallel on GPUs may"
NO_REFERENCE = "there is no memory for the plain module beside it; a smaller --batch-size leaves some"


@dataclass(frozen=True)
class Shown:
    """What the first proof has shown of a case."""

    error: float | None
    not_proved: str = ""


@dataclass
class Prover:
    """Proves one case after another for one workload; keeps the reference gradients it has computed."""

    workload: Workload
    place: Place
    seed: int
    equal_replicas: bool = False
    """Whether every rank's module was found to be the same, so that nothing has to be broadcast."""

    data_workers: int = 0
    """Loader processes of every rank, with a folder of images."""

    control: dist.ProcessGroup | None = None
    """What ranks speak through in a proof; None is the default group."""

    alone: dist.ProcessGroup | None = None
    """The group of the first rank alone, which is the default one where it computes alone."""

    draws: bool = False
    """Whether the model of the case that was proved last, or its loss, draws random numbers."""

    why_float32: str = ""
    """What the model raised in float64; empty where it runs in it."""

    def __post_init__(self) -> None:
        self._loss = loss_function(self.workload)
        self.maker = Maker(self.workload, self.seed)
        self._start: Weights | None = None
        self._effects: dict[object, Weights] = {}
        self.splitter = Splitter(self.workload, self.maker, self.place, self.seed)

    @functools.cached_property
    def reference(self) -> Reference:
        """What the plain module computes."""
        return Reference(self.workload, self.maker, self.place.device, self.seed, self.data_workers)

    def subject(self, case: Case, stages: Stages | None = None) -> Subject:
        """The case as it is proved; each of its ranks asks."""
        peers = Peers(self.place.rank, case.num_ranks, self.control)
        if peers.number > 1 and peers.largest(self._start is None):
            self._start = peers.all_given(self.maker.start)
        return Subject(case=case, stages=stages, peers=peers, start=self._start, alone=self.alone)

    @functools.cached_property
    def _dtype_and_rows(self) -> tuple[torch.dtype | None, int]:
        """Float64, or float32 for a model that does not run in it; None, as it was made, for one in neither.

        And rows that a part should have. Raises what the model raises in all, and what is no matter of the
        dtype: full memory, which float32 would hide, and a broken device.
        """
        for dtype in _DTYPES[:2]:
            try:
                return dtype, self._tried(dtype)
            except RAISED_BY_USERS as error:
                found = report_of(error)
                if isinstance(error, UsageError) or found.status == "oom" or found.restart:
                    raise
                self.why_float32 = self.why_float32 or found.reason
        return None, self._tried(None)

    def _tried(self, dtype: torch.dtype | None) -> int:
        """Compute a gradient on the least batch; how many rows there should be."""
        values: list[float] = []

        def enter(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if isinstance(module, _BatchNorm) and inputs and inputs[0].ndim > 1:
                values.append(inputs[0].numel() / inputs[0].shape[1])

        module = self.maker.module(self.place.device, dtype, refers=True)
        hook = register_module_forward_pre_hook(enter)
        try:
            begin_draws(self.seed)
            loss = self._loss(module, self._batch(LEAST_ROWS, dtype))
        finally:
            hook.remove()
        check_loss(self.workload, loss)
        loss.backward()
        self.maker.take_back(module)
        return math.ceil(LEAST_ROWS * max(1.0, LEAST_VALUES / min(values, default=LEAST_VALUES)))

    @property
    def dtype(self) -> torch.dtype | None:
        """What it is proved in; see `_dtype_and_rows`."""
        return self._dtype_and_rows[0]

    def prove(self, case: Case, group: dist.ProcessGroup | None, stages: Stages | None = None) -> Shown:
        """Relative gradient error ‖g - g_single‖ / ‖g_single‖ of this case.

        Every rank of the case calls it together, and finds the same. Raises ProofError where the error
        exceeds the tolerance, UnusedParametersError where DDP would wait for ever. A model that does not run
        in float64 is proven in float32 without TF32, whose 10 bits would use up the tolerance.
        """
        with float32_precision("fp32", self.place.device):
            of = self.subject(case, stages)
            agreed = torch.zeros(2, dtype=torch.int64)
            with of.peers.together(), as_default(self.alone):
                if not of.peers.rank:
                    agreed[0], agreed[1] = _DTYPES.index(self.dtype), self._dtype_and_rows[1]
            which, num_rows = of.peers.given(agreed).tolist()
            dtype, split = _DTYPES[which], _proven_split(case, num_rows)
            part = 0 if of.sources is None else of.sources.part
            fetch = partial(self._part, split, dtype, part)
            try:
                found = self._of_mode(of, group, split, dtype)
            except RAISED_BY_USERS as error:
                if case.impl != STAND_IN or isinstance(error, UsageError) or not _is_plain_failure(error):
                    raise
                self.reference.gradients(of, split, dtype, fetch)  # an error of the model's own comes first
                raise Unsupported(f"{NOT_STOOD_IN}: {one_line(error)}") from error
            try:
                return self._compared(
                    of, found, dtype, partial(self.reference.gradients, of, split, dtype, fetch)
                )
            except RuntimeError as error:
                if not is_out_of_gpu_memory(error):
                    raise
                return Shown(None, NO_REFERENCE)

    def _of_mode(
        self, of: Subject, group: dist.ProcessGroup | None, split: Split, dtype: torch.dtype | None
    ) -> tuple[Weights, Weights, dict[str, Any]]:
        """Gradients, buffers, and the shapes in the state dict that the mode has."""
        with of.peers.together():
            module = self.maker.module(self.place.device, dtype)
        equal = self.equal_replicas
        mode = build_mode(of.case, module, self.place, group, equal_replicas=equal, stages=of.stages)
        try:
            if of.shares_buffers and of.peers.rank:
                _disturb(mode.module)  # the first rank's have to come
            with of.peers.together():
                self._backward(of.case, mode, split, dtype)
                if waits := why_ddp_waits(of.case, mode.module):
                    raise UnusedParametersError(waits)
            return on_host(mode.gradients()), on_host(mode.buffers()), shapes_of(mode.state_dict())
        except RuntimeError as error:
            if why := mode.why_stopped(error):
                raise why from error
            raise
        finally:
            mode.close()

    def _backward(self, case: Case, mode: Mode, split: Split, dtype: torch.dtype | None) -> None:
        part = case.part_of(self.place.rank)
        for micro in range(split.accumulate):

            def loss(model: Any, batch: Batch, micro: int = micro) -> Tensor:
                found = self._loss(model, batch)
                check_loss(self.workload, found)
                return found * (sign_of(split, part, micro) / split.accumulate)

            own = self._part(split, dtype, part, micro)
            if split.joined:
                own = cut(own, split.num_sources)[part]
            begin = partial(begin_draws, self.seed, 0, micro, part)
            begin()
            is_last = micro == split.accumulate - 1
            with contextlib.nullcontext() if is_last else mode.no_sync(), mode.draws_from(begin):
                mode.train(own, loss)

    def _compared(
        self,
        of: Subject,
        found: tuple[Weights, Weights, dict[str, Any]],
        dtype: torch.dtype | None,
        plain: Callable[..., Computed | None],
    ) -> Shown:
        case, peers, right = of.case, of.peers, plain()
        gradients, buffers, state = found
        if odd := peers.largest(0.0 if right is None else state != right.state):
            assert odd
            raise ProofError(f"its state dict is not the plain module's{_odd(state, right)}")
        self.draws = bool(peers.largest(right is not None and right.draws))
        allowed = TOLERANCES[case.comm_hook]

        def off(one: Computed | None, gradients: Weights, buffers: Weights) -> Off:
            if one is None or right is None:
                own = Off()
            else:
                share = CANCELLED if allowed <= TOLERANCES["none"] else 1.0
                own = off_by(gradients, right.gradients, right.sizes, share)
                own = larger(own, off_by_buffers(buffers, right.buffers))
            return own.among(peers)

        error = off(right, gradients, buffers)
        if dtype != torch.float64 or not error.is_within(allowed):
            allowed = max(allowed, peers.largest(self._allowed(peers)))
            error = off(right, gradients, buffers)
        if error.is_within(allowed):
            return Shown(error.total)
        if is_plain(case):
            return Shown(None, two_runs_differ(error.total))
        if case.sync_batchnorm and self.draws:
            return Shown(None, NO_SEED)
        again = plain(repeated=True)
        differ = off(again, *((again.gradients, again.buffers) if again else ({}, {}))).total
        if not differ <= OF_LIMIT * allowed:
            return Shown(None, two_runs_differ(differ))
        raise ProofError(f"{error.said(allowed)} (relative; at most {allowed:.0e}{self._less()})")

    def forget(self) -> None:
        """Give back the memory of what cases are compared with: copies of the model, some in float64."""
        self._effects.clear()
        self._start = None
        self.__dict__.pop("reference", None)

    def split_effect(self, case: Case) -> float | None:
        """How far the gradient of the case's parts of a batch is from that of all rows at once, relative.

        Of a loss that is a mean over rows of equal weight it is rounding. To be asked on the first rank where
        `prove` compared. In evaluation, for batch norm has rows depend on each other, and dropout differs;
        None for a model that does not compute its loss in it, or draws, changes buffers or asks other ranks.
        """
        num_parts = _proven_split(case, 1).num_rows
        num_rows = max(case.batch_per_device // num_parts, 1) * num_parts
        with float32_precision("fp32", self.place.device), as_default(self.alone):
            parts, whole = (self._evaluated(num_rows, number) for number in (num_parts, 1))
        if not parts or not whole:
            return None
        length = norm(whole)
        return norm(difference(parts, whole)) / length if length else math.nan

    def _evaluated(self, num_rows: int, num_parts: int) -> Weights:
        """The mean of the parts' gradients in evaluation; empty where they tell nothing."""
        key = (num_rows, num_parts)
        if key in self._effects:
            return self._effects[key]
        module = self.maker.module(self.place.device, self.dtype, refers=True)
        in_training = [part for part in module.modules() if part.training]
        module.eval()
        before, buffers, launched = generators(), buffers_of(module), self._num_collectives()
        try:
            for part in cut(self._batch(num_rows, self.dtype), num_parts):
                loss = self._loss(module, part)
                check_loss(self.workload, loss)
                (loss / num_parts).backward()
        except RAISED_BY_USERS as error:
            if report_of(error).restart:
                raise
            module.zero_grad()
        tells = any(one.grad is not None for one in module.parameters()) and generators() == before
        tells = tells and launched == self._num_collectives()
        tells = tells and not off_by_buffers(buffers_of(module), buffers).total
        self._effects[key] = on_host(gradients_of(module)) if tells else {}
        for part in in_training:
            part.training = True
        self.maker.take_back(module)
        return self._effects[key]

    def _num_collectives(self) -> int:
        """How many the workload has launched where this rank computes alone."""
        return 0 if self.alone is None else int(self.alone._get_sequence_number_for_group())  # type: ignore[attr-defined]

    def _less(self) -> str:
        """Why the tolerance is not that of float64."""
        if not self.why_float32:
            return ""
        return f"; in {'float32' if self.dtype else 'its own dtype'}, for in float64: {self.why_float32}"

    def _allowed(self, peers: Peers) -> float:
        """What the model's own arithmetic may cost, as the first rank sees it."""
        if peers.rank:
            return 0.0
        with as_default(self.alone):
            return TOLERANCES_BY_DTYPE.get(self._coarsest_dtype, BF16_TOLERANCE)

    @functools.cached_property
    def _coarsest_dtype(self) -> torch.dtype:
        """The coarsest type that the model computes in, where gradients pass: it may round to one inside."""
        module = self.maker.module(self.place.device, self.dtype)
        with _DtypesSeen() as seen:
            self._loss(module, self._batch(LEAST_ROWS, self.dtype))
        coarsest: torch.dtype = max(
            seen.dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64
        )
        return coarsest

    def _part(self, split: Split, dtype: torch.dtype | None, part: int, micro: int) -> Batch:
        """A part of a micro-batch, of a joined one the whole, made anew for each use."""
        whole = cut(self._batch(split.num_rows, dtype), split.accumulate)[micro]
        return whole if split.joined else cut(whole, split.num_sources)[part]

    def _batch(self, size: int, dtype: torch.dtype | None) -> Batch:
        """One global batch on the device, floating tensors as `dtype`, integers and masks as they are."""
        generator = torch.Generator().manual_seed(self.seed)
        batch = make_batch(self.workload, batch_size=size, generator=generator)
        return map_tensors(lambda tensor: precise(tensor.to(self.place.device), dtype), batch)


class _DtypesSeen(TorchFunctionMode):
    """Notes within it of which floating types results are that have gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.dtypes |= {one.dtype for one in tensors_of(result) if one.requires_grad}
        return result


def _is_plain_failure(error: BaseException) -> bool:
    """Whether memory and device are well."""
    found = report_of(error)
    return found.status == "failed" and not found.restart


def is_plain(case: Case) -> bool:
    """Whether a case is what it is compared with: one device, eager, with the workload's own optimizer."""
    return (
        case.mode == "single"
        and case.compile == "off"
        and case.precision == "fp32"
        and not (case.fused_optimizer or case.channels_last)
    )


def _proven_split(case: Case, num_rows: int) -> Split:
    """How a case splits the batch of its proof: `num_rows` for each part, if it trains on as many."""
    split = split_of(case)
    parts = split.num_chunks if split.num_sources == 1 else 1
    return replace(split, batch_size=min(num_rows, max(split.batch_size // parts, 1)) * parts)


@torch.no_grad()
def _disturb(module: nn.Module) -> None:
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.add_(1)


def _odd(state: Mapping[str, Any], right: Computed | None) -> str:
    """The first entry that one of them lacks, or has in another shape."""
    odd = sorted(set(state.items()) ^ set(right.state.items()), key=str) if right else []
    return f": {odd[0][0]}" if odd else ""
