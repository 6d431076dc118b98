"""What has to be the same for which question, and the machine as it is read."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from commands import ROOT
from doctor_machines import write
from made import made_manifest
from packaging.version import Version

from ddp_bench.bench.common.errors import UsageError
from ddp_bench.bench.machine.conditions import UNKNOWN, Question, find_differences, select_required
from ddp_bench.bench.machine.host import describe_machine, select_environment
from ddp_bench.bench.machine.manifest import Cgroup, RankPlace
from ddp_bench.bench.run.conductor import check_alike
from ddp_bench.bench.worker import stores as module
from ddp_bench.bench.worker.facts import Begun

HOSTS, RESUME, GATE = Question

RUN = {
    "plan_hash": "p",
    "ranks": [{"rank": 0, "device_name": "A"}, {"rank": 1, "device_name": "A"}],
    "versions": {"torch": "2.15.0", "cuda": "13.0", "python": "3.12.1", "scipy": "1.13", "numpy": "2.3"},
    "environment": {
        "host": "here",
        "cpu_model": "Some CPU",
        "num_cores": 8,
        "gpus": [{"name": "A", "driver": "570", "power_limit_w": 700.0} for _ in range(2)],
        "governors": ["performance"],
        "huge_pages": "madvise",
        "cgroup": {"cpu_quota_cores": "unlimited", "memory_limit_gib": 16.0, "cpuset": "0-7"},
        "env": {"NCCL_ALGO": "Ring"},
    },
    "git": {"commit": "abc", "dirty": False},
    "settings": {
        "device": "cuda", "data": "/images", "data_workers": 2, "steps": 2, "seed": 0,
        "out": "a", "name": "n",
    },
    "model": {"num_params": 10, "gradient_bytes": 40},
}  # fmt: skip

KERNEL = ("governors", "huge_pages", "cgroup")

TABLE = {
    # what changes, its new value, whom it blocks, whom it is only told to
    "plan_hash": ("q", {RESUME}, set()),
    "ranks": ([{"rank": 0, "device_name": "A"}], {RESUME}, set()),
    "ranks.0.device_name": ("B", {RESUME}, set()),
    "versions.torch": ("2.11.0", {HOSTS, RESUME, GATE}, set()),
    "versions.cuda": ("12.8", {HOSTS, RESUME, GATE}, set()),
    "versions.python": ("3.13.0", {HOSTS, RESUME}, {GATE}),
    "versions.nccl_backend": ("nccl2", {HOSTS, RESUME, GATE}, set()),
    "versions.scipy": ("1.14", {RESUME}, set()),
    "versions.numpy": ("2.4", {RESUME}, {GATE}),
    "environment.host": ("there", set(), {GATE}),
    "environment.cpu_model": ("Other CPU", {RESUME, GATE}, set()),
    "environment.num_cores": (4, {RESUME, GATE}, set()),
    "environment.gpus.0.name": ("B", {RESUME, GATE}, set()),
    "environment.gpus.0.driver": ("580", {HOSTS, RESUME}, {GATE}),
    "environment.gpus.0.power_limit_w": (350.0, {GATE}, set()),
    "environment.governors": (["powersave"], set(), {GATE}),
    "environment.huge_pages": ("never", set(), {GATE}),
    "environment.cgroup.cpu_quota_cores": (4.0, set(), {GATE}),
    "environment.cgroup.memory_limit_gib": ("unlimited", set(), {GATE}),
    "environment.cgroup.cpuset": ("0-3", set(), {GATE}),
    "environment.env.NCCL_ALGO": ("Tree", set(), {GATE}),
    "git.commit": ("def", {HOSTS}, {GATE}),
    "git.dirty": (True, {HOSTS}, {GATE}),
    "settings.data_workers": (4, {HOSTS, GATE}, set()),
    "settings.steps": (3, {HOSTS}, {GATE}),
    "settings.seed": (1, {HOSTS}, {GATE}),
    "settings.out": ("b", set(), set()),
    "settings.name": ("m", set(), set()),
    "model.num_params": (11, {GATE}, set()),
    "model.gradient_bytes": (44, {GATE}, set()),
}


def changed(path, value):
    """The run with another value of a field."""
    other = copy.deepcopy(RUN)
    *parents, last = path.split(".")
    place = other
    for name in parents:
        place = place[int(name)] if isinstance(place, list) else place[name]
    place[int(last) if isinstance(place, list) else last] = value
    return made_manifest(**other)


SAME = made_manifest(**RUN)


@pytest.mark.parametrize("question", Question)
@pytest.mark.parametrize("path", TABLE)
def test_a_change_blocks_whom_it_should(path, question):
    value, blocks, told = TABLE[path]
    for pair in ((SAME, changed(path, value)), (changed(path, value), SAME)):
        found = find_differences(*pair, question)
        assert any(d.blocking for d in found) == (question in blocks)
        assert any(not d.blocking for d in found) == (question in told)


@pytest.mark.parametrize("missing", ["versions", "environment"])
@pytest.mark.parametrize("question", [RESUME, GATE])
def test_what_is_needed_and_unknown_blocks_even_its_like(missing, question):
    run = made_manifest(**RUN | {missing: {}})
    assert any(d.blocking and UNKNOWN in (d.then, d.now) for d in find_differences(run, run, question))
    assert select_required(changed("environment.gpus.0.name", None), GATE)["GPUs"] == UNKNOWN


@pytest.mark.parametrize("question", Question)
def test_what_is_no_difference(question):
    """Equal runs, the order of GPUs, and what is unknown and not needed."""
    assert find_differences(SAME, made_manifest(**RUN), question) == []
    mixed, turned = (changed(f"environment.gpus.{place}.name", "B") for place in (0, 1))
    assert find_differences(mixed, turned, GATE) == []
    told = {name: fact for name, fact in RUN["environment"].items() if name not in KERNEL}
    unknown = changed("environment", told)
    assert find_differences(unknown, SAME, GATE) == find_differences(SAME, unknown, GATE) == []


BOUND = [{"rank": rank, "bound_cores": cores} for rank, cores in enumerate(("0-31", "0-31", "32-63", ""))]


@pytest.mark.parametrize(
    ("path", "then", "now", "told"),
    [
        ("environment.governors", ["performance"], ["powersave", "schedutil"],
         ("CPU governor", "performance", "powersave/schedutil", False)),
        ("environment.cgroup.cpu_quota_cores", "unlimited", 1.5,
         ("container's CPU quota, cores", "unlimited", "1.5", False)),
        ("ranks", [], BOUND, ("ranks bound to cores", "none", "0-31, 32-63", False)),
        ("environment.gpus.0.name", "A", "B", ("GPUs", "2 x A", "1 x A, 1 x B", True)),
    ],
)  # fmt: skip
def test_a_difference_is_named_with_both_values(path, then, now, told):
    (found,) = find_differences(changed(path, then), changed(path, now), GATE)
    assert (found.name, found.then, found.now, found.blocking) == told


def test_the_kernels_settings_and_limits_are_read(tmp_path):
    tree = {
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "schedutil",
        "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "performance",
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]",
        "proc/self/cgroup": "0::/pod/job",
        "sys/fs/cgroup/pod/cpu.max": "150000 100000",
        "sys/fs/cgroup/pod/job/cpu.max": "max 100000",
        "sys/fs/cgroup/pod/job/memory.max": "3221225472",
        "sys/fs/cgroup/cpuset.cpus.effective": "0-63",
        "sys/fs/cgroup/pod/job/cpuset.cpus.effective": "0-3,8",
    }
    found = describe_machine("here", write(tmp_path, tree))
    assert (found.governors, found.huge_pages) == (("performance", "schedutil"), "never")
    assert found.cgroup == Cgroup(cpu_quota_cores=1.5, memory_limit_gib=3.0, cpuset="0-3,8")


def test_a_container_under_cgroup_v1(tmp_path):
    """As Docker makes one; the limit of memory is its way to say none."""
    tree = {
        "proc/self/cgroup": "5:cpuset:/docker/ab\n4:memory:/docker/ab\n3:cpu,cpuacct:/docker/ab\n0::/",
        "sys/fs/cgroup/cpuset/docker/ab/cpuset.cpus": "2-3",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
    }
    found = describe_machine("here", write(tmp_path, tree)).cgroup
    assert found == Cgroup(cpu_quota_cores=0.5, memory_limit_gib="unlimited", cpuset="2-3")


def test_no_limit_is_not_unknown(tmp_path):
    nothing = describe_machine("here", tmp_path)
    assert (nothing.governors, nothing.huge_pages, nothing.cgroup) == (None, None, Cgroup())
    tree = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "what?"}
    found = describe_machine("here", write(tmp_path, tree)).cgroup
    assert (found.cpu_quota_cores, found.memory_limit_gib) == ("unlimited", "unlimited")


@pytest.mark.parametrize(
    ("name", "value", "hidden"),
    [
        ("TORCH_HUB_TOKEN", "abc", True),
        ("CUDA_PROXY_PASSWORD", "abc", True),
        ("DDP_KEY", "abc", True),
        ("GLOO_AUTH", "abc", True),
        ("TORCH_MIRROR", "https://me:hunter2@example.org/simple", True),
        ("NCCL_CONF", "retries=3 password=hunter2", True),
        ("TORCH_ANY", "ghp_0123456789abcdef", True),
        ("TORCH_ANY", "Bearer 0123", True),
        ("NCCL_IB_PKEY", "1", False),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:128", False),
        ("NCCL_COMM_ID", "10.0.0.1:29500", False),
        ("CUDA_VISIBLE_DEVICES", "GPU-8f2c1a44-0000", False),
    ],
)
def test_a_credential_is_never_recorded_and_what_changes_speed_is(name, value, hidden, monkeypatch):
    monkeypatch.setenv(name, value)
    assert select_environment()[name] == ("(hidden)" if hidden else value)


def test_variables_that_change_speed_are_recorded_and_no_others(monkeypatch):
    asked = ("PYTORCH", "GOMP", "DDP", "OMP", "MKL", "NCCL", "GLOO", "TORCH", "CUDA")
    speed = {*(f"{prefix}_ANY" for prefix in asked), "LD_PRELOAD", "TORCHINDUCTOR_MAX_AUTOTUNE"}
    for name in (*speed, "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("BENCH_STARTED_S", "12.5")
    found = select_environment()
    assert speed <= set(found)
    assert "AWS_SECRET_ACCESS_KEY" not in found
    assert not [name for name in found if name.startswith("BENCH_")], "the suite's own are no conditions"


NCCL_SAID = """
import os, torch.distributed
from ddp_bench.bench.machine import host as machine
for wanted in ("", "0", "1"):
    if not os.fork():
        os.environ |= {"TORCH_DIST_USE_NCCL2": wanted} if wanted else {}
        print(wanted, machine.get_nccl_backend(), machine.find_backend("nccl-lazy") is not None, flush=True)
        os._exit(0)
    os.wait()
