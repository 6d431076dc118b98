"""Rows that a process appends as JSON lines to `FOLDER/ranks/HOST-LAUNCH-PID.jsonl`.

What they hold is said where they are read, in `../rows.py`: this package can import nothing from there.
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
        rank = os.environ.get("RANK", "")
        self.rank = int(rank) if rank.isdecimal() else 0  # until the process group tells it
        # Containers on one machine may share its name, and have processes of the same numbers.
        name = f"{self.host.replace(os.sep, '-')}-{config['launch']}"
        self.file = os.path.join(config["folder"], "ranks", name)  # noqa: PTH118
        self.lines: list[str] = []
        self.flushed = 0.0

    def write(self, **row: Any) -> None:
        """Append a row; steps are written to the disk once a second, all others at once."""
        if self.pid != os.getpid():
            self.pid, self.lines = os.getpid(), []
        self.lines.append(json.dumps({"rank": self.rank, **row}, separators=(",", ":")) + "\n")
        if row["kind"] != "step" or now() - self.flushed > FLUSH_S:
            self.flush()

    def note(self, text: str) -> None:
        """Append what the user shall be told."""
        self.write(kind="note", text=text)

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
