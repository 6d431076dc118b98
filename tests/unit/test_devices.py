"""Which GPUs the ranks of a launcher have, what a plan makes of it, and the cores next to a GPU.

Torch tells of GPUs that are made up here.
"""

from types import SimpleNamespace

import pytest
import torch
from doctor_machines import write
from made import case_of, inspected, torchrun
from msgspec.structs import replace
from stand_ins import stand_in

from ddp_bench.bench.common.errors import UsageError
from ddp_bench.bench.machine.launch import Launch
from ddp_bench.bench.machine.manifest import Gpu, GpuPair
from ddp_bench.bench.modes import Place, base, list_devices
from ddp_bench.bench.modes.base import list_gpus
from ddp_bench.bench.plan.resolve import GpuKind, fill_device_defaults, resolve
from ddp_bench.bench.plan.settings import Settings
from ddp_bench.bench.plan.sweep import SHARING, Machine, expand_cases
from ddp_bench.bench.run.job import add_visible_gpus, make_job
from ddp_bench.bench.worker import devices, messages
from ddp_bench.bench.worker.devices import (
    choose_gpu,
    describe_this_machine,
    is_narrowed,
    list_seen_gpus,
    read_near_cores,
)
from ddp_bench.bench.worker.facts import Devices


def seen(*uuids):
    return {uuid: Gpu(uuid=uuid, name="A") for uuid in uuids}


def launched(*gpus, per_node=None):
    """The machine of a launcher's ranks, of which each sees these GPUs, a letter each."""
    per_node = per_node or len(gpus)
    ranks = [
        Devices(cores=(), host=f"host{rank // per_node}", local_rank=rank % per_node, gpus=seen(*own))
        for rank, own in enumerate(gpus)
    ]
    hosts = tuple(one.host for one in ranks)
    return add_visible_gpus(
        Machine(device_type="cuda", devices_per_node=len(gpus[0]), rank_hosts=hosts), ranks
    )


def placed(machine, counts, **asked):
    """Of every case beside `single`, whether it shares devices, and why it is skipped."""
    settings = Settings.from_stored({"gpus": list(counts), "bucket_cap_mb": ["default"], **asked})
    whole = fill_device_defaults(settings, device_type="cuda", num_local_devices=machine.devices_per_node)
    plan = expand_cases(whole, machine, arch="resnet50", image_size=224)
    return [(p.oversubscribed, p.skip_reason) for p in plan[1:]]


def test_ranks_that_see_a_gpu_each_have_as_many_gpus():
    """As with srun --gpus-per-task=1, on one node and on two."""
    for machine, num_gpus in ((launched(*"abcdefgh"), 8), (launched(*"abcdefgh", per_node=4), 4)):
        assert placed(machine, (2, 8), modes=["ddp"]) == [(False, None)] * 2
        assert machine.devices_per_node == num_gpus


def test_data_parallel_has_what_the_first_rank_sees():
    ((_, reason),) = placed(launched(*"abcdefgh"), (4,), modes=["dp"])
    assert reason == (
        "DataParallel needs 4 GPUs in one process, and the first rank sees 1 of 8; with Slurm, give "
        "--gpus-per-node or --gres instead of --gpus-per-task"
    )
    ((_, reason),) = placed(launched(*"abcdefgh"), (16,), modes=["dp"])
    assert reason == f"more than 8 GPUs; {SHARING}"


def test_ranks_that_see_the_same_gpu_share_it():
    assert placed(launched("a", "a"), (2,), modes=["ddp"]) == [(True, f"more than 1 GPU; {SHARING}")]
    assert placed(launched("a", "a"), (2,), modes=["ddp"], backend="gloo") == [(True, None)]
    # There are as many GPUs as ranks of the case, and yet its two ranks have the same one.
    mixed = placed(launched(*"aabc"), (1, 2, 3, 4), modes=["ddp"])
    assert [shared for shared, _ in mixed] == [False, True, True, True]
    assert mixed[-1][1] == f"more than 3 GPUs; {SHARING}"
    late = placed(launched(*"abca"), (2, 3, 4), modes=["ddp"])
    assert [shared for shared, _ in late] == [False, False, True]


