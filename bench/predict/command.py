"""What predict does once its command line is read."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ddp_bench.bench import cli
from ddp_bench.bench.case import HALF_HOOKS
from ddp_bench.bench.errors import ExitCode, UsageError
from ddp_bench.bench.layout import BucketCaps
from ddp_bench.bench.predict import output as predict_output
from ddp_bench.bench.predict.source import Source, read_network, read_source
from ddp_bench.bench.results.store import RunData, load_run
from ddp_bench.bench.scaling.calibration import check_same
from ddp_bench.bench.scaling.document import Predictions
from ddp_bench.bench.scaling.measured import most_like
from ddp_bench.bench.scaling.networks import NetworkModel, network
from ddp_bench.bench.scaling.predict import Prediction, predict
from ddp_bench.bench.scaling.scaling_limit import curve
from ddp_bench.bench.scaling.scenario import MeasuredNetwork, Scenario, as_calibrated
from ddp_bench.bench.scaling.validate import HeldOut, drift, held_out, model_error_pct
from ddp_bench.bench.settings import PRECISIONS
from ddp_bench.bench.stats import Interval

T = TypeVar("T")


def predicted(options: argparse.Namespace) -> int:
    """Predict, validate, show and write what `options` ask for; the exit status."""
    scenarios = _scenarios(options)
    source = read_source(options.run, accept=options.accept)
    scenarios = [[as_calibrated(source.calibration, one) for one in group] for group in scenarios]
    _check_precision(options, source)
    validated, changed = (None, None) if options.validate is None else _validated(options, source)
    error = None if validated is None else model_error_pct(validated)
    groups = [[predict(source.calibration, s, model_error_pct=error) for s in g] for g in scenarios]
    _check_any([p for group in groups for p in group])
    fill = options.json or options.out is not None
    curves = [curve(source.calibration, group, fill=fill, model_error_pct=error) for group in groups]
    if options.csv is not None:
        predict_output.write_csv(options.csv, [p for group in groups for p in group])
    document = predict_output.document(source, curves, groups, validated, changed)
    if options.out is not None:
        predict_output.write_json(options.out, predict_output.as_json(document, groups))
    _show(options, document, groups)
    return ExitCode.OK


def _check_any(asked: Sequence[Prediction]) -> None:
    """Raise UsageError, with the reason of the last, where nothing that was asked for may be shown."""
    if asked and all(p.reason for p in asked):
        last = asked[-1]
        which = f" (for {last.scenario.num_devices} devices; the others are refused for such reasons, too)"
        raise UsageError(f"{last.reason}{which if len(asked) > 1 else ''}")


def _show(options: argparse.Namespace, document: Predictions, groups: predict_output.Asked) -> None:
    if options.json:
        print(predict_output.as_json(document, groups), end="")
        return
    if document.validation is not None:
        predict_output.show_validation(document.validation)
    if groups:
        predict_output.show([p for group in groups for p in group])
        print(f"{document.rule}:")
    for text in (*(f"- {line.verdict}" for line in document.lines), *document.notes):
        print(text)
    if options.out is not None:
        print(
            f"Wrote {options.out}; to draw it: "
            + cli.command("report", str(options.run), "--predictions", str(options.out))
        )


def _check_precision(options: argparse.Namespace, source: Source) -> None:
    if options.precision is None:
        return
    asked, measured = cli.choice(PRECISIONS)(options.precision), source.calibration.identity.precision
    if asked != measured:
        raise UsageError(
            f"{options.run} was measured in {measured}, not {asked}; measure it with --precision {asked}"
        )


def _scenarios(options: argparse.Namespace) -> list[list[Scenario]]:
    """Parse what is asked for, in groups that differ in devices alone."""
    if options.gpus is None and options.validate is None:
        raise UsageError("nothing to predict; give --gpus 8,64 or --validate")
    if options.gpus is None:
        return []
    intra = None if options.intra is None else network(options.intra, level="intra")
    return [
        [
            Scenario(
                num_devices=n,
                network=joined if isinstance(joined, NetworkModel) else None,
                measured=joined if isinstance(joined, MeasuredNetwork) else None,
                intra=intra,
                gpus_per_node=_whole(options, "gpus_per_node"),
                nics_per_node=_whole(options, "nics_per_node"),
                bucket_cap_mb=cap,
                batch_per_device=_whole(options, "batch_size"),
                scaling="" if options.scaling is None else cli.choice(("weak", "strong"))(options.scaling),
                comm_hook=cli.choice(("none", *HALF_HOOKS))(options.comm_hook),
                accumulate=_parsed(options, "accumulate", cli.positive_int),
            )
            for n in _parsed(options, "gpus", cli.csv(cli.positive_int))
        ]
        for joined in _networks(options.network)
        for cap in _parsed(options, "bucket_cap_mb", cli.csv(BucketCaps.parse))
    ]


def _networks(text: str | None) -> list[NetworkModel | MeasuredNetwork | None]:
    """Read several networks by comma, unless a file or folder has that name."""
    if text is None:
        return [None]
    names = [text] if Path(text).exists() else text.split(",")
    return [read_network(name) for name in dict.fromkeys(names)]


def _whole(options: argparse.Namespace, name: str) -> int | None:
    return None if getattr(options, name) is None else _parsed(options, name, cli.positive_int)


def _parsed(options: argparse.Namespace, name: str, parse: Callable[[str], T]) -> T:
    return cli.named(name, parse, getattr(options, name))


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
            # Another rate is what a prediction is for; everything else has to agree.
            link = network(f"link:{found.link}")
            found = replace(found, link=calibrated.link)
        check_same(calibrated, found, accept=accept)
    return link
