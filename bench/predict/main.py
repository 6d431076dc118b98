"""Scaling on hardware you do not have: step time, throughput and exposed communication, with intervals."""

from __future__ import annotations

from pathlib import Path

from ..common import cli
from .networks import NETWORKS


def make_parser() -> cli.Parser:
    """Make the command line."""
    made = cli.Parser(
        "predict",
        __doc__,
        common=("throughput", "gpus", "network", "intra", "validate"),
        examples=(
            ("RUN --gpus 16,64 --network ib-400g", "from a run"),
            ("RUN --validate", "its own measured cases"),
            ("--throughput 319 --arch resnet50 --batch-size 32 --gpus 2 --network ib-100g", ""),
        ),
        exit_codes="0 predicted, 2 for a wrong command line, or a run that nothing can be predicted from.",
        details=f"Networks: {', '.join(NETWORKS)}, link:RATE such as link:350mbit, the folder of a "
        "calibrated run whose all-reduces to take, or a network of your own, FILE.toml:NAME.",
    )
    made.add_argument(
        "run",
        type=Path,
        nargs="?",
        metavar="RUN",
        help="folder of a run with --calibrate, or of a watched training on GPUs; or --throughput",
    )

    add = made.add_argument_group("instead of a run, a known rate").add_argument
    add(
        "--throughput",
        metavar="RATE",
        help="of one GPU, per second: images, or units of the workload",
    )
    add(
        "--arch",
        metavar="NAME",
        help=f"model that it trains, as in {cli.get_message_prefix('run')}; with --batch-size",
    )
    add("--workload", metavar="NAME", help="your own model instead of --arch: package.module:name")
    add("--image-size", metavar="N", help="image height and width, pixels (224)")
    add("--without-ddp", action="store_true", help="the rate is that of the plain model, not of DDP")

    add = made.add_argument_group("devices and links").add_argument
    add("--gpus", metavar="N,N", help="devices to predict, up to 4096")
    add("--network", metavar="NAME,NAME", help="link between the nodes (--help-all); default as in RUN")
    add("--intra", metavar="NAME", help="link between the GPUs of a node, such as nvlink-h100")
    add("--gpus-per-node", metavar="N", help="default 1, with --intra 8")
    add("--nics-per-node", metavar="N", help="network ports that a node's GPUs share; default one per GPU")

    add = made.add_argument_group("how they train").add_argument
    add(
        "--bucket-cap-mb",
        default="default",
        metavar="CAPS",
        help=f"as in {cli.get_message_prefix('run')}; several by comma",
    )
    add("--batch-size", metavar="N", help="per device (weak) or global (strong); default as measured")
    add("--scaling", metavar="NAME", help="weak or strong; default as measured")
    add("--comm-hook", default="none", metavar="NAME", help="none, fp16 or bf16: half the bytes on the wire")
    add("--accumulate", default="1", metavar="K", help="micro-batches per optimizer step (default 1)")

    add = made.add_argument_group("how far to trust it").add_argument
    add(
        "--validate",
        nargs="*",
        type=Path,
        metavar="RUN",
        help="predict measured cases of this run, or of the runs named, that no model was fitted to; print "
        "the errors, and widen the intervals by the largest",
    )
    add("--accept", action="store_true", help="also accept a run of another machine, torch or workload")

    add = made.add_argument_group("output").add_argument
    drawn = cli.format_command("report", "RUN", "--predictions", "p.json")
    add("--json", action="store_true", help=f"everything as JSON, which `{drawn}` draws")
    return made


@cli.make_main("predict")
def main(argv: list[str]) -> int:
    """Entry point of the command; the exit status."""
    options = make_parser().parse_args(argv)
    from .command import run_prediction  # pandas and scipy take a second

    return run_prediction(options)
