"""Scripts that run as real ranks, forked from one process that has imported torch already.

A launcher would import torch anew in every rank of every test: 5 s each time on two cores. The ranks play one
script after another, so that they meet once.
Scripts have the names of `real_ranks`, and change modules by `patch`.
"""

import gc
import json
import multiprocessing
import os
import sys
import textwrap
import traceback
import warnings
from multiprocessing.connection import wait

from commands import ROOT
from stand_ins import Patch

PRELOADED = ("stand_ins", "torch._dynamo", "torchvision.models", "real_ranks", "ddp_bench.bench.worker.rank")
LIMIT_S = 240.0
START_METHOD = "forkserver"
"""Of ranks; "fork" starts sooner where the process itself is a fork of one that has imported torch alone."""


def run_ranks(script, num_ranks, folder, *, meet=False):
    """Return what each of the new processes passes to `report`; unless they `meet`, `script` sees to it."""
    ranks = Ranks(num_ranks, folder, meet=meet)
    try:
        return ranks.play(script)
    finally:
        ranks.end()


def get_pool():
    """Return the pool, which starts processes that have torch."""
    pool = multiprocessing.get_context(START_METHOD)
    pool.set_forkserver_preload(list(PRELOADED))
    return pool


class Ranks:
    """Processes on this machine that meet as under torchrun: at a store that somebody else hosts."""

    def __init__(self, num_ranks, folder, *, meet=True):
        self._num_ranks, self._folder, self._meet = num_ranks, folder, meet
        self._processes, self._connections, self._store = [], [], None

    def play(self, script):
        """Run `script` in all of them; what each passed to `report`, by rank. A failure ends them."""
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send(script)
        waiting, found = dict(zip(self._connections, range(self._num_ranks), strict=True)), {}
        while waiting:
            ready = wait(waiting, timeout=LIMIT_S)
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    is_done, said = connection.recv()
                except EOFError:
                    is_done, said = False, "it ended"
                found[rank] = said
                if not is_done:
                    self._fail(f"rank {rank}: {said}")
            if not ready:
                self._fail(f"ranks {[*waiting.values()]} are not done after {LIMIT_S:g} s")
        return [json.loads(found[rank]) for rank in range(self._num_ranks)]

    def end(self):
        """End them, whatever they do."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._connections, self._store = [], [], None

    def _start(self):
        from torch.distributed import TCPStore  # most tests need no torch

        pool = get_pool()
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self._num_ranks):
            ours, theirs = pool.Pipe()
            where = (rank, self._num_ranks, self._store.port, self._folder, self._meet)
            self._processes.append(pool.Process(target=_serve, args=(theirs, *where)))
            self._connections.append(ours)
            sys.audit("tests.rank")
            self._processes[-1].start()
            theirs.close()

    def _fail(self, why):
        self.end()
        logs = [self._folder / f"{rank}.txt" for rank in range(self._num_ranks)]
        raise AssertionError("\n".join([why, *(log.read_text()[-4000:] for log in logs if log.exists())]))


def _serve(connection, rank, num_ranks, port, folder, meet):
    """One rank: its own environment and output, then scripts until there is nobody to send one."""
    with (folder / f"{rank}.txt").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sizes = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "RANK": rank, "LOCAL_RANK": rank}
    os.environ |= {name: str(value) for name, value in sizes.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "tests"}
    os.chdir(ROOT)
    warnings.resetwarnings()  # a fork of pytest would make errors of them
    import real_ranks

    names = dict(vars(real_ranks))
    names["torch"].set_num_threads(1)
    if meet:
        names["cluster"] = real_ranks.Cluster()
    gc.freeze()  # or each collection would look through all of torch
    while True:
        try:
            script = connection.recv()
        except EOFError:
            sys.stdout.flush()
            os._exit(0)  # gloo's threads may hold tensors, which abort an interpreter that shuts down
        connection.send(_played(script, names))


def _played(script, names):
    """Whether the script came to its end, and its report as JSON, or the traceback."""
    patch, reports = Patch(), []
    names["torch"].manual_seed(0)
    try:
        code = compile(textwrap.dedent(script), "script", "exec")
        exec(code, {**names, "patch": patch, "report": reports.append})
        return True, json.dumps(reports[-1])
    except BaseException:  # noqa: BLE001 - whatever the script raises is told
        return False, traceback.format_exc()
    finally:
        patch.undo()
        names["torch"]._dynamo.reset()
        gc.enable()
        gc.collect()
