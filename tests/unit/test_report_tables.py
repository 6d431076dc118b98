"""Tables of the page and of the terminal: rates formed for them, and that quotients agree as printed."""

import re
from dataclasses import replace

import pytest
import torch
from made import made_manifest
from report_runs import case, communicating, dashed, measured, run
from rich.console import Console
from sample_runs import EVERY_SAMPLE, rebuilt, sample

from ddp_bench.bench.findings.numbers import finite
from ddp_bench.bench.findings.wording import text
from ddp_bench.bench.manifest import Manifest
from ddp_bench.bench.results.schema import records
from ddp_bench.bench.run.summary import COLUMNS, OF_SCALING, case_table
from ddp_bench.report.cases import DENSE_PEAKS, EPOCH_IMAGES, with_rates, workloads
from ddp_bench.report.page import page
from ddp_bench.report.tables import communication


@pytest.mark.parametrize(
    ("trace_pct", "reason"), [(59.0, ""), (70.0, "compute that it slows"), (30.0, "gaps between operators")]
)
def test_a_trace_that_contradicts_what_is_hidden_is_explained(trace_pct, reason):
    """Half is hidden; ten points apart are alike."""
    row = communicating(2, 200.0) | measured(overlap_trace_pct=trace_pct, compute_slowdown=1.25)
    (workload,) = workloads(run([row]).cases)
    why = [line for line in communication(workload.cases.assign(workload="")).below if "points apart" in line]
    assert len(why) == bool(reason)
    assert all(reason in line for line in why)


@pytest.mark.parametrize(
    ("memory", "columns"),
    [
        ({}, []),
        ({"peak_mem_mib": 135.0}, ["Peak memory (MiB)"]),
        ({"peak_mem_mib": 6.0, "reserved_mem_mib": 7.0}, ["Peak memory (MiB)", "Reserved memory (MiB)"]),
    ],
)
def test_memory_has_the_columns_that_were_counted(memory, columns):
    every = page([run([case("single", 1, 100.0, **memory)])]).runs[0].tables[1]
    assert [column.name for column in every.columns if "emory" in column.name] == columns
    assert ("Memory is" in every.note, "Reserved is" in every.note) == (len(columns) > 0, len(columns) > 1)


@pytest.mark.parametrize(
    ("low", "width", "cost"),
    [
        (-40.0, 8.0, "below the noise"),
        (-1.0, 8.0, "below the noise"),
        (4.0, 8.0, dashed("8 (4--12)")),
        (-1.0, 80.0, "not known"),
    ],
)
def test_instruments_never_cost_less_than_nothing(low, width, cost):
    ends = {"": low + width / 2, "_low": low, "_high": low + width}
    row = communicating(2, 200.0) | {f"anatomy_slowdown_pct{end}": value for end, value in ends.items()}
    table = next(t for t in page([run([row])]).runs[0].tables if t.title == "Where the step goes")
    assert table.rows[0][-1] == cost


MANIFEST = {"model": {"forward_flops_per_image": 4e9}}
MIB = 2**20


def rates(*cases, price=None):
    return records(with_rates(run(cases).cases, made_manifest(**MANIFEST), price))


def test_arithmetic_is_three_forwards_per_image_and_device():
    one, two = rates(case("single", 1, 100.0), case("ddp", 2, 180.0))
    assert one["tflop_per_s"] == pytest.approx(1.2)
    assert two["tflop_per_s"] == pytest.approx(180 * 12e9 / 2 / 1e12)
    assert (two["tflop_per_s_low"], two["tflop_per_s_high"]) == pytest.approx((1.0692, 1.0908))


def test_a_model_whose_operators_are_not_counted_has_no_arithmetic():
    (row,) = records(with_rates(run([case("single", 1, 100.0)]).cases, Manifest(), None))
    assert row["tflop_per_s"] != row["tflop_per_s"]


def device(num_devices, rank, tflop_per_s):
    """What a rank's device reached beside the others."""
    return {"num_devices": num_devices, "rank": rank, "matrix_tflop_per_s": tflop_per_s}


ONE = device(1, 0, 2.0)


def mfu(devices, *cases):
    """The last case's MFU, of the measured rate and of the data sheet's peak."""
    manifest = made_manifest(**MANIFEST, roofline=devices)
    row = records(with_rates(run(cases or [case("single", 1, 100.0)]).cases, manifest, None))[-1]
    over_rate, over_sheet = (finite(row[name]) for name in ("mfu_pct", "mfu_sheet_pct"))
    return over_rate, over_sheet


def test_mfu_is_the_arithmetic_over_the_devices_own_rate():
    assert mfu([ONE]) == (pytest.approx(60.0), None)


def test_several_devices_are_held_against_what_they_reached_together():
    together = [ONE, device(2, 0, 1.0), device(2, 1, 2.0)]
    assert mfu(together, case("ddp", 2, 180.0))[0] == pytest.approx(72.0)


