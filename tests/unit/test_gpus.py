import os
from types import SimpleNamespace

import pynvml
import pytest
from doctor_machines import Nvml

from ddp_bench.bench import gpus
from ddp_bench.bench.lab.main import visible_gpus
from ddp_bench.bench.manifest import Gpu, GpuPair


def two_a100(states=12):
    """Answers of two A100 joined by NVLink: the first shared and capped, the second idle."""

    def nvlink(_, link):
        if link >= states:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return 1

    busy = {"a": 63, "b": 0}
    process = SimpleNamespace(pid=4242, usedGpuMemory=12 * 2**30)
    ours = SimpleNamespace(pid=os.getpid(), usedGpuMemory=None)
    return {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda i: "ab"[i],
        "nvmlSystemGetDriverVersion": lambda: "570.86.15",
        "nvmlSystemGetCudaDriverVersion_v2": lambda: 12080,
        "nvmlDeviceGetName": lambda _: "NVIDIA A100-SXM4-80GB",
        "nvmlDeviceGetUUID": lambda h: f"GPU-{h}1234567",
        "nvmlDeviceGetPciInfo": lambda h: SimpleNamespace(busId=f"00000000:{h.upper()}7:00.0"),
        "nvmlDeviceGetMemoryInfo": lambda _h, _v=None: SimpleNamespace(used=3 * 2**20, total=80 * 2**30),
        "nvmlDeviceGetUtilizationRates": lambda h: SimpleNamespace(gpu=busy[h]),
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _: 0x5,
        "nvmlDeviceGetEccMode": lambda _: [1, 1],
        "nvmlDeviceGetMigMode": lambda _: [0, 0],
        "nvmlDeviceGetTotalEccErrors": lambda _h, kind, _c: 7 if kind == 1 else 0,
        "nvmlDeviceGetRemappedRows": lambda _: (0, 0, 1, 0),
        "nvmlDeviceGetTemperature": lambda _h, _s: 41,
        "nvmlDeviceGetTemperatureThreshold": lambda _h, _t: 92,
        "nvmlDeviceGetEnforcedPowerLimit": lambda h: 250000 if h == "a" else 400000,
        "nvmlDeviceGetPowerManagementDefaultLimit": lambda _: 400000,
        "nvmlDeviceGetPersistenceMode": lambda _: 1,
        "nvmlDeviceGetClockInfo": lambda _h, _c: 210,
        "nvmlDeviceGetMaxClockInfo": lambda _h, _c: 1410,
        "nvmlDeviceGetComputeRunningProcesses": lambda h: [process, ours] if h == "a" else [],
        "nvmlDeviceGetNvLinkState": nvlink,
        "nvmlDeviceGetP2PStatus": lambda _a, _b, _i: pynvml.NVML_P2P_STATUS_OK,
        "nvmlDeviceGetTopologyCommonAncestor": lambda _a, _b: pynvml.NVML_TOPOLOGY_NODE,
    }


def test_a_gpu_that_supports_no_reading(monkeypatch):
    kept = ("nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex")
    monkeypatch.setattr(gpus, "pynvml", Nvml({name: two_a100()[name] for name in kept}))
    assert gpus.gpus() == [Gpu(), Gpu()]


def test_what_a_manifest_keeps_of_gpus(monkeypatch):
    monkeypatch.setattr(gpus, "pynvml", Nvml(two_a100()))
    first, second = gpus.gpus()
    assert first == Gpu(
        uuid="GPU-a1234567",
        name="NVIDIA A100-SXM4-80GB",
        driver="570.86.15",
        memory_mib=81920,
        power_limit_w=250.0,
        max_sm_clock_mhz=1410,
    )
    assert second.power_limit_w == 400.0


@pytest.mark.parametrize(
    ("setting", "chosen"),
    [
        (None, [0, 1, 2]),
        ("2,0", [0, 2]),
        ("", []),
        ("-1", []),
        ("1,7,0", [1]),
        ("GPU-cc", [2]),
        ("GPU-", []),
        ("MIG-b1", [1]),
        ("MIG-1234", [0, 1, 2]),  # old drivers have other names for slices
    ],
)
def test_visible_devices(setting, chosen):
    names = [["GPU-aa11"], ["GPU-bb22", "MIG-b111", "MIG-b222"], ["GPU-cc33"]]
    assert gpus.visible(setting, names) == chosen


@pytest.fixture
def two(monkeypatch):
    """NVML's answers of the two A100, to be changed."""
    answers = two_a100()
    monkeypatch.setattr(gpus, "pynvml", Nvml(answers))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return answers


@pytest.mark.usefixtures("two")
def test_gpus_are_those_that_cuda_sees(monkeypatch):
    a, b = "GPU-a1234567", "GPU-b1234567"
    assert [gpu.uuid for gpu in gpus.gpus()] == visible_gpus() == [a, b]
    assert [gpu.uuid for gpu in gpus.gpus([b, a])] == [b, a]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [gpu.uuid for gpu in gpus.gpus()] == [b]
    assert visible_gpus() == ["1"]  # the user's own word
    assert [gpu.uuid for gpu in gpus.gpus([a])] == [a], "torch has looked"
    assert [gpu.uuid for gpu in gpus.gpus(["GPU-unknown"])] == [b], "as the variable says"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus.gpus() == []


def test_a_gpu_that_a_cgroup_keeps_away_is_none(two):
    def handle(index):
        if index == 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        return "b"

    two["nvmlDeviceGetHandleByIndex"] = handle
    assert [gpu.uuid for gpu in gpus.gpus()] == ["GPU-b1234567"]
    assert gpus.pairs(["GPU-a1234567", "GPU-b1234567"]) == []


def test_pairs_are_told_by_the_places_of_their_uuids(two):
    two["nvmlDeviceGetP2PStatus"] = lambda a, b, index: int(
        (a, b, index) != ("b", "a", pynvml.NVML_P2P_CAPS_INDEX_WRITE)
    )
    found = gpus.pairs(["GPU-unknown", "GPU-b1234567", "GPU-a1234567"])
    assert found == [GpuPair(first=1, second=2, nvlink=False, peer_access=True, path="NODE")]


def test_a_slice_is_its_parent_and_says_mig(two):
    def slot(_, number):
        if number != 2:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return "slice"

    two["nvmlDeviceGetMigMode"] = lambda handle: [int(handle == "b"), 0]
    two["nvmlDeviceGetMaxMigDeviceCount"] = lambda handle: 7 if handle == "b" else 0
    two["nvmlDeviceGetMigDeviceHandleByIndex"] = slot
    two["nvmlDeviceGetUUID"] = lambda handle: "MIG-5117e" if handle == "slice" else f"GPU-{handle}1234567"
    for name in ("GPU-5117e", "GPU-b1234567"):  # torch may tell the slice's digits, or its parent's
        (found,) = gpus.gpus([name])
        assert (found.uuid, found.name) == ("GPU-b1234567", "NVIDIA A100-SXM4-80GB MIG")
        assert found.memory_mib is None
    assert gpus.pairs(["GPU-a1234567", "GPU-5117e"]) == [GpuPair(first=0, second=1)]


def test_a_gpu_that_fell_off_the_bus_hides_no_other(monkeypatch):
    whole = two_a100()

    def handle(index):
        if index == 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return whole["nvmlDeviceGetHandleByIndex"](index) if "nvmlDeviceGetHandleByIndex" in whole else index

    monkeypatch.setattr(gpus, "pynvml", Nvml({**whole, "nvmlDeviceGetHandleByIndex": handle}))
    assert len(gpus.gpus()) == 1
