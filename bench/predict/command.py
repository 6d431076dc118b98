"""The work of predict once its command line is read."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..common import values
from ..common.errors import ExitCode, UsageError
from ..page import terminal
from ..plan.buckets import bucket_caps
from ..plan.case import HALF_HOOKS
from ..plan.settings import Settings
from ..results.store import RunData, load_run
from . import output
from .calibration import Calibration, Identity, check_same, is_watched, load_calibration
from .from_rate import from_rate
from .from_watch import calibrate_watched
from .networks import MeasuredNetwork, NetworkModel, network
from .prediction import Scenario, as_calibrated, predict
from .runs import HeldOut, error_sizes, held_out, most_like

OF_RATE = ("arch", "workload", "image_size", "without_ddp")
"""Options that say what trains at the rate of `--throughput`."""


def positive(text: str) -> float:
    """A number above 0. Raises UsageError for another text."""
    if not re.fullmatch(r"[0-9]{1,15}(\.[0-9]{1,9})?", text) or not float(text):
        raise UsageError(f"{text!r} is not a number above 0")
    return float(text)


PARSED: dict[str, Callable[[str], Any]] = {
    "throughput": positive,
    "scaling": values.choice(("weak", "strong")),
    "comm_hook": values.choice(("none", *HALF_HOOKS)),
    "gpus": values.csv(values.positive_int),
    "bucket_cap_mb": values.csv(bucket_caps),
    **dict.fromkeys(
        ("image_size", "batch_size", "accumulate", "gpus_per_node", "nics_per_node"), values.positive_int
    ),
}
"""Options that are more than a text, and what makes a value of it."""


def predicted(options: argparse.Namespace) -> int:
    """Predict, validate, show and write what `options` ask for; the exit status."""
    for name, parse in PARSED.items():
        if (given := getattr(options, name)) is not None:
            setattr(options, name, values.named(name, parse, given))
    asked, calibration = _scenarios(options), _calibration(options)
    validated = _validated(options, calibration) if options.validate is not None else []
    scenarios = [as_calibrated(calibration, one) for one in asked]
    error = max(error_sizes(validated), default=None)
    predictions = [predict(calibration, one, model_error_pct=error) for one in scenarios]
    found = output.Predictions(
        identity=calibration.identity,
        notes=output.notes(calibration, scenarios, predictions, validated=bool(validated)),
        predictions=tuple(predictions),
        validation=tuple(validated),
    )
    if options.json:
        print(found.to_json())
    else:
        terminal.show(found.page())
    return ExitCode.OK


def _calibration(options: argparse.Namespace) -> Calibration:
    """Read the calibration of RUN, or make one of the rate that is given instead."""
    if options.throughput is None:
        if options.run is None:
            raise UsageError("nothing to predict from; name the folder of a run, or give --throughput")
        given = [name for name in OF_RATE if getattr(options, name)]
        if given:
            raise UsageError(
                f"--{given[0].replace('_', '-')} belongs to --throughput; {options.run} has its own"
            )
        if not is_watched(options.run):
            return load_calibration(options.run)
        if options.batch_size is not None:
            raise UsageError(
                f"{options.run} is a watched training, whose batch is not known; leave --batch-size out"
            )
        return calibrate_watched(options.run)
    if options.run is not None or options.validate is not None:
        raise UsageError("--throughput stands instead of a run, and validates none; leave RUN out")
    batch = options.batch_size
    if batch is None or (options.arch is None) == (options.workload is None):
        raise UsageError(
            "--throughput RATE takes what trains so fast: --batch-size, and --arch or --workload"
        )
    from ...models.profile import gradients_backwards  # torch takes seconds
    from ...models.registry import workload_of

    trained = {name: getattr(options, name) for name in ("arch", "workload", "image_size")}
    workload = workload_of(Settings(**trained, device="cuda"))
    identity = Identity(
        arch=workload.name,
        image_size=workload.image_size,
        batch_per_device=batch,
        precision="",
        device_type="cuda",
        device_name="GPU",
        torch="",
        host="",
        unit=workload.unit,
        units_per_sample=workload.units_per_sample,
    )
    return from_rate(
        identity,
        gradients_backwards(workload),
        per_second=options.throughput,
        with_ddp=not options.without_ddp,
    )


def _scenarios(options: argparse.Namespace) -> list[Scenario]:
    """Parse what is asked for; nothing where only errors are."""
    if options.gpus is None and options.validate is None:
        raise UsageError("nothing to predict; give --gpus 8,64 or --validate")
    if options.gpus is None:
        return []
    networks = [None] if options.network is None else map(_network, options.network.split(","))
    intra = None if options.intra is None else network(options.intra, level="intra")
    return [
        Scenario(
            num_devices=num_devices,
            network=joined,
            intra=intra,
            gpus_per_node=options.gpus_per_node,
            nics_per_node=options.nics_per_node,
            bucket_cap_mb=cap,
            batch_size=options.batch_size,
            scaling=options.scaling or "",
            comm_hook=options.comm_hook,
            accumulate=options.accumulate,
        )
        for joined in networks
        for cap in options.bucket_cap_mb
        for num_devices in options.gpus
    ]


def _network(name: str) -> NetworkModel | MeasuredNetwork:
    """Find a network: by name, or in the folder of a calibrated run."""
    path = Path(name)
    if os.path.isdir(name):  # noqa: PTH112 - Path's raises where a name is too long
        return MeasuredNetwork(f"run {path.resolve().name}", load_calibration(path).allreduce)
    return network(name)


def _validated(options: argparse.Namespace, calibration: Calibration) -> list[HeldOut]:
    """Predict the held-out cases. Raises UsageError where there are none."""
    folders = options.validate or [options.run]
    found: list[HeldOut] = []
    for folder in folders:
        run = load_run(folder)
        if run.manifest.watched is not None:
            raise UsageError(f"{folder} is a watched training, whose batch is not known; validate with runs")
        own = folder.resolve() == options.run.resolve()
        link = None if own else _checked_network(calibration.identity, run, accept=options.accept)
        found += held_out(calibration, run, fitted=calibration.fitted if own else "", network=link)
    if not found:
        raise UsageError(
            f"{', '.join(map(str, folders))}: no measured DDP case besides the one fitted to; "
            "measure more caps or counts"
        )
    return found


def _checked_network(calibrated: Identity, run: RunData, *, accept: bool) -> NetworkModel | None:
    """Find what joins the hosts of `run`; None where it is what was calibrated.

    Raises UsageError where anything else differs, unless `accept`.
    """
    found = most_like(run, calibrated)
    if found is None:
        return None
    # Another rate is what a prediction is for; everything else has to agree.
    check_same(calibrated, replace(found, link=found.link and calibrated.link), accept=accept)
    if found.link in (None, calibrated.link):
        return None
    return network(f"link:{found.link}")
