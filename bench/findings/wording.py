"""Names cases, their devices and settings, for the terminal and for the page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ..common.numbers import TIMES, format_count, format_integer
from ..common.text import format_list
from ..plan.buckets import parse_bucket_caps, write_cap_code
from ..plan.case import Case
from ..plan.case_settings import STEP_SETTINGS
from ..plan.modes import SPECS
from ..plan.settings import IMAGES
from ..results.case_result import CaseResult
from ..stats.interval import Interval

CPU_STAND_IN = "CPU cores stand in for GPUs: ratios show the mechanism, not the speed of GPUs"
"""Stands beside every number that was measured on CPU cores."""

_EMULATED_DP = "Without GPUs, DP cannot be compared with DDP: its rows are an emulation"

_SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B"}
_LINK = re.compile(r"(?P<rate>[0-9]+(?:\.[0-9]+)?)(?P<unit>[kmg])bit(?:\+(?P<delay>[0-9.]+)(?P<time>\w+))?")
_PER_S = {"k": "kbit/s", "m": "Mbit/s", "g": "Gbit/s"}
_MODEL = re.compile(r"(?P<family>(?:wide_)?resne(?:x)?t)(?P<rest>[0-9].*)")
_FAMILIES = {"resnet": "ResNet", "resnext": "ResNeXt", "wide_resnet": "Wide ResNet"}


MAX_HIDDEN_WIDTH_PCT = 100.0
"""A wider interval holds both that all is hidden and that none is."""


def get_hidden_share(case: CaseResult) -> Interval | None:
    """Return the percent of communication that is hidden; None where it is not known to 50 points."""
    found = case.hidden_pct
    return found if found and found.high - found.low <= MAX_HIDDEN_WIDTH_PCT else None


def name_model(arch: str) -> str:
    """Write a built-in architecture as papers do: `ResNet-18`; another name as it is."""
    found = _MODEL.fullmatch(arch)
    return arch if found is None else f"{_FAMILIES[found['family']]}-{found['rest']}"


def get_unit(cases: Sequence[CaseResult]) -> str:
    """Return what the rates of a run count; its cases all train the same workload."""
    return cases[0].unit if cases else IMAGES


def name_samples(case: CaseResult) -> str:
    """Name the rows of a batch: by the unit where each is one of it, else `samples`."""
    return case.unit if case.units_per_sample == 1 else "samples"


def name_device(device_type: str) -> str:
    """Return `GPU` or `CPU core`."""
    return "CPU core" if device_type == "cpu" else "GPU"


def name_devices(case: CaseResult) -> str:
    """Name the devices of a case: `2 GPUs`, `16 GPUs of 2 hosts`, `4 shared CPU cores`."""
    shared = "shared " if case.oversubscribed else ""
    named = format_count(case.num_devices, f"{shared}{name_device(case.device_type)}")
    return f"{named} of {case.num_nodes:,d} hosts" if case.num_nodes > 1 else named


def describe_stand_ins(cases: Iterable[CaseResult]) -> list[str]:
    """Say what stands in for what in these cases, a sentence each without its full stop."""
    modes = {case.mode for case in cases if case.device_type == "cpu"}
    return [CPU_STAND_IN, *([_EMULATED_DP] if "dp" in modes else [])] if modes else []


def name_mode(case: CaseResult) -> str:
    """Name the mode: `DDP`, `DP`, `DP emulated`, and whether it is not proved."""
    emulated, not_proved = " emulated" * case.is_stand_in, " (not proved)" * bool(case.not_proved)
    return f"{SPECS[case.mode].label}{emulated}{not_proved}"


def format_cap(cap: str) -> str:
    """Write a bucket cap with its unit."""
    return cap if cap in ("", "default") else f"{cap} MiB"


def name_compile_mode(mode: str) -> str:
    """Name cases by their mode of torch.compile: `eager`, `compiled`, `compiled (max-autotune)`."""
    return {"off": "eager", "default": "compiled"}.get(mode, f"compiled ({mode})")


def name_variants(cases: Sequence[CaseResult]) -> list[str]:
    """Name each case by its batch size and mode of torch.compile, where there are several of them."""
    several = len({case.compile for case in cases}) > 1
    parts = ((case.batch_name, name_compile_mode(case.compile) * several) for case in cases)
    return [", ".join(filter(None, of_case)) for of_case in parts]


def name_settings(changed: Mapping[str, str]) -> str:
    """Name settings in a sentence: `cap 1 MiB`; of others as they are typed, `static_graph=True`."""
    caps = {axis: f"cap {format_cap(value)}" for axis, value in changed.items() if axis == "bucket_cap_mb"}
    return ", ".join(caps.get(axis, f"{axis}={value}") for axis, value in changed.items())


def write_ddp_call(changed: Mapping[str, str]) -> str:
    """Write the lines that make DDP so: `model = DDP(model, bucket_cap_mb=25)`."""
    given = [
        write_cap_code(parse_bucket_caps(value)) if axis == "bucket_cap_mb" else f"{axis}={value}"
        for axis, value in changed.items()
        if axis != "optimize_ddp"
    ]
    way = changed.get("optimize_ddp")
    first = f'torch._dynamo.config.optimize_ddp = "{way}"; ' if way else ""
    return f"{first}model = DDP({', '.join(part for part in ('model', *given) if part)})"


def name_case(case: CaseResult) -> str:
    """Name a case in a sentence: `DDP on 2 GPUs with bucket_cap_mb=1`."""
    where, changed = name_case_parts(case)
    return f"{where}{f' with {changed}' if changed else ''}"


def name_case_parts(case: CaseResult) -> tuple[str, str]:
    """Return the two parts of a case's name: `DDP on 2 GPUs`, `bucket_cap_mb=1`; the second may be empty."""
    changed = name_settings(
        ({} if case.compile == "off" else {"compile": case.compile}) | case.list_changed()
    )
    return f"{name_mode(case)} on {name_devices(case)}", ", ".join(filter(None, (case.batch_name, changed)))


