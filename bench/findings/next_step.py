"""Answers what to run next: a complete command, to be pasted, and what it is good for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..common.cli import NextStep, format_command
from ..common.numbers import format_interval, format_rough_duration, format_short
from ..common.text import begin_sentence, escape_controls
from ..machine.load import describe_busy_cores
from ..machine.manifest import Manifest
from ..plan.case_settings import DDP_DEFAULTS, MODE_DEFAULTS
from ..plan.settings import format_value
from ..results.case_result import CaseResult
from ..results.columns import UNUSED_PARAMETERS
from ..results.commands import write_command, write_resume_command
from ..results.comparisons import find_default
from ..results.store import RunData
from ..stats.fit import MIN_ROUNDS
from .answers import label_variants, select_headline
from .cautions import Caution
from .communication import (
    COMMUNICATION_SAVINGS,
    DEFAULTS,
    OWN_WORK,
    StepExplanation,
    estimate_half_bytes,
    format_most,
)
from .notes import find_failed_modes
from .verdicts import MIN_SHARE, Saving, Verdict

MAX_RUN_S = 7200.0
"""A longer run is not proposed: at such noise a quieter machine helps more."""

MIN_RUN_S = 60.0
MIN_EXTRA_ROUNDS = 2 * MIN_ROUNDS
TIME_FACTOR = 1.3
"""Factor on the time that an interval as wide as expected takes: half of them come out wider."""

TUNE_SETTINGS = frozenset(
    {
        *("preset", "modes", "gpus", "bucket_cap_mb", "sweep", "race", "passes", "margin", "name", "out"),
        *("max_time", "rounds", "precision_target", "trace", "allreduce_curve", "calibrate"),
        *(MODE_DEFAULTS.keys() - DDP_DEFAULTS.keys()),
    }
)
"""Settings that a search for buckets decides itself or has no use for; it keeps all others."""

NVLINK_GPUS = ("B200", "H200", "H100", "A100", "V100")
"""GPUs whose servers join them by NVLink; others are taken to be on PCIe."""


def propose_next_step(
    run: RunData,
    verdicts: Sequence[Verdict],
    step: StepExplanation | None = None,
    cautions: Iterable[Caution] = (),
) -> NextStep | None:
    """Propose what would answer what is open, or what comes after it.

    None where nothing was measured, or a mode failed: what is to be mended first is in the reasons. A run
    with failed cases is no baseline. None of a side of an interleaved gate: the gate says what comes next.
    A folder without its log, such as a baseline, is not `resumable`: its command begins anew.
    """
    folder, manifest, cases = run.path, run.manifest, run.results
    failed = set(find_failed_modes(cases, dict.fromkeys(case.mode for case in cases)))
    if any(case.mode in failed and case.reason_code == UNUSED_PARAMETERS for case in cases):
        kept = [mode for mode in manifest.settings.modes if mode == "ddp" or mode not in failed]
        search = write_command(manifest, modes=format_value(kept), find_unused_parameters="on", out=None)
        return NextStep("let DDP search for parameters without gradient", search)
    no_baseline = bool(failed or manifest.interleaved_id)
    forecast = _propose_forecast(run) if manifest.settings.calibrate and not no_baseline else None
    if forecast is not None or no_baseline or not verdicts:
        return forecast or (None if no_baseline else _propose_real_gpus(run))
    is_loaded = any(one.kind == "other load" for one in cautions)
    if any(verdict.is_open for verdict in verdicts):
        more = _propose_more_rounds(run, [one for one in verdicts if one.is_open])
        stop = f"stop the other programs first ({describe_busy_cores(manifest)}); then: "
        return replace(more, why=f"{stop}{more.why}") if is_loaded else more
    if is_loaded:
        return NextStep("reduce the background load first, then measure again", format_command("doctor"))
    is_baseline = not any(case.has_failed for case in cases) and folder.suffix != ".zip"
    less = _propose_less_communication(manifest, cases, verdicts, step)
    less = less or _propose_compiling(manifest, cases)
    if less or not is_baseline:
        return less
    place = folder if folder.name.strip(".") else folder / "run"  # the folder may be called . or ..
    save = format_command("export", str(folder), "--format", "zip", "--out", f"{place}.zip")
    return NextStep("save this run as a baseline, to compare later runs with", escape_controls(save))


def _propose_forecast(run: RunData) -> NextStep | None:
    """Forecast more GPUs from a calibration of one."""
    ok = [case for case in run.results if case.is_ok and case.mode == "ddp" and case.device_type == "cuda"]
    if not ok or any(case.num_devices > 1 for case in ok):
        return None
    kinds = () if "PCIE" in ok[0].device_name.upper() else NVLINK_GPUS
    joined = next((f"nvlink-{name.lower()}" for name in kinds if name in ok[0].device_name), "pcie-4")
    ask = format_command("predict", str(run.path), "--gpus", "2,4,8", "--intra", joined)
    return NextStep("forecast how it scales on GPUs like this one", escape_controls(ask))


def _propose_real_gpus(run: RunData) -> NextStep | None:
    """Measure on GPUs that ranks do not share; None where a case has its own."""
    ok = [case for case in run.results if case.is_ok and case.num_devices > 1]
    if not ok or not all(case.shares_gpu for case in ok):
        return None
    most = max(case.num_devices for case in ok)
    again = write_command(run.manifest, share_gpus=None, out=None)
    return NextStep(f"measure speed on a machine with {most} GPUs", again)


def _propose_compiling(manifest: Manifest, cases: Sequence[CaseResult]) -> NextStep | None:
    """Try torch.compile where DDP on one GPU costs little; None where it was compiled already."""
    ddp = find_default(select_headline(cases))
    if ddp is None or ddp.num_devices > 1 or ddp.device_type != "cuda" or ddp.speedup is None:
        return None
    cost = max(1 - ddp.speedup.estimate, 0.0)
    if cost >= MIN_SHARE or set(manifest.settings.axes.get("compile", ())) - {"off"}:
        return None
    why = f"Nothing about DDP to save ({cost:.0%} of a step). For the step itself try torch.compile."
    return NextStep(why, write_command(manifest, compile="off,on", out=None))


def _propose_less_communication(
    manifest: Manifest, cases: Sequence[CaseResult], verdicts: Iterable[Verdict], step: StepExplanation | None
) -> NextStep | None:
    """Expose less communication: by other buckets, or by fewer bytes where no cap helps."""
    savings = step.savings if step else ()
    saving = next((one for one in savings if one.what in COMMUNICATION_SAVINGS), None)
    own_work = next((one for one in savings if one.what == OWN_WORK), None)
    label, group = label_variants(cases)[0]
    exposing = [case for case in select_headline(group) if case.mode == "ddp" and case.exposed_comm_ms]
    shares = (
        c.exposed_comm_ms.estimate / c.step_ms.estimate for c in exposing if c.exposed_comm_ms and c.step_ms
    )
    ddp, axes = find_default(exposing), manifest.settings.axes
    if ddp is None:
        return None
    # One variant is measured; where a run compared several, the first: the smallest batch, eager.
    varied = {"compile": axes.get("compile", ()), "batch_size": manifest.settings.batch_size or ()}
    first = {"gpus": f"{ddp.num_devices}"}
    first |= {name: format_value(values[0]) for name, values in varied.items() if len(values) > 1}
    if saving is None or min(shares, default=0.0) < MIN_SHARE:
        return _propose_larger_batch(manifest, ddp, own_work, first)
    if not any(one.no_cap_helps and one.scope == label for one in verdicts):
        if all(case.num_buckets == 1 for case in exposing):  # which have no better cap
            return _propose_larger_batch(manifest, ddp, saving, first)
        search = write_command(manifest, "tune", **{**dict.fromkeys(TUNE_SETTINGS), **first})
        most = format_most(ddp.exposed_comm_ms or saving.ms)
        best = next((format_interval(one.ms, "ms") for one in savings if one.what == DEFAULTS), "")
        known = f"the best measured setting saves {best}" if best else "how much is not known yet"
        why = f"search for better bucket caps, which save {most} of each step ({known})"
        return NextStep(why, search)
    if set(axes["comm_hook"]) != {"none"}:
        return _propose_larger_batch(manifest, ddp, saving, first)
    gain = estimate_half_bytes(ddp, saving.ms)
    halved = {"bucket_cap_mb": format_value(axes["bucket_cap_mb"][0]), "comm_hook": "none,bf16", "out": None}
    why = (
        f"No bucket cap helps. 16-bit gradients halve the bytes, which saves {format_most(gain)} of each "
        "step. They change the training: check the loss."
    )
    return NextStep(why, write_command(manifest, **first, modes="ddp", **halved))


def _propose_larger_batch(
    manifest: Manifest, ddp: CaseResult, saving: Saving | None, first: dict[str, str]
) -> NextStep | None:
    """Try larger batches against a cost of each step; None without one, or where several were measured."""
    size = int(ddp.batch or 0)
    if saving is None or not size or "batch_size" in first:
        return None
    why = f"{begin_sentence(saving.what)} takes {format_interval(saving.ms, 'ms')} of each step. "
    why += "Larger batches take fewer steps, but change the training: check the loss."
    cap = format_value(manifest.settings.get_first("bucket_cap_mb"))
    tried = {**first, "batch_size": format_value([size, 2 * size, 4 * size]), "bucket_cap_mb": cap}
    return NextStep(why, write_command(manifest, **tried, modes="ddp", out=None))


def _propose_more_rounds(run: RunData, verdicts: Sequence[Verdict]) -> NextStep:
    """Go on for as long as the widest of what is open needs."""
    manifest = run.manifest
    spent_s = manifest.timing.measuring_s or MIN_RUN_S
    apart = f"{format_short(100 * manifest.margin)}%"
    widest = max(one.width_ratio for one in verdicts)
    rounds = max(case.num_rounds for case in run.results)
    if math.isinf(widest):
        compared = (one for verdict in verdicts for one in verdict.comparisons)
        few = min((one.num_rounds for one in compared if math.isinf(one.half_width)), default=rounds)
        factor, why = max(MIN_EXTRA_ROUNDS / max(few, 1), 1.1), f"{MIN_EXTRA_ROUNDS} rounds give intervals"
    else:
        factor = max(TIME_FACTOR * widest**2, 1.1)
        if factor * spent_s > MAX_RUN_S:
            why = f"telling {apart} apart would take {format_rough_duration(factor * spent_s)} at this noise"
            return NextStep(f"{why}; reduce the background load first", format_command("doctor"))
        why = (
            f"about {format_rough_duration((factor - 1) * spent_s)} more would decide what is "
            f"open, at a margin of {apart}"
        )
    if manifest.settings.rounds is not None:
        more = {"rounds": f"{math.ceil(rounds * factor)}"}
    else:
        more = {"max_time": f"{math.ceil(max(factor * spent_s, MIN_RUN_S) / 60)}m"}
    if run.resumable:
        return NextStep(why, write_resume_command(manifest, run.path, **more))
    return NextStep(why, write_command(manifest, **more, out=None))
