"""A run folder with the shape of the default run on a CPU, and a real browser to look at its page."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from bench.aggregate import Outcome, case_rows
from bench.plan import Machine, Planned, expand
from bench.schema import BLOCKS, SCHEMA_VERSION
from bench.settings import Settings
from bench.store import MANIFEST, RunWriter, replace_file, typed_frame

if TYPE_CHECKING:
    from collections.abc import Iterator

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
LAYOUTS = {
    "default": "2052000/28852224/15853824",
    "1": "/".join(["4000000"] * 11 + ["2758048"]),
    "25": "30904224/15853824",
    "100": "46758048",
}
STEP_MS = {"single": 229.0, "dp": 290.0, "ddp": 262.0}
NUM_ROUNDS = 12


def step_ms(planned: Planned) -> float:
    case = planned.case
    sharing = max(1.0, case.num_devices / 2)
    cap = {"1": 1.04, "25": 0.99, "100": 1.02}.get(case.bucket_cap_mb, 1.0)
    return (STEP_MS[case.mode] if case.num_devices > 1 else STEP_MS["single"] + 4) * sharing * cap


def block(planned: Planned, phase: str, round_index: int, rank: int, ms: float) -> dict[str, Any]:
    steps = " ".join(f"{ms:.3f}" for _ in range(4))
    return {
        "case_id": planned.case.case_id,
        "phase": phase,
        "round": round_index,
        "position": 0,
        "rank": rank,
        "host": "laptop",
        "started_s": 10.0 * round_index,
        "num_steps": 4,
        "block_ms": 4 * ms,
        "steps_ms": steps,
    }


def outcome(planned: Planned) -> Outcome:
    if planned.skip_reason is not None:
        return Outcome(planned, status="skipped", reason=planned.skip_reason)
    case, ms = planned.case, step_ms(planned)
    facts: dict[str, Any] = {
        "device_name": "Intel Xeon Platinum 8370C",
        "forward_ms": ms * 0.33,
        "backward_ms": ms * 0.62,
        "optimizer_ms": ms * 0.04,
        "data_ms": 0.21,
        "peak_mem_mib": 912.0 + 41.0 * case.num_devices,
        "rank_skew_ms": 3.1 if case.mode == "ddp" and case.num_devices > 1 else None,
    }
    if case.mode == "ddp":
        layout = LAYOUTS[case.bucket_cap_mb]
        facts |= {"bucket_bytes": layout, "num_buckets": layout.count("/") + 1}
    if case.mode == "dp":
        stages = ("scatter", "replicate", "apply", "gather", "backward", "reduce")
        facts |= {f"dp_{stage}_ms": ms / (7 - i) for i, stage in enumerate(stages)}
        facts |= {"dp_device0_pct": 11.4}
    return Outcome(planned, facts=facts)


def manifest() -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "name": "first-look",
        "created_utc": "2026-03-01T09:30:00Z",
        "command": "python -m bench.run --modes dp,ddp --gpus 1,2,4",
        "settings": {"modes": ["dp", "ddp"], "gpus": [1, 2, 4], "rounds": None, "precision_target": 0.02},
        "seed": 0,
        "plan_hash": "5b1f0c9e7a44",
        "versions": {"python": "3.12.3", "torch": "2.15.0", "torchvision": "0.30.0"},
        "git": {"commit": "0f3c9d2ab417", "dirty": False},
        "environment": {
            "host": "laptop",
            "os": "Linux 6.8.0 x86_64",
            "cpu_model": "Intel Xeon Platinum 8370C",
            "num_cores": 2,
            "memory_gib": 15.6,
            "gpus": [],
            "topology": "NUMA node0 CPU(s):   0,1\nL3 cache:            48 MiB (1 instance), shared",
            "env": {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        },
        "model": {
            "arch": "resnet18",
            "num_params": 11689512,
            "gradient_bytes": 46758048,
            "forward_flops_per_image": 297e6,
        },
        "ranks": [
            {
                "rank": i,
                "host": "laptop",
                "local_rank": i,
                "device": f"cpu:{i % 2}",
                "device_name": "CPU core",
            }
            for i in range(4)
        ],
        "timing": {
            "total_s": 186.2,
            "startup_s": 9.4,
            "timed_share_pct": 71.3,
            "rounds": NUM_ROUNDS,
            "stopped_because": "time limit of 180 s",
        },
    }


def write_run(folder: Path) -> Path:
    """Plan, blocks and rows through the project's own code; only the durations are made up, and seeded."""
    settings = Settings(gpus=(1, 2, 4), batch_size=16, backend="gloo")
    plan = expand(settings, Machine(device_type="cpu", devices_per_node=2), arch="resnet18", image_size=64)
    outcomes = [outcome(planned) for planned in plan]
    random, rows = Random(7), []  # noqa: S311 - noise of a hand-made run, not a secret
    for o in outcomes:
        if o.status != "ok":
            continue
        ranks = range(o.planned.case.num_devices if o.planned.case.mode == "ddp" else 1)
        for round_index in range(1, NUM_ROUNDS + 1):
            ms = step_ms(o.planned) * random.gauss(1, 0.015)
            rows += [block(o.planned, "timed", round_index, rank, ms - rank) for rank in ranks]
            if len(ranks) > 1:
                rows += [block(o.planned, "no_sync", round_index, rank, ms * 0.9) for rank in ranks]
                rows += [block(o.planned, "comm", round_index, rank, ms * 0.22) for rank in ranks]
    folder.mkdir(parents=True)
    replace_file(folder / MANIFEST, lambda path: path.write_text(json.dumps(manifest())))
    writer = RunWriter(folder)
    writer.append("blocks.csv", rows)
    writer.write_cases(case_rows(outcomes, typed_frame(rows, BLOCKS)))
    return folder


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "first-look")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=chromium, args=list(FLAGS))
        yield running
        running.close()
