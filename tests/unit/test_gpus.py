"""GPUs as NVML tells of them, and what their readings in blocks make of columns and cautions."""

import json
import math
from types import SimpleNamespace

import pandas as pd
import pynvml
import pytest
from doctor_machines import Machine
from made import block, made_manifest, planned, resolved, times_of
from report_runs import case

from ddp_bench.bench.findings.cautions import check_conditions
from ddp_bench.bench.lab.main import list_visible_gpus
from ddp_bench.bench.machine import gpus
from ddp_bench.bench.machine.manifest import Gpu, GpuPair
from ddp_bench.bench.results.aggregate import describe_planned_case, make_case_rows
from ddp_bench.bench.results.case_columns import CASES
from ddp_bench.bench.results.case_result import read_case_results
from ddp_bench.bench.results.columns import BLOCKS, make_frame

BOTH = ["GPU-a1234567", "GPU-b1234567"]


@pytest.fixture
def two(monkeypatch):
    """NVML's answers of two A100, of which the first is capped, to be changed."""
    alike = {"Name": "NVIDIA A100-SXM4-80GB", "MigMode": [0, 0]}
    alike |= {"MemoryInfo": SimpleNamespace(used=3 * 2**20, total=80 * 2**30)}
    limits_mw = {"GPU-a1234567": 250000, "GPU-b1234567": 400000}
    machine = Machine(
        {},
        gpus=[alike | {"UUID": uuid, "EnforcedPowerLimit": mw} for uuid, mw in limits_mw.items()],
        link={"P2PStatus": pynvml.NVML_P2P_STATUS_OK},
    )
    fake = machine.nvml()
    fake.answers["nvmlSystemGetDriverVersion"] = lambda: "570.86.15"
    monkeypatch.setattr(gpus, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake.answers


def test_what_a_manifest_keeps_of_gpus(two):
    first, second = gpus.describe_gpus(BOTH)
    assert first == Gpu(
        uuid="GPU-a1234567",
        name="NVIDIA A100-SXM4-80GB",
        driver="570.86.15",
        memory_mib=81920,
        power_limit_w=250.0,
    )
    assert second.power_limit_w == 400.0
    kept = ("nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex")
    for name in two.keys() - set(kept):
        del two[name]
    assert gpus.describe_gpus(BOTH) == [Gpu(), Gpu()], "of those that support no reading"


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
    assert gpus.find_visible_gpus(setting, names) == chosen


@pytest.mark.parametrize(
    ("modes", "has_mps", "found"), [((0, 0), False, False), ((0, 3), False, True), ((3, 3), True, False)]
)
def test_gpus_that_take_a_single_process(two, monkeypatch, tmp_path, modes, has_mps, found):
    """3 is NVML_COMPUTEMODE_EXCLUSIVE_PROCESS in nvml.h; an MPS server has the GPU for all its clients."""
    by_uuid = dict(zip(BOTH, modes, strict=True))
    two["nvmlDeviceGetComputeMode"] = lambda handle: by_uuid[handle["UUID"]]
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path if has_mps else tmp_path / "none"))
    assert gpus.is_exclusive(BOTH) is found


