"""The DDP paper's experiments beside this run's: another machine, so only shapes compare. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bench.findings.wording import link_name
from report import conditions
from report.caps import bucket_caps
from report.fields import Field, interval, table, value, whole
from report.model import Column, Section, Table
from report.numbers import finite, mib, plain, plural
from report.paper_figures import accumulation, allreduce_curve, devices, overlap, size_label
from report.select import headline_count, text

if TYPE_CHECKING:
    import pandas as pd

    from bench.results.store import RunData
    from report.select import Workload

_SOURCE = (
    "Source: Li et al., “PyTorch Distributed: Experiences on Accelerating Data Parallel Training”, "
    "PVLDB 13(12), 2020."
)
_NOTE = (
    "The paper's experiments, repeated at the size of this machine. Its figures are quoted beside ours from "
    "another machine, another model and an older PyTorch: compare directions and shapes, not numbers."
)
_CAPS_BESIDE = "The best bucket for ResNet-50 on 16 GPUs with NCCL was 10 to 25 MB."
_CURVE: tuple[Field, ...] = (
    whole("Devices", "num_devices"),
    (Column("Backend"), lambda row: text(row["backend"])),
    (Column("Message", "number"), lambda row: size_label(finite(row["bytes"]))),
    interval("Time", "time_ms", "ms"),
    value("Bus bandwidth", "busbw_gb_per_s", "GB/s"),
    whole("Repetitions", "num_samples"),
)
_CURVE_NOTE = (
    "One all-reduce by itself, longest rank. Bus bandwidth is bytes / time x 2 (n - 1) / n, in 10⁹ bytes/s."
)


def section(run: RunData, workload: Workload, *, key: str) -> Section | None:
    """The section, for runs that vary one setting at a time as the paper does; None for others."""
    settings = conditions.section(run.manifest, "settings")
    if settings.get("sweep") != "star" and run.manifest.get("preset") != "ddp-paper":
        return None
    caps = bucket_caps(workload, key=key)
    figures = (
        overlap(workload, run.blocks, key=key),
        None if caps is None else replace(caps, beside=_CAPS_BESIDE),
        allreduce_curve(run.allreduce, workload.device, key=key),
        devices(workload, key=key),
        accumulation(workload, key=key),
    )
    curve = table("All-reduce by itself", _CURVE_NOTE, run.allreduce, (), _CURVE)
    return Section(
        title="The DDP paper beside this run",
        notes=(_NOTE, _SOURCE),
        figures=tuple(figure for figure in figures if figure is not None),
        tables=tuple(made for made in (_differences(run, workload), curve) if made is not None),
    )


def _differences(run: RunData, workload: Workload) -> Table:
    cases = workload.cases
    ours = {
        "Hardware": _hardware(workload),
        "Model": " at ".join(filter(None, (_once(cases, "arch"), _once(cases, "image_size", " px")))),
        "Gradients per step": mib(finite(conditions.section(run.manifest, "model").get("gradient_bytes"))),
        "Backend": _once(cases[cases["mode"] == "ddp"], "backend"),
        "PyTorch": plain(conditions.section(run.manifest, "versions").get("torch")),
    }
    theirs = {
        "Hardware": "32 GPUs for the breakdown, 16 for bucket sizes, up to 256 for scaling",
        "Model": "ResNet-50 and BERT; the figures quoted here are ResNet-50's",
        "Gradients per step": mib(4 * 25_557_032),
        "Backend": "nccl and gloo",
        "PyTorch": "1.5",
    }
    rows = tuple((name, theirs[name], ours[name]) for name in theirs)
    columns = (Column("Condition"), Column("The paper"), Column("This run"))
    return Table("What differs from the paper", "Why numbers do not compare.", columns, rows)


def _hardware(workload: Workload) -> str:
    cases = workload.cases
    count, hosts = headline_count(cases), finite(cases["num_nodes"].max())
    link = ", ".join(dict.fromkeys(link_name(text(cell)) for cell in cases["link"] if text(cell)))
    parts = (
        plural(count or 1, workload.device),
        f"on {plural(hosts, 'host')}" if hosts is not None and hosts > 1 else "",
        f"({_once(cases, 'device_name')})" if workload.device == "GPU" else "",
        f"over a link of {link}" if link else "",
    )
    return " ".join(part for part in parts if part)


def _once(cases: pd.DataFrame, name: str, unit: str = "") -> str:
    return ", ".join(dict.fromkeys(f"{text(cell)}{unit}" for cell in cases[name] if text(cell)))
