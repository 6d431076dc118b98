"""The command to run next: complete, to be pasted, and what it buys."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..common.cli import command, quoted
from ..common.numbers import about, short, with_interval
from ..common.text import visible
from ..machine.manifest import Manifest
from ..plan.case_settings import DDP_DEFAULTS, MODE_DEFAULTS
from ..plan.resolve import as_options, with_device_defaults
from ..plan.settings import Settings, options_of
from ..results.case_result import CaseResult
from ..results.columns import UNUSED_PARAMETERS
from ..results.comparisons import EQUAL
from ..results.recorder import resume_command
from ..stats.fit import MIN_ROUNDS
from .answers import by_compile_label, headline
from .notes import failed_modes
from .verdicts import Verdict

MOST_S = 7200.0
"""A longer run is not proposed: at such noise a quieter machine helps more."""

LEAST_S = 60.0
ENOUGH_ROUNDS = 2 * MIN_ROUNDS
ENOUGH_CAPS = 3
SAFETY = 1.3
"""Of the time that an interval as wide as expected takes: half of them come out wider."""

WORTH_TUNING = 0.05
"""Share of the step that communication adds from which on tuning its buckets is proposed."""

DECIDED_BY_TUNE = frozenset(
    {
        *("modes", "gpus", "bucket_cap_mb", "sweep", "race", "passes", "margin", "name", "out"),
        *("max_time", "rounds", "precision_target", "trace", "allreduce_curve", "calibrate"),
        *(MODE_DEFAULTS.keys() - DDP_DEFAULTS.keys()),
    }
)
"""Settings that a search for buckets decides itself or has no use for; it keeps all others."""

_DECIDED_ALIKE: dict[str, Any] = {
    "backend": "auto",
    **dict.fromkeys(("image_size", "margin", "max_time", "steps", "calibrate")),
}
"""Settings that a run decides alike on all machines with its kind of devices, where they are not given."""

_DECIDED_ON_CPU: dict[str, Any] = {"arch": None, "batch_size": None}
"""And on CPU cores."""

NVLINK_GPUS = ("B200", "H200", "H100", "A100", "V100")
"""GPUs whose servers join them by NVLink; others are taken to be on PCIe."""

ALL_BUT_WHERE = {setting.name for setting in options_of()} - {"out"}


@dataclass(frozen=True)
class NextStep:
    """What to run next."""

    why: str
    command: str


def next_step(
    folder: Path,
    manifest: Manifest,
    cases: Sequence[CaseResult],
    verdicts: Sequence[Verdict],
    *,
    resumable: bool = True,
) -> NextStep | None:
    """Say what would answer what is open, or what comes after it.

    None where nothing was measured, or a mode failed: what is to be mended first is in the reasons. A run
    with failed cases is no baseline. None of a side of an interleaved gate: the gate says what comes next.
    A folder without its journal, such as a baseline, is not `resumable`: its command begins anew.
    """
    given = manifest.settings
    failed = set(failed_modes(cases, dict.fromkeys(case.mode for case in cases)))
    if any(case.mode in failed and case.reason_code == UNUSED_PARAMETERS for case in cases):
        kept = tuple(mode for mode in given.modes if mode == "ddp" or mode not in failed)
        wanted = replace(given, modes=kept).sweeping(find_unused_parameters=(True,))
        return NextStep("let DDP search for parameters without gradient", _run(manifest, wanted))
    no_baseline = bool(failed or manifest.interleaved_id)
    forecast = _forecast(folder, cases) if given.calibrate and not no_baseline else None
    if forecast is not None or no_baseline or not verdicts:
        return forecast
    if any(verdict.is_open for verdict in verdicts):
        begin = in_lab(manifest, resume_command(folder))
        if not resumable:
            begin = _run(manifest, given, ALL_BUT_WHERE - {"rounds", "max_time"})
        return _more(begin, manifest, cases, [one for one in verdicts if one.is_open])
    label, group = by_compile_label(cases)[0]
    own = [verdict for verdict in verdicts if verdict.of == label]
    if (step := _less_exposed(manifest, headline(group), own)) is not None:
        return step
    if any(case.has_failed for case in cases) or folder.suffix == ".zip":
        return None
    place = folder if folder.name.strip(".") else folder / "run"  # the folder may be called . or ..
    save = command("export", str(folder), "--format", "zip", "--out", f"{place}.zip")
    return NextStep("keep this run, to hold later ones against it", visible(save))


def _run(manifest: Manifest, settings: Settings, names: Collection[str] = ALL_BUT_WHERE) -> str:
    """The command that runs so, in the lab of the run that it follows."""
    return in_lab(manifest, visible(command("run", *_options(manifest, settings, names))))


def _options(manifest: Manifest, settings: Settings, names: Collection[str]) -> list[str]:
    """Those of `names` that are not the default on the machine of a run; a GPU's memory is not known."""
    hosts = (manifest.environment, *manifest.hosts.values())
    is_cpu = settings.device == "cpu" and not any(host.gpus for host in hosts)
    decided = {**_DECIDED_ALIKE, **(_DECIDED_ON_CPU if is_cpu else {})}
    usual = with_device_defaults(
        replace(settings, **decided), device_type="cpu" if is_cpu else "cuda", num_local_devices=1
    )
    same = {name for name in decided if getattr(settings, name) == getattr(usual, name)}
    return as_options(settings, set(names) - same - ({"device"} if is_cpu else set()))