def label_settings(case: CaseResult, *, with_cap: bool = True) -> str:
    """Name settings in a figure or a table: the bucket cap if asked for, then what is no default."""
    if case.mode == "pipeline":
        schedule = _SCHEDULES.get(case.pipeline_schedule, case.pipeline_schedule)
        return f"{schedule}, {format_integer(case.micro_batches)} micro-batches"
    changed = case.list_changed()
    changed.pop("bucket_cap_mb", None)
    parts = (
        [f"cap {format_cap(case.get_setting('bucket_cap_mb'))}"] if with_cap and case.mode == "ddp" else []
    )
    for axis, value in changed.items():
        words = axis.replace("_", " ")
        parts.append({"True": words, "False": f"no {words}"}.get(value, f"{words} {value}"))
    return ", ".join(parts)


def label_case(case: CaseResult, *, with_cap: bool = True) -> str:
    """Name a case in a figure or a table: `DDP, 2 GPUs, cap 25 MiB`, and whether the devices are shared."""
    where = format_count(case.num_devices, name_device(case.device_type)) if case.num_devices else ""
    shared = " (shared)" * case.oversubscribed
    parts = (
        name_mode(case),
        f"{where}{shared}",
        case.batch_name,
        label_settings(case, with_cap=with_cap),
    )
    return ", ".join(part for part in parts if part)


def label_planned_case(case: Case, sizes: Sequence[int] = ()) -> str:
    """Name a case of which nothing is measured yet with its batch size if `sizes` are several."""
    name = f"batch {case.batch}" if len(sizes) > 1 else ""
    return label_case(replace(CaseResult.from_row(case.to_row()), batch_name=name))


def label_step(case: CaseResult) -> list[str]:
    """Name the precision of a case's step and what else of it is not PyTorch's default."""
    found = [case.precision]
    for setting in STEP_SETTINGS:
        value, label = case.get_text(setting.name), setting.metadata["label"]
        if value and value != str(setting.default):
            found.append(label if isinstance(setting.default, bool) else f"{label} ({value})")
    return [label for label in found if label]


def name_workload_parts(case: CaseResult, sizes: Sequence[float] = ()) -> list[str]:
    """Name what a case trains, with its batch or `sizes` of several: per device, or in all if strong."""
    where = "in all" if case.scaling == "strong" else "per device"
    batch = format_list([*map(format_integer, sizes or filter(None, [case.batch]))])
    each = f" of {case.units_per_sample:,d} {case.unit}" if case.units_per_sample > 1 else ""
    parts = (
        case.arch,
        f"{case.image_size:.0f} {TIMES} {case.image_size:.0f} px" if case.image_size else "",
        f"{batch} {name_samples(case)}{each} {where}" if batch else "",
        f"{case.scaling} scaling" if case.scaling else "",
        *label_step(case),
    )
    return [part for part in parts if part]


def name_link(link: str) -> str:
    """Write `1 Gbit/s`, `200 Mbit/s with 5 ms of delay`; another text as it is."""
    found = _LINK.fullmatch(link)
    if found is None:
        return link
    delay = f" with {found['delay']} {found['time']} of delay" if found["delay"] else ""
    return f"{found['rate']} {_PER_S[found['unit']]}{delay}"
