"""Arithmetic, bus bandwidth, time and cost of an epoch, from round numbers."""

from __future__ import annotations

from typing import Any

import pytest
from report_runs import case, communicating, run

from ddp_bench.bench.results.schema import records
from ddp_bench.report.main import main
from ddp_bench.report.rates import EPOCH_IMAGES, with_rates
from ddp_bench.report.view import page

MANIFEST = {"model": {"forward_flops_per_image": 4e9}}
MIB = 2**20


def rates(*cases: dict[str, Any], price: float | None = None) -> list[Any]:
    return records(with_rates(run(cases).cases, MANIFEST, price))


def test_arithmetic_is_three_forwards_per_image_and_device() -> None:
    one, two = rates(case("single", 1, 100.0), case("ddp", 2, 180.0))
    assert one["tflop_per_s"] == pytest.approx(1.2)
    assert two["tflop_per_s"] == pytest.approx(180 * 12e9 / 2 / 1e12)
    assert (two["tflop_per_s_low"], two["tflop_per_s_high"]) == pytest.approx((1.0692, 1.0908))


def test_a_model_whose_operators_are_not_counted_has_no_arithmetic() -> None:
    (row,) = records(with_rates(run([case("single", 1, 100.0)]).cases, {}, None))
    assert row["tflop_per_s"] != row["tflop_per_s"]


@pytest.mark.parametrize(("ranks", "hook", "factor"), [(2, "none", 1.0), (4, "none", 1.5), (4, "bf16", 0.75)])
def test_bus_bandwidth_is_that_of_nccl_tests(ranks: int, hook: str, factor: float) -> None:
    """Communication alone takes 40 ms; a half-precision hook sends half the bytes."""
    (row,) = rates(communicating(ranks, 200.0, bucket_bytes=f"{30 * MIB}/{10 * MIB}", comm_hook=hook))
    assert row["bus_gb_per_s"] == pytest.approx(factor * 40 * MIB / 0.040 / 1e9)
    assert row["bus_gb_per_s_low"] < row["bus_gb_per_s"] < row["bus_gb_per_s_high"]


def test_an_epoch_counts_pauses_and_costs_every_device() -> None:
    cell = {"images_per_s_sustained": EPOCH_IMAGES / 3600 / 2}
    (row,) = rates(case("ddp", 4, 240.0, **cell), price=2.5)
    assert (row["epoch_h"], row["epoch_cost"]) == pytest.approx((2.0, 20.0))
    (unpriced,) = rates(case("ddp", 4, 240.0, **cell))
    assert unpriced["epoch_cost"] != unpriced["epoch_cost"]


def test_the_results_have_the_cost_where_a_price_is_given() -> None:
    data = run([case("single", 1, 100.0, images_per_s_sustained=EPOCH_IMAGES / 3600)])
    results = [page([data], price=price).runs[0].tables[0] for price in (None, 3.0)]
    assert "Cost of an epoch" not in [column.name for column in results[0].columns]
    costs = [column.name for column in results[1].columns].index("Cost of an epoch")
    assert [row[costs] for row in results[1].rows] == ["3.00"]


@pytest.mark.parametrize("text", ["0", "-1", "x", "1e3", "inf", ""])
def test_no_price_is_refused_in_one_line(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", f"--price-per-device-hour={text}"]) == 2
    assert "is not a price above 0; write it as 2.5" in capsys.readouterr().err
