"""Write a run for benchmark trackers, or as one file to send."""

from __future__ import annotations

from pathlib import Path

from ..common import cli, values
from ..common.errors import ExitCode, UsageError

FORMATS = "pytest-benchmark", "zip"


def make_parser() -> cli.Parser:
    """Make the command line."""
    made = cli.Parser(
        "export",
        __doc__,
        examples=(
            ("RUN --format zip --out run.zip", "to send it"),
            ("RUN --format pytest-benchmark", "JSON on standard output"),
            ("RUN --format pytest-benchmark --out bench.json", "the same as a file"),
        ),
        exit_codes="0 written, 2 for a wrong command line or a folder that is no run.",
        details="pytest-benchmark: its JSON, in seconds per step, which github-action-benchmark and Bencher "
        "read, too. zip: without names of hosts, folders and users; commands read it as a run. What was not "
        "measured is left out. docs/export.md has more.",
    )
    made.add_argument("run", type=Path, metavar="RUN", help="results folder or archive of a run")
    made.add_argument("--format", required=True, metavar="NAME", help=f"one of {', '.join(FORMATS)}")
    made.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write to this file instead of to standard output (zip needs it)",
    )
    return made


@cli.make_main("export")
def main(argv: list[str]) -> int:
    """Entry point of the command; the exit status."""
    options = make_parser().parse_args(argv)
    name = values.parse_option("format", values.make_choice_parser(FORMATS), options.format)
    # pandas takes a second
    from ..results import archive
    from ..results.run_folder import write_output
    from ..results.store import load_run
    from .pytest_benchmark import write_pytest_benchmark

    run = load_run(options.run)
    if name == "zip":
        if options.out is None or options.out.suffix != archive.SUFFIX:
            raise UsageError(f"--format zip needs --out FILE{archive.SUFFIX}, by which an archive is known")
        content = archive.encode_archive(archive.publish_members(run))
        write_output(options.out, lambda part: part.write_bytes(content), option="--out")
        return ExitCode.OK
    text = write_pytest_benchmark(run)
    if options.out is None:
        print(text)
    else:
        write_output(options.out, lambda part: part.write_text(f"{text}\n", encoding="utf-8"), option="--out")
    return ExitCode.OK
