"""What Ctrl-C and SIGTERM do to a rank: at once, even where its main thread sits in a collective."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def die_at_once() -> None:
    """Leave on a signal without a word: another process closes the books."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def on_stop(act: Callable[[], None]) -> None:
    """Call `act` on a thread of its own once a signal comes; it ends the process.

    Python's own handler would wait for the main thread to come back from C++.
    """
    heard, woken = socket.socketpair()
    woken.settimeout(0)

    def wait() -> None:
        while True:
            if heard.recv(1)[0] in STOP_SIGNALS:
                act()
                os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
    signal.set_wakeup_fd(woken.detach(), warn_on_full_buffer=False)
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)
