from typing import Any

import pandas as pd
import pytest

from bench.plan import Machine, expand
from bench.records.aggregate import Outcome, case_rows, step_ms_by_round
from bench.records.schema import BLOCKS, typed_frame
from bench.settings import Settings, with_device_defaults

SETTINGS = with_device_defaults(
    Settings(gpus=(1, 2), bucket_cap_mb=("default", "1")), device_type="cpu", num_local_devices=2
)
PLAN = expand(SETTINGS, Machine(device_type="cpu", devices_per_node=2), arch="resnet18", image_size=64)
IDS = {(p.case.mode, p.case.num_devices, p.case.bucket_cap_mb): p.case.case_id for p in PLAN}


def block(
    key: tuple[str, int, str], round_index: int, step_ms: float, *, rank: int = 0, phase: str = "timed"
) -> dict[str, Any]:
    return {
        "case_id": IDS[key],
        "phase": phase,
        "round": round_index,
        "rank": rank,
        "num_steps": 2,
        "block_ms": 2 * step_ms,
        "steps_ms": f"{step_ms} {step_ms}",
    }


def frames(step_ms: dict[tuple[str, int, str], list[float]]) -> tuple[pd.DataFrame, pd.DataFrame]:
    blocks = typed_frame(
        [
            block(key, r + 1, ms, rank=rank)
            for key, series in step_ms.items()
            for r, ms in enumerate(series)
            for rank in range(key[1] if key[0] == "ddp" else 1)
        ],
        BLOCKS,
    )
    measured = {IDS[key] for key in step_ms}
    outcomes = [
        Outcome(p, "ok") if p.case.case_id in measured else Outcome(p, "skipped", p.skip_reason or "?")
        for p in PLAN
    ]
    return case_rows(outcomes, blocks), blocks


DRIFTING = {
    ("single", 1, ""): [100.0, 110, 120, 130, 140],
    ("ddp", 1, "default"): [101.0, 111, 121, 131, 141],
    ("dp", 2, ""): [200.0, 220, 240, 260, 280],
    ("ddp", 2, "default"): [125.0, 137.5, 150, 162.5, 175],
    ("ddp", 2, "1"): [112.5, 123.8, 135, 146.2, 157.5],
}


def test_throughput_is_global_batch_over_the_longest_ranks_block() -> None:
    blocks = typed_frame(
        [block(("ddp", 2, "1"), 1, 50.0, rank=0), block(("ddp", 2, "1"), 1, 80.0, rank=1)], BLOCKS
    )
    assert step_ms_by_round(blocks, "timed") == {IDS["ddp", 2, "1"]: {1: 80.0}}


def test_rows_hang_together() -> None:
    cases, _ = frames(DRIFTING)
    assert len(cases) == len(PLAN), "every planned case has exactly one row"
    ok = cases[cases["status"] == "ok"]
    assert (ok["images_per_s"] * ok["step_ms_p50"] / 1000 / ok["global_batch"]).tolist() == pytest.approx(
        [1] * 5
    )
    for name in ("images_per_s", "speedup", "efficiency"):
        assert (ok[f"{name}_low"] <= ok[name]).all()
        assert (ok[name] <= ok[f"{name}_high"]).all()
    assert (ok["efficiency"] * ok["num_devices"]).tolist() == pytest.approx(ok["speedup"].tolist())


def test_ratios_are_formed_inside_a_round() -> None:
    cases, _ = frames(DRIFTING)
    row = cases.set_index("case_id").loc[IDS["ddp", 2, "default"]]
    assert row["speedup"] == pytest.approx(1.6)
    assert row["speedup_high"] - row["speedup_low"] < 1e-6, "the drift of 40% cancels"
    assert row["images_per_s_high"] - row["images_per_s_low"] > 20


def test_what_was_not_measured_is_empty() -> None:
    cases, _ = frames(DRIFTING)
    skipped = cases[cases["status"] == "skipped"].iloc[0]
    assert pd.isna(skipped["images_per_s"])
    assert pd.isna(skipped["num_rounds"])
    assert cases["comm_ms"].isna().all()
    assert cases.set_index("mode").loc["single", "bucket_cap_mb"] is pd.NA


def test_exposed_and_hidden_communication_by_definition() -> None:
    key = ("ddp", 2, "1")
    rows = []
    for r in (1, 2, 3):
        rows += [block(("single", 1, ""), r, 100.0), block(key, r, 130.0)]
        rows += [block(key, r, 100.0, phase="no_sync"), block(key, r, 40.0, phase="comm")]
    measured = {IDS["single", 1, ""], IDS[key]}
    outcomes = [Outcome(p, "ok" if p.case.case_id in measured else "skipped") for p in PLAN]
    row = case_rows(outcomes, typed_frame(rows, BLOCKS)).set_index("case_id").loc[IDS[key]]
    assert row["exposed_comm_ms"] == pytest.approx(30.0)
    assert row["comm_ms"] == pytest.approx(40.0)
    assert row["hidden_pct"] == pytest.approx(25.0)
    assert row["no_sync_step_ms"] == pytest.approx(100.0)