@pytest.mark.usefixtures("two")
def test_gpus_are_those_that_cuda_sees(monkeypatch):
    assert [gpu.uuid for gpu in gpus.describe_gpus()] == list_visible_gpus() == BOTH
    assert [gpu.uuid for gpu in gpus.describe_gpus(BOTH[::-1])] == BOTH[::-1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [gpu.uuid for gpu in gpus.describe_gpus()] == [BOTH[1]]
    assert list_visible_gpus() == ["1"]  # the user's own word
    assert [gpu.uuid for gpu in gpus.describe_gpus(BOTH[:1])] == BOTH[:1], "torch has looked"
    assert gpus.describe_gpus(["GPU-unknown"]) == [Gpu()]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus.describe_gpus() == []


def test_a_gpu_that_a_cgroup_keeps_away_is_none(two):
    opened = two["nvmlDeviceGetHandleByIndex"]

    def handle(index):
        if index == 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        return opened(index)

    two["nvmlDeviceGetHandleByIndex"] = handle
    assert [gpu.uuid for gpu in gpus.describe_gpus(BOTH)] == [None, BOTH[1]]
    assert gpus.describe_pairs(BOTH) == []


def test_pairs_are_told_by_the_places_of_their_uuids(two):
    first, second = map(two["nvmlDeviceGetHandleByIndex"], (1, 0))
    two["nvmlDeviceGetP2PStatus"] = lambda a, b, index: int(
        (a, b, index) != (first, second, pynvml.NVML_P2P_CAPS_INDEX_WRITE)
    )
    found = gpus.describe_pairs(["GPU-unknown", "GPU-b1234567", "GPU-a1234567"])
    assert found == [GpuPair(first=1, second=2, nvlink=False, peer_access=True)]


def test_a_slice_is_its_parent_and_says_mig(two):
    def slot(_, number):
        if number != 2:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return {"UUID": "MIG-5117e"}

    parent = two["nvmlDeviceGetHandleByIndex"](1)
    parent["MigMode"] = [1, 0]
    two["nvmlDeviceGetMaxMigDeviceCount"] = lambda handle: 7 if handle is parent else 0
    two["nvmlDeviceGetMigDeviceHandleByIndex"] = slot
    for name in ("GPU-5117e", "GPU-b1234567"):  # torch may tell the slice's digits, or its parent's
        (found,) = gpus.describe_gpus([name])
        assert (found.uuid, found.name) == ("GPU-b1234567", "NVIDIA A100-SXM4-80GB MIG")
        assert found.memory_mib is None
    assert gpus.describe_pairs(["GPU-a1234567", "GPU-5117e"]) == [GpuPair(first=0, second=1)]


SETTINGS = resolved(device="cuda", gpus=(2,), batch_size=50, sweep="star")
PLAN = {p.case.mode: p for p in reversed(planned(SETTINGS, device="cuda"))}
"""By mode, on two GPUs of 50 images each; `single` on one."""


def gpu(mhz, watts, degrees=60, held=0, **by_pct):
    read = {"sm_clock_mhz": mhz, "power_w": watts, "temperature_c": degrees, "throttled_pct": held}
    return read | {"throttled_by_pct": by_pct}


def rows(mode, round_index, *ranks, ms=100.0):
    """A timed block of two steps: what each rank tells of its GPUs by number; None for nothing."""
    return [
        block(PLAN[mode].case.case_id, round_index, ms, rank=rank, steps=2, host=f"host{rank}")
        | {"detail": None if gpus is None else json.dumps({"gpus": gpus})}
        for rank, gpus in enumerate(ranks)
    ]


def row_of(mode, *blocks):
    frame = make_frame([row for ranks in blocks for row in ranks], BLOCKS)
    return make_case_rows([describe_planned_case(PLAN[mode])], times_of(frame)).iloc[0]


def test_the_gpus_of_all_ranks_together():
    """Both are number 0, of different hosts; images are 2 x 50."""
    row = row_of(
        "ddp",
        rows("ddp", 1, {"0": gpu(1800, 500, 60, 10)}, {"0": gpu(1700, 400, 70)}),
        rows("ddp", 2, {"0": gpu(1800, 520)}, {"0": gpu(1750, 440, 65, 30)}, ms=110),
        rows("ddp", 3, {"0": gpu(1900, 500)}, {"0": gpu(1800, 500, 64, 20)}),
    )
    assert row["sm_clock_mhz"] == 1750, "of 1700, 1750 and 1800"
    assert row["power_w"] == 960, "of 900, 960 and 1000"
    # 900 W x 0.1 s, 960 W x 0.11 s and 1000 W x 0.1 s, each over 100 images
    assert row["joules_per_image"] == pytest.approx(1.0)
    bounds = [
        row[f"{name}_{end}"] for name in ("sm_clock_mhz", "joules_per_image") for end in ("low", "high")
    ]
    assert all(map(math.isnan, bounds)), "three rounds give no interval"
    assert row["temperature_c"] == 70
    assert row["throttled_pct"] == pytest.approx((10 + 30 + 20) / 3)


def test_reasons_are_named_with_the_most_frequent_first():
    telling = gpu(1700, 400, 70, 50, **{"power cap": 10, "hardware slow-down": 40, "of no kind": 50})
    row = row_of("single", rows("single", 1, {"0": telling}))
    assert row["throttle_reasons"] == "hardware slow-down, power cap"
    assert pd.isna(row_of("single", rows("single", 1, {"0": gpu(1700, 400)}))["throttle_reasons"])


def test_dp_has_all_its_gpus_from_one_rank_and_a_gpu_that_ranks_share_counts_once():
    row = row_of("dp", rows("dp", 1, {"2": gpu(1800, 500), "3": gpu(1600, 200)}))
    assert (row["sm_clock_mhz"], row["power_w"], row["joules_per_image"]) == (1600, 700, 0.7)
    shared = rows("ddp", 1, {"0": gpu(1800, 500)}, {"0": gpu(1800, 500)})
    assert row_of("ddp", [one | {"host": "host0"} for one in shared])["power_w"] == 500


@pytest.mark.parametrize("other", [None, {}, {"1": {}}], ids=["no telemetry", "no GPU", "no reading"])
def test_what_is_unknown_of_one_gpu_is_unknown_of_all(other):
    known = rows("ddp", 1, {"0": gpu(1800, 500)}, {"0": gpu(1700, 450)})
    unknown = rows("ddp", 2, {"0": gpu(900, 100)}, other)
    row = row_of("ddp", known, unknown)
    assert (row["sm_clock_mhz"], row["power_w"]) == (1700, 950)
    alone = row_of("ddp", unknown)
    names = ("sm_clock_mhz", "power_w", "joules_per_image", "temperature_c", "throttled_pct")
    assert all(pd.isna(alone[name]) for name in names)
    assert alone["num_rounds"] == 1


def test_what_steps_asked_the_driver_for_is_added_up():
    """Over ranks and blocks of steps; a CPU tells nothing."""
    blocks = [*rows("ddp", 1, None, None), *rows("ddp", 2, None, None), *rows("ddp", 2, None, None)]
    assert pd.isna(row_of("ddp", blocks)["device_allocs"])
    for one, count in zip(blocks, (0, 3, 0, 0, 1, 2), strict=True):
        one["detail"] = json.dumps({"device_allocs": count})
    for one in blocks[4:]:
        one["phase"] = "no_sync"
    assert row_of("ddp", blocks)["device_allocs"] == 6


def warned(*rows):
    cases = read_case_results(make_frame(rows, CASES))
    return {one.kind: one for one in check_conditions(made_manifest(), cases, cases)}


@pytest.mark.parametrize(
    ("reasons", "advice"),
    [("power cap", "nvidia-smi -pl"), ("power cap, hardware thermal slow-down", "bench.doctor")],
)
def test_a_gpu_slowed_by_heat_or_power_is_a_caution(reasons, advice):
    slowed = {"throttled_pct": 43.2, "throttle_reasons": reasons}
    cool = {"throttled_pct": 5.0, "throttle_reasons": "power brake"}
    caution = warned(case("single", 1, 100.0, **cool), case("ddp", 2, 150.0, **slowed))["slowed GPUs"]
    assert caution.text.startswith("1 case of 2 ran with a GPU slowed by ")
    assert "43% of samples" in caution.text
    assert "power brake" not in caution.text
    assert caution.case_id == "ddp-n2-x-1"
    assert advice in caution.advice


@pytest.mark.parametrize(("sustained", "is_told"), [(135.0, True), (141.0, True), (144.0, False)])
def test_slow_steps_are_a_caution_where_they_cost_a_case_more_than_others_by_the_margin(sustained, is_told):
    """As FSDP2 on the H200, whose typical step hides 2.9% of pauses; this margin is 5%."""
    slow = case("ddp", 2, 150.0, images_per_s_sustained=sustained)
    steady, as_slow = (case("single", 1, 100.0, images_per_s_sustained=rate) for rate in (100.0, 92.0))
    told = warned(steady, slow).get("slow steps")
    assert (told is not None) == is_told
    if sustained == 135:
        assert told.case_id == slow["case_id"]
        assert "cost DDP, 2 GPUs, cap default 10% of its throughput" in told.text
        assert warned(as_slow, slow) == {}, "a machine that slows all cases changes no ratio"


def test_cases_at_unequal_clocks_are_a_caution():
    slow, middle = (case("ddp", n, 150.0, sm_clock_mhz=mhz) for n, mhz in ((4, 1600.0), (2, 1650.0)))
    fast = case("single", 1, 100.0, sm_clock_mhz=1680.0)
    caution = warned(fast, slow, middle, case("dp", 2, 120.0))["unequal clocks"]
    assert caution.case_id == "ddp-n4-x-1"
    assert "differ by 5.0% between cases" in caution.text
    assert "(DDP, 4 GPUs, cap default: 1600 MHz; single, 1 GPU: 1680 MHz)" in caution.text
    known = case("single", 1, 100.0, sm_clock_mhz=1653.0)
    for others in ((), (1686.0,), (None,)):  # 2% of 1653 MHz are 33 MHz
        alike = [case("ddp", 2, 1.0, sm_clock_mhz=mhz) for mhz in others]
        assert warned(known, *alike) == {}