def test_ranks_and_replicas_share_gpus_where_that_is_asked_for():
    """All are marked, those with GPUs of their own too: NCCL's settings hold for their processes."""
    one = Machine(device_type="cuda", devices_per_node=1)
    assert placed(one, (1, 4), modes=["ddp"], share_gpus=True) == [(True, None)] * 2
    assert placed(one, (2,), modes=["dp"], share_gpus=True) == [(True, None)]
    assert placed(launched("a", "a"), (2,), modes=["ddp"], share_gpus=True) == [(True, None)]
    two = Machine(device_type="cuda", devices_per_node=2)
    assert placed(two, (2, 3), modes=["ddp"], share_gpus=True) == [(True, None)] * 2


@pytest.mark.parametrize(
    ("nccl", "gpus", "ranks", "wanted"),
    [
        ((2, 28, 9), 1, 2, {"NCCL_HOSTID": "ddp-bench-rank-1"}),
        ((2, 30, 7), 1, 2, {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}),
        (
            (2, 30, 7),
            1,
            4,
            {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "4"},
        ),
    ],
)
def test_what_lets_nccl_share_a_gpu(nccl, gpus, ranks, wanted, monkeypatch):
    stand_in(monkeypatch, devices, {"torch.cuda.nccl.version": lambda: nccl})
    monkeypatch.setattr(devices, "count_gpus", lambda: gpus)
    assert devices.make_sharing_variables(1, ranks) == wanted


KIND = GpuKind(capability=(9, 0), memory_gib=80.0)


def backends(nccl, has=(), **asked):
    """Of the cases on two GPUs of a torch with this NCCL, as its rank tells of it."""
    look = messages.Look(device="auto")
    told = Devices(cores=(0, 1), gpus=seen("a", "b"), kind=KIND, nccl=nccl, nccl_backends=has)
    line = messages.encode(messages.Report(value=told))
    found = look.read_reply(messages.decode(line, messages.AnyAnswer))
    asked = resolve({"arch": "resnet20", "gpus": "2", "modes": "ddp", **asked})
    return {p.case.backend for p in make_job(asked, [found], inspect).plan if p.case.communicates}


def test_a_version_of_nccl_may_end_in_a_word_and_torch_may_be_built_without(monkeypatch):
    assert backends((2, 28, 9)) == backends((2, 28, 9, "rc1")) == {"nccl"}
    assert backends(()) == {"gloo"}
    with pytest.raises(UsageError, match="--backend nccl: this torch was built without NCCL; use gloo"):
        backends((), backend="nccl")
    for name in ("nccl2", "nccl-lazy"):
        assert backends((2, 28, 9), has=(name,), backend=name) == {name}
        with pytest.raises(UsageError, match=f"--backend {name}: this torch lacks it"):
            backends((2, 28, 9), backend=name)
        with pytest.raises(UsageError, match=f"--backend {name}: this torch was built without NCCL"):
            backends((), has=(name,), backend=name)
    without = SimpleNamespace(cuda=SimpleNamespace(nccl=SimpleNamespace()))
    monkeypatch.setattr(devices, "torch", without)
    assert devices.read_nccl_version() == ()


def inspect(settings):
    return inspected(image_size=settings.image_size)


def test_an_old_nccl_shares_only_where_there_is_one_gpu():
    """Its host ids would make a real pair of GPUs talk through sockets."""
    two = Devices(cores=(0, 1), gpus=seen("a", "b"), kind=KIND, nccl=(2, 28, 9))
    asked = resolve({"arch": "resnet20", "gpus": "4", "share_gpus": "on"})
    with pytest.raises(UsageError, match=r"NCCL 2\.28\.9 .* CUDA_VISIBLE_DEVICES=0"):
        make_job(asked, [two], inspect)
    plan = make_job(asked, [replace(two, nccl=(2, 30, 7))], inspect).plan
    assert {p.skip_reason for p in plan if p.case.mode == "dp"} == {None}


@pytest.mark.parametrize(
    ("mode", "device", "num_gpus", "indices"),
    [
        *(("dp", "cuda:0", n, [0, *others]) for n, others in ((0, [1, 2]), (1, [0, 0]), (2, [1, 0]))),
        *(("ddp", "cuda:1", 3, [1]), ("dp", "cpu", 0, [None])),
    ],
)
def test_a_rank_trains_on_its_device_and_in_dp_on_all_in_turn(mode, device, num_gpus, indices, monkeypatch):
    stand_in(monkeypatch, base, {"torch.cuda.device_count": lambda: num_gpus})
    place = Place(rank=0, device=torch.device(device), cores=(0,))
    case = case_of(mode=mode, num_devices=3, device_type="cuda")
    assert [one.index for one in list_devices(case, place)] == indices
    assert list_gpus(case, place) == sorted({*indices} - {None}), "each counts once"


