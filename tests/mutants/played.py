"""Runs tests in forks of one process that has imported torch, in the copy of our tree around it.

A line read is a list of tests' ids as JSON; the answer is pytest's exit status, once what it said is in
the file that is named. Nothing of ours is imported before the fork, for the copy may have been changed since.
"""

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torchvision.models  # noqa: F401 - for the forks, as above

OPTIONS = ("-vv", "-x", "--showlocals", "-n", "0", "-p", "no:cacheprovider", "--no-cov", "--timeout", "200")
FORKS = ("-W", "ignore:This process:DeprecationWarning")
"""Python 3.12 warns of forks in processes with threads; those of torch wait for work."""


def _play(tests):
    os.setpgid(0, 0)
    with Path(sys.argv[1]).open("w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    sys.path[:0] = [str(Path.cwd()), str(Path("tests").resolve())]
    import rank_pool

    rank_pool.START_METHOD = "fork"
    return int(pytest.main([*OPTIONS, *FORKS, *tests]))


def main():
    """Answer line after line."""
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            status = 3  # pytest's own for what is no test's fault
            try:
                status = _play(json.loads(line))
            finally:
                sys.stdout.flush()
                os._exit(status)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # ranks that a failed test has left
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
