"""A run from its settings to its results: prepare it, show its plan, launch its ranks, be one of them."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import torch

from bench import environment, plan, store
from bench.cluster import Cluster, RankInfo, host_name, is_rank
from bench.console import Console, format_s, print_cases
from bench.errors import UsageError
from bench.findings import devices, findings
from bench.launch import launch
from bench.measure.probe import step_seconds
from bench.plan import Machine, Planned
from bench.recorder import Recorder
from bench.settings import Settings, with_device_defaults
from bench.worker import Session
from models.data import check_folder
from models.profile import profile_workload
from models.registry import default_image_size, load_workload, resnet_workload
from models.workload import Workload

STARTED_ENV = "BENCH_STARTED_S"
"""When the command began (epoch seconds), handed to the ranks so that start-up can be told."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A validated run, the same on every rank."""

    settings: Settings
    machine: Machine
    workload: Workload
    plan: list[Planned]


def prepare(settings: Settings) -> Job:
    """Resolve the device, the workload and the plan. Raises UsageError for what cannot run here."""
    device_type = _device_type(settings.device)
    num_devices = torch.cuda.device_count() if device_type == "cuda" else _num_cores()
    settings = with_device_defaults(settings, device_type=device_type, num_local_devices=num_devices)
    _check_precision(settings)
    machine = Machine(device_type=device_type, devices_per_node=num_devices, **_launched_ranks())
    workload = _workload(settings)
    settings = dataclasses.replace(settings, image_size=workload.image_size)
    if settings.data not in ("device", "host"):
        check_folder(Path(settings.data))
    planned = plan.expand(settings, machine, arch=workload.name, image_size=workload.image_size)
    if settings.out is not None:
        store.check_claimable(Path(settings.out))
    return Job(settings=settings, machine=machine, workload=workload, plan=planned)


def print_plan(job: Job) -> None:
    """Every case, why it is skipped, the order of the first round and the expected time."""
    runnable = [p for p in job.plan if p.skip_reason is None]
    order = plan.round_order(len(runnable), seed=job.settings.seed, round_index=1)
    place = {runnable[i].case.case_id: position + 1 for position, i in enumerate(order)}
    width = max(len(p.case.case_id) for p in job.plan)
    here = devices(job.machine.devices_per_node, job.machine.device_type)
    print(f"{len(job.plan)} cases, {len(runnable)} to measure, on {here}:")
    for p in job.plan:
        what = f"skipped: {p.skip_reason}" if p.skip_reason else f"place {place[p.case.case_id]} in round 1"
        more = ", oversubscribed" if p.oversubscribed and not p.skip_reason else ""
        print(f"  {p.case.case_id:<{width}}  {p.case.global_batch:>5} images/step  {what}{more}")
    step_s = step_seconds(job.workload, job.plan[0].case, torch.device(job.machine.device_type))
    expected = plan.estimate_s(
        job.plan, step_s=step_s, single_batch=job.plan[0].case.global_batch, settings=job.settings
    )
    print(
        f"Rounds in random order (seed {job.settings.seed}), {job.settings.steps} steps per block; a step of "
        f"single takes {step_s * 1000:.0f} ms here (one probe)."
    )
    limit = "" if job.settings.max_time is None else f", limit {format_s(job.settings.max_time)}"
    print(f"Expected time: about {format_s(expected)} of measuring{limit}, plus start-up.")


def launch_here(job: Job, arguments: Sequence[str]) -> int:
    """Start the ranks on this machine; their exit code."""
    settings = job.settings
    out = Path(settings.out) if settings.out else store.default_folder(host=host_name(), name=settings.name)
    store.check_claimable(out)
    # A later --out wins, so every rank gets the one folder.
    return launch(
        [*arguments, "--out", str(out)],
        num_ranks=plan.world_size(job.plan),
        device_type=job.machine.device_type,
    )


