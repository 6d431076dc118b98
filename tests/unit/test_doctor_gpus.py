from __future__ import annotations

from dataclasses import replace

import pytest
from doctor_machines import H100, h100_box, laptop, nvlink_pairs, virtual_gpu, with_gpu
from msgspec import structs

from ddp_bench.bench.clock_reasons import ClockReason
from ddp_bench.bench.doctor.main import diagnose
from ddp_bench.bench.doctor.readings import GpuProcess, HostReadings, Software
from ddp_bench.bench.doctor.rules import Finding
from ddp_bench.bench.doctor.rules.gpu import span
from ddp_bench.bench.manifest import GpuPair
from ddp_bench.bench.sysfs import ranges


def line(machine: HostReadings, name: str) -> Finding:
    (found,) = [finding for finding in diagnose(machine) if finding.name == name]
    return found


def test_equal_gpus_share_a_line_with_the_span_of_their_values() -> None:
    assert line(h100_box(), "GPUs").text == "8 x NVIDIA H100 80GB HBM3"
    assert line(h100_box(), "GPU heat").text == "29-36 C"
    assert line(h100_box(), "GPU clocks").text == "345 of 1980 MHz, idle"
    assert line(h100_box(), "GPU links").text == "28 of 28 pairs by NVLink"


def test_a_power_capped_a100() -> None:
    a100 = replace(H100, name="NVIDIA A100-SXM4-80GB", power_limit_w=250.0, default_power_limit_w=400.0)
    found = line(replace(h100_box(), gpus=(a100,), num_gpus_present=1, pairs=()), "GPU power")
    assert found == Finding(
        "GPU power",
        "caution",
        "capped at 250 W, default 400 W",
        "sudo nvidia-smi -pl 400; else compare only runs with this limit",
    )


def test_a_gpu_that_someone_else_is_computing_on() -> None:
    theirs = (GpuProcess(pid=4242, used_mib=12034),)
    found = line(with_gpu(h100_box(), 2, processes=theirs, busy_pct=87), "GPU use")
    assert found.status == "bad"
    assert found.text.startswith("GPU 2: used by process 4242 (12034 MiB), 87% busy; GPU 0-1,3-7: no other")
    idle = with_gpu(h100_box(), 2, processes=theirs, busy_pct=0)
    assert line(idle, "GPU use").status == "caution"


def test_use_that_shows_no_process_is_still_use() -> None:
    assert line(with_gpu(h100_box(), 0, busy_pct=40), "GPU use").status == "bad"
    held = line(with_gpu(h100_box(), 0, used_mib=30000), "GPU use")
    assert held.status == "caution"
    assert "30000 MiB in use by a process not visible from here" in held.text


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (ClockReason.HARDWARE_HEAT, "bad"),
        (ClockReason.SOFTWARE_HEAT, "bad"),
        (ClockReason.POWER_BRAKE, "bad"),
        (ClockReason.POWER_CAP, "caution"),
        (ClockReason.APPLICATION, "caution"),
        (ClockReason.IDLE, "ok"),
    ],
)
def test_slow_clocks_are_judged_by_their_reason(reason: ClockReason, status: str) -> None:
    found = line(with_gpu(h100_box(), 5, clock_reasons=frozenset({reason})), "GPU clocks")
    assert found.status == status
    assert (f"GPU 5: 345 of 1980 MHz, held down by {reason}" in found.text) == (status != "ok")


def test_memory_errors() -> None:
    name = "GPU memory errors"
    for broken in (with_gpu(h100_box(), 1, uncorrected_errors=3), with_gpu(h100_box(), 1, remap_failed=True)):
        assert line(broken, name).status == "bad"
        assert "GPU 1: memory errors that ECC could not correct" in line(broken, name).text
    assert line(h100_box(), name) == Finding(name, "ok", "none, ECC on")
    assert line(with_gpu(h100_box(), 1, ecc=False), name).status == "ok"


@pytest.mark.parametrize(("margin_c", "status"), [(11, "ok"), (10, "caution"), (0, "bad")])
def test_heat_by_the_margin_to_slow_down(margin_c: int, status: str) -> None:
    assert line(with_gpu(h100_box(), 0, margin_c=margin_c), "GPU heat").status == status


def test_a_virtual_gpu_hides_its_readings() -> None:
    found = {f.name: f.status for f in diagnose(virtual_gpu())}
    assert found["GPUs"] == "caution"
    hidden = ("GPU clocks", "GPU power", "GPU memory errors", "GPU heat", "GPU persistence", "GPU affinity")
    assert {found[name] for name in hidden} == {"unknown"}


def test_links_that_differ_or_lack_peer_access_are_a_caution() -> None:
    pci = GpuPair(first=0, second=1, nvlink=False, peer_access=True, path="PHB")
    two = replace(h100_box(), gpus=h100_box().gpus[:2], pairs=(pci,))
    assert line(two, "GPU links") == Finding("GPU links", "ok", "1 of 1 pairs by PCIe")
    assert line(replace(two, pairs=nvlink_pairs(2)), "GPU links").status == "ok"
    mixed = line(replace(h100_box(), pairs=(pci, *nvlink_pairs(8)[1:])), "GPU links")
    assert (mixed.status, mixed.text) == ("caution", "1 of 28 pairs by PCIe, 27 of 28 pairs by NVLink")
    through_host = replace(two, pairs=(structs.replace(pci, peer_access=False),))
    assert line(through_host, "GPU links").status == "caution"
    assert "ACS" in line(through_host, "GPU links").advice
    geforce = tuple(replace(gpu, name="NVIDIA GeForce RTX 4090") for gpu in through_host.gpus or ())
    assert line(replace(through_host, gpus=geforce), "GPU links").status == "ok", "they have no other way"
    unread = replace(two, pairs=(structs.replace(pci, peer_access=None),))
    assert line(unread, "GPU links").status == "unknown"


def test_mixed_split_and_hidden_gpus() -> None:
    assert line(with_gpu(h100_box(), 7, name="NVIDIA H200"), "GPUs").status == "caution"
    assert "MIG" in line(with_gpu(h100_box(), 7, mig=True), "GPUs").text
    some = replace(h100_box(), gpus=h100_box().gpus[:2])
    assert line(some, "GPUs").text.endswith("(2 of 8 visible)")
    none = replace(laptop(), num_gpus_present=8)
    assert "unset CUDA_VISIBLE_DEVICES" in line(none, "GPUs").advice


def test_a_driver_that_only_answers_an_error() -> None:
    broken = replace(laptop(), gpus=None, gpu_error="RM has detected an NVML/RM version mismatch.")
    found = line(broken, "GPUs")
    assert found.status == "bad"
    assert "version mismatch" in found.text
    torch_sees = replace(broken, software=Software(num_cuda_devices=2))
    assert line(torch_sees, "GPUs").status == "unknown"
    other_maker = replace(laptop(), software=Software(num_cuda_devices=4))
    assert line(other_maker, "GPUs").status == "unknown"


def test_spans_and_ranges() -> None:
    assert (span([41.2, 40.6]), span([40, 47]), span([])) == ("41", "40-47", "?")
    assert (ranges([0, 1, 2, 3, 6]), ranges([5])) == ("0-3,6", "5")