def test_data_parallel_without_ranks_takes_the_largest_count_and_no_other_case_does():
    assert mfu([ONE], case("dp", 2, 100.0))[0] == pytest.approx(30.0)
    assert mfu([ONE], case("ddp", 2, 100.0))[0] is None
    assert mfu([ONE], case("dp", 2, 100.0, oversubscribed=True))[0] is None


def test_a_known_gpu_has_the_data_sheets_peak_too():
    def over_sheet(name):
        return mfu([ONE], case("single", 1, 100.0, device_name=name, precision="bf16"))[1]

    assert over_sheet("NVIDIA H200") == pytest.approx(100 * 1.2 / 989.4)
    for name in ("NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"):
        assert over_sheet(name) is None


@pytest.mark.parametrize("name", sorted(DENSE_PEAKS))
def test_peaks_are_those_that_torch_has_of_the_data_sheets(name):
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


@pytest.mark.parametrize("odd", [[], [device(1, 0, 0)], [device(1, 0, None)], [device(4, 0, 2.0)]])
def test_a_manifest_without_usable_rates_gives_no_mfu(odd):
    assert mfu(odd)[0] is None


@pytest.mark.parametrize("extreme", [1e-320, 1e15])
def test_extreme_rates_leave_the_page_whole(extreme):
    page([run([case("single", 1, 100.0)], MANIFEST | {"roofline": [device(1, 0, extreme)]})])


@pytest.mark.parametrize(("ranks", "hook", "factor"), [(2, "none", 1.0), (4, "none", 1.5), (4, "bf16", 0.75)])
def test_bus_bandwidth_is_that_of_nccl_tests(ranks, hook, factor):
    """Communication alone takes 40 ms; a half-precision hook sends half the bytes."""
    (row,) = rates(communicating(ranks, 200.0, bucket_bytes=f"{30 * MIB}/{10 * MIB}", comm_hook=hook))
    assert row["bus_gb_per_s"] == pytest.approx(factor * 40 * MIB / 0.040 / 1e9)
    assert row["bus_gb_per_s_low"] < row["bus_gb_per_s"] < row["bus_gb_per_s_high"]


def test_an_epoch_counts_pauses_and_costs_every_device():
    cell = {"images_per_s_sustained": EPOCH_IMAGES / 3600 / 2}
    (row,) = rates(case("ddp", 4, 240.0, **cell), price=2.5)
    assert (row["epoch_h"], row["epoch_cost"]) == pytest.approx((2.0, 20.0))
    (unpriced,) = rates(case("ddp", 4, 240.0, **cell))
    assert unpriced["epoch_cost"] != unpriced["epoch_cost"]


NUMBER = re.compile(r"-?[0-9][0-9,]*\.?[0-9]*")


def printed(cell):
    """The first number of a cell, and half a unit of its last digit."""
    found = NUMBER.match(cell)
    assert found is not None, cell
    digits = len(found[0].partition(".")[2])
    return float(found[0].replace(",", "")), 0.5 * 10**-digits


@pytest.mark.parametrize("path", EVERY_SAMPLE)
def test_the_terminal_prints_what_cases_csv_holds(path):
    cases = rebuilt(path).reset_index()
    ok = cases[cases["status"] == "ok"].to_dict("records")
    table = {column.header: list(column.cells) for column in case_table(cases).columns}
    checked = 0
    for name, shown in COLUMNS.items():
        for row, cell in zip(ok, table[shown.heading or "images/s (95%)"], strict=True):
            if row["oversubscribed"] is True and name in OF_SCALING:
                assert cell == ""
            elif cell == "none":
                assert (name, row["hidden_pct_high"] < 0) == ("hidden_pct", True)
            elif cell:
                number, half = printed(str(cell))
                assert abs(number - shown.factor * row[name]) <= half * (1 + 1e-9)
                checked += 1
    assert checked >= 2


@pytest.mark.parametrize("path", EVERY_SAMPLE)
def test_the_table_fits_a_terminal_of_100_columns(path):
    assert Console(width=1000).measure(case_table(rebuilt(path).reset_index())).maximum <= 100


@pytest.mark.parametrize("path", EVERY_SAMPLE)
def test_the_page_prints_rates_whose_quotients_are_its_speed_ups(path):
    (view,) = page([replace(sample(path), cases=rebuilt(path))]).runs
    every = next(table for table in view.tables if table.title == "Every column")
    names = [column.name.partition(" (")[0] for column in every.columns]
    rows = [dict(zip(names, row, strict=True)) for row in every.rows]
    single = next((row for row in rows if text(row["Case"]).startswith("single")), None)
    if single is None or "Speed-up" not in names:
        return
    reference, least = printed(single["Throughput"])
    for row in rows:
        rate, half = printed(row["Throughput"])
        speedup, rounding = printed(row["Speed-up"])
        assert abs(speedup - rate / reference) <= rounding + (half + least * rate / reference) / reference
