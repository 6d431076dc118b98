"""The command to run next: complete, to be pasted, and why."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from bench.conditions import part
from bench.estimate import MIN_ROUNDS
from bench.findings.answers import Verdict, headline
from bench.findings.wording import about
from bench.results.comparisons import Comparison
from bench.results.recorder import resume_command
from bench.settings import as_options
from bench.text import visible

MOST_S = 7200.0
"""A longer run is not proposed: at such noise a quieter machine helps more."""

LEAST_S = 60.0
ENOUGH_ROUNDS = 2 * MIN_ROUNDS
WORTH_TUNING = 0.05
"""Share of the step that communication adds from which on tuning its buckets is proposed."""

CARRIED = (
    *("arch", "workload", "batch_size", "image_size", "precision", "data", "data_workers", "scaling"),
    *("seed", "device"),
)
"""Settings that say what trains; a next command about the same training repeats them."""


@dataclass(frozen=True)
class NextStep:
    """What to run next."""

    why: str
    command: str


def next_step(
    folder: Path,
    manifest: Mapping[str, Any],
    cases: pd.DataFrame,
    comparisons: Sequence[Comparison],
    verdicts: Sequence[Verdict],
) -> NextStep | None:
    """Say what would answer what is open, or what comes after it; None where nothing was measured."""
    if not verdicts:
        return None
    if any(verdict.is_open for verdict in verdicts):
        return _more(folder, manifest, cases, comparisons)
    here = headline(cases)
    ddp = here[(here["mode"] == "ddp") & here["exposed_comm_ms"].notna()]
    num_devices = int(here["num_devices"].iloc[0])
    step_ms = ddp["step_ms"].fillna(ddp["step_ms_p50"])  # schema 1 has the median alone
    if not ddp.empty and (ddp["exposed_comm_ms"] / step_ms).min() >= WORTH_TUNING:
        options = as_options(part(manifest, "settings"), CARRIED)
        command = ["python", "-m", "bench.tune", "--gpus", str(num_devices), *options]
        return NextStep("search for better buckets", visible(shlex.join(command)))
    save = ["python", "-m", "bench.gate", "--save-baseline", str(folder)]
    return NextStep("keep this run, to hold later ones against it", visible(shlex.join(save)))


def _more(
    folder: Path, manifest: Mapping[str, Any], cases: pd.DataFrame, comparisons: Sequence[Comparison]
) -> NextStep:
    """Go on with the run for as long as the widest comparison needs."""
    spent_s = float(part(manifest, "timing").get("measuring_s") or LEAST_S)
    widest = max(comparisons, key=lambda one: one.half_width, default=None)
    rounds = int(cases["num_rounds"].fillna(0).max() or 0)
    if widest is None or math.isinf(widest.half_width):
        factor, why = ENOUGH_ROUNDS / max(rounds, 1), f"{ENOUGH_ROUNDS} rounds give intervals"
        margin = None
    else:
        margin = 100 * widest.margin
        factor = max((widest.half_width / (math.log1p(widest.margin) / 2)) ** 2, 1.1)
        why = ""
    needed_s = factor * spent_s
    if needed_s > MOST_S:
        why = f"telling {margin:g}% apart would take {about(needed_s)} at this noise; quiet the machine first"
        return NextStep(why, "python -m bench.doctor")
    if part(manifest, "settings").get("rounds") is not None:
        more = f"--rounds {math.ceil(rounds * factor)}"
    else:
        more = f"--max-time {math.ceil(max(needed_s, LEAST_S) / 60)}m"
    why = why or f"about {about(needed_s)} would tell {margin:g}% apart here"
    return NextStep(why, f"{resume_command(folder)} {more}")
