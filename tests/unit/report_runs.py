"""Small runs made by hand: round numbers, so that what the page shows can be checked by eye."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.schema import BLOCKS, BUCKETS, CASES
from bench.store import RunData, typed_frame
from report.select import DDP_DEFAULTS

if TYPE_CHECKING:
    from collections.abc import Sequence

Row = dict[str, Any]


def case(mode: str, num_devices: int, images_per_s: float | None = None, **more: Any) -> Row:
    """A case of 10 images per device; a rate makes it `ok`, with an interval of 1% either way."""
    row: Row = {
        "case_id": f"{mode}-n{num_devices}-{more.get('bucket_cap_mb', 'x')}",
        "status": "ok",
        "mode": mode,
        "impl": "torch",
        "device_type": "cuda",
        "device_name": "Test GPU",
        "num_devices": num_devices,
        "num_nodes": 1,
        "oversubscribed": False,
        "arch": "resnet50",
        "image_size": 224,
        "batch_per_device": 10,
        "global_batch": 10 * num_devices,
        "scaling": "weak",
        "precision": "fp32",
        "data": "device",
        **(DDP_DEFAULTS if mode == "ddp" else {}),
    }
    if images_per_s is not None:
        for name, value in (
            ("images_per_s", images_per_s),
            ("speedup", images_per_s / 100),
            ("efficiency", images_per_s / 100 / num_devices),
        ):
            row |= {name: value, f"{name}_low": 0.99 * value, f"{name}_high": 1.01 * value}
    return row | more


def blocks(cases: Sequence[Row]) -> list[Row]:
    """Two rounds of one timed step for every case that has a rate."""
    return [
        {
            "case_id": row["case_id"],
            "phase": "timed",
            "round": round_index,
            "position": 0,
            "rank": 0,
            "host": "h",
            "started_s": 0.0,
            "num_steps": 1,
            "block_ms": 1000 * row["global_batch"] / row["images_per_s"],
        }
        for row in cases
        if row.get("images_per_s")
        for round_index in (1, 2)
    ]


def run(cases: Sequence[Row], manifest: Row | None = None, *, path: str = "runs/by-hand") -> RunData:
    return RunData(
        path=Path(path),
        manifest=manifest or {},
        cases=typed_frame(cases, CASES),
        blocks=typed_frame(blocks(cases), BLOCKS),
        buckets=typed_frame([], BUCKETS),
    )


def usual_cases() -> list[Row]:
    """Two GPUs in the machine, four asked for; single runs at 100 images/s."""
    return [
        case("single", 1, 100.0),
        case("dp", 1, status="skipped", reason="DataParallel on one device is the plain module"),
        case("dp", 2, 150.0),
        case("dp", 4, 160.0, oversubscribed=True),
        case("ddp", 1, 98.0, num_buckets=3),
        case("ddp", 2, 180.0, num_buckets=3, bucket_bytes="1048576/2097152/10485760"),
        case("ddp", 2, 160.0, bucket_cap_mb="1", num_buckets=12),
        case("ddp", 2, 200.0, bucket_cap_mb="25", num_buckets=2),
        case("ddp", 4, 240.0, oversubscribed=True, num_buckets=3),
        case("ddp", 4, None, bucket_cap_mb="25", status="failed", reason="rank 3 died: exit code 9"),
    ]
