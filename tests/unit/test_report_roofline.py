"""What the page says of a case against its devices' own rates, from round numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from report_runs import case, dashed, run
from sample_runs import SAMPLES, name_of, sample

from ddp_bench.bench.findings.numbers import TIMES
from ddp_bench.report.model import Table
from ddp_bench.report.roofline import DENSE_PEAKS
from ddp_bench.report.view import page

TITLE = "Against the devices' own rates"


def measured(num_devices: int, rank: int, tflop: float, gb: float) -> dict[str, Any]:
    """A rank's rates, with a spread of 10% either way."""
    return {
        "num_devices": num_devices,
        "rank": rank,
        **{
            f"{name}{end}": factor * rate
            for name, rate in (("matrix_tflop_per_s", tflop), ("copy_gb_per_s", gb))
            for end, factor in (("", 1.0), ("_low", 0.9), ("_high", 1.1))
        },
    }


ONE = measured(1, 0, 2.0, 100.0)
OPERATORS = [
    {"count": 2, "flops": 10**10, "num_bytes": 10**8},
    {"count": 1, "flops": 0, "num_bytes": 4 * 10**8},
]


def manifest(*rates: Any, operators: Any = OPERATORS) -> dict[str, Any]:
    """Three forwards of 4 GFLOP an image; arithmetic takes 30 ms, other operators 10, the optimizer 5."""
    model = {"forward_flops_per_image": 4e9, "gradient_bytes": 10**8, "operators": {"10": operators}}
    return {"model": model, "roofline": list(rates)}


def shown(told: Any, *cases: dict[str, Any]) -> Table | None:
    tables = page([run(cases or [case("single", 1, 100.0)], told)]).runs[0].tables
    return next((table for table in tables if table.title == TITLE), None)


def cells(told: Any, *cases: dict[str, Any]) -> dict[str, str]:
    """The last case's."""
    table = shown(told, *cases)
    assert table is not None
    return dict(zip((column.name for column in table.columns), table.rows[-1], strict=True))


def test_a_case_stands_beside_the_rates_of_its_device() -> None:
    assert cells(manifest(ONE)) == {
        "Case": "single, 1 GPU",
        "Throughput (images/s)": dashed("100 (99--101)"),
        "Arithmetic per device (TFLOP/s)": dashed("1.20 (1.19--1.21)"),
        "Matrix rate (TFLOP/s)": dashed("2.00 (1.80--2.20)"),
        "MFU (% of the measured matrix rate)": dashed("60.0 (59.4--60.6)"),
        "Copy (GB/s)": dashed("100 (90--110)"),
        "Roofline step (ms)": "45.0",
        f"Step / roofline ({TIMES})": dashed("2.22 (2.20--2.24)"),
    }


def test_what_binds_is_the_share_of_the_roofline_in_which_memory_is_the_limit() -> None:
    table = shown(manifest(ONE))
    assert table is not None
    assert table.below == (
        "What binds: memory bandwidth for 33% of the roofline step, arithmetic for the rest.",
    )
    slow_memory = shown(manifest(measured(1, 0, 2.0, 1.0)))
    assert slow_memory is not None
    assert "memory bandwidth for 100% of the roofline step" in slow_memory.below[0]


def test_micro_batches_repeat_the_forward_and_not_the_optimizer() -> None:
    found = cells(manifest(ONE), case("ddp", 1, 100.0, accumulate=2, global_batch=20))
    assert found["Roofline step (ms)"] == "85.0"
    assert found[f"Step / roofline ({TIMES})"].startswith("2.35")


def test_several_devices_are_held_against_what_they_reached_together() -> None:
    told = manifest(ONE, *(measured(2, rank, 1.0 + rank, 80.0) for rank in range(2)))
    found = cells(told, case("ddp", 2, 180.0))
    assert found["Matrix rate (TFLOP/s)"] == dashed("1.50 (0.90--2.20)")
    assert found["MFU (% of the measured matrix rate)"].startswith("72.0 ")


