"""The reduction of a DDP model's gradients, as DDP does it, with the times of its buckets."""

from __future__ import annotations

import random
from functools import partial
from time import thread_time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from . import private, reducer
from .clock import Moment, Taken
from .race import Race
from .setup import find_caller

if TYPE_CHECKING:
    from .steps import Watch

PROBE_SHARE = 0.25
"""Share of the synchronised backwards that are probes, from FIRST_PROBES after the hook came in."""

FIRST_PROBES = 3


class Model:
    """A DDP instance as the watch knows it, and the state of its communication hook.

    In a probe the hook holds the buckets back until the last one is ready, and then sends them in the same
    order. No collective is added, dropped or reordered: ranks that disagree about a probe wait for nothing.
    """

    def __init__(self, watch: Watch, ddp: Any, number: int) -> None:
        self.watch, self.number = watch, number
        self.group, self.size = ddp.process_group, ddp.process_group.size()
        self.why = watch.unsupported or private.explain_no_hook(ddp)
        self.facts = private.describe_model(ddp) | watch.setup.callers.get(ddp, {})
        self.facts["bucket_cap_mb"] = reducer.format_caps(ddp)
        self.hooked_in: int | None = None
        """Identity of the reducer that has our hook: a DDP that was copied in place makes a new one."""
        self.is_pending = False
        self.count = 0
        self.has_synced = self.keeps = False
        self.mark: tuple[int, int] | None = None
        """Mark of its gradients after the latest synchronised backward of this step."""
        self.before: list[tuple[int, int]] | None = None
        """Marks of its gradients before this backward, where no hook of ours tells whether it takes part."""
        self.sync: dict[str, Any] = {}
        self.held: list[tuple[torch.Tensor, Any]] = []
        self.sent: list[tuple[Any, torch.Tensor, Any]] = []
        """All-reduces that nobody has waited for: work, bucket, future of its result."""
        self.inner: tuple[Any, Any] | None = None
        """State and hook that the user registered after ours came in; they run inside it."""
        self.joined: Any = None
        """Work of the all-reduce that counts the ranks that have not joined, where DDP divides by them."""
        self.sequence = 0
        """Collectives of the group before the first bucket of this backward, or after its last one."""
        is_raced = watch.config["race"] is not None and number == 0
        self.race = Race(self, ddp) if is_raced else None
        self.write_row()

    def write_row(self) -> None:
        """Write what is known of the model."""
        self.watch.rows.write(kind="model", model=self.number, why=self.why, **self.facts)

    def note(self, name: str, value: Any) -> None:
        """Note a fact, and write it where it is new."""
        if self.facts.get(name) != value:
            self.facts[name] = value
            self.write_row()

    def observe_only(self, why: str) -> None:
        """Make no probes from now on, for a reason."""
        if self.why is None:
            self.why = why
            self.write_row()

    def register_hook(self, ddp: Any) -> None:
        """Register the hook, once, at a forward whose number was fixed before training."""
        self.is_pending = True
        if self.race is not None and self.race.has_rebuilt:
            return  # training goes on as it would without us
        if self.why or self.count < self.watch.config["hook_at"] or self.hooked_in == id(ddp.reducer):
            return
        self.why = private.explain_no_hook(ddp)  # the user may have registered a hook by now
        if self.why or private.has_active_divisor(ddp):
            self.write_row()
            return
        if private.register_hook(ddp, self, reduce_bucket):
            self.hooked_in = id(ddp.reducer)
        else:
            self.observe_only(private.USER_HOOK)

    def begin_backward(self, ddp: Any) -> None:
        """Look at the gradients before a backward, which may add to averaged ones, or average others."""
        self.keeps = self.mark is not None and private.get_gradient_mark(ddp) == self.mark
        if self.keeps and not self.facts.get("kept_at"):
            self.note("kept_at", find_caller()["line"])
        waits = self.is_pending and self.hooked_in is None
        self.before = private.list_gradient_marks(ddp) if waits else None

    def end_backward(self, ddp: Any) -> None:
        """End a backward that this model may have taken part in."""
        if self.before is not None and self.is_pending and private.list_gradient_marks(ddp) != self.before:
            self.begin_sync(hooked=False)
        if self.has_synced:
            self.has_synced, self.mark = False, private.get_gradient_mark(ddp)
        self.release_buckets()  # where the backward has raised

    def begin_sync(self, *, hooked: bool) -> None:
        """Count a synchronised backward, which is the same one on all ranks."""
        watch, self.is_pending = self.watch, False
        self.sent.clear()  # after a backward that has raised
        watch.setup.accumulated += self.keeps
        self.has_synced = True
        self.count += 1
        may = hooked and watch.config["probes"] and self.count >= watch.config["hook_at"] + FIRST_PROBES
        may = may and not watch.is_racing()
        probe = bool(may and not self.why and self.draw() < PROBE_SHARE and not private.is_captured())
        self.sync = {
            "model": self.number,
            "k": self.count,
            "probe": probe,
            "begin_s": watch.backward_begin,
            "ready_s": [],
            "bytes": [],
            **(self.race.get_labels() if self.race is not None else {}),
        }
        watch.add_sync(self.sync)
        self.sequence = self.group._get_sequence_number_for_group()

    def draw(self) -> float:
        """Draw a number of 0 to 1 for this synchronised backward, the same on all ranks."""
        return random.Random(f"{self.watch.config['seed']}-{self.number}-{self.count}").random()

    def begin_bucket(self, index: int, buffer: torch.Tensor) -> bool:
        """Note that a bucket is ready, and return whether it is held back."""
        if index == 0:
            self.begin_sync(hooked=True)
        self.sync["bytes"].append(private.count_bytes(buffer))
        self.sync["ready_s"].append(self.watch.clock.take_moment())
        return bool(self.sync["probe"])

    def end_sync(self) -> None:
        """Check that nothing else was sent between the buckets, after the last one has been sent."""
        sent = self.group._get_sequence_number_for_group() - self.sequence
        if not self.why and sent != len(self.sync["ready_s"]):
            self.observe_only("other collectives run between its buckets")

    def scale_bucket(self, buffer: torch.Tensor) -> None:
        """Divide a bucket as DDP does: it multiplies dense gradients with the inverse, and divides sparse."""
        divisor = self.size
        if self.joined is not None:
            self.joined.wait()
            divisor = int(self.joined.get_future().value()[0].item())
        if buffer.is_sparse:
            buffer.div_(divisor)
        else:
            buffer.mul_(1.0 / divisor)

    def hold_bucket(self, buffer: torch.Tensor) -> Any:
        """Keep a bucket, and return the future of what it will be."""
        is_cpu = buffer.device.type == "cpu"
        future: Any = torch.futures.Future() if is_cpu else torch.futures.Future(devices=[buffer.device])
        self.held.append((buffer, future))
        return future

    def release_buckets(self) -> None:
        """Begin the all-reduces of what is held, in order and as DDP does."""
        held, self.held = self.held, []
        if self.sync.get("probe") and held:
            self.sync["sent"] = self.watch.clock.take_moment()
        for buffer, future in held:
            work = dist.all_reduce(buffer, group=self.group, async_op=True)
            self.sent.append((work, buffer, future))

    def finish_sync(self, sync: dict[str, Any]) -> None:
        """Wait for what was sent and pass it on, before DDP does, in the thread that trains.

        Nothing of Python may stand on the backend's threads: one that lets go of the process group there, or
        comes there when the interpreter ends, aborts the process.
        """
        sent, self.sent = self.sent, []
        for work, buffer, future in sent:
            work.wait()
            future.set_result(buffer)
        self.watch.guard(self.note_done, sync)

    def note_done(self, sync: dict[str, Any]) -> None:
        """Note that all buckets have been reduced."""
        sync["done"] = self.watch.clock.take_moment()


