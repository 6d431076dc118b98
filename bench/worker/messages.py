"""Messages between conductor and workers: one typed record per line of JSON.

Whoever reaches a port could send something. So a message holds data alone: nothing that arrives is unpickled,
imported or called, and what no record describes is refused.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any, Generic, TypeAlias, TypeVar, Union, get_args

import msgspec

from ..common.text import to_json
from ..machine.load import LoadReading
from ..machine.records import Record
from ..plan.case import Case
from ..plan.settings import ResolvedSettings
from ..results.block_times import BlockTimes, Fault
from .facts import Begun, Devices, Gpus, Inspected, Prepared

MAX_BYTES = 2**28
"""Bytes of a line. The longest have a trace: 300 KiB, of a large model some MiB."""

LOOPBACK = "127.0.0.1"

GroupKey: TypeAlias = tuple[int, str]
"""A process group: the number of its ranks, the first ones, and its backend, empty where they need none."""

NO_GROUP = -1
"""Stands for the number of collectives on a rank outside the case's process group; no count is negative."""


Reply_co = TypeVar("Reply_co", covariant=True)


class Answer(Record, frozen=True, tag_field="is", tag=str.lower):
    """A message that a worker sends."""


class Hello(Answer, frozen=True):
    """The first line of a worker."""

    token: str
    """Token that the launcher's store told it; empty where the conductor has started it."""
    rank: int
    host: str


class RankStatus(Answer, frozen=True):
    """The present work of a worker, or what it waits for."""

    waits_for: str
    """Empty while it works."""
    where: str
    stacks: str


class Report(Answer, frozen=True):
    """The end of a rank's work: its result, or what went wrong."""

    value: Any = None
    fault: Fault | None = None
    """Why there is no value; its status may be `usage`, too: a mistake of the user."""
    launched: int | None = NO_GROUP
    """Collectives that it has launched on the case's process group so far; None where it cannot be told."""
    place: str = ""
    """File, line and function that raised, of the user's code where it did; empty where that says nothing."""
    traceback: str = ""
    exit_code: int = 0
    label: str = ""
    """Label of a mistake of the user."""

    @property
    def is_failure(self) -> bool:
        return self.fault is not None and self.fault.status != "skipped"


AnyAnswer: TypeAlias = Hello | RankStatus | Report


class Command(Record, Generic[Reply_co], frozen=True, tag_field="do", tag=str.lower):
    """An order of the conductor to a worker; each one is answered by a `Report`, which has a reply."""

    def read_reply(self, report: Report) -> Reply_co:
        """Return a worker's reply. Raises msgspec.ValidationError for what no worker says."""
        (base,) = type(self).__orig_bases__  # type: ignore[attr-defined]  # every generic class has it
        found: Reply_co = msgspec.convert(report.value, get_args(base)[0])
        return found


class AskStatus(Command[None], frozen=True):
    """Say at once, whatever is under way, what that is: a `RankStatus`, and no `Report`."""


class Quit(Command[None], frozen=True):
    """Leave, without an answer."""


class Open(Command[int], frozen=True):
    """Open the store of the process groups, or join the launcher's: its port.

    The other ranks of a launcher find the conductor's `address` there.
    """

    address: str = ""


class Look(Command[Devices], frozen=True):
    """Tell what there is to train on; of GPUs nothing where `device` is `cpu`."""

    device: str


class Inspect(Command[Inspected], frozen=True):
    """Load and describe the workload, and see that the images are there that it is to train on."""

    settings: ResolvedSettings


class Begin(Command[Begun], frozen=True):
    """Take a device, meet the other ranks and make the model that all cases begin with."""

    settings: ResolvedSettings
    num_outputs: int
    """Number that the worker which has looked at the model tells; none of those that train looks."""
    cases: tuple[Case, ...]
    """Cases that run, one for each mode, number of devices and backend; commands bring their own."""
    world_size: int
    local_world_size: int
    meeting: str
    """Its name, which no other has."""
    port: int = 0
    """Port of the store on this machine; 0: the launcher's."""
    gpus: Gpus = {}
    """GPUs that a launcher's ranks on the same host see."""

    @property
    def num_connections(self) -> int:
        """Connections of a rank: in the group of all ranks, on the first to the store, and in cases' groups.

        Gloo connects every two ranks of a group.
        """
        groups = {(case.num_ranks, case.backend) for case in self.cases if case.backend == "gloo"}
        return 2 * self.world_size + sum(num_ranks for num_ranks, _ in groups)


class Wait(Command[None], frozen=True):
    """Take no part in what the other ranks begin, but wait for its beginning."""

    gives_caches_back: bool = False


class Load(Command[LoadReading | None], frozen=True):
    """Read how busy the machine is."""


class Group(Command[None], frozen=True):
    """Make a process group; all ranks together."""

    group: GroupKey


class Link(Command[None], frozen=True):
    """See that the first ranks, as many as the group has, can communicate; all ranks together."""

    group: GroupKey


class Prepare(Command[Prepared], frozen=True):
    """Build a case and warm it up; prove it, where no launch has."""

    index: int
    case: Case
    by_device: tuple[int, ...] | None = None
    """Layers of each device, where it is known how the case splits the model."""
    least_s: float = 0.0
    """Seconds of the warm-up, at least."""
    proves: bool = True
    """True where gradients, and the first steps of the warm-up, are compared with the plain module's."""


class Block(Command[BlockTimes], frozen=True):
    """Measure a block of `steps` steps."""

    index: int
    phase: str
    steps: int
    gives_caches_back: bool = False
    """True where other processes, or DP of rank 0, need the GPU memory that cases leave cached."""


class Agree(Command[tuple[str, ...]], frozen=True):
    """Name the parameters whose averaged gradients differ from those of the first rank."""

    index: int


class Curve(Command[float], frozen=True):
    """Time an all-reduce of so many bytes by itself, in milliseconds."""

    group: GroupKey
    num_bytes: int


class AskNccl(Command[str], frozen=True):
    """Ask NCCL, in a process beside this one, how it sends float32 messages of so many bytes: its log."""

    name: str
    """Name of the ranks' meeting."""
    num_ranks: int
    sizes: tuple[int, ...]
    backend: str


class Settle(Command[None], frozen=True):
    """Wait for what was launched, measure the case, if it is one, no further, and give memory back."""

    index: int | None = None
    group: GroupKey = (1, "")
    forgets: bool = False
    """True once all cases are prepared: what they were compared with goes, too."""


STEP_COMMANDS = (Wait, Link, Prepare, Block, Agree, Curve, Settle)
"""Commands that all ranks begin together; a rank that takes no part in one is told to `Wait`."""

Commands: TypeAlias = Mapping[int, Command[Any]]
"""Commands by rank."""

AnyCommand: Any = Union[tuple(Command.__subclasses__())]  # noqa: UP007 - of a list of classes


def encode(message: Command[Any] | Answer) -> bytes:
    """Return the line that `decode` makes `message` of again."""
    return to_json(message, indent=None).encode() + b"\n"


def decode(line: bytes | bytearray, kind: Any) -> Any:
    """Return what a line holds. Raises ValueError for one that holds no `kind`."""
    try:
        return msgspec.convert(json.loads(line), kind)
    except RecursionError:
        raise ValueError("no message: nested too deeply") from None


def set_socket_options(connection: socket.socket) -> socket.socket:
    """Have each line sent at once, and notice within two minutes where the other host has lost its power."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # Linux has all three
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
