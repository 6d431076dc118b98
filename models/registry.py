"""From a name on the command line to a workload: built-in architectures and the user's own code."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..bench.common.errors import UsageError
from ..bench.common.values import suggest_known
from ..bench.machine.provenance import explain_not_found
from ..bench.plan.resolve import choose_image_size
from ..bench.plan.settings import IMAGES, Settings
from .checks import check_workload
from .importing import import_alone
from .nested import describe
from .resnet import RESNET20_CLASSES, ResNet20, list_resnet_layers
from .workload import Batch, Workload, report_user_errors

_IMAGENET_CLASSES = 1000

ARCHS: tuple[str, ...] = (
    "resnet20",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnext50_32x4d",
    "resnext101_32x8d",
    "wide_resnet50_2",
)
"""Built-in architectures: ResNet-20 for 32x32 images, the others from torchvision, without weights."""

_SPEC = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<name>[^\W\d]\w*)")


def _make_torchvision_model(arch: str) -> nn.Module:
    # torchvision imports PyTorch's compiler, seconds that the launcher and other models do without.
    from torchvision.models import get_model

    model: nn.Module = get_model(arch, weights=None)
    return model


def make_resnet_workload(arch: str, image_size: int) -> Workload:
    """Image classification with a built-in architecture on synthetic images (N, 3, image_size, image_size).

    Raises UsageError for an unknown architecture.
    """
    if arch not in ARCHS:
        raise UsageError(f"unknown architecture {arch!r}; {suggest_known(arch, ARCHS)}")
    small = arch == "resnet20"
    return Workload(
        name=arch,
        module=ResNet20 if small else partial(_make_torchvision_model, arch),
        batch=partial(
            draw_images,
            image_size=image_size,
            num_classes=RESNET20_CLASSES if small else _IMAGENET_CLASSES,
        ),
        layers=list_resnet_layers,
        image_size=image_size,
        unit=IMAGES,
    )


def make_workload(settings: Settings, num_outputs: int | None = None) -> Workload:
    """Make the workload of a run, a module of the user's or a built-in one. Raises UsageError.

    `num_outputs` as in `load_workload`.
    """
    arch = settings.arch or ""
    size = settings.image_size or choose_image_size(arch, settings.device)
    if settings.workload is None:
        return make_resnet_workload(arch, size)
    return load_workload(settings.workload, size, num_outputs)


def count_classes(workload: Workload) -> int:
    """Count the classes that the batches of a workload are drawn from; 0 where they are the user's own."""
    batch = workload.batch
    return batch.keywords["num_classes"] if isinstance(batch, partial) and batch.func is draw_images else 0


def load_workload(spec: str, image_size: int, num_outputs: int | None = None) -> Workload:
    """Load the user's workload from `package.module:name`; the current folder is importable.

    `name` is a `Workload`, or a function without arguments that returns one, or a function (or class)
    without arguments that returns an `nn.Module` mapping images (N, 3, H, W) to logits (N, classes), which
    is then trained on synthetic images of `image_size` pixels.

    Another process that has looked at the model gives `num_outputs`, 0 where they matter not; the user's
    forward and loss, which may keep what they see first, then do not run here.

    Raises UserCodeError where the user's code raises, UsageError for everything else that is wrong.
    """
    target = _resolve(spec)
    looks = num_outputs is None
    if isinstance(target, Workload):
        return check_workload(target, looks=looks)
    if isinstance(target, nn.Module):
        raise UsageError(f"{spec} is one module; every mode needs a fresh one: name a function that makes it")
    if not callable(target):
        raise UsageError(f"{spec} is {describe(target)}; it must be a models.Workload or a function")
    with torch.random.fork_rng(devices=[]):
        made = _call(target, spec)
    if isinstance(made, Workload):
        return check_workload(made, looks=looks)
    if not isinstance(made, nn.Module):
        raise UsageError(
            f"{spec} returned {describe(made)}; it must return an nn.Module or a models.Workload"
        )
    num_classes = num_outputs or _count_classes(made, spec, image_size)
    batch = partial(draw_images, image_size=image_size, num_classes=num_classes)
    return Workload(name=spec, module=target, batch=batch, image_size=image_size, unit=IMAGES)


def draw_images(batch_size: int, generator: torch.Generator, *, image_size: int, num_classes: int) -> Batch:
    """Draw normal noise (batch_size, 3, image_size, image_size) and uniform classes (batch_size,)."""
    images = torch.randn(batch_size, 3, image_size, image_size, generator=generator)
    return images, torch.randint(num_classes, (batch_size,), generator=generator)


def _resolve(spec: str) -> Any:
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise UsageError(
            f"malformed workload {spec!r}; write package.module:name, such as train.net:make_model"
        )
    folder, name = str(Path.cwd()), match["name"]
    if folder not in sys.path:
        sys.path.insert(0, folder)
    importlib.invalidate_caches()
    with report_user_errors(f"module {match['module']} cannot be imported"):
        try:
            module = import_alone(match["module"], folder)
        except ModuleNotFoundError as exc:
            if exc.name is not None and f"{match['module']}.".startswith(f"{exc.name}."):
                raise UsageError(explain_not_found(exc.name, Path(folder))) from None
            raise
    if not hasattr(module, name):
        public = [key for key in vars(module) if not key.startswith("_")]
        raise UsageError(f"module {match['module']} has no {name!r}; {suggest_known(name, public)}")
    return getattr(module, name)


def _call(function: Any, spec: str) -> object:
    try:
        inspect.signature(function).bind()
    except TypeError as exc:
        raise UsageError(f"{spec} needs arguments ({exc}); wrap it in a function that takes none") from None
    except ValueError:
        pass  # some callables written in C have no signature: calling them shows
    with report_user_errors(f"{spec} cannot be called"):
        return function()


def _count_classes(module: nn.Module, spec: str, image_size: int) -> int:
    shape = (2, 3, image_size, image_size)
    remedy = (
        "; one that takes something else needs a Workload, with batches of its own (README, Your own model)"
    )
    with (
        report_user_errors(f"the module of {spec} raised on images of shape {shape}", remedy),
        torch.no_grad(),
    ):
        logits = module.eval()(torch.zeros(shape))
    if not isinstance(logits, Tensor):
        raise UsageError(
            f"the module of {spec} returned {describe(logits)}; it must return logits, a tensor, or be a"
            " models.Workload with its own loss"
        )
    if logits.ndim != 2 or logits.shape[0] != 2 or logits.shape[1] < 1:
        raise UsageError(
            f"the module of {spec} maps images {shape} to shape {tuple(logits.shape)}; it must return logits"
            " (2, classes), or be a models.Workload with its own loss"
        )
    return logits.shape[1]
