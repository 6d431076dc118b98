"""Find the bucket cap with which DDP trains a model fastest on this machine, and prove it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_bench.bench.cli import Parser, command, guarded, to_json
from ddp_bench.bench.cluster.process import is_first, is_rank, ranks_environment
from ddp_bench.bench.errors import UsageError
from ddp_bench.bench.resolve import resolve
from ddp_bench.bench.run.workers import Workers, running_workers
from ddp_bench.bench.settings import options_of

if TYPE_CHECKING:
    from ddp_bench.bench.tune.request import Request
    from ddp_bench.bench.worker.messages import Prepared

NOT_SETTINGS = ("calibration", "accept", "dry_run", "quiet", "json")
DECIDED = (
    *("modes", "bucket_cap_mb", "sweep", "trace", "allreduce_curve", "calibrate", "passes", "sustain"),
    "name",
)
"""Settings of bench.run that tuning decides by itself."""

NEAREST = {
    "what to tune": ("gpus", "arch", "workload", "batch_size", "image_size", "precision"),
    "how long to measure": ("max_time", "rounds", "precision_target"),
    "what to compare beside bucket caps": ("gradient_as_bucket_view", "comm_hook", "accumulate"),
    "output": ("out",),
}
"""Settings by the heading that --help gives them; the others come last."""

HELP = {
    "gpus": "ranks to tune for (default: all devices)",
    "max_time": "time to measure in, both stages together (default 150s)",
    "rounds": "exactly N rounds in each stage",
    "precision_target": "stop a stage when each throughput is known to ± this (calibration 2%%, proof 0.5%%)",
    "gradient_as_bucket_view": "compare these as well (default off alone)",
    "comm_hook": "compare these as well: none, fp16, bf16 (default none alone)",
    "accumulate": "compare these as well (default 1 alone)",
    "out": "folder for tune.json, calibration/ and proof/ (default: results/<time>-<host>-tune)",
}


def parser() -> Parser:
    """The command line: settings of bench.run, and how to tune."""
    made = Parser(
        prog=command("tune"),
        description=__doc__,
        epilog="Works under torchrun, srun and bench.lab like bench.run.",
    )
    settings = {setting.name: setting for setting in options_of() if setting.name not in DECIDED}

    def group(title: str, names: Iterable[str]) -> Any:
        made_group = made.add_argument_group(title)
        for setting in map(settings.pop, list(names)):
            made_group.add_argument(
                f"--{setting.name.replace('_', '-')}",
                metavar="N" if setting.name == "gpus" else setting.metadata["metavar"],
                help=HELP.get(setting.name, setting.metadata["help"]),
                default=argparse.SUPPRESS,
            )
        return made_group.add_argument

    *_, add = [group(title, names) for title, names in NEAREST.items()]
    add("--dry-run", action="store_true", help="print what would be done; measure nothing")
    add("--quiet", action="store_true", help="no progress, only the answer")
    add("--json", action="store_true", help="the answer as JSON on stdout")
    add = group("calibration", ())
    add("--calibration", type=Path, metavar="DIR", help="take that of this run instead of measuring one")
    add("--accept", action="store_true", help="though it is of another machine, torch or workload")
    group("further settings, as in bench.run", settings)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command, and of every process that torchrun or srun starts; the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    first = is_first()
    return guarded("tune", lambda: _main(arguments, first=first), silent=None if first else UsageError)


def _main(arguments: list[str], *, first: bool) -> int:
    options = vars(parser().parse_args(arguments))
    how = {name: options.pop(name) for name in NOT_SETTINGS}
    os.environ.update(ranks_environment(os.environ))
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    settings = resolve(options)
    if not first:
        from ddp_bench.bench.worker.main import join  # torch takes seconds

        join()
    with running_workers(settings) as workers:
        # Pandas and scipy take a second, in which the workers import torch.
        from ddp_bench.bench.predict.source import load_calibration
        from ddp_bench.bench.results.store import check_claimable
        from ddp_bench.bench.run.conductor import prepare
        from ddp_bench.bench.tune.output import as_json, show
        from ddp_bench.bench.tune.request import make_request
        from ddp_bench.bench.tune.stages import Tuning

        request, job = make_request(
            options, partial(prepare, workers), reuse=how["calibration"], accept=how["accept"]
        )
        if how["dry_run"]:
            return _show_plan(request, job, workers)
        if not is_rank():
            if request.reuse is not None:
                load_calibration(request.reuse)  # a folder that cannot be used is refused before the stages
            if request.out is not None:
                check_claimable(request.out)
        tuning = Tuning(request, job, workers, quiet=how["quiet"])
        answer = tuning.run()
        if isinstance(answer, int):
            return answer
        workers.end()
        if how["json"]:
            print(to_json({"results": str(tuning.out), **as_json(answer)}))
        else:
            show(answer, tuning.out, device_type=job.machine.device_type)
    return 0


def _show_plan(request: Request, job: Prepared, workers: Workers) -> int:
    from ddp_bench.bench.console import format_s
    from ddp_bench.bench.run.conductor import show_plan

    if request.reuse is None:
        print("Stage 1, calibration: ready times, all-reduce curve, slow-downs, copies, residual")
        show_plan(workers, job)
    else:
        print(f"Stage 1, calibration: taken from {request.reuse}")
    print(
        "Stage 2, proof: the default and up to 3 uniform caps that promise most by the calibration, with one "
        "or two per further value of another axis, in turns; one after another the slowest is dropped, until "
        "the default and two are left"
    )
    limit = "as long as the rounds take" if "rounds" in request.options else format_s(request.max_time_s)
    print(f"Expected time: at most {limit} of measuring in both stages together, plus start-up and reports.")
    return 0
