"""A model's layers split over the devices by PyTorch's pipelining: in micro-batches, or all at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from ...models.workload import Batch, Loss
from ..plan.case import Case
from .base import Mode, Place, Stages, collect_tensors

SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class PipelineMode(Mode):
    """One stage of a case of `pipeline` or `partition`; every rank of `group` builds it at the same time.

    `module` is this rank's stage; `train` does the forwards and backwards of a batch over all of them.
    """

    def __init__(
        self,
        case: Case,
        module: nn.Module,
        stages: Stages | None,
        place: Place,
        group: dist.ProcessGroup | None,
    ) -> None:
        assert stages is not None  # prepared with the case
        first = sum(stages.by_device[: place.rank])
        own = stages.layers(module)[first : first + stages.by_device[place.rank]]
        is_first, is_last = place.rank == 0, place.rank == case.num_devices - 1
        ends = [[] if is_end else [_Boundary()] for is_end in (is_first, is_last)]
        super().__init__(nn.Sequential(*ends[0], *own, *ends[1]))
        self._names = _map_names(module, self.module)
        self._whole = {name: value.to("meta") for name, value in module.state_dict().items()}
        self._trained = [name for name, p in module.named_parameters() if p.requires_grad]
        self._buffers = [name for name, _ in module.named_buffers() if name in self._whole]
        self._group = group
        self._is_first, self._is_last = is_first, is_last
        self._stage = place.rank
        self._loss: Loss | None = None
        self.stage = PipelineStage(self.module, place.rank, case.num_devices, place.device, group=group)
        made = SCHEDULES[case.pipeline_schedule]
        self._schedule = made(self.stage, case.num_micro_batches, loss_fn=self._compute_loss)

    def train(self, batch: Batch, loss: Loss) -> Tensor | None:
        """Run forwards and backwards of a batch, given to every stage; return its loss on the last."""
        self._loss = loss
        inputs, targets = batch
        losses: list[Tensor] = []
        own = {"target": targets, "losses": losses} if self._is_last else {}
        try:
            self._schedule.step(*((inputs,) if self._is_first else ()), return_outputs=False, **own)
        except RuntimeError as error:
            # PyTorch says only in which stage the model raised.
            raise error.__cause__ or error from None
        return torch.stack(losses).mean().detach() if losses else None

    def gather_weights(self) -> dict[str, Tensor]:
        return self._gather_tensors(super().gather_weights(), self._trained)

    def collect_buffers(self) -> dict[str, Tensor]:
        """Those of the state dict; none before torch 2.14, whose look at a stage's shapes changes them."""
        if not hasattr(PipelineStage, "_pre_metadata_inference_backup"):
            return {}
        own = {name: one for name, one in self.module.named_buffers() if self._names[name] in self._buffers}
        return self._gather_tensors(own, self._buffers)

    @contextlib.contextmanager
    def seed_parts(self, begin: Callable[..., None]) -> Iterator[None]:
        forward = self.stage.forward_one_chunk

        def run(chunk: int, *arguments: Any, **named: Any) -> Any:
            begin(chunk, self._stage)
            return forward(chunk, *arguments, **named)

        vars(self.stage)["forward_one_chunk"] = run
        try:
            yield
        finally:
            del vars(self.stage)["forward_one_chunk"]  # the class's own method shows again

    def gather_state_dict(self) -> dict[str, Tensor]:
        return self._gather_tensors(self.module.state_dict(), self._whole)

    def _gather_tensors(self, own: dict[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors of the whole model, each from the one stage that has it: the sum of its bytes and zeros."""
        named = {self._names[name]: value for name, value in own.items()}
        found = {}
        for name in names:
            like = self._whole[name]
            value = named[name] if name in named else torch.zeros_like(like, device=self.stage.device)
            sent = value.detach().flatten().view(torch.uint8).clone()
            dist.all_reduce(sent, group=self._group)
            found[name] = sent.view(like.dtype).view(like.shape)
        return found

    def _compute_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        assert self._loss is not None  # set before the schedule runs
        # The stages were the model: what is left of the loss is that of what came out of them.
        return self._loss(lambda _: outputs, (outputs, targets))


class _Boundary(nn.Module):
    """The boundary behind a stage: makes what it passes on contiguous, under channels_last too.

    gloo refuses others. NCCL sends it as it lies, and torch 2.11 receives it into contiguous memory: the
    activations arrive in another order, in silence.
    """

    def forward(self, passed: Tensor) -> Tensor:
        found: Tensor = _Contiguous.apply(passed)
        return found


class _Contiguous(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, passed: Tensor) -> Tensor:
        return passed.contiguous()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def _map_names(module: nn.Module, stage: nn.Module) -> dict[str, str]:
    whole = {id(value): name for name, value in collect_tensors(module).items()}
    return {name: whole[id(value)] for name, value in collect_tensors(stage).items()}
