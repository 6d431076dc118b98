"""Slurm's environment in torchrun's words; the notations are those of Slurm's manual."""

import pytest

from bench.cluster.slurm import hosts, ranks_environment, tasks_per_node
from bench.errors import UsageError

STEP = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "3",
}


def test_a_task_of_srun_is_a_rank() -> None:
    assert ranks_environment(STEP) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "24567",
        "TORCHELASTIC_RUN_ID": "slurm-1234567.3",
    }
    assert ranks_environment({**STEP, "MASTER_PORT": "1", "MASTER_ADDR": "x"})["MASTER_PORT"] == "1"


@pytest.mark.parametrize(
    "other",
    [
        {},
        {**STEP, "RANK": "0"},
        {k: v for k, v in STEP.items() if k != "SLURM_STEP_NODELIST"},
        {**STEP, "SLURM_STEP_NUM_TASKS": "1"},
    ],
    ids=["no Slurm", "torchrun under srun", "batch script", "one task"],
)
def test_what_is_no_step_of_ranks(other: dict[str, str]) -> None:
    assert ranks_environment(other) == {}


def test_host_lists() -> None:
    assert hosts("node[01-03,7],other,rack[1-2]n[8-9]x") == [
        *("node01", "node02", "node03", "node7", "other"),
        *("rack1n8x", "rack1n9x", "rack2n8x", "rack2n9x"),
    ]
    assert hosts("single") == ["single"]
    with pytest.raises(UsageError, match="node"):
        hosts("node[a-b]")


def test_unequal_nodes_are_refused() -> None:
    assert tasks_per_node("4(x2),1") == [4, 4, 1]
    with pytest.raises(UsageError, match="1 and 4 tasks"):
        ranks_environment({**STEP, "SLURM_STEP_TASKS_PER_NODE": "4(x2),1"})
