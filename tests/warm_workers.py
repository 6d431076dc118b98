"""Real runs whose processes are forks of the one that has imported torch already.

All of them is real but this: neither a command nor what forks its workers is started anew, which takes
seconds of a core for imports. `integration/test_run.py` starts runs as a user types them.
"""

import os
import socket
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

from rank_pool import LIMIT_S, get_pool
from stand_ins import Patch, stand_in

from ddp_bench.bench.run import main, processes


def measure(arguments, folder, env=None):
    """Do `bench.run` in a folder; what it ended with and said, as `commands.finished` tells of others."""
    with tempfile.TemporaryDirectory() as place:
        said = [Path(place) / name for name in ("stdout", "stderr")]
        sys.audit("tests.rank")
        command = get_pool().Process(target=_run, args=(arguments, folder, env or {}, said))
        command.start()
        command.join(LIMIT_S)
        if command.is_alive():
            command.kill()
            command.join()
        stdout, stderr = (path.read_text() for path in said)
    return SimpleNamespace(returncode=command.exitcode, stdout=stdout, stderr=stderr)


def _run(arguments, folder, env, said):
    for descriptor, path in enumerate(said, 1):
        with path.open("w") as file:
            os.dup2(file.fileno(), descriptor)
    os.chdir(folder)
    os.environ.update(env)
    with Patch.context() as patch:
        stand_in(patch, processes, {"subprocess.Popen": Server})
        sys.exit(main.main(arguments))


class Server:
    """Stands for the process that a conductor starts, to import torch once for all workers."""

    def __init__(self, command, *, env, pass_fds, **_):
        self._code, conductor = None, os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            modules = command[command.index("ddp_bench.bench.worker.main") + 3 :]
            _serve(conductor, socket.socket(fileno=os.dup(*pass_fds)), modules, env)

    def poll(self):
        if self._code is None and (found := os.waitpid(self.pid, os.WNOHANG))[0]:
            self._code = os.waitstatus_to_exitcode(found[1])
        return self._code


def _serve(parent, conductor, modules, env):
    import torch  # most tests need none

    from ddp_bench.bench.common.process import end_with
    from ddp_bench.bench.worker.main import serve_forks

    end_with(parent)
    os.setsid()
    os.environ.update(env)
    torch.set_num_threads(1)
    serve_forks(conductor, modules)
    os._exit(0)
