"""Rows that a process appends as JSON lines to `FOLDER/ranks/HOST-LAUNCH-PID.jsonl`.

Times end in `_s` and are seconds; those of a sync are relative to the start of its step. Kinds of rows:

start: rank, local_rank, world_size, host, pid, torch, python, backend, device, time_s (Unix time),
    unsupported (private names of torch that differ, so that everything is observed only), threads (of an
    operator), cores (numbers of those it may use), debug (TORCH_DISTRIBUTED_DEBUG).
model: rank, model (number), parameters, num_bytes, why (reason to get no probes, or null; the last row of a
    model counts), find_unused_parameters, broadcast_buffers, static_graph, gradient_as_bucket_view,
    bucket_cap_mb (text as of `--bucket-cap-mb`), buffers_argument,
    line (FILE:LINE of the user that wrapped it), made_by (package that did so for the user), unused (whether
    a search found unused parameters), kept_at (FILE:LINE of a backward that added to averaged gradients).
loader: rank, loader (number), line, made_by, workers, pinned, passes (in training), epochs (different ones
    of a shuffling DistributedSampler, 0 without one). It is of the first passes.
parallel: rank, how ("DTensor": the optimizer holds distributed tensors; "DataParallel", with devices, line,
    made_by).
step: rank, n (from 1), step_s, parts (seconds by part; they add up), signature (counts of forwards,
    backwards, syncs and optimizer steps), hooked, probe, marks (parts on a GPU in their order: part, seconds,
    and how much later their end came by the GPU than by the host), overhead_s (our own time since the row
    before), search_s (search for unused parameters, within the forward), loading_s (this thread's CPU time
    within data), accumulated (syncs that added to gradients which an earlier one had averaged), collectives
    (of the default group, where no DDP model trains), syncs: model, k (number of this model's synchronised
    backward, from 1), probe, begin_s and end_s (of the backward); with the hook also ready_s and bytes, one
    for each bucket; of a probe alone_s (from sending the first bucket until all are reduced); in a race of
    bucket caps cap (empty where the backward does not count) and round (from 0).
note: rank, text.
end: rank, peak_bytes (of tensors on a GPU, or null); the last row of a process that was watched to its end,
    or to `--steps`.
"""

from __future__ import annotations

import json
import os
import socket
from time import perf_counter as now
from typing import Any

FLUSH_S = 1.0
"""Seconds of rows that a killed process may lose."""


class Rows:
    """Buffered writer of this process's rows; it never raises, and a forked child begins its own file."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.host, self.pid = os.environ.get("BENCH_HOST") or socket.gethostname(), 0
        # Containers on one machine may share its name, and have processes of the same numbers.
        name = f"{self.host.replace(os.sep, '-')}-{config['launch']}"
        self.file = os.path.join(config["folder"], "ranks", name)  # noqa: PTH118
        self.lines: list[str] = []
        self.flushed = 0.0

    def write(self, **row: Any) -> None:
        """Append a row; steps are written to the disk once a second, all others at once."""
        if self.pid != os.getpid():
            self.pid, self.lines = os.getpid(), []
        self.lines.append(json.dumps(row, separators=(",", ":")) + "\n")
        if row["kind"] != "step" or now() - self.flushed > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Write what is buffered to the disk."""
        if self.pid != os.getpid():
            return
        lines, self.lines = self.lines, []
        self.flushed = now()
        try:
            with open(f"{self.file}-{self.pid}.jsonl", "a") as file:  # noqa: PTH123
                file.write("".join(lines))
        except OSError:
            pass  # a full disk must not end a training
