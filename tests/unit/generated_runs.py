"""Odd runs by a seeded generator: noise alone, few rounds, equal times, negative parts, loads, shared cores.

What they measured is drawn; plan, fit, tables and comparisons are the product's own.
"""

import functools
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from made import block, compared, made_manifest, planned, resolved, times_of

from ddp_bench.bench.findings.findings import Conclusion, conclude_run
from ddp_bench.bench.page.page import Page
from ddp_bench.bench.results.aggregate import describe_planned_case, make_case_rows
from ddp_bench.bench.results.columns import ALLREDUCE, BLOCKS, BUCKETS, COMPARISONS, make_frame
from ddp_bench.bench.results.store import RunData
from ddp_bench.report.page import make_page

NUM_RUNS = 126

SWEEPS = (
    {"modes": ("ddp",)},
    {"modes": ("ddp",), "bucket_cap_mb": ("default", "0.25", "0.5", "1", "5", "10", "25", "50", "100")},
    {"modes": ("dp", "ddp"), "bucket_cap_mb": ("default", "1")},
    {"modes": ("dp", "ddp"), "comm_hook": ("none", "bf16")},
    {"modes": ("ddp",), "gradient_as_bucket_view": (False, True)},
    {"modes": ("ddp",), "accumulate": (4,)},
    {"modes": ("ddp",), "accumulate": (1, 2, 8), "sweep": "star"},
    {"modes": ("dp", "ddp"), "scaling": "strong", "batch_size": 64},
    {"modes": ("ddp",), "compile": ("off", "default"), "bucket_cap_mb": ("default", "25")},
    {"modes": ("pipeline",)},
    {"modes": ("ddp", "pipeline", "partition")},
    {"modes": ("ddp", "fsdp", "replicate")},
    {"modes": ("dp",)},
    {"modes": ("dp", "ddp"), "bucket_cap_mb": ("default", "1"), "batch_size": (8, 16, 32)},
)

PACES = {
    "single": 1.0, "dp": 1.1, "ddp": 1.05, "fsdp": 1.2, "replicate": 1.06, "partition": 1.9, "pipeline": 0.8,
}  # fmt: skip


class Generated(NamedTuple):
    """A run, what is concluded of it, and its page."""

    run: RunData
    conclusion: Conclusion
    page: Page


@functools.cache
def generated(seed):
    """Draw a run, conclude it and make its page."""
    run = _draw(np.random.default_rng(seed), seed)
    conclusion = conclude_run(run)
    return Generated(run, conclusion, make_page(run, conclusion=conclusion))


def _draw(rng, seed):
    def one_of(*values):
        return values[rng.integers(len(values))]

    device, devices = one_of("cpu", "cpu", "cuda"), one_of(2, 4)
    counts = one_of((1, devices), (devices,), (1, devices, 2 * devices), (2 * devices,))
    stored = {
        "gpus": counts,
        "margin": one_of(0.01, 0.05),
        "batch_size": 16,
        "share_gpus": one_of(False, False, True),
    }
    stored |= SWEEPS[seed % len(SWEEPS)]
    settings = resolved(device=device, devices=devices, **stored)
    plan = planned(settings, device=device, devices=devices)
    blocks, facts = [], {}
    noise, common = one_of(0.0, 1e-5, 0.005, 0.03, 0.4), one_of(0.0, 0.1)
    rounds = one_of(1, 3, 5, 6, 12, 24)
    paces = np.exp(common * rng.standard_normal(rounds))
    usual = {
        "exposed": one_of(-0.05, 0.0, 0.02, 0.3, 0.3, 3.0),
        "alone": one_of(0.01, 0.15, 0.5, 4.0),
        "other": one_of(-0.15, 0.0, 0.1),
        "skew": one_of(0.0, 0.0, 0.3),
        "buffers": one_of(0.0, 0.01, 0.4),
        "data": one_of(0.0, 0.2),
    }
    if "gradient_as_bucket_view" in stored:  # whose saving is seen where communication is
        usual["exposed"] = 0.3
    scale = one_of(0.02, 80.0, 40_000.0)
    for planned_case in plan:
        case = planned_case.case
        fate = rng.random()
        if planned_case.skip_reason or fate < 0.04:
            facts[case.case_id] = {"status": "skipped", "reason": planned_case.skip_reason or "not reached"}
            continue
        if fate < 0.08:
            status = "oom" if case.batch == 32 else "failed"
            facts[case.case_id] = {"status": status, "reason": "RuntimeError: it broke"}
            continue
        facts[case.case_id] = {"gradient_error": 1e-7, "device_name": "Test device"}
        if fate > 0.95:
            facts[case.case_id] = {"not_proved": "it draws", "proved_by": "a seed"}
        blocks += _blocks_of(rng, case, scale, usual, noise, paces)
    outcomes = [describe_planned_case(p, **facts[p.case.case_id]) for p in plan]
    frame = make_frame(blocks, BLOCKS)
    times = times_of(frame)
    comparisons = compared(make_case_rows(outcomes, times), times, settings.margin)
    others = one_of(0.0, 0.3, 20.0)
    manifest = made_manifest(
        settings={name: [*value] if isinstance(value, tuple) else value for name, value in stored.items()},
        timing={"measuring_s": one_of(20.0, 500.0)},
        load=[{"cores": 4, "others": min(others, 4.0), "steal": one_of(0.0, 0.5)}],
        load_before=one_of(0.0, 0.4, 15.88),
    )
    return RunData(
        path=Path(f"runs/{seed}"),
        manifest=manifest,
        cases=make_case_rows(outcomes, times, comparisons),
        blocks=frame,
        buckets=make_frame([], BUCKETS),
        allreduce=make_frame([], ALLREDUCE),
        comparisons=make_frame([one.to_row() for one in comparisons], COMPARISONS),
    )