def test_ranks_that_see_several_gpus_take_them_in_turn():
    """As under torchrun, whose ranks see all, and with two GPUs per task."""
    torchrun = launched(*["abcdefgh"] * 2)
    assert (torchrun.devices_per_node, torchrun.rank_devices) == (8, ("a", "b"))
    assert placed(torchrun, (8,), modes=["dp"]) == [(False, None)]
    assert launched(*["ab"] * 4).rank_devices == ("a", "b", "a", "b")
    assert launched("ab", "cd", "ef", "gh").rank_devices == ("a", "d", "e", "h")


def gpu(number):
    """What torch tells of a GPU."""
    return SimpleNamespace(uuid=f"{number:036d}", pci_domain_id=0, pci_bus_id=0xA0 + number, pci_device_id=0)


@pytest.fixture
def two_gpus(monkeypatch):
    """Torch has two GPUs, the second NUMA node's first."""
    calls = {
        "torch.cuda.init": lambda: None,
        "torch.cuda.device_count": lambda: 2,
        "torch.cuda.get_device_properties": lambda device: gpu(getattr(device, "index", device)),
    }
    stand_in(monkeypatch, devices, calls)


@pytest.mark.usefixtures("two_gpus")
def test_the_gpu_that_a_rank_takes_is_the_one_it_says():
    for local_rank in range(4):
        index = choose_gpu(local_rank).index
        own = Devices(cores=(), local_rank=local_rank, gpus=list_seen_gpus()).own_gpu
        assert own == f"GPU-{gpu(index).uuid}" == f"GPU-{local_rank % 2:036d}"


def test_a_host_lists_what_its_ranks_see_once_each(monkeypatch):
    def pairs(uuids):
        asked.append(list(uuids))
        return [GpuPair(first=0, second=1, peer_access=False)]

    asked = []
    monkeypatch.setattr(devices, "describe_pairs", pairs)
    monkeypatch.setattr(devices, "get_host_name", lambda: "here")
    found = describe_this_machine(seen("b") | seen("a", "b"))
    assert [one.uuid for one in found.gpus or ()] == ["b", "a"]
    assert asked == [["b", "a"]]
    assert found.gpu_pairs == (GpuPair(first=0, second=1, peer_access=False),)
    assert describe_this_machine({}).gpus == ()


@pytest.mark.parametrize(("sees", "num_gpus"), [(("a", "b"), 2), (("a", "a"), 1)])
def test_what_launched_ranks_see_decides_the_plan(sees, num_gpus):
    """Each sees one GPU, of its own or the same."""
    both = [
        Devices(cores=(0, 1), local_rank=rank, gpus=seen(uuid), kind=KIND) for rank, uuid in enumerate(sees)
    ]
    plan = make_job(
        resolve({"arch": "resnet20", "bucket_cap_mb": "default"}), both, inspect, torchrun(2)
    ).plan
    whole = [p for p in plan if not (p.oversubscribed or p.skip_reason)]
    assert [p.case.num_devices for p in whole if p.case.mode == "ddp"] == [1, 2][:num_gpus]
    assert max(p.case.num_devices for p in plan) == num_gpus, "the default counts are those of the host"


def on_core(rank, *cores, host="here", boot_id="1", local_rank=None, physical=None):
    """A rank that a launcher has started on CPU cores."""
    local_rank = rank if local_rank is None else local_rank
    where = {"host": host, "boot_id": boot_id, "local_rank": local_rank}
    return Devices(cores=cores, physical=physical or cores, **where)


def ddp_cases(ranks, **asked):
    """Devices, hosts and whether it shares devices, of every DDP case that runs; else why not."""
    asked = {"arch": "resnet20", "bucket_cap_mb": "default", "modes": "ddp", "device": "cpu", **asked}
    plan = make_job(resolve(asked), ranks, inspect, Launch(0, len(ranks), 0, 4, 29500)).plan
    return [
        p.skip_reason or (p.case.num_devices, p.num_nodes, p.oversubscribed)
        for p in plan
        if p.case.mode == "ddp"
    ]


