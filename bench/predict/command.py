"""What predict does once its command line is read."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .. import cli
from ..buckets import BucketCaps
from ..case import HALF_HOOKS
from ..errors import ExitCode, UsageError
from ..findings.wording import link_name
from ..results.disk import MOST_JSON_BYTES, read_text
from ..results.store import CALIBRATION, RunData, load_run, write_output
from ..settings import PRECISIONS
from ..stats.interval import Interval
from . import output
from .calibration import Identity, check_same, load_calibration
from .from_pass import Source, read_source
from .from_rate import from_rate
from .held_out import HeldOut, drift, held_out, model_error_pct
from .networks import (
    MeasuredNetwork,
    NetworkModel,
    named_networks,
    network,
    parse_nccl_log,
)
from .prediction import Prediction
from .scaling_limit import predicted_line
from .scenario import Scenario
from .tables import allreduce_of_run, most_like

OF_RATE = ("arch", "workload", "image_size", "without_ddp")
"""Options that say what trains at the rate of `--throughput`."""


def positive(text: str) -> float:
    """A number above 0. Raises UsageError for another text."""
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text) or not float(text):
        raise UsageError(f"{text!r} is not a number above 0")
    return float(text)


def predicted(options: argparse.Namespace) -> int:
    """Predict, validate, show and write what `options` ask for; the exit status."""
    counts, scenarios = _scenarios(options)
    source = _source(options)
    calibration = source.calibration
    _check_precision(options, calibration.identity.precision)
    validated, changed = (None, None) if options.validate is None else _validated(options, source)
    error = None if validated is None else model_error_pct(validated)
    fill = options.json or options.out is not None
    lines = [predicted_line(calibration, one, counts, fill=fill, model_error_pct=error) for one in scenarios]
    asked = [p for line in lines for n in counts for p in line.predictions if p.num_devices == n]
    if asked and all(p.reason for p in asked):
        last = asked[-1]
        which = f" (for {last.num_devices} devices; the others are refused for such reasons, too)"
        raise UsageError(f"{last.reason}{which if len(asked) > 1 else ''}")
    found = output.Predictions(
        identity=calibration.identity,
        fitted=source.fitted,
        notes=output.notes(calibration, scenarios, asked, validated, changed),
        lines=tuple(lines),
        validation=None if validated is None else tuple(validated),
    )
    if options.csv is not None:
        output.write_csv(options.csv, asked)
    if options.out is not None:
        text = found.to_json()
        write_output(options.out, lambda part: part.write_text(text, encoding="utf-8"), option="--out")
    if options.json:
        print(found.to_json(), end="")
    else:
        _show(options, found, asked)
    return ExitCode.OK


def _show(options: argparse.Namespace, found: output.Predictions, asked: Sequence[Prediction]) -> None:
    if found.validation is not None:
        output.show_validation(found.validation)
    if asked:
        output.show(asked)
        print(f"{found.rule}:")
    for text in (*(f"- {line.verdict}" for line in found.lines), *found.notes):
        print(text)
    if options.out is not None and options.run is not None:
        drawn = cli.command("report", str(options.run), "--predictions", str(options.out))
        print(f"Wrote {options.out}; to draw it: {drawn}")


def _source(options: argparse.Namespace) -> Source:
    """Read the calibration of RUN, or make one of the rate that is given instead."""
    if options.throughput is None:
        if options.run is None:
            raise UsageError("nothing to predict from; name the folder of a run, or give --throughput")
        given = [name for name in OF_RATE if getattr(options, name)]
        if given:
            raise UsageError(
                f"--{given[0].replace('_', '-')} belongs to --throughput; {options.run} has its own"
            )
        return read_source(options.run, accept=options.accept)
    if options.run is not None or options.validate is not None:
        raise UsageError("--throughput stands instead of a run, and validates none; leave RUN out")
    if options.batch_size is None or (options.arch is None) == (options.workload is None):
        raise UsageError(
            "--throughput RATE takes what trains so fast: --batch-size, and --arch or --workload"
        )
    from ...models.profile import gradients_backwards  # torch takes seconds
    from ...models.registry import default_image_size, load_workload, resnet_workload

    size = _whole(options, "image_size") or default_image_size(options.arch or "", "cuda")
    workload = resnet_workload(options.arch, size) if options.arch else load_workload(options.workload, size)
    identity = Identity(
        arch=workload.name,
        image_size=workload.image_size,
        batch_per_device=_whole(options, "batch_size") or 1,
        precision=options.precision or "fp32",
        device_type="cuda",
        device_name="GPU",
        torch="",
        host="",
        unit=workload.unit,
        units_per_sample=workload.units_per_sample,
    )
    rate = cli.named("throughput", positive, options.throughput)
    return Source(
        from_rate(identity, gradients_backwards(workload), per_second=rate, with_ddp=not options.without_ddp)
    )


def _check_precision(options: argparse.Namespace, measured: str) -> None:
    if options.precision is None:
        return
    asked = cli.choice(PRECISIONS)(options.precision)
    if asked != measured:
        raise UsageError(
            f"{options.run} was measured in {measured}, not {asked}; measure it with --precision {asked}"
        )


def _scenarios(options: argparse.Namespace) -> tuple[tuple[int, ...], list[Scenario]]:
    """Parse what is asked for: the numbers of devices, and each scenario, with the largest of them."""
    if options.gpus is None and options.validate is None:
        raise UsageError("nothing to predict; give --gpus 8,64 or --validate")
    if options.gpus is None:
        if options.csv is not None:
            raise UsageError("--csv is a table of predictions; say for how many devices: --gpus 8,64")
        return (), []
    counts = cli.named("gpus", cli.csv(cli.positive_int), options.gpus)
    intra = [None] if options.intra is None else named_networks(options.intra, level="intra")
    if len(intra) > 1:
        raise UsageError(f"--intra {options.intra} has several networks; name one, as {options.intra}:NAME")
    return counts, [
        Scenario(
            num_devices=max(counts),
            network=joined,
            intra=intra[0],
            gpus_per_node=_whole(options, "gpus_per_node"),
            nics_per_node=_whole(options, "nics_per_node"),
            bucket_cap_mb=cap,
            batch_per_device=_whole(options, "batch_size"),
            scaling="" if options.scaling is None else cli.choice(("weak", "strong"))(options.scaling),
            comm_hook=cli.choice(("none", *HALF_HOOKS))(options.comm_hook),
            accumulate=cli.named("accumulate", cli.positive_int, options.accumulate),
        )
        for joined in _networks(options.network)
        for cap in cli.named("bucket_cap_mb", cli.csv(BucketCaps.parse), options.bucket_cap_mb)
    ]


def _networks(text: str | None) -> list[NetworkModel | MeasuredNetwork | None]:
    """Read several networks by comma, unless a file or folder has that name."""
    if text is None:
        return [None]
    names = [text] if _exists(text) else dict.fromkeys(text.split(","))
    return [one for name in names for one in _networks_of(name)]


def _networks_of(name: str) -> list[NetworkModel | MeasuredNetwork]:
    """Find networks: by name, in a TOML file, in the JSON log of nccl-tests, or in the folder of a run."""
    path = Path(name)
    if path.suffix == ".toml" or not _exists(name):
        return [*named_networks(name)]
    if not path.is_dir():
        log = parse_nccl_log(read_text(path, most_bytes=MOST_JSON_BYTES, follow=True), source=name)
        return [MeasuredNetwork(f"nccl-tests log of {log.num_ranks} ranks", name, (log,))]
    calibrated = os.path.lexists(path / CALIBRATION)
    known = load_calibration(path).allreduce if calibrated else (allreduce_of_run(load_run(path)),)
    allreduce = tuple(times for times in known if times.num_ranks > 1)
    if not allreduce:
        raise UsageError(f"--network {path} has no all-reduce of 2 ranks or more; name another run")
    return [MeasuredNetwork(f"run {path.resolve().name}", f"the all-reduces of {path}", allreduce)]


def _exists(name: str) -> bool:
    return os.path.exists(name)  # noqa: PTH110 - Path's raises where a name is too long


def _whole(options: argparse.Namespace, name: str) -> int | None:
    text = getattr(options, name)
    return None if text is None else cli.named(name, cli.positive_int, text)


def _validated(options: argparse.Namespace, source: Source) -> tuple[list[HeldOut], Interval | None]:
    """Predict the held-out cases; also the largest change of the machine since its calibration."""
    found: list[HeldOut] = []
    changes: list[Interval] = []
    folders = options.validate or [options.run]
    for folder in folders:
        run = load_run(folder)
        if folder.resolve() == options.run.resolve():
            found += held_out(source.calibration, run, fitted=source.fitted)
            continue
        link = _checked_network(source, run, accept=options.accept)
        found += held_out(source.calibration, run, fitted=None, network=link)
        changed = drift(source.calibration, run)
        changes += [changed] if changed is not None and changed.excludes(1.0) else []
    if not found:
        raise UsageError(
            f"{', '.join(map(str, folders))}: no measured DDP case besides the one fitted to; "
            "measure more caps or counts"
        )
    return found, max(changes, key=lambda change: abs(math.log(change.estimate)), default=None)


def _checked_network(source: Source, run: RunData, *, accept: bool) -> NetworkModel | None:
    """Find what joins the hosts of `run`; None where it is what was calibrated.

    Raises UsageError where anything else differs, unless `accept`.
    """
    calibrated, link = source.calibration.identity, None
    if found := most_like(run, calibrated):
        if found.link != calibrated.link and found.link is not None:
            if "+" in found.link:
                raise UsageError(
                    f"{run.path} was measured over {link_name(found.link)}, and what a delay costs is not "
                    "predicted; leave the run out"
                )
            # Another rate is what a prediction is for; everything else has to agree.
            link = network(f"link:{found.link}")
            found = replace(found, link=calibrated.link)
        check_same(calibrated, found, accept=accept)
    return link
