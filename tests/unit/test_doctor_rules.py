from __future__ import annotations

import dataclasses
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from doctor_machines import ETH0, GIB, LOOPBACK, container, h100_box, laptop, virtual_gpu, with_gpu

from ddp_bench.bench.doctor.main import diagnose
from ddp_bench.bench.doctor.readings import HostReadings, Interface, NumaNode, Port
from ddp_bench.bench.doctor.rules import Finding, figures, gib, graded
from ddp_bench.bench.doctor.rules.libraries import nccl_interfaces


def line(machine: HostReadings, name: str) -> Finding:
    (found,) = [finding for finding in diagnose(machine) if finding.name == name]
    return found


def cpu(machine: HostReadings, **changes: Any) -> HostReadings:
    return replace(machine, cpu=replace(machine.cpu, **changes))


def memory(machine: HostReadings, **changes: Any) -> HostReadings:
    return replace(machine, memory=replace(machine.memory, **changes))


def software(machine: HostReadings, **changes: Any) -> HostReadings:
    return replace(machine, software=replace(machine.software, **changes))


def test_an_idle_eight_gpu_box_is_fit_in_every_line() -> None:
    assert {finding.name: finding.text for finding in diagnose(h100_box()) if finding.status != "ok"} == {}


def test_a_machine_without_gpu_has_one_line_about_gpus() -> None:
    about_gpus = ("CUDA driver", "NCCL network")
    gpu_lines = [f for f in diagnose(laptop()) if "GPU" in f.name or f.name in about_gpus]
    assert gpu_lines == [Finding("GPUs", "ok", "no CUDA device: devices are CPU cores")]


def test_what_was_not_read_is_unknown_and_never_judged() -> None:
    judged = {f.name for f in diagnose(HostReadings()) if f.status != "unknown"}
    assert judged == {"threads", "settings"}  # these come from the environment, which is always known


def without_each_reading(value: Any) -> list[Any]:
    """Copies of a tree of readings, each with one reading missing."""
    copies = []
    for field in fields(value):
        part = getattr(value, field.name)
        if is_dataclass(part) and not isinstance(part, type):
            copies += [replace(value, **{field.name: copy}) for copy in without_each_reading(part)]
        elif isinstance(part, tuple) and part and is_dataclass(part[0]):
            firsts = without_each_reading(part[0])
            copies += [replace(value, **{field.name: (first, *part[1:])}) for first in firsts]
        if field.default is None:
            copies.append(replace(value, **{field.name: None}))
    return copies


# Not the container: without its quota it looks like more devices, each of which needs memory.
@pytest.mark.parametrize("make", [h100_box, laptop, virtual_gpu])
def test_no_missing_reading_makes_a_machine_worse(make: Any) -> None:
    machine = make()
    bad = {f.name for f in diagnose(machine) if f.status == "bad"}
    copies = without_each_reading(machine)
    assert len(copies) > 40
    for copy in copies:
        assert {f.name for f in diagnose(copy) if f.status == "bad"} <= bad, copy


@pytest.mark.parametrize("make", [h100_box, laptop, container, virtual_gpu])
def test_every_caution_says_what_to_do_on_one_plain_line(make: Any) -> None:
    for finding in diagnose(make()):
        assert (finding.advice != "") == (finding.status in ("caution", "bad")), finding
        assert f"{finding.text}{finding.advice}".isascii()
        assert "\n" not in finding.text + finding.advice


def test_a_laptop_on_powersave() -> None:
    governor = line(laptop(), "governor")
    assert governor.status == "caution"
    assert "frequency-set -g performance" in governor.advice
    assert line(laptop(), "turbo").status == "caution"
    assert "hardware threads of 4 cores" in line(laptop(), "cores").text


def test_powersave_is_bad_where_it_means_the_lowest_frequency() -> None:
    assert line(cpu(laptop(), driver="acpi-cpufreq"), "governor").status == "bad"
    assert line(cpu(laptop(), driver="amd-pstate-epp"), "governor").status == "caution"
    mixed = cpu(h100_box(), governors=("performance", "schedutil"))
    assert line(mixed, "governor").status == "caution"


def test_turbo_matters_only_where_cores_stand_in_for_gpus() -> None:
    assert line(h100_box(), "turbo").status == "ok"
    assert line(cpu(laptop(), turbo=False), "turbo").status == "ok"


def test_a_container_is_judged_by_its_limits_not_by_its_host() -> None:
    cores = line(container(), "cores")
    assert cores.status == "caution"
    assert cores.text.startswith("2.5 of 8 usable, 8 visible")
    assert "--gpus up to 2" in cores.advice
    memory_line = line(container(), "memory")
    assert memory_line.status == "caution"
    assert "container limit 3.0 GiB" in memory_line.text
    assert line(container(), "shared memory").status == "caution"
    assert line(cpu(container(), quota=0.5), "cores").status == "bad"


