"""Say where the time of your own training goes, and which line to change first.

After -- put your usual training command. Training results stay bit-identical to a run without ddp-bench.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path

from ..common.cli import Parser, format_command, make_main, print_message
from ..common.errors import UsageError
from ..common.process import get_host_name
from ..common.values import parse_positive_int, parse_whole_number
from . import STEPS

OUT = (
    "new folder for the results (default: results/<time>-<host>-watch); for several hosts one that all see: "
    "type the command on each"
)


def make_parser() -> Parser:
    """Make the command line's parser."""
    made = Parser(
        "watch",
        __doc__,
        usage="%(prog)s [options] -- COMMAND ...",
        common=("out", "steps", "stop", "bucket_cap_mb", "quiet"),
        examples=(
            ("-- torchrun --nproc-per-node 2 train.py", "your training, as it is"),
            ("--steps 100 --stop -- python train.py", "end after 100 steps"),
            (
                "--out watched -- torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint "
                "node0:29500 train.py",
                "",
            ),
        ),
        exit_codes="the command's; 128 + N where signal N ended it; 0 with --stop; 2 for a wrong command "
        "line. docs/watch.md says how it works, and what it cannot see.",
    )
    add = made.add_argument
    add("--out", metavar="DIR", help=OUT)
    add("--steps", metavar="N", default=str(STEPS), help="steps to watch (default %(default)s)")
    add("--stop", action="store_true", help="end the command after these steps, with exit code 0")
    add(
        "--no-probes",
        action="store_true",
        help="never hold gradients back; do not measure exposed communication",
    )
    add(
        "--bucket-cap-mb",
        metavar="LIST",
        default="",
        help="compare bucket caps after these steps, such as default,1,25,100 (MiB), in about as many steps "
        "again, and at least 48 for each cap; for a shorter training add --steps 100. On more than 2 ranks "
        "gradients may then differ by rounding",
    )
    add(
        "--seed",
        metavar="N",
        default="0",
        help="seed to choose the steps that hold gradients back (default 0)",
    )
    add("--quiet", action="store_true", help="print nothing on stderr")
    return made


@make_main("watch")
def main(argv: list[str]) -> int:
    """Run the command and return its exit code: that of the user's command."""
    dashes = argv.index("--") if "--" in argv else len(argv)
    made = make_parser()
    if dashes == len(argv):
        made.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = made.parse_args([*argv[:dashes]])
    words = [*argv[dashes + 1 :]] or getattr(options, "words", [])
    is_rank = "RANK" in os.environ and bool(words) and (words[0] == "-m" or words[0].endswith(".py"))
    if not words or (dashes == len(argv) and not is_rank):
        example = f"{format_command('watch')} -- torchrun --nproc-per-node 2 train.py"
        raise UsageError(f"name the command of your training after --, as in {example}")
    if is_rank and (options.out is None or options.stop):
        raise UsageError("within a launcher's ranks give --out DIR, which all ranks can write, and no --stop")
    # What reads and writes results takes seconds to import.
    from ..machine.load import compute_loads, read_load
    from ..results.run_folder import check_claimable, name_default_folder
    from . import launch

    folder = Path(options.out) if options.out else name_default_folder(host=get_host_name(), name="watch")
    if not is_rank and not launch.is_joined(folder):
        check_claimable(folder)
    config = launch.make_config(
        folder,
        parse_positive_int(options.steps),
        probes=not options.no_probes,
        seed=parse_whole_number(options.seed),
        bucket_cap_mb=options.bucket_cap_mb,
    )
    if config["race"] and not options.quiet and os.environ.get("RANK", "0") == "0":
        print_message(config["race"]["note"])
    before = None if is_rank else read_load()
    if is_rank:
        code = launch.run_here(words, config)
    else:
        code = launch.run(words, config, stop=options.stop, quiet=options.quiet)
    ours = launch.list_ranks(config)
    if not ours:
        print_message(explain_unreached(words))
    elif 0 in ours:
        code = launch.report(folder, ours, code, options.quiet, words, compute_loads([before], [read_load()]))
    elif not is_rank and not options.quiet:
        print_message(
            f"the watch on rank 0's host writes the report, with ranks of this host if both share {folder}"
        )
    return code


def explain_unreached(words: Sequence[str]) -> str:
    """Say that no process was watched, with the likely cause."""
    if any(re.fullmatch(r"-[a-zA-Z]*[EI][a-zA-Z]*", word) for word in words):
        why = "Python's option -E or -I keeps it from reading PYTHONPATH: leave it out"
    else:
        why = (
            "it ended before its first step, or runs elsewhere (in a container, over ssh) or with -E or -I. "
            "Call ddp_bench.watch() in the script instead"
        )
    return (
        f"no training was seen: no process of the command took a step with torch that could be watched; {why}"
    )
