"""A race of bucket caps within the user's training: DDP's reducer is built anew with each cap in turns.

A rank that builds its reducer anew alone ends the job. So a turn begins at a number of synchronised backwards
that was fixed before the first step, and all ranks take it or none. In the turn before, each rank that can
adds itself to a counter in the store of the process group; the counter's name holds the number of the group's
collectives, which shows that all ranks stand at the same step. When the turn is due the first rank to come
decides for all, and no rank waits for another.
"""

from __future__ import annotations

import contextlib
import os
import random
from typing import TYPE_CHECKING, Any

import torch

from . import private, reducer

if TYPE_CHECKING:
    from .buckets import Model

KEY = "ddp-bench-watch"

MIN_FREE = 2
"""Free memory in sizes of the gradients: DDP holds two sets of buckets while it puts them in their order."""


class Race:
    """The turns of one DDP model, and what its ranks have agreed on.

    `config["race"]` has `at` (the number of the synchronised backward after which the first turn begins),
    `block` (backwards of a turn), `skipped` (the first ones of a turn that count for nothing: a new reducer
    begins with one bucket), `rounds` (turns of each cap), `caps` (arguments of DDP by the name of the cap).
    """

    def __init__(self, model: Model, ddp: Any) -> None:
        self.model, self.rows, config = model, model.watch.rows, model.watch.config["race"]
        self.at, self.block, self.skipped = config["at"], config["block"], config["skipped"]
        why = model.why or reducer.explain_no_race(ddp)
        own = reducer.get_caps(ddp)
        given = {} if why else config["caps"]
        asked = {name: reducer.make_cap_attributes(arguments) for name, arguments in given.items()}
        self.own = next((name for name, caps in asked.items() if caps == own), model.facts["bucket_cap_mb"])
        self.caps = {self.own: own, **asked}
        self.turns: list[str] = []
        for number in range(config["rounds"]):
            names = [*self.caps]
            random.Random(f"{model.watch.config['seed']}-caps-{number}").shuffle(names)
            self.turns += names
        self.place = 0
        """Number of the turn to come; the last one gives the script its own cap back."""
        self.key = ""
        """Name of this rank's vote about the turn to come; empty before it."""
        self.why: str | None = None
        """Reason of this rank not to take the turn to come, as it voted."""
        self.store: Any = None
        self.voted_at = self.began_at = 0
        self.cap: str | None = None
        """Cap of a reducer that was built for the race."""
        self.has_rebuilt = self.was_captured = self.is_broken_off = self.is_over = False
        model.facts |= {"bucket_cap_mb": self.own, "race_ends_at": self.at + self.block * len(self.turns)}
        self.rows.note(config["note"])
        if why or len(self.caps) < 2:
            self.refuse(why or "the script has this cap already")

    @property
    def due(self) -> int:
        """The number of synchronised backwards after which the turn to come begins."""
        return int(self.at + self.place * self.block)

    def begin_forward(self, ddp: Any) -> None:
        """Vote about the turn to come, or take it: no backward is pending."""
        count = self.model.count
        self.was_captured = self.was_captured or private.is_captured()
        if self.is_over:
            return
        if not self.key:
            if count > self.due - self.block:
                self.vote(ddp)
        elif count >= self.due and count > self.voted_at:
            self.decide(ddp)

    def vote(self, ddp: Any) -> None:
        """Tell the other ranks whether this one can take the turn to come."""
        model = self.model
        self.voted_at, self.store = model.count, reducer.get_store(model.group)
        self.key = f"{KEY}/{model.number}/{self.place}/{model.sequence}"
        self.why = self.explain_refusal(ddp) or self.explain_memory(ddp)
        if self.why is None:
            self.store.add(self.key, 1)

    def decide(self, ddp: Any) -> None:
        """Take the turn that is due if all ranks can."""
        why = self.why or self.explain_refusal(ddp)
        all_can = why is None and self.store.add(self.key, 0) == self.model.size
        if self.why is None and self.decide_turn(takes=all_can):
            self.take_turn(ddp)
        else:
            self.refuse(why or "not all ranks could take their turn")

    def decide_turn(self, *, takes: bool) -> bool:
        """Return whether all ranks take the turn: as this one says, unless another was first."""
        return bool(self.store.compare_set(f"{self.key}/taken", "", "yes" if takes else "no") == b"yes")

    def take_turn(self, ddp: Any) -> None:
        """Build the reducer anew with the cap of the turn; the last turn is that of the script's own cap."""
        is_last = self.is_broken_off or self.place == len(self.turns)
        name = self.own if is_last else self.turns[self.place]
        reducer.rebuild_reducer(ddp, self.caps[name])
        self.model.hooked_in, self.has_rebuilt = None, True
        self.key, self.cap, self.began_at = "", None if is_last else name, self.model.count
        self.place += 1
        self.is_over = is_last

    def refuse(self, why: str) -> None:
        """Break the race off; a reducer that was built anew gets the script's own cap in a later turn."""
        if not self.is_broken_off:
            self.rows.note(f"the race of bucket caps ended: {why}")
            self.model.note("race_ends_at", 0)
        self.is_broken_off, self.key = True, ""
        self.place += 1
        self.is_over = not self.has_rebuilt or self.place > len(self.turns)

    def explain_refusal(self, ddp: Any) -> str | None:
        """Return why this rank cannot build its reducer anew, or None."""
        model = self.model
        own_hook = private.USER_HOOK if ddp._comm_hooks or model.inner is not None else None
        captured = "its steps were captured in a CUDA graph" if self.was_captured else None
        return model.why or own_hook or captured or reducer.explain_no_race(ddp)

    def explain_memory(self, ddp: Any) -> str | None:
        """Return how much memory is missing for another set of buckets, or None."""
        needed = MIN_FREE * self.model.facts["num_bytes"]
        free = read_free_bytes(ddp._module_parameters[0].device)
        if free is None or free >= needed:
            return None
        return f"{free >> 20} MiB of memory are free, and new buckets may need {needed >> 20}"

    def get_labels(self) -> dict[str, Any]:
        """Return what the row of a synchronised backward says of the race."""
        if self.cap is None:
            return {}
        counts = self.model.count > self.began_at + self.skipped and not self.is_broken_off
        return {"cap": self.cap if counts else "", "round": (self.place - 1) // len(self.caps)}

    def leave(self, ddp: Any, *, in_forward: bool) -> None:
        """End the race after an error of the watch; a turn that another rank has begun is taken yet."""
        if self.is_over or not self.key or not self.decide_turn(takes=False):
            return
        if in_forward:
            self.take_turn(ddp)
            return

        def take_turn(*_: Any) -> None:
            handle.remove()
            with contextlib.suppress(Exception):
                self.take_turn(ddp)

        handle = ddp.register_forward_pre_hook(take_turn)


def read_free_bytes(device: torch.device) -> int | None:
    """Return the bytes of memory that this rank may take, or None where the system does not say."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    try:
        with open("/proc/meminfo") as lines:  # noqa: PTH123 - pathlib delays the start of every rank
            kib = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    return 1024 * int(kib) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
