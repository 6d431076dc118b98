from typing import Any

import pandas as pd
import pytest

from bench.aggregate import Outcome, case_rows, step_ms_by_round
from bench.findings import findings
from bench.plan import Machine, expand
from bench.schema import BLOCKS
from bench.settings import Settings, with_device_defaults
from bench.store import typed_frame

SETTINGS = with_device_defaults(
    Settings(gpus=(1, 2), bucket_cap_mb=("default", "1")), device_type="cpu", num_local_devices=2
)
PLAN = expand(SETTINGS, Machine(device_type="cpu", devices_per_node=2), arch="resnet18", image_size=64)
IDS = {(p.case.mode, p.case.num_devices, p.case.bucket_cap_mb): p.case.case_id for p in PLAN}


def block(
    key: tuple[str, int, str], round_index: int, step_ms: float, *, rank: int = 0, phase: str = "timed"
) -> dict[str, Any]:
