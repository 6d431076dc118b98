"""Each host's part of a job: its command, its environment, its exit code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..common.cli import TORCHRUN
from ..common.process import make_package_command
from .network import INTERFACE, ShapedLink, get_address, name_host

RENDEZVOUS_PORT = 29500
"""torchrun's default for --master-port; in a lab's own network no other program can hold it."""

TORCHRUN_PORT = 29400
"""Port at which torchruns that the job starts itself meet: the lab's own agents may hold the other."""


@dataclass(frozen=True)
class HostJob:
    """One host's part of a job: which host it is, and the command that each of its ranks runs."""

    host: int
    num_hosts: int
    ranks_per_host: int
    run_id: str
    command: list[str]


def is_torchrun(command: Sequence[str]) -> bool:
    """Tell whether a resolved command starts the ranks of its host itself."""
    return command[1:3] == TORCHRUN


def is_bench_run(command: Sequence[str]) -> bool:
    """Tell whether a resolved command is `bench.run`: it goes on where its ranks died."""
    return command[1:3] == make_package_command("run")[1:]


def make_host_environment(host: int, link: ShapedLink, gpus: Sequence[str]) -> dict[str, str]:
    """Return the variables of a host's ranks beside the user's own."""
    environment = {
        "BENCH_HOST": name_host(host),
        "BENCH_LINK": link.label,
        "GLOO_SOCKET_IFNAME": INTERFACE,
        # NCCL must take the hosts for different machines and the link for the only way between them
        "NCCL_SOCKET_IFNAME": INTERFACE,
        "NCCL_HOSTID": name_host(host),
        "NCCL_IB_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    return environment | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})


def make_torchrun_environment(job: HostJob) -> dict[str, str]:
    """Return the variables that a torchrun on this host reads in place of options: they tell where it is."""
    return {
        "NODE_RANK": str(job.host),
        "PET_NNODES": str(job.num_hosts),
        "PET_NODE_RANK": str(job.host),
        "PET_NPROC_PER_NODE": str(job.ranks_per_host),
        "PET_MASTER_ADDR": get_address(0),
        "PET_MASTER_PORT": str(TORCHRUN_PORT),
        "PET_LOCAL_ADDR": get_address(job.host),
    }


def choose_exit_code(codes: Sequence[int]) -> int:
    """Choose the exit code of a job from its processes' codes, in the order in which they ended.

    Peers of a failed process die of its absence, with 1 (an exception) or by a signal (negative, or above
    128), sometimes before it has ended itself. So a code that a program chose, such as 2, goes first; 0 only
    where all are 0.
    """
    failed = [128 - code if code < 0 else code for code in codes if code]
    chosen = [code for code in failed if 1 < code < 128]
    return (chosen or failed or [0])[0]
