"""The work of predict once its command line is read."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..common import values
from ..common.errors import ExitCode, UsageError
from ..findings.cautions import LARGE_DRIFT, find_cautions
from ..page import terminal
from ..plan.buckets import parse_bucket_caps
from ..plan.case import HALF_HOOKS
from ..plan.settings import Settings
from ..results.store import RunData, load_run
from . import output
from .calibration import Calibration, Identity, check_same, is_watched, load_calibration
from .from_rate import calibrate_from_rate
from .from_watch import calibrate_watched
from .networks import MeasuredNetwork, NetworkModel, find_network
from .prediction import Scenario, fill_scenario, predict
from .runs import HeldOut, find_closest_identity, list_error_sizes, predict_held_out

RATE_OPTIONS = ("arch", "workload", "image_size", "without_ddp")
"""Options that say what trains at the rate of `--throughput`."""


def parse_positive(text: str) -> float:
    """Parse a number above 0. Raises UsageError for another text."""
    if not re.fullmatch(r"[0-9]{1,15}(\.[0-9]{1,9})?", text) or not float(text):
        raise UsageError(f"{text!r} is not a number above 0")
    return float(text)


OPTION_PARSERS: dict[str, Callable[[str], Any]] = {
    "throughput": parse_positive,
    "scaling": values.make_choice_parser(("weak", "strong")),
    "comm_hook": values.make_choice_parser(("none", *HALF_HOOKS)),
    "gpus": values.make_csv_parser(values.parse_positive_int),
    "bucket_cap_mb": values.make_csv_parser(parse_bucket_caps),
    **dict.fromkeys(
        ("image_size", "batch_size", "accumulate", "gpus_per_node", "nics_per_node"),
        values.parse_positive_int,
    ),
}
"""Options that are more than a text, and what makes a value of it."""


def run_prediction(options: argparse.Namespace) -> int:
    """Predict, validate, show and write what `options` ask for; the exit status."""
    for name, parse in OPTION_PARSERS.items():
        if (given := getattr(options, name)) is not None:
            setattr(options, name, values.parse_option(name, parse, given))
    asked, calibration = _parse_scenarios(options), _read_calibration(options)
    validated = _predict_held_out(options, calibration) if options.validate is not None else []
    scenarios = [fill_scenario(calibration, one) for one in asked]
    error = max(list_error_sizes(validated), default=None)
    predictions = [predict(calibration, one, model_error_pct=error) for one in scenarios]
    found = output.Predictions(
        identity=calibration.identity,
        notes=output.list_notes(calibration, scenarios, predictions, validated=bool(validated)),
        predictions=tuple(predictions),
        validation=tuple(validated),
    )
    if options.json:
        print(found.to_json())
    else:
        terminal.print_page(found.make_page())
    return ExitCode.OK


def _add_cautions(calibration: Calibration, folder: Path) -> Calibration:
    """Note a drift of the calibrated run; without tables of it nothing is known."""
    with contextlib.suppress(UsageError):
        found = find_cautions(load_run(folder))
        notes = (f"{one.short}; calibrate again" for one in found if one.kind == LARGE_DRIFT)
        return replace(calibration, notes=(*calibration.notes, *notes))
    return calibration


def _read_calibration(options: argparse.Namespace) -> Calibration:
    """Read the calibration of RUN, or make one of the rate that is given instead."""
    if options.throughput is None:
        if options.run is None:
            raise UsageError("nothing to predict from; name the folder of a run, or give --throughput")
        given = [name for name in RATE_OPTIONS if getattr(options, name)]
        if given:
            raise UsageError(
                f"--{given[0].replace('_', '-')} belongs to --throughput; {options.run} has its own"
            )
        if not is_watched(options.run):
            return _add_cautions(load_calibration(options.run), options.run)
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
    from ...models.profile import list_gradients  # torch takes seconds
    from ...models.registry import make_workload

    trained = {name: getattr(options, name) for name in ("arch", "workload", "image_size")}
    workload = make_workload(Settings(**trained, device="cuda"))
    identity = Identity(
        arch=workload.name,
        image_size=workload.image_size,
        batch_per_device=batch,
        device_type="cuda",
        device_name="GPU",
        unit=workload.unit,
        units_per_sample=workload.units_per_sample,
    )
    return calibrate_from_rate(
        identity,
        list_gradients(workload),
        per_second=options.throughput,
        with_ddp=not options.without_ddp,
    )


def _parse_scenarios(options: argparse.Namespace) -> list[Scenario]:
    """Parse what is asked for; nothing where only errors are."""
    if options.gpus is None and options.validate is None:
        raise UsageError("nothing to predict; give --gpus 8,64 or --validate")
    if options.gpus is None:
        return []
    networks = [None] if options.network is None else map(_find_network, options.network.split(","))
    intra = None if options.intra is None else find_network(options.intra, level="intra")
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


def _find_network(name: str) -> NetworkModel | MeasuredNetwork:
    """Find a network: by name, or in the folder of a calibrated run."""
    path = Path(name)
    if os.path.isdir(name):  # noqa: PTH112 - Path's raises where a name is too long
        return MeasuredNetwork(f"run {path.resolve().name}", load_calibration(path).allreduce)
    return find_network(name)


def _predict_held_out(options: argparse.Namespace, calibration: Calibration) -> list[HeldOut]:
    """Predict the held-out cases. Raises UsageError where there are none."""
    folders = options.validate or [options.run]
    found: list[HeldOut] = []
    for folder in folders:
        run = load_run(folder)
        if run.manifest.watched is not None:
            raise UsageError(f"{folder} is a watched training, whose batch is not known; validate with runs")
        own = folder.resolve() == options.run.resolve()
        link = None if own else _find_run_network(calibration.identity, run, accept=options.accept)
        found += predict_held_out(calibration, run, fitted=calibration.fitted if own else "", network=link)
    if not found:
        raise UsageError(
            f"{', '.join(map(str, folders))}: no measured DDP case besides the one fitted to; "
            "measure more caps or counts"
        )
    return found


def _find_run_network(calibrated: Identity, run: RunData, *, accept: bool) -> NetworkModel | None:
    """Find what joins the hosts of `run`; None where it is what was calibrated.

    Raises UsageError where anything else differs, unless `accept`.
    """
    found = find_closest_identity(run, calibrated)
    if found is None:
        return None
    # Another rate is what a prediction is for; everything else has to agree.
    check_same(calibrated, replace(found, link=found.link and calibrated.link), accept=accept)
    if found.link in (None, calibrated.link):
        return None
    return find_network(f"link:{found.link}")
