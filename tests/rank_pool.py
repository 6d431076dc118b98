"""Scripts that run as real ranks, forked from one process that has imported torch already.

A launcher would import torch anew in every rank of every test: 5 s each time on two cores.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import textwrap
import traceback
import warnings
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn

from commands import ROOT

PRELOADED = (
    *("torch", "torch.distributed", "torch._dynamo", "torchvision.models"),
    *(
        "real_ranks",
        "ddp_bench.bench.worker.main",
        "ddp_bench.bench.modes.ddp",
        "ddp_bench.bench.measure.anatomy",
    ),
    *(
        "ddp_bench.bench.measure.trace",
        "ddp_bench.models.data",
        "ddp_bench.models.registry",
    ),
)
LIMIT_S = 120.0


def run_ranks(script: str, num_ranks: int, folder: Path) -> list[Any]:
    """Run `script` in `num_ranks` processes on this machine; what each passed to `report`, by rank.

    The ranks meet as under torchrun: at a store that somebody else hosts.
    """
    from torch.distributed import TCPStore  # most tests need no torch

    pool = multiprocessing.get_context("forkserver")
    pool.set_forkserver_preload(list(PRELOADED))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = [
        pool.Process(target=_play, args=(script, rank, num_ranks, store.port, folder), daemon=True)
        for rank in range(num_ranks)
    ]
    for process in started:
        sys.audit("tests.rank")
        process.start()
    try:
        running = {process.sentinel for process in started}
        while running:
            ended = wait(running, timeout=LIMIT_S)
            assert ended, f"the ranks did not end within {LIMIT_S:g} s\n{_said(folder, num_ranks)}"
            running -= set(ended)
            if any(process.exitcode for process in started):
                break  # the others may wait for this one
    finally:
        for process in started:
            process.kill()
            process.join()
    assert not any(p.exitcode for p in started), _said(folder, num_ranks)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]


def _said(folder: Path, num_ranks: int) -> str:
    logs = [folder / f"{rank}.txt" for rank in range(num_ranks)]
    return "\n".join(log.read_text()[-4000:] for log in logs if log.exists())


def _play(script: str, rank: int, num_ranks: int, port: int, folder: Path) -> NoReturn:
    """One rank: its own environment and output, then the script, then the end that a rank comes to."""
    with (folder / f"{rank}.txt").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sizes = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "RANK": rank, "LOCAL_RANK": rank}
    os.environ |= {name: str(value) for name, value in sizes.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "tests"}
    os.chdir(ROOT)
    import torch
    import torch.distributed as dist

    from ddp_bench.bench.cluster.process import leave

    torch.set_num_threads(1)
    names = {"torch": torch, "dist": dist, "json": json, "os": os, "sys": sys, "warnings": warnings}

    def report(value: Any) -> None:
        (folder / f"{rank}.json").write_text(json.dumps(value))

    code = 1
    with contextlib.suppress(SystemExit):
        try:
            exec(compile(textwrap.dedent(script), "script", "exec"), {**names, "report": report})
            code = 0
        except Exception:  # noqa: BLE001 - whatever the script raises is told
            traceback.print_exc()
    leave(code)