def make_sync_row(sync: dict[str, Any], taken: Taken) -> dict[str, Any]:
    """Return a synchronised backward as its row has it: moments are seconds from the start of its step."""

    def to_seconds(value: Any) -> Any:
        if isinstance(value, Moment):
            return round(value.compute_seconds_since(taken.start), 7)
        return [*map(to_seconds, value)] if isinstance(value, list) else value

    sent, done = sync.pop("sent", None), sync.pop("done", None)
    row = {name: to_seconds(value) for name, value in ({"end_s": taken.end} | sync).items()}
    if sent is not None and done is not None:
        row["alone_s"] = round(done.compute_seconds_since(sent), 7)
    return row


def reduce_bucket(model: Model, bucket: Any) -> Any:
    """Reduce a bucket as DDP does without a hook: the communication hook."""
    watch, begin = model.watch, thread_time()  # a thread that waits for a core costs nothing of ours
    buffer = bucket.buffer()
    holds = watch.guard(model.begin_bucket, bucket.index(), buffer)
    if model.inner is not None:
        state, hook = model.inner
        return hook(state, bucket)
    model.scale_bucket(buffer)
    future = model.hold_bucket(buffer)
    if bucket.is_last() or not holds:  # after an exception of ours no bucket is held back
        model.release_buckets()
    if bucket.is_last():
        watch.guard(model.end_sync)
        private.register_before_end(partial(model.finish_sync, model.sync))
    watch.overhead += thread_time() - begin
    return future