def _blocks_of(rng, case, scale, usual, noise, paces):
    """Blocks of a case: what each phase takes is a share of what one device takes."""
    work = case.accumulate * (case.batch_per_device / 16 if case.scaling == "weak" else 1 / case.num_devices)
    pace = PACES[case.mode] * (0.8 if case.gradient_as_bucket_view else 1)
    step = scale * work * pace * np.exp(0.05 * rng.standard_normal())
    local, exposed = step * (1 + usual["other"]), scale * usual["exposed"]
    communicates = case.mode == "ddp" and case.num_devices > 1
    phases = {"timed": max(local + exposed, 0.3 * local) if communicates else step}
    if communicates and rng.random() < 0.9:
        phases["no_sync"] = local
        if rng.random() < 0.9:
            phases["comm"] = scale * usual["alone"]
    if rng.random() < 0.7:
        phases["anatomy"] = phases["timed"]
    buffers = {"buffers_ms": usual["buffers"] * phases.get("comm", 0.0)}
    parts = {"data": usual["data"], "forward": 0.3, "backward": 0.6 - usual["data"], "optimizer": 0.1}
    details = {
        "comm": buffers if usual["buffers"] else {},
        "anatomy": {f"{name}_ms": share * phases["timed"] for name, share in parts.items()},
    }
    if case.mode == "dp":
        stages = ("scatter", "replicate", "apply", "gather", "backward", "reduce")
        details["anatomy"] |= {f"dp_{name}_ms": 0.1 * step for name in stages}
    last = rng.integers(case.num_ranks)
    found = []
    for phase, ms in phases.items():
        for r, pace in enumerate(paces):
            if rng.random() < 0.02:  # a visit that the time limit cut off
                continue
            shifted = ms * pace * np.exp(noise * rng.standard_normal())
            for rank in range(case.num_ranks):
                late = 1 + usual["skew"] * (rank == last) * (phase == "no_sync")
                detail = json.dumps({name: value * pace for name, value in details.get(phase, {}).items()})
                more = {"detail": detail, "host": "h", "launch": 1}
                found.append(
                    block(case.case_id, r + 1, float(shifted * late), phase=phase, rank=rank, **more)
                )
    return found


def texts_of(page):
    """Every text that a page shows, but for conditions and commands."""
    tables = [*page.tables, *(table for part in (*page.sections, *page.folds) for table in part.tables)]
    figures = [*page.figures, *(figure for part in (*page.sections, *page.folds) for figure in part.figures)]
    return [
        *(page.heading, page.status, *page.subtitle, *page.setup, *page.warnings),
        *(*page.notes, page.savings.note if page.savings else ""),
        *(text for card in page.cards for text in (card.title, card.label, card.sentence)),
        *page.trust.values(),
        page.following.why if page.following else "",
        *(sentence for _, sentence in page.cautions),
        *(note for part in page.sections for note in part.notes),
        *(f"{figure.caption} {figure.note}" for figure in figures),
        *(cell for table in tables for row in table.rows for cell in row if isinstance(cell, str)),
        *(text for table in tables for text in (table.note, *table.below)),
    ]