def run_rank(job: Job, arguments: Sequence[str], *, quiet: bool, as_json: bool) -> int:
    """One rank's life; rank 0 also writes the results and the summary."""
    cluster = Cluster(job.machine.device_type)
    settings = job.settings
    started_s = float(os.environ.get(STARTED_ENV, psutil.Process().create_time()))
    infos = cluster.gather(cluster.info())
    recorder = None
    console = Console(silent=quiet or not cluster.is_first)
    if cluster.is_first:
        default = store.default_folder(host=host_name(), name=settings.name)
        folder = store.claim(Path(settings.out) if settings.out else default)
        writer = store.RunWriter(folder)
        manifest = _manifest(job, arguments, infos)
        writer.write_manifest(manifest)
        recorder = Recorder(job.plan, writer)
    startup_s = time.time() - started_s
    begun = time.perf_counter()
    session = Session(
        cluster=cluster,
        settings=settings,
        plan=job.plan,
        workload=job.workload,
        infos=infos,
        recorder=recorder,
        console=console,
    )
    session.run()
    cluster.close()
    if recorder is None:
        return 0
    cases = recorder.write()
    manifest["timing"] = timing = {
        "startup_s": round(startup_s, 2),
        "measuring_s": round(time.perf_counter() - begun, 2),
        "timed_steps_s": round(recorder.timed_s, 2),
        "rounds": session.rounds,
        "stopped_because": session.stopped_because,
    }
    writer.write_manifest(manifest)
    # The report is a separate package that never imports torch; only a finished run reaches for it.
    from report import build  # noqa: PLC0415

    page = build([folder], folder / "report.html")
    after_startup_s = time.perf_counter() - begun
    timing["total_s"] = round(startup_s + after_startup_s, 2)
    timing["timed_share_pct"] = round(100 * recorder.timed_s / after_startup_s, 1)
    writer.write_manifest(manifest)
    sentences = findings(cases, recorder.blocks())
    if as_json:
        print(_summary_json(folder, cases, sentences, timing))
    elif not quiet:
        _print_summary(job, cases, sentences, timing, page, recorder)
    return 0 if bool((cases["status"] == "ok").any()) else 1


def _print_summary(
    job: Job,
    cases: pd.DataFrame,
    sentences: list[str],
    timing: dict[str, Any],
    page: Path,
    recorder: Recorder,
) -> None:
    print_cases(cases)
    width = recorder.half_width()
    if job.settings.rounds is None and not width <= job.settings.precision_target:
        known = f"± {100 * width:.1f}%" if width == width else "without an interval"  # noqa: PLR0124
        print(
            f"Target precision ± {100 * job.settings.precision_target:g}% not reached ({known} at worst); "
            "a longer --max-time narrows the intervals"
        )
    print(
        f"{timing['rounds']} rounds ({timing['stopped_because']}); start-up {timing['startup_s']:.0f} s, "
        f"{timing['timed_share_pct']:.0f}% of the {timing['total_s'] - timing['startup_s']:.0f} s after it "
        "were timed steps"
    )
    for sentence in sentences:
        print(sentence)
    print(f"Report: {page}")


def _summary_json(folder: Path, cases: pd.DataFrame, sentences: list[str], timing: dict[str, Any]) -> str:
    rows = json.loads(cases.to_json(orient="records"))
    return json.dumps(
        {"results": str(folder), "findings": sentences, "timing": timing, "cases": rows}, indent=2
    )


def _manifest(job: Job, arguments: Sequence[str], infos: Sequence[RankInfo]) -> dict[str, Any]:
    profile = profile_workload(job.workload)
    return {
        "name": job.settings.name,
        "preset": job.settings.preset,
        "created_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": list(arguments),
        "command": shlex.join(["python", "-m", "bench.run", *arguments]),
        "settings": asdict(job.settings),
        "seed": job.settings.seed,
        "plan_hash": plan.plan_hash(job.plan),
        "versions": environment.versions(),
        "git": environment.git_state(),
        "environment": environment.machine(host_name()),
        "model": {"arch": job.workload.name, **asdict(profile)},
        "ranks": [asdict(info) for info in infos],
        "link": infos[0].link,
    }


def _workload(settings: Settings) -> Workload:
    if settings.workload is not None:
        return load_workload(
            settings.workload, settings.image_size or default_image_size("", settings.device)
        )
    arch = settings.arch or ""
    return resnet_workload(arch, settings.image_size or default_image_size(arch, settings.device))


def _device_type(wanted: str) -> str:
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise UsageError("--device cuda: torch finds no CUDA device here; use --device cpu or auto")
    return "cuda" if available and wanted != "cpu" else "cpu"


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _launched_ranks() -> dict[str, int]:
    if not is_rank() or STARTED_ENV in os.environ:
        return {}
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    return {"ranks_per_node": per_node, "num_nodes": int(os.environ["WORLD_SIZE"]) // per_node}


def _check_precision(settings: Settings) -> None:
    if settings.device == "cpu" and settings.precision in ("tf32", "fp16"):
        raise UsageError(f"--precision {settings.precision} needs a CUDA device; use fp32 or bf16 on a CPU")
    if settings.device == "cpu" and settings.backend == "nccl":
        raise UsageError("--backend nccl needs CUDA devices; use gloo on a CPU")


__all__ = ["Job", "is_rank", "launch_here", "prepare", "print_plan", "run_rank"]