def _forecast(folder: Path, cases: Iterable[CaseResult]) -> NextStep | None:
    """Forecast more GPUs from a calibration of one."""
    ok = [case for case in cases if case.is_ok and case.mode == "ddp" and case.device_type == "cuda"]
    if not ok or any(case.num_devices > 1 for case in ok):
        return None
    kinds = () if "PCIE" in ok[0].device_name.upper() else NVLINK_GPUS
    joined = next((f"nvlink-{name.lower()}" for name in kinds if name in ok[0].device_name), "pcie-4")
    ask = command("predict", str(folder), "--gpus", "2,4,8", "--intra", joined)
    return NextStep("forecast how it scales on GPUs like this one", visible(ask))


def in_lab(manifest: Manifest, whole: str) -> str:
    """A command of bench.run or bench.tune as it has to be typed: a lab's within that lab."""
    if not manifest.link:
        return whole
    ranks = Counter(rank.host for rank in manifest.ranks)
    each = max(ranks.values(), default=1)
    more = ["--ranks-per-host", str(each)] if each > 1 else []
    lab = command("lab", "--hosts", str(max(len(ranks), 2)), "--rate", manifest.link, *more)
    return f"{lab} -- {whole}"


def again(manifest: Manifest) -> str:
    """The command that repeats a run, to be pasted: in its lab, and into a folder of its own."""
    try:
        words = shlex.split(manifest.command or "")
    except ValueError:  # nothing that a shell would take
        return manifest.command or ""
    places = [i for i, word in enumerate(words) if word == "--out"]
    kept = [w for i, w in enumerate(words) if i not in places and i - 1 not in places]
    return in_lab(manifest, " ".join(map(quoted, (w for w in kept if not w.startswith("--out=")))))


def _less_exposed(
    manifest: Manifest, here: Sequence[CaseResult], verdicts: Iterable[Verdict]
) -> NextStep | None:
    """Expose less communication: by other buckets, or by fewer bytes where no cap helps."""
    settings = manifest.settings
    exposing = [case for case in here if case.mode == "ddp" and case.exposed_comm_ms]
    shares = (
        c.exposed_comm_ms.estimate / c.step_ms.estimate for c in exposing if c.exposed_comm_ms and c.step_ms
    )
    if min(shares, default=0.0) < WORTH_TUNING:
        return None
    # One way to compile is measured; where a run compared several, eager, which is the first.
    first = settings.sweeping(compile=settings.axes.get("compile", ("off",))[:1])
    if any(one.noun == "cap" and one.answer == EQUAL and one.num_tried >= ENOUGH_CAPS for one in verdicts):
        if set(settings.axes["comm_hook"]) != {"none"}:
            return None
        of_ddp = replace(first, modes=("ddp",), gpus=(here[0].num_devices,))
        caps = settings.axes["bucket_cap_mb"][:1]
        halved = _run(manifest, of_ddp.sweeping(bucket_cap_mb=caps, comm_hook=("none", "bf16")))
        alone_ms = exposing[0].comm_ms
        gain = f", at most {with_interval(alone_ms.scaled(0.5), 'ms')}" if alone_ms else ""
        return NextStep(f"no cap helps; 16-bit gradients halve the bytes{gain}", halved)
    if all(case.num_buckets == 1 for case in exposing):  # which have no better cap
        return None
    kept = _options(manifest, first, ALL_BUT_WHERE - DECIDED_BY_TUNE)
    search = command("tune", "--gpus", f"{here[0].num_devices}", *kept)
    return NextStep("search for better buckets", in_lab(manifest, search))


def _more(
    begin: str, manifest: Manifest, cases: Sequence[CaseResult], verdicts: Sequence[Verdict]
) -> NextStep:
    """Go on, with the command that `begin`s so, for as long as the widest of what is open needs."""
    spent_s = manifest.timing.measuring_s or LEAST_S
    apart = f"{short(100 * manifest.margin)}%"
    widest = max(one.excess for one in verdicts)
    rounds = max(case.num_rounds for case in cases)
    if math.isinf(widest):
        compared = (one for verdict in verdicts for one in verdict.comparisons)
        few = min((one.num_rounds for one in compared if math.isinf(one.half_width)), default=rounds)
        factor, why = max(ENOUGH_ROUNDS / max(few, 1), 1.1), f"{ENOUGH_ROUNDS} rounds give intervals"
    else:
        factor = max(SAFETY * widest**2, 1.1)
        if factor * spent_s > MOST_S:
            why = f"telling {apart} apart would take {about(factor * spent_s)} at this noise"
            return NextStep(f"{why}; quiet the machine first", command("doctor"))
        why = f"{about((factor - 1) * spent_s)} more decides what is open, at a margin of {apart}"
    if manifest.settings.rounds is not None:
        more = f"--rounds {math.ceil(rounds * factor)}"
    else:
        more = f"--max-time {math.ceil(max(factor * spent_s, LEAST_S) / 60)}m"
    return NextStep(why, f"{begin} {more}")