def test_cores_and_load_are_held_against_the_number_of_gpus() -> None:
    assert line(cpu(h100_box(), allowed=7), "cores").status == "bad"
    assert line(cpu(h100_box(), allowed=15), "cores").status == "caution"
    assert line(cpu(h100_box(), allowed=16), "cores").status == "ok"
    assert line(cpu(h100_box(), busy_share=0.5), "load").status == "ok"
    assert line(cpu(h100_box(), busy_share=0.95), "load").status == "bad"


@pytest.mark.parametrize(
    ("busy", "status"), [(0.049, "ok"), (0.05, "caution"), (0.249, "caution"), (0.25, "bad")]
)
def test_load_where_every_core_is_a_device(busy: float, status: str) -> None:
    found = line(cpu(laptop(), busy_share=busy), "load")
    assert found.status == status
    assert f"{figures(busy * 8)} of 8 cores busy" in found.text


def test_a_load_average_above_the_cores_is_a_caution_though_it_is_quiet_now() -> None:
    assert line(cpu(laptop(), load_1min=8.5), "load").status == "caution"


@pytest.mark.parametrize(
    ("now", "ever", "status"), [(0, 0.019, "ok"), (0.02, 0, "caution"), (0, 0.03, "caution"), (0.1, 0, "bad")]
)
def test_stolen_time_now_or_ever(now: float, ever: float, status: str) -> None:
    assert line(cpu(laptop(), steal_share=now, steal_share_since_boot=ever), "steal").status == status


def test_memory_swap_and_stalls() -> None:
    assert line(memory(laptop(), available_bytes=7 * GIB), "memory").status == "bad"
    assert line(memory(laptop(), pressure_pct=6.0), "memory stalls").status == "caution"
    assert line(memory(laptop(), swap_used_bytes=GIB), "swap").status == "ok"
    assert line(memory(laptop(), swap_used_bytes=2**20, swapped_in_bytes=4096), "swap").status == "caution"


@pytest.mark.parametrize(("pages", "status"), [("never", "caution"), ("madvise", "ok"), (None, "unknown")])
def test_huge_pages_are_for_ranks_on_cores(pages: str | None, status: str) -> None:
    assert line(memory(laptop(), huge_pages=pages), "huge pages").status == status
    assert "huge pages" not in {found.name for found in diagnose(memory(h100_box(), huge_pages=pages))}


def test_shared_memory_holds_the_batches_in_flight_of_every_device() -> None:
    batches = 8 * 2 * 2 * 256 * 3 * 224 * 224 * 4  # GPUs x workers x prefetched x images x float32
    assert line(memory(h100_box(), shm_free_bytes=batches + 1), "shared memory").status == "ok"
    assert line(memory(h100_box(), shm_free_bytes=batches), "shared memory").status == "caution"
    assert line(memory(h100_box(), shm_free_bytes=0), "shared memory").status == "caution", "no loader runs"


def test_results_disk() -> None:
    full = replace(laptop(), disk=replace(laptop().disk, free_bytes=50 * 2**20))
    assert line(full, "disk").status == "bad"
    locked = replace(laptop(), disk=replace(laptop().disk, writable=False))
    assert "--out" in line(locked, "disk").advice


def test_numa_balancing_and_a_gpu_without_cores_nearby() -> None:
    assert "numa_balancing=0" in line(cpu(h100_box(), numa_balancing=True), "NUMA").advice
    nodes = (
        NumaNode(number=0, num_cores=56, num_allowed=56),
        NumaNode(number=1, num_cores=56, num_allowed=0),
    )
    far = line(cpu(h100_box(), nodes=nodes), "GPU affinity")
    assert far.status == "caution"
    assert far.text.startswith("GPU 4-7: on NUMA node 1, where no core is allowed")
    assert "gpus-per-task" not in far.advice, "it leaves DataParallel one GPU"