"""


def test_which_nccl_backend_runs_is_told():
    """Expected by torch's own code: 2.14 takes the newer backend where it is told to, 2.15 unless told."""
    version = Version(torch.__version__).release[:2]
    newer = {"": version >= (2, 15), "0": False, "1": version >= (2, 14)}
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_DIST_USE_NCCL2"}
    command = [sys.executable, "-c", NCCL_SAID]
    asked = subprocess.run(
        command, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    assert asked.stdout.splitlines() == [
        f"{wanted} {'nccl2' if chosen else 'nccl'} {version >= (2, 14)}" for wanted, chosen in newer.items()
    ]


PLACE = RankPlace(rank=0)


def host(name, *, torch="2.15.0", seed=0):
    told = made_manifest(
        environment={"host": name, "gpus": [{"name": "H200", "driver": "570"}]},
        versions={"torch": torch, "cuda": "13.0", "python": "3.11.7"},
        git={"commit": "abc", "dirty": False},
        settings={"seed": seed, "batch_size": 64},
    )
    conditions = select_required(told, Question.HOSTS)
    return Begun(place=PLACE, machine=told.environment, conditions=conditions)


def test_every_difference_of_hosts_is_listed():
    silent = Begun(place=PLACE)
    check_alike([host("a"), silent, host("b"), silent])
    with pytest.raises(UsageError) as caught:
        check_alike([host("a"), *(host(name, torch="2.11.0", seed=1) for name in "bc")])
    text = str(caught.value)
    assert "a: torch 2.15.0 (CUDA 13.0), b and 1 more: torch 2.11.0 (CUDA 13.0)" in text
    assert "a: --seed 0, b and 1 more: --seed 1" in text
    assert "batch" not in text
    assert "\n" not in text


def test_ranks_that_cannot_meet_for_no_reason_given_are_told_so(monkeypatch):
    def fails(*_, **__):
        raise RuntimeError

    monkeypatch.setattr(module, "rendezvous", fails)
    with pytest.raises(UsageError, match=r"cannot meet at .*: RuntimeError"):
        module.join_store()
