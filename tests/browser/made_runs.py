"""Run folders shaped like a default run and like the DDP paper's sweep; only the durations are made up."""

import gzip
import json
from random import Random

from ddp_bench.bench.layout import BucketLayout
from ddp_bench.bench.manifest import SCHEMA_VERSION
from ddp_bench.bench.plan import Machine, expand
from ddp_bench.bench.resolve import PRESETS, resolve, with_device_defaults
from ddp_bench.bench.results.aggregate import Outcome, allreduce_rows, bucket_rows, case_rows
from ddp_bench.bench.results.disk import replace_file
from ddp_bench.bench.results.schema import BLOCKS, typed_frame
from ddp_bench.bench.results.store import MANIFEST, RunWriter
from ddp_bench.bench.settings import Settings

LAYOUTS = {
    "default": [2052000, 28852224, 15853824],
    "0": [754161] * 62,
    "1": [2052000] + [4000000] * 10 + [4706048],
    "25": [30904224, 15853824],
    "100": [46758048],
}
STEP_MS = {"single": 229.0, "dp": 290.0, "ddp": 262.0}
FORWARD_MS, BACKWARD_MS = 76.0, 142.0
BYTES_PER_MS = 120_000.0
NUM_ROUNDS = 12
CPU = "Intel Xeon Platinum 8370C"


def default_run(folder):
    """DP and DDP on 1, 2 and 4 cores of a machine that has two."""
    return _write(folder, Settings(gpus=(1, 2, 4), batch_size=16, backend="gloo"), link=None)


def paper_run(folder):
    """The preset of the DDP paper on two hosts, over a slow link."""
    caps = {"bucket_cap_mb": "default,0,1,25,100", "gpus": "1,2", "batch_size": 16, "backend": "gloo"}
    return _write(folder, resolve(PRESETS["ddp-paper"] | caps), link="1gbit")


def _write(folder, settings, *, link):
    """Plan, blocks and rows through the project's own code, with seeded noise."""
    settings = with_device_defaults(settings, device_type="cpu", num_local_devices=2)
    plan = expand(settings, Machine(device_type="cpu", devices_per_node=2), arch="resnet18", image_size=64)
    layouts = {p.case.case_id: _layout(p.case) for p in plan if p.case.mode == "ddp" and not p.skip_reason}
    outcomes = [_outcome(p, link) for p in plan]
    random = Random(7)
    rows = [row for o in outcomes if o.status == "ok" for row in _blocks(o.planned, random)]
    folder.mkdir(parents=True)
    manifest = _manifest(folder.name, settings, link)
    replace_file(folder / MANIFEST, lambda path: path.write_text(json.dumps(manifest)))
    writer = RunWriter(folder)
    writer.append("blocks.csv", rows)
    blocks = typed_frame(rows, BLOCKS)
    writer.replace("cases.csv", case_rows(outcomes, blocks))
    writer.replace("buckets.csv", bucket_rows(layouts, blocks))
    for name in sorted({f"{row['case_id']}-rank{row['rank']}" for row in rows if row["phase"] == "trace"}):
        writer.write_trace(f"{name}.json.gz", gzip.compress(b'{"traceEvents": []}'))
    if settings.allreduce_curve:
        sizes = [4096 * 4**i for i in range(8)]
        times = {size: [(0.3 + size / 1e5) * (1 + 0.05 * i) for i in range(5)] for size in sizes}
        writer.append("allreduce.csv", allreduce_rows(2, "gloo", times))
    return folder