@pytest.mark.parametrize(
    ("env", "status", "says"),
    [
        ({"OMP_NUM_THREADS": "14"}, "ok", "14 per rank x 8 GPU"),
        ({"OMP_NUM_THREADS": "16"}, "caution", "OMP_NUM_THREADS=14"),
        ({"OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "16"}, "caution", "MKL_NUM_THREADS=14"),
        ({"OMP_NUM_THREADS": "many"}, "caution", "no number"),
        ({"GOMP_CPU_AFFINITY": "0-3"}, "caution", "unset GOMP_CPU_AFFINITY"),
    ],
)
def test_thread_settings(env: dict[str, str], status: str, says: str) -> None:
    found = line(replace(h100_box(), env=env), "threads")
    assert found.status == status
    assert says in f"{found.text} {found.advice}"


def test_torchvision_made_for_another_torch() -> None:
    found = line(software(h100_box(), torch="2.13.0+cu128"), "torchvision")
    assert found.status == "bad"
    assert "needs torch==2.11.0, here is 2.13.0+cu128" in found.text
    assert "pip install" in found.advice
    broken = software(h100_box(), torchvision_error="operator torchvision::nms does not exist")
    assert "nms does not exist" in line(broken, "torchvision").text
    nightly = software(h100_box(), torch="2.16.0.dev20261001", torchvision_needs="torch==2.16.0.dev20261001")
    assert line(nightly, "torchvision").status == "ok"


def test_torch_has_to_see_the_gpus_of_the_driver() -> None:
    assert line(software(h100_box(), torch_cuda=""), "torch").status == "bad"
    assert line(software(h100_box(), num_cuda_devices=0), "torch").status == "bad"


@pytest.mark.parametrize(("cuda", "status"), [("12.2", "ok"), ("13.0", "ok"), ("11.8", "bad")])
def test_the_driver_serves_its_own_major_version_and_older(cuda: str, status: str) -> None:
    assert line(software(h100_box(), driver_cuda=cuda), "CUDA driver").status == status


def test_debugging_settings_are_named() -> None:
    found = line(replace(h100_box(), env={"CUDA_LAUNCH_BLOCKING": "1", "NCCL_DEBUG": "info"}), "settings")
    assert found.status == "bad"
    assert found.advice == "unset CUDA_LAUNCH_BLOCKING NCCL_DEBUG"
    assert line(replace(h100_box(), env={"NCCL_DEBUG": "WARN"}), "settings").status == "ok"


def test_a_limit_belongs_to_the_worse_side_and_sizes_read_well() -> None:
    assert [graded(v, caution=1, bad=2) for v in (0.9, 1, 1.9, 2)] == ["ok", "caution", "caution", "bad"]
    assert (gib(64 * 2**20), gib(1.5 * GIB)) == ("64 MiB", "1.5 GiB")


def test_readings_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        h100_box().cpu.present = 1  # type: ignore[misc]
    assert with_gpu(h100_box(), 0, ecc=False) != h100_box()


DOCKER = Interface(name="docker0", is_up=True, is_loopback=False, addresses=("172.17.0.1",))
IB0 = Interface(name="ib0", is_up=True, is_loopback=False, addresses=("198.51.100.2",))
DOWN = Interface(name="eth1", is_up=False, is_loopback=False, addresses=("203.0.113.4",))


@pytest.mark.parametrize(
    ("setting", "present", "chosen"),
    [
        (None, (LOOPBACK, DOCKER, ETH0, DOWN), ["eth0"]),
        (None, (LOOPBACK, ETH0, IB0), ["ib0"]),
        (None, (LOOPBACK, DOCKER), ["docker0"]),
        (None, (LOOPBACK,), ["lo"]),
        ("eth,ib", (LOOPBACK, ETH0, IB0, DOWN), ["eth0", "ib0"]),
        ("=eth", (LOOPBACK, ETH0), []),
        ("=eth0,lo", (LOOPBACK, ETH0), ["lo", "eth0"]),
        ("^docker,lo", (LOOPBACK, DOCKER, ETH0), ["eth0"]),
        ("^=lo", (LOOPBACK, ETH0), ["eth0"]),
        ("eth1", (LOOPBACK, ETH0, DOWN), []),
    ],
)
def test_the_interface_nccl_would_choose(
    setting: str | None, present: tuple[Interface, ...], chosen: list[str]
) -> None:
    assert [interface.name for interface in nccl_interfaces(present, setting)] == chosen


def test_nccl_line() -> None:
    assert line(h100_box(), "NCCL network").text == (
        "eth0 (192.0.2.7, 10000 Mbit/s); RDMA ports mlx5_0 400 Gb/sec (4X NDR)"
    )
    wrong = line(replace(h100_box(), env={"NCCL_SOCKET_IFNAME": "ens5"}), "NCCL network")
    assert wrong.status == "bad"
    assert "there are lo, eth0" in wrong.text
    assert wrong.advice.endswith("export NCCL_SOCKET_IFNAME=eth0")
    box = h100_box()
    dark = replace(box, network=replace(box.network, ports=(Port(name="mlx5_0", active=False),)))
    assert line(dark, "NCCL network").status == "caution"
    alone = replace(box, network=replace(box.network, interfaces=(LOOPBACK,)))
    assert line(alone, "NCCL network").status == "caution"


def test_gloo_follows_the_hosts_name_unless_told() -> None:
    assert line(h100_box(), "gloo network").text == "eth0 (192.0.2.7, 10000 Mbit/s)"
    to_itself = line(laptop(), "gloo network")
    assert to_itself.status == "caution"
    assert "resolves to 127.0.1.1" in to_itself.text
    assert to_itself.advice == "for several machines: export GLOO_SOCKET_IFNAME=eth0"
    told = replace(laptop(), env={"GLOO_SOCKET_IFNAME": "eth0"})
    assert line(told, "gloo network").status == "ok"
    wrong = replace(laptop(), env={"GLOO_SOCKET_IFNAME": "eth"})
    assert line(wrong, "gloo network").status == "bad"
    slow = replace(laptop(), network=replace(laptop().network, host_addresses=None))
    assert line(slow, "gloo network").status == "unknown"
