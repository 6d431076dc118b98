"""Facts of this process from torchrun, srun or a hand that does their part: read here alone.

torch reads the same variables of the environment. For a task of srun they are made of Slurm's.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Annotated

import msgspec
from msgspec import Meta

from ..common.cli import format_command, quote_word, split_command
from ..common.errors import UsageError

REQUIRED_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLURM = "slurm-"
"""Prefix of the id of a launch by srun."""

START = "start with torchrun or srun, which set all of them, or unset RANK"


class Launch(msgspec.Struct, frozen=True, rename="upper"):
    """Facts that a launcher tells one of the processes that it has started, one for each rank."""

    rank: int
    world_size: Annotated[int, Meta(le=100_000)]
    local_rank: int
    local_world_size: int
    master_port: Annotated[int, Meta(ge=1, le=65_535)]
    torchelastic_run_id: str = ""
    """Id of all attempts of a launch; empty where nobody says it."""
    torchelastic_restart_count: int = 0


def read_launch(environment: Mapping[str, str]) -> Launch | None:
    """Read the launcher's variables in `environment`; None where there are none.

    Raises UsageError that names what is missing or wrong: one rank would wait for others for ever, or all of
    them measure the same devices at once.
    """
    if "RANK" not in environment:
        return None
    if not environment["RANK"]:
        raise UsageError(f"RANK is set, but empty: {START}")
    if missing := [name for name in REQUIRED_VARIABLES if not environment.get(name)]:
        raise UsageError(f"RANK is set, but not {', '.join(missing)}: {START}")
    try:
        found = msgspec.convert({**environment}, Launch, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"{str(error).replace('$.', '')} in the environment: {START}") from None
    if not (0 <= found.rank < found.world_size and 0 <= found.local_rank < found.local_world_size):
        raise UsageError(
            f"RANK {found.rank} of {found.world_size}, LOCAL_RANK {found.local_rank} of "
            f"{found.local_world_size}: there is no such rank: {START}"
        )
    return found


def make_ranks_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torchrun would have set for this task of `srun`; empty without one.

    Empty under torchrun, too. The ranks meet at a port by job id, below those given out at random, unless
    MASTER_PORT says so. Raises UsageError for nodes with different numbers of tasks.
    """
    if "RANK" in environment or "SLURM_PROCID" not in environment:
        return {}
    if "SLURM_STEP_NODELIST" not in environment:
        if environment["SLURM_PROCID"] == "0":
            return {}  # a batch script, which is no step of srun
        raise UsageError(
            "SLURM_PROCID is set, but not SLURM_STEP_NODELIST: start with srun, and pass all of Slurm's "
            "variables on, or unset it"
        )
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "1")
    if tasks == "1":
        return {}
    # As 4(x2),1: four on two nodes, one on the next.
    counts = (environment.get("SLURM_STEP_TASKS_PER_NODE") or tasks).split(",")
    per_node = {count.partition("(")[0] for count in counts}
    if len(per_node) > 1:
        found = " and ".join(sorted(per_node))
        raise UsageError(f"srun started {found} tasks on different nodes; give every node the same number")
    job = environment.get("SLURM_JOB_ID", "0")
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": per_node.pop(),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or parse_first_host(environment["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": environment.get("MASTER_PORT") or f"2{job[-4:]:0>4}",
        "TORCHELASTIC_RUN_ID": f"{SLURM}{job}.{environment.get('SLURM_STEP_ID', '0')}",
    }


def write_launched_command(environment: Mapping[str, str], parent: Sequence[str], *arguments: str) -> str:
    """Write the `run` of these arguments as it was typed, with its torchrun or srun where they are known.

    `parent` is the command line of this process's parent: torchrun's, where it is torchrun.
    """
    head, _ = split_command(parent)
    names = [PurePath(word).name.replace("torch.distributed.run", "torchrun") for word in head]
    if "torchrun" in names:
        head[-1] = "bench.run" if head[-1].startswith("bench.") else "run"  # `arguments` are of a run
        return " ".join(map(quote_word, ("torchrun", *head[names.index("torchrun") + 1 :], *arguments)))
    whole = format_command("run", *arguments)
    if environment.get("TORCHELASTIC_RUN_ID", "").startswith(SLURM):
        counts = environment["WORLD_SIZE"], environment["LOCAL_WORLD_SIZE"]
        whole = f"srun --ntasks={counts[0]} --ntasks-per-node={counts[1]} {whole}"
    return whole


def read_parent_command() -> list[str]:
    """Return the command line of the process that started this one; empty where it is not to be had."""
    import psutil  # only a run that begins asks

    with contextlib.suppress(psutil.Error):
        parent = psutil.Process().parent()
        return parent.cmdline() if parent else []
    return []


def parse_first_host(text: str) -> str:
    """Parse the first host of Slurm's `node[01-04,7],other`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", text)
    if first is None:
        raise UsageError(f"SLURM_STEP_NODELIST {text!r} names no host")
    name = re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])
    if "[" in name:
        raise UsageError(f"SLURM_STEP_NODELIST {text!r} is not understood; expected e.g. node[01-04]")
    return name
