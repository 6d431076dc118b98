"""What launchers set: torchrun, srun, and what only looks like one of them."""

import pytest
from commands import bench_run

from ddp_bench.bench.common.errors import UsageError
from ddp_bench.bench.machine.launch import Launch, make_ranks_environment, read_launch

PLACE = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
TORCHRUN = {**PLACE, "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


def test_torchrun_and_a_hand_that_does_its_part():
    assert read_launch(TORCHRUN) == Launch(5, 8, 1, 4, 29500)
    again = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert read_launch(TORCHRUN | again) == Launch(5, 8, 1, 4, 29500, "job", 2)
    assert read_launch({"WORLD_SIZE": "8", "MASTER_ADDR": "node0"}) is None, "a container's image may say so"


WRONG = [
    ({"RANK": "1"}, "RANK is set, but not WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PO"),
    (  # a pod of a PyTorchJob without torchrun
        {k: v for k, v in TORCHRUN.items() if k != "LOCAL_WORLD_SIZE"},
        "RANK is set, but not LOCAL_WORLD_SIZE: start with torchrun or srun, which set all of them, or",
    ),
    (TORCHRUN | {"MASTER_ADDR": ""}, "RANK is set, but not MASTER_ADDR: "),
    (TORCHRUN | {"RANK": "abc"}, "Expected `int`, got `str` - at `RANK` in the environment: "),
    (TORCHRUN | {"RANK": "-1"}, "RANK -1 of 8, LOCAL_RANK 1 of 4: there is no such rank: "),
    (TORCHRUN | {"RANK": "8"}, "RANK 8 of 8, LOCAL_RANK 1 of 4: "),
    (TORCHRUN | {"LOCAL_RANK": "4"}, "RANK 5 of 8, LOCAL_RANK 4 of 4: "),
    (TORCHRUN | {"MASTER_PORT": "x"}, "Expected `int`, got `str` - at `MASTER_PORT` in the environment: "),
    (TORCHRUN | {"RANK": ""}, "RANK is set, but empty: "),
    (TORCHRUN | {"WORLD_SIZE": "9" * 18}, "Expected `int` <= 100000 - at `WORLD_SIZE` in the environment: "),
    (TORCHRUN | {"MASTER_PORT": "0"}, "Expected `int` >= 1 - at `MASTER_PORT` in the environment: "),
    (TORCHRUN | {"MASTER_PORT": "65536"}, "Expected `int` <= 65535 - at `MASTER_PORT` in"),
    (TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "x"}, "Expected `int`, got `str` - at `TORCHELASTIC_RES"),
    ({"SLURM_PROCID": "1"}, "SLURM_PROCID is set, but not SLURM_STEP_NODELIST: start with srun, "),
]


@pytest.mark.parametrize(("environment", "said"), WRONG)
def test_what_is_missing_or_wrong_is_named(environment, said):
    with pytest.raises(UsageError) as caught:
        read_launch({**environment, **make_ranks_environment(environment)})
    assert str(caught.value).startswith(said)


def test_a_run_without_its_launcher_ends_in_one_line():
    environment, said = WRONG[1]
    done = bench_run("--modes", "ddp", "--gpus", "1", "--device", "cpu", env=environment)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"bench.run: error: {said}")


STEP = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "3",
}


def test_a_task_of_srun_is_a_rank():
    meeting = {"MASTER_ADDR": "gpu07", "MASTER_PORT": "24567", "TORCHELASTIC_RUN_ID": "slurm-1234567.3"}
    assert make_ranks_environment(STEP) == PLACE | meeting
    assert make_ranks_environment({**STEP, "MASTER_PORT": "1", "MASTER_ADDR": "x"})["MASTER_PORT"] == "1"


@pytest.mark.parametrize(
    "other",
    [
        {},
        {**STEP, "RANK": "0"},
        {**{k: v for k, v in STEP.items() if k != "SLURM_STEP_NODELIST"}, "SLURM_PROCID": "0"},
        {**STEP, "SLURM_STEP_NUM_TASKS": "1"},
    ],
    ids=["no Slurm", "torchrun under srun", "batch script", "one task"],
)
def test_what_is_no_step_of_ranks(other):
    assert make_ranks_environment(other) == {}


@pytest.mark.parametrize(
    ("names", "first"),
    [
        ("single", "single"),
        ("node[01-03,7],other", "node01"),
        ("other,node[01-03]", "other"),
        ("rack[1-2]n[8-9]x,other", "rack1n8x"),
    ],
)
def test_ranks_meet_on_the_first_host(names, first):
    found = make_ranks_environment({**STEP, "SLURM_STEP_NODELIST": names})
    assert found["MASTER_ADDR"] == first


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        *(("SLURM_STEP_NODELIST", value, "SLURM_STEP_NODELIST") for value in ("node[a-b]", ",x", "")),
        ("SLURM_STEP_TASKS_PER_NODE", "4(x2),1", "1 and 4 tasks"),
    ],
)
def test_hosts_without_a_name_and_unequal_ones_are_refused(name, value, said):
    with pytest.raises(UsageError, match=said):
        make_ranks_environment({**STEP, name: value})
