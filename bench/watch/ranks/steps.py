"""The steps of a training, cut from what passes the hooks."""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from multiprocessing import util
from time import perf_counter as now
from typing import Any

import torch
import torch.distributed as dist

from . import private
from .buckets import Model, make_sync_row
from .clock import PartClock, Taken, make_clock
from .rows import Rows
from .setup import Setup, describe_process

UNUSED_EVERY = 16
"""Steps between two looks for unused parameters."""

MAX_FLUSH_S = 1.0
"""Seconds to wait, after the last watched step, for a GPU that is behind its host."""


class Watch:
    """The steps of this process, as one thread trains them."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        """Folder, launch (name), steps, hook_at, probes, seed and race (or null), made by `make_config`."""
        self.rows = Rows(config)
        names = private.find_differing_names()
        self.unsupported = f"this torch differs in {', '.join(names)}" if names else None
        self.hidden: list[Any] = []
        """Functions of ours that torch's compiler must not compile."""
        self.setup = Setup(self)
        self.restart()
        os.register_at_fork(after_in_child=self.restart)

    def restart(self) -> None:
        """Begin anew, at the start and in a forked child."""
        self.is_on, self.thread, self.num_models = True, 0, 0
        self.clock, self.overhead = PartClock(), 0.0
        self.untold: deque[tuple[Taken, dict[str, Any]]] = deque()
        """Steps whose end the GPU has not reached, each with its row as far as it is known."""
        self.models: weakref.WeakKeyDictionary[Any, Model] = weakref.WeakKeyDictionary()
        self.numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Numbers of optimizers, in the order of their first steps."""
        self.open_optimizers: list[int] = []
        self.optimizer_depth = self.backwards = self.num_optimizers = 0
        self.has_cut_at_optimizer = self.has_synced = False
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the step that has been written."""
        self.signature = Counter[str]()
        self.backward_begin = self.clock.taken.start
        self.syncs: list[dict[str, Any]] = []
        for model in self.models.values():
            model.mark, model.keeps = None, False

    def guard(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Call `work` while the watch is on; its exception ends the watch, never the training."""
        if not self.is_on:
            return None
        try:
            return work(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever it is
            self.is_on = False
            where = f"{getattr(work, 'func', work).__name__}: {type(error).__name__}: {error}"
            with contextlib.suppress(Exception):
                self.rows.note(f"the watch ended after an error of its own, in {where}")
            self.leave_races(arguments[0] if work == self.begin_forward else None)
            return None

    def leave_races(self, begun: Any) -> None:
        """End the races of bucket caps after an error of ours; `begun` is the DDP whose forward has begun."""
        for ddp, model in [*self.models.items()]:
            if model.race is not None:
                with contextlib.suppress(Exception):
                    model.race.leave(ddp, in_forward=ddp is begun)

    def is_racing(self) -> bool:
        """Tell whether a model has a reducer that was built for a race of bucket caps."""
        return any(model.race is not None and model.race.cap is not None for model in self.models.values())

    def is_ours(self, *, begins: bool = False) -> bool:
        """Tell whether this thread trains; the first that begins a part of training does."""
        if not self.thread and begins:
            self.thread, self.clock = threading.get_ident(), make_clock()
            self.write_start()
        return self.thread == threading.get_ident()

    def write_start(self) -> None:
        """Write the row of the process, whose rank is known now."""
        is_group = dist.is_available() and dist.is_initialized()
        self.rows.rank = dist.get_rank() if is_group else int(os.environ.get("RANK", "0"))
        util.Finalize(None, self.end, exitpriority=0)  # also where multiprocessing leaves by os._exit
        self.rows.write(
            kind="start",
            local_rank=int(os.environ.get("LOCAL_RANK", self.rows.rank)),
            world_size=dist.get_world_size() if is_group else int(os.environ.get("WORLD_SIZE", "1")),
            host=self.rows.host,
            torch=torch.__version__,
            python=platform.python_version(),
            backend=dist.get_backend() if is_group else None,
            device=self.clock.device,
            time_s=time.time(),
            **describe_process(),
        )
        if self.unsupported:
            self.rows.note(self.unsupported)

    def count(self, name: str) -> None:
        """Count what happens in a step, which tells kinds of steps apart."""
        self.signature[name] += 1

    def add_sync(self, sync: dict[str, Any]) -> None:
        """Add a synchronised backward to the step."""
        self.has_synced = True
        self.syncs.append(sync)
        self.count(f"sync{sync['model']}")

    def begin_part(self, part: str, *_given: Any) -> int | None:
        """Begin a part of the thread that trains, and return the depth with which to leave it."""
        return self.clock.enter(part) if self.is_ours() else None

    def end_part(self, depth: int) -> None:
        """End a part."""
        self.clock.leave(depth)

    def begin_forward(self, ddp: Any) -> int | None:
        """Begin a forward of DDP; with gradients it may end a step, and bring in the hook."""
        if not self.is_ours(begins=torch.is_grad_enabled()):
            return None
        if not torch.is_grad_enabled():
            return self.clock.enter("evaluation")
        if self.syncs and not self.has_cut_at_optimizer and not self.open_optimizers:
            self.cut()
        model = self.models.get(ddp)
        if model is None:
            model = self.models[ddp] = Model(self, ddp, self.num_models)
            self.num_models += 1
        if model.race is not None:
            model.race.begin_forward(ddp)
        if ddp.require_backward_grad_sync:
            model.register_hook(ddp)
        self.count(f"forward{model.number}")
        return self.clock.enter("forward")

    def begin_batch(self, iterator: Any) -> int | None:
        """Begin the wait for a batch."""
        self.setup.note_batch(iterator)
        if not self.is_ours():
            return None
        self.open_optimizers.clear()  # one that has raised
        self.setup.loading_since_s = time.thread_time()
        return self.clock.enter("data")

    def end_batch(self, depth: int) -> None:
        """End the wait for a batch."""
        self.setup.loading_s += time.thread_time() - self.setup.loading_since_s
        self.clock.leave(depth)

    def begin_backward(self, *_tensors: Any) -> int | None:
        """Begin a backward."""
        if not self.is_ours(begins=True):
            return None
        self.backwards += 1
        if self.backwards == 1:
            self.count("backward")
            self.setup.note_backward()
            self.backward_begin = self.clock.take_moment()
            for ddp, model in self.models.items():
                model.begin_backward(ddp)
        return self.clock.enter("backward")

    def end_backward(self, depth: int) -> None:
        """End a backward: find the models without our hook that it has synchronised."""
        self.clock.leave(depth)
        self.backwards -= 1
        if self.backwards:
            return
        for ddp, model in self.models.items():
            model.end_backward(ddp)
        for sync in self.syncs:
            sync.setdefault("end_s", self.clock.taken.end)

    def begin_optimizer(self, optimizer: Any) -> None:
        """Begin an optimizer's step, but for those that run within a backward."""
        if not self.is_ours(begins=True) or (self.backwards and not self.open_optimizers):
            return
        if not self.open_optimizers:
            self.optimizer_depth = self.clock.enter("optimizer")
        self.open_optimizers.append(id(optimizer))

    def end_optimizer(self, optimizer: Any) -> None:
        """End an optimizer's step; the outermost one after a synchronised backward ends the training step."""
        if not self.is_ours() or id(optimizer) not in self.open_optimizers:
            return
        self.open_optimizers.pop()
        if self.open_optimizers:
            return
        self.clock.leave(self.optimizer_depth)
        if optimizer not in self.numbers:
            self.setup.note_optimizer(optimizer)
            self.numbers[optimizer] = self.num_optimizers
            self.num_optimizers += 1
        self.count(f"optimizer{self.numbers[optimizer]}")
        if self.syncs or not self.has_synced:
            self.has_cut_at_optimizer = self.has_cut_at_optimizer or bool(self.syncs)
            self.cut()

    def cut(self) -> None:
        """End a step; after the last step end the watch."""
        taken, n = self.clock.cut(), self.clock.num_steps
        row = {"n": n, "signature": self.signature, "syncs": self.syncs, **self.setup.take_row()}
        self.untold.append((taken, row | {"overhead_s": round(self.overhead, 7)}))
        self.overhead = 0.0
        self.begin_step()
        self.write_steps()
        if n % UNUSED_EVERY == 0:
            self.note_unused()
        races = [model.race for model in self.models.values() if model.race is not None]
        is_done = n >= self.config["steps"] or any(race.has_rebuilt for race in races)
        if is_done and all(race.is_over for race in races):
            self.end()

    def write_steps(self) -> None:
        """Write the rows of the steps whose end is past, in their order."""
        while self.untold and self.untold[0][0].end.is_past():
            taken, row = self.untold.popleft()
            row["syncs"] = [make_sync_row(sync, taken) for sync in row["syncs"]]
            self.rows.write(kind="step", **row, **self.clock.describe_step(taken))

    def note_unused(self) -> None:
        """Write of models that search for unused parameters whether there were any."""
        for ddp, model in self.models.items():
            if private.is_searching(ddp):
                model.note("unused", private.has_unused(ddp))

    def end(self) -> None:
        """End the watch: from here on the hooks only pass on."""
        if self.is_on and self.clock.num_steps:
            self.guard(self.note_unused)
            self.guard(self.write_last_steps)
            peak_bytes = self.guard(private.read_peak_bytes)
            self.is_on = False
            self.rows.write(kind="end", peak_bytes=peak_bytes)

    def write_last_steps(self) -> None:
        """Write the rows of the last steps; a GPU that does not come to their end keeps nobody waiting."""
        deadline_s = now() + MAX_FLUSH_S
        self.write_steps()
        while self.untold and now() < deadline_s:
            time.sleep(0.001)
            self.write_steps()
