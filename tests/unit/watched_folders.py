"""Folders of watched trainings, of rows whose figures are known in closed form."""

import contextlib
import io
import json
import random

from ddp_bench.bench.results.store import load_run
from ddp_bench.bench.watch.result import write_result
from ddp_bench.report.build import build_page

OWN_S = {"data": 0.004, "forward": 0.03, "backward": 0.06, "optimizer": 0.005, "other": 0.001}
EXPOSED_S, ALONE_S, OWN_S_OF_WATCH = 0.02, 0.05, 0.0006
HOOK_AT = 15
EACH = {"forward0": 1, "backward": 1, "sync0": 1, "optimizer0": 1}


def step_rows(own_s, n, *, probe=False, hooked=False, num_syncs=1, buffers_s=0.0):
    """The rows of one step of all ranks, of the own work of each; ranks wait for the last one."""
    longest_s, sent_s = max(sum(own.values()) for own in own_s), ALONE_S if probe else EXPOSED_S
    rows = []
    for rank, own in enumerate(own_s):
        waits_s = longest_s - sum(own.values()) + sent_s
        ready_s = sum(own.values()) - own["optimizer"] + buffers_s
        sync = {"model": 0, "k": n, "probe": probe, "bytes": [1000, 3000], "end_s": ready_s + waits_s}
        sync |= {"ready_s": [ready_s / 2, ready_s]} if hooked else {}
        sync |= {"alone_s": waits_s} if probe else {}
        other = sync | {"k": n - 1, "probe": False, "alone_s": None, "end_s": ready_s}
        parts = own | {"backward": own["backward"] + waits_s, "buffers": buffers_s}
        row = {"kind": "step", "n": n, "step_s": sum(parts.values()), "parts": parts, "signature": EACH}
        row |= {"syncs": [*[other] * (num_syncs - 1), sync], "overhead_s": OWN_S_OF_WATCH * (1 + rank)}
        rows.append(row)
    return rows


def write_rows(folder, steps, *rows, host="host", **by_kind):
    """A watched folder of these steps and `rows` of each process; rows say more by kind, or kind and rank."""
    (folder / "ranks").mkdir(parents=True)
    num_ranks = len(steps[0]) if steps else 2
    start = {"kind": "start", "host": host, "world_size": num_ranks, "torch": "2.14.1", "python": "3.11.7"}
    start |= {"backend": "gloo", "device": "cpu", "time_s": 1.8e9, "threads": 1}
    model = {"kind": "model", "model": 0, "parameters": 1000, "num_bytes": 4000}
    for rank in range(num_ranks):
        text = ""
        for row in (start, model, *rows, *(step[rank] for step in steps), {"kind": "end"}):
            more = by_kind.get(row["kind"], {})
            more = more[rank] if isinstance(more, list) else more
            text += f"{json.dumps({'rank': rank, **row, **more})}\n"
        (folder / "ranks" / f"{host}-{rank}.jsonl").write_text(text)
    return folder


def list_rows(steps):
    """The rows of steps, of all ranks."""
    return [row for step in steps for row in step]


def lengthen(row, **parts_s):
    """Let parts of a step take so many seconds more."""
    for part, seconds in parts_s.items():
        row["parts"][part] = row["parts"].get(part, 0.0) + seconds
        row["step_s"] += seconds


def training(
    num_steps=80, *, num_ranks=2, noise=0.0, seed=0, late_s=None, late_part="other", hook_at=HOOK_AT, **more
):
    """Steps of a training, every fourth a probe from `hook_at` on."""
    draw = random.Random(seed)
    steps = []
    for n in range(1, num_steps + 1):
        own = [{k: s * draw.lognormvariate(0, noise) for k, s in OWN_S.items()} for _ in range(num_ranks)]
        if late_s:
            own[-1][late_part] = own[-1].get(late_part, 0.0) + late_s
        hooked = n > hook_at
        steps.append(step_rows(own, n, probe=hooked and n % 4 == 0, hooked=hooked, **more))
    return steps


def watched_run(folder, *, command=("torchrun", "train.py"), quiet=True, with_page=False):
    """The run of a watched folder; its page is made, but drawn only where asked for, or said to be there."""
    is_drawn = with_page or not quiet
    with contextlib.nullcontext() if is_drawn else contextlib.redirect_stderr(io.StringIO()):
        write_result(folder, 0, quiet, command, with_page=is_drawn)
    run = load_run(folder)
    build_page(run, folder)
    return run


def trained(folder, num_steps=80, **more):
    """The loaded run of a training, as `training` makes it."""
    return watched_run(write_rows(folder, training(num_steps, **more)))
