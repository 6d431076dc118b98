"""The command to run next: complete, to be pasted, and what it buys."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from ..axes import STEP_DEFAULTS
from ..cli import command, quoted
from ..manifest import Manifest
from ..results.case_columns import EXPOSED_COMM, UNUSED_PARAMETERS
from ..results.comparisons import OPEN, Comparison
from ..results.recorder import resume_command
from ..settings import Settings, as_options, options_of
from ..stats.one_run import MIN_ROUNDS
from ..text import visible
from .answers import by_compile_label, headline
from .notes import failed_modes
from .numbers import about, short
from .verdicts import CommunicationVerdict, SettingsVerdict, Verdict

MOST_S = 7200.0
"""A longer run is not proposed: at such noise a quieter machine helps more."""

LEAST_S = 60.0
ENOUGH_ROUNDS = 2 * MIN_ROUNDS
ENOUGH_CAPS = 3
SAFETY = 1.3
"""Of the time that an interval as wide as expected takes: half of them come out wider."""

WORTH_TUNING = 0.05
"""Share of the step that communication adds from which on tuning its buckets is proposed."""

CARRIED = (
    *("arch", "workload", "batch_size", "image_size", "precision", *STEP_DEFAULTS, "data", "data_workers"),
    "prefetch",
    *("scaling", "seed", "device", "find_unused_parameters"),
)
"""Settings that say what trains; a next command about the same training repeats them.

Without a search for unused parameters some models do not train under DDP.
"""

NVLINK_GPUS = ("B200", "H200", "H100", "A100", "V100")
"""GPUs whose servers join them by NVLink; others are taken to be on PCIe."""

_ALL_BUT_WHERE = {setting.name for setting in options_of()} - {"out"}


@dataclass(frozen=True)
class NextStep:
    """What to run next."""

    why: str
    command: str


def next_step(
    folder: Path,
    manifest: Manifest,
    cases: pd.DataFrame,
    comparisons: Sequence[Comparison],
    verdicts: Sequence[Verdict],
    *,
    resumable: bool = True,
) -> NextStep | None:
    """Say what would answer what is open, or what comes after it.

    None where nothing was measured, or a mode failed: what is to be mended first is in the reasons. A run
    with failed cases is no baseline. None of a side of an interleaved gate: the gate says what comes next.
    A folder without its journal, such as a baseline, is not `resumable`: its command begins anew.
    """
    settings = manifest.settings
    failed = cases[cases["mode"].isin(failed_modes(cases, cases["mode"].unique()))]
    if (failed["reason_code"] == UNUSED_PARAMETERS).any():
        searching = _with_unused_parameters(settings, set(failed["mode"]) - {"ddp"})
        return replace(searching, command=in_lab(manifest, searching.command))
    no_baseline = bool(not failed.empty or manifest.interleaved_id)
    forecast = None if no_baseline else _forecast(folder, settings, cases)
    if forecast is not None or no_baseline or not verdicts:
        return forecast
    if any(verdict.is_open for verdict in verdicts):
        begin_anew = command("run", *as_options(settings, _ALL_BUT_WHERE - {"rounds", "max_time"}))
        begin = in_lab(manifest, resume_command(folder) if resumable else visible(begin_anew))
        return _more(begin, manifest, cases, comparisons, [one for one in verdicts if one.is_open])
    label, group = by_compile_label(cases)[0]
    here = headline(group)
    ddp = here[(here["mode"] == "ddp") & here[EXPOSED_COMM].notna()]
    num_devices = int(here["num_devices"].iloc[0])
    own = [verdict for verdict in verdicts if verdict.of == label]
    if (step := _less_exposed(settings, ddp, num_devices, own)) is not None:
        return replace(step, command=in_lab(manifest, step.command))
    if not cases["status"].isin(["ok", "skipped"]).all():
        return None
    save = command("gate", "--save-baseline", str(folder))
    return NextStep("keep this run, to hold later ones against it", visible(save))


def _forecast(folder: Path, settings: Settings, cases: pd.DataFrame) -> NextStep | None:
    """Forecast more GPUs from a calibration of one."""
    ok = cases[(cases["mode"] == "ddp") & (cases["status"] == "ok") & (cases["device_type"] == "cuda")]
    if not settings.calibrate or ok.empty or ok["num_devices"].max() > 1:
        return None
    gpu = str(ok["device_name"].iloc[0])
    kinds = () if "PCIE" in gpu.upper() else NVLINK_GPUS
    joined = next((f"nvlink-{name.lower()}" for name in kinds if name in gpu), "pcie-4")
    ask = command("predict", str(folder), "--gpus", "2,4,8", "--intra", joined)
    return NextStep("forecast how it scales on GPUs like this one", visible(ask))


def in_lab(manifest: Manifest, whole: str) -> str:
    """A command of bench.run or bench.tune as it has to be typed: a lab's within that lab."""
    if not manifest.link:
        return whole
    rate, _, delay = manifest.link.partition("+")
    ranks = Counter(rank.host for rank in manifest.ranks)
    each = max(ranks.values(), default=1)
    more = [*(["--delay", delay] if delay else []), *(["--ranks-per-host", str(each)] if each > 1 else [])]
    lab = command("lab", "--hosts", str(max(len(ranks), 2)), "--rate", rate, *more)
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
    settings: Settings, ddp: pd.DataFrame, num_devices: int, verdicts: Sequence[Verdict]
) -> NextStep | None:
    """Expose less communication: by other buckets, or by fewer bytes where no cap helps."""
    exposed = (ddp[EXPOSED_COMM] / ddp["step_ms"]).min()
    if not exposed >= WORTH_TUNING:
        return None
    # One way to compile is measured; where a run compared several, eager, which is the first.
    first = replace(settings, compile=settings.compile and settings.compile[:1])
    if _no_cap_helps(verdicts):
        if set(settings.comm_hook) != {"none"}:
            return None
        caps, hooks = settings.bucket_cap_mb[:1], ("none", "bf16")
        halved = replace(first, modes=("ddp",), gpus=(num_devices,), bucket_cap_mb=caps, comm_hook=hooks)
        halving = command("run", *as_options(halved, _ALL_BUT_WHERE))
        cost = next((one.cost for one in verdicts if isinstance(one, CommunicationVerdict)), None)
        added = f" of what communication adds, {cost}" if cost else ""
        why = f"no cap gains more than the margin; gradients in 16 bits may spare a half{added}"
        return NextStep(why, visible(halving))
    several = ddp["num_buckets"].isna() | (ddp["num_buckets"] > 1)  # a single bucket has no better cap
    if not several.any():
        return None
    search = command("tune", "--gpus", str(num_devices), *as_options(first, CARRIED))
    why = f"search for better buckets, the best so far leave {100 * exposed:.0f}% of the step exposed"
    return NextStep(why, visible(search))