def test_data_parallel_without_ranks_takes_the_largest_count_and_no_other_case_does() -> None:
    assert cells(manifest(ONE), case("dp", 2, 100.0))["MFU (% of the measured matrix rate)"].startswith(
        "30.0"
    )
    assert shown(manifest(ONE), case("ddp", 2, 100.0)) is None
    assert shown(manifest(ONE), case("dp", 2, 100.0, oversubscribed=True)) is None


def test_a_step_below_its_roofline_is_shown_and_explained() -> None:
    told = manifest(measured(1, 0, 0.5, 100.0))
    assert cells(told)[f"Step / roofline ({TIMES})"].startswith("0.741 ")
    table = shown(told)
    assert table is not None
    assert table.below[-1].startswith("A step below its roofline: caches")


def test_a_known_gpu_has_the_data_sheets_peak_too() -> None:
    found = cells(manifest(ONE), case("single", 1, 100.0, device_name="NVIDIA H200", precision="bf16"))
    assert found["MFU (% of the data sheet's peak)"] == dashed("0.121 (0.120--0.122)")
    for name in ("NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"):
        other = cells(manifest(ONE), case("single", 1, 100.0, device_name=name, precision="bf16"))
        assert "MFU (% of the data sheet's peak)" not in other


@pytest.mark.parametrize("name", sorted(DENSE_PEAKS))
def test_peaks_are_those_that_torch_has_of_the_data_sheets(name: str) -> None:
    """Its H100 is the SXM5 card, counted with sparsity; an H200 has the same chip."""
    known = pytest.importorskip("torch._inductor.analysis.device_info")._device_mapping
    info = known["NVIDIA A100" if "A100" in name else "NVIDIA H100"]
    sparse = getattr(info, "tops_sparsity_factor", None)
    if sparse is None:
        pytest.skip("this torch does not say which of its figures count sparsity")
    found = DENSE_PEAKS[name]
    for precision, key in (("tf32", "torch.tf32"), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        assert found[precision] == pytest.approx(info.tops[key] / sparse, rel=0.005)
    assert found["fp32"] == pytest.approx(info.tops[torch.float32], rel=0.005)


def test_rates_without_operators_give_mfu_alone() -> None:
    for operators in ([], "x", [1], [{"count": 1}], [{"count": -1, "flops": 1, "num_bytes": 1}]):
        found = cells(manifest(ONE, operators=operators))
        assert "Roofline step (ms)" not in found
        assert found["MFU (% of the measured matrix rate)"].startswith("60.0")


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"roofline": None},
        {"roofline": {"num_devices": 1}},
        {"roofline": [None, 1, "x", {}, {"num_devices": [1]}]},
        {"roofline": [{"num_devices": 1, "matrix_tflop_per_s": 0, "copy_gb_per_s": -1}]},
        {"roofline": [{"num_devices": 1, "matrix_tflop_per_s": "nan", "copy_gb_per_s": 1e999}]},
    ],
)
def test_a_manifest_without_usable_rates_has_no_such_table(odd: dict[str, Any]) -> None:
    assert shown(manifest() | odd) is None


@pytest.mark.parametrize("extreme", [1e-320, 1e308, 10**400])
def test_extreme_numbers_leave_cells_blank(extreme: float) -> None:
    operators = [{"count": extreme, "flops": extreme, "num_bytes": extreme}]
    rates = {"num_devices": 1, "rank": 0, "matrix_tflop_per_s": extreme, "copy_gb_per_s": extreme}
    shown(manifest(rates, operators=operators))
    shown(manifest(ONE, operators=operators))


@pytest.mark.parametrize("path", SAMPLES[::10], ids=name_of)
def test_runs_of_before_have_no_such_table(path: Any) -> None:
    assert TITLE not in [table.title for table in page([sample(path)]).runs[0].tables]