def test_ranks_that_a_launcher_binds_to_a_core_each_share_none():
    """As srun does by default; the counts are those of the host."""
    assert ddp_cases([on_core(rank, rank) for rank in range(4)]) == [
        (1, 1, False),
        (2, 1, False),
        (4, 1, False),
    ]
    crowded = [on_core(rank, 0, 1) for rank in range(4)]  # as under torchrun
    assert ddp_cases(crowded, gpus="2,4") == [(2, 1, False), (4, 1, True)]


def test_the_hosts_of_a_case_are_those_of_its_ranks():
    """Numbered host by host or, with srun -m cyclic, in turn; and torchrun's agents may start 4 and 2."""
    cyclic = [on_core(r, 0, 1, host=f"host{r % 2}", boot_id=str(r % 2), local_rank=r // 2) for r in range(4)]
    assert ddp_cases(cyclic, gpus="1,2,4") == [(1, 1, False), (2, 2, False), (4, 2, False)]
    uneven = [on_core(k, *range(4)) for k in range(4)]
    uneven += [on_core(4 + k, 0, 1, host="there", boot_id="2", local_rank=k) for k in range(2)]
    assert ddp_cases(uneven, gpus="4,6,8") == [
        (4, 1, False),
        (6, 2, False),
        "needs 8 ranks, the launcher started 6",
    ]


def test_two_hosts_of_one_name_are_refused():
    """Their GPUs would count as those of one, and nobody would compare them."""
    ranks = [on_core(rank, 0, host="localhost", boot_id=str(rank), local_rank=0) for rank in range(2)]
    with pytest.raises(UsageError, match="two hosts are both named 'localhost'; set BENCH_HOST"):
        ddp_cases(ranks)
    named = [replace(one, host=f"{one.host}{rank}") for rank, one in enumerate(ranks)]
    assert ddp_cases(named, gpus="2") == [(2, 2, False)]


def test_ranks_take_a_physical_core_each_before_two_share_one(tmp_path, capsys):
    siblings = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    root = write(tmp_path, {siblings.format(core): f"{core % 2},{core % 2 + 2}" for core in range(4)})
    assert devices.list_device_cores((0, 1, 2, 3), root) == {0: 0, 1: 1, 2: 0, 3: 1}
    assert [*devices.list_device_cores((1, 2, 3), root)] == [1, 2, 3]
    assert devices.list_device_cores((1, 3), root) == {1: 1, 3: 1}
    assert devices.list_device_cores((5, 4), root) == {4: 4, 5: 5}, "the kernel does not say"
    asked = resolve({"arch": "resnet20", "gpus": "1,2,4", "device": "cpu", "modes": "ddp"})
    make_job(asked, [on_core(0, 0, 1, 2, 3, physical=(0, 1, 0, 1))], inspect)
    assert "from 4 devices on some are two hardware threads of one physical core" in capsys.readouterr().err
    make_job(asked, [on_core(0, 0, 1, 2, 3)], inspect)
    assert not capsys.readouterr().err


@pytest.mark.usefixtures("two_gpus")
def test_the_cores_next_to_a_gpu(tmp_path):
    slots = "sys/bus/pci/devices"
    root = write(tmp_path, {f"{slots}/0000:a1:00.0/local_cpulist": "16-31,48-63"})
    assert read_near_cores(torch.device("cuda", 1), root) == {*range(16, 32), *range(48, 64)}
    assert read_near_cores(torch.device("cuda", 0), root) == frozenset()


def test_cores_are_narrowed_where_one_that_is_online_is_not_allowed(tmp_path):
    root = write(tmp_path, {"sys/devices/system/cpu/online": "0-3"})
    assert not is_narrowed(range(4), root)
    assert is_narrowed((0, 1, 2), root)
    assert not is_narrowed((0,), tmp_path / "nowhere"), "not known"


@pytest.mark.parametrize(
    ("device", "num_devices", "asked", "calibrates"),
    [
        ("cuda", 1, {}, True),
        ("cuda", 8, {"gpus": "1"}, True),
        ("cuda", 8, {}, False),
        ("cpu", 1, {}, False),
        ("cuda", 1, {"modes": "dp"}, False),
        ("cuda", 1, {"comm_hook": "powersgd"}, False),
        ("cuda", 1, {"calibrate": "off"}, False),
        ("cuda", 8, {"calibrate": "on"}, True),
    ],
)
def test_ddp_on_one_gpu_alone_is_calibrated_by_itself(device, num_devices, asked, calibrates):
    whole = fill_device_defaults(resolve(asked), device_type=device, num_local_devices=num_devices)
    assert whole.calibrate is calibrates