def _blocks(planned, random):
    case = planned.case
    communicates = case.mode == "ddp" and case.num_devices > 1
    ranks = range(case.num_devices if case.mode == "ddp" else 1)
    for round_index in range(1, NUM_ROUNDS + 1):
        ms = _step_ms(case) * random.gauss(1, 0.015)
        phases = {"timed": (ms, {})}
        if communicates:
            phases |= {"no_sync": (ms * 0.8, {}), "comm": (ms * 0.32, {})}
        if round_index <= 3:
            phases["anatomy"] = (ms * 1.02, _anatomy(case, ms))
            if communicates:
                phases["trace"] = (ms * 1.1, _trace(case))
        for phase, (step_ms, detail) in phases.items():
            for rank in ranks:
                yield {
                    "case_id": case.case_id,
                    "phase": phase,
                    "round": round_index,
                    "position": 0,
                    "rank": rank,
                    "host": "laptop",
                    "started_s": 10.0 * round_index,
                    "num_steps": 4,
                    "block_ms": 4 * (step_ms - rank),
                    "steps_ms": " ".join(f"{step_ms - rank:.3f}" for _ in range(4)),
                    "detail": json.dumps(detail) if detail else None,
                }


def _step_ms(case):
    sharing = max(1.0, case.num_devices / 2)
    cap = {"0": 1.2, "1": 1.04, "25": 0.99, "100": 1.08}.get(case.bucket_cap_mb, 1.0)
    several = STEP_MS[case.mode] * cap if case.num_devices > 1 else STEP_MS["single"] + 4
    return several * sharing + (case.accumulate - 1) * 210


def _anatomy(case, ms):
    detail = {"data_ms": 0.21, "forward_ms": 0.29 * ms, "backward_ms": 0.66 * ms, "optimizer_ms": 0.05 * ms}
    if case.mode == "dp":
        shares = {"scatter": 0.01, "replicate": 0.05, "apply": 0.27, "gather": 0.01}
        shares |= {"backward": 0.5, "reduce": 0.1}
        detail |= {f"dp_{stage}_ms": share * ms for stage, share in shares.items()}
        detail |= {"dp_device0_pct": 23.0}
    if case.mode == "ddp" and case.num_devices > 1:
        detail |= {"last_ready_ms": 1.2 * BACKWARD_MS, "local_last_ready_ms": BACKWARD_MS}
        detail |= {"overlap_window_pct": 61.5, "ready_ms": _ready_ms(case)}
    return detail


def _trace(case):
    """Buckets one after the other on a link that carries one at a time."""
    start, done, free = [], [], 0.0
    for ready, size in zip(_ready_ms(case), LAYOUTS[str(case.bucket_cap_mb)], strict=True):
        start.append(max(ready, free) + 1.0)
        free = start[-1] + size / BYTES_PER_MS
        done.append(free)
    return {"overlap_trace_pct": 74.0, "start_ms": start, "done_ms": done}


def _ready_ms(case):
    sizes = LAYOUTS[str(case.bucket_cap_mb)]
    return [BACKWARD_MS * sum(sizes[: i + 1]) / sum(sizes) for i in range(len(sizes))]


def _layout(case):
    return BucketLayout(tuple(LAYOUTS[str(case.bucket_cap_mb)]), ())


def _outcome(planned, link):
    if planned.skip_reason is not None:
        return Outcome(planned, status="skipped", reason=planned.skip_reason)
    case = planned.case
    facts = {"device_name": CPU, "link": link, "peak_mem_mib": 912.0 + 41.0 * case.num_devices}
    if case.mode == "ddp":
        sizes = LAYOUTS[str(case.bucket_cap_mb)]
        facts |= {"bucket_bytes": "/".join(map(str, sizes)), "num_buckets": len(sizes)}
    return Outcome(planned, facts=facts)


def _manifest(name, settings, link):
    return {
        "schema_version": SCHEMA_VERSION,
        "name": name,
        "created_utc": "2026-03-01T09:30:00Z",
        "command": "python -m bench.run --modes dp,ddp --gpus 1,2,4",
        "settings": settings.stored(),
        "seed": 0,
        "plan_hash": "5b1f0c9e7a44",
        "link": link,
        "versions": {"python": "3.12.3", "torch": "2.15.0", "torchvision": "0.30.0"},
        "git": {"commit": "0f3c9d2ab417", "dirty": False},
        "environment": {
            "host": "laptop",
            "os": "Linux 6.8.0 x86_64",
            "cpu_model": CPU,
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