def _no_cap_helps(verdicts: Sequence[Verdict]) -> bool:
    """Whether so many caps were tried, and decided, that more of them would bring nothing."""
    caps = (one for one in verdicts if isinstance(one, SettingsVerdict) and one.noun == "cap")
    return any(one.best is None and not one.is_open and one.num_known >= ENOUGH_CAPS for one in caps)


def _with_unused_parameters(settings: Settings, failed: set[str]) -> NextStep:
    """Measure DDP as it can train here, without the modes that `failed` for another reason."""
    kept = tuple(mode for mode in settings.modes if mode not in failed)
    wanted = replace(settings, modes=kept, find_unused_parameters=(True,))
    searching = command("run", *as_options(wanted, _ALL_BUT_WHERE))
    return NextStep("let DDP search for parameters without gradient", visible(searching))


def _more(
    begin: str,
    manifest: Manifest,
    cases: pd.DataFrame,
    comparisons: Sequence[Comparison],
    verdicts: Sequence[Verdict],
) -> NextStep:
    """Go on, with the command that `begin`s so, for as long as the widest of what is open needs."""
    spent_s = manifest.timing.measuring_s or LEAST_S
    margin = manifest.margin
    rounds = int(cases["num_rounds"].fillna(0).max() or 0)
    unsettled = [one for one in comparisons if one.answer in OPEN]
    wanted = math.log1p(margin) / 2
    excess = [one.half_width / wanted for one in unsettled]
    excess += [one.excess for one in verdicts if one.excess is not None]
    widest = max(excess, default=_width_of_speedups(cases) / wanted)
    if math.isinf(widest):
        fewest = min((one.num_rounds for one in unsettled if math.isinf(one.half_width)), default=rounds)
        factor, why = max(ENOUGH_ROUNDS / max(fewest, 1), 1.1), f"{ENOUGH_ROUNDS} rounds give intervals"
    else:
        factor = max(SAFETY * widest**2, 1.1)
        decided = " and ".join(dict.fromkeys(one.decides for one in verdicts))
        why = f"{about((factor - 1) * spent_s)} more decides {decided}, at a margin of {short(100 * margin)}%"
        if factor * spent_s > MOST_S:
            why = f"telling {short(100 * margin)}% apart would take {about(factor * spent_s)} at this noise"
            return NextStep(f"{why}; quiet the machine first", command("doctor"))
    if manifest.settings.rounds is not None:
        more = f"--rounds {math.ceil(rounds * factor)}"
    else:
        more = f"--max-time {math.ceil(max(factor * spent_s, LEAST_S) / 60)}m"
    return NextStep(why, f"{begin} {more}")


def _width_of_speedups(cases: pd.DataFrame) -> float:
    """Half the widest interval of a speed-up's logarithm; infinite where one is unknown."""
    here = headline(cases)
    ends = zip(here["speedup_low"].astype(float), here["speedup_high"].astype(float), strict=True)
    widths = [math.log(high / low) / 2 for low, high in ends]
    return max((math.inf if math.isnan(width) else width for width in widths), default=math.inf)


NOT_INTERLEAVED = "Not interleaved: a change may be the machine's."
"""Stands before every comparison of two separate runs."""

UNKNOWN_REF = "REF"

LEFT_OUT = {"out", "name", "race", "trace", "calibrate", "allreduce_curve"}
"""Settings that are not repeated: the gate decides on folders, and compares nothing of the others."""


def took_turns(runs: Sequence[Manifest]) -> bool:
    """Whether these manifests are of runs that `bench.gate --interleave` measured together, and of no more.

    A run that was gone on with later has rounds beyond those in turns.
    """
    ids = {manifest.interleaved_id for manifest in runs}
    return len(ids) == 1 and None not in ids and not any(manifest.resumed for manifest in runs)


def interleave_command(baseline: Manifest, candidate: Manifest) -> str:
    """Write the command that measures what two manifests tell of in turns, as the candidate was measured.

    `UNKNOWN_REF` stands for the baseline's commit, of the repository that holds what trains, where its
    manifest does not know it. Empty of a lab's runs: no gate measures in a lab.
    """
    if candidate.link:
        return ""
    arguments = as_options(candidate.settings, _ALL_BUT_WHERE - LEFT_OUT)
    code = baseline.workload if candidate.settings.workload else baseline.git
    reference = code.commit[:12] if code and code.commit else UNKNOWN_REF
    return visible(command("gate", "--interleave", reference, "--", *arguments))
