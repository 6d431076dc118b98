"""Which code a side of a comparison would measure: its run is prepared in a process of its own, not begun.

As a script: `OUT TOP ARGUMENTS` writes to the file OUT what a run with these arguments imports of its
workload, and every module that is imported from below TOP.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_bench.bench.cli import guarded
from ddp_bench.bench.errors import ExitCode
from ddp_bench.bench.provenance import imported_below, workload_code
from ddp_bench.bench.run.main import settings_of


@dataclass(frozen=True)
class Seen:
    """What a side imports: `code` as in a manifest, `modules` with their files below a folder."""

    code: Mapping[str, Any]
    file: Path
    modules: Mapping[str, Path]


def read(place: Path) -> Seen:
    """Read what a probe has written."""
    told = json.loads(place.read_text(encoding="utf-8"))
    modules = {name: Path(file) for name, file in told["modules"].items()}
    return Seen(told["code"], Path(told["file"]), modules)


def main(given: Sequence[str]) -> int:
    """Prepare a run and write what it has imported; the exit code."""
    out, top, *arguments = given
    return guarded("run", lambda: _main(Path(out), Path(top), arguments))


def _main(out: Path, top: Path, arguments: Sequence[str]) -> int:
    settings = settings_of(arguments)
    from ddp_bench.bench.run import job  # torch: a typing mistake is answered before that

    job.prepare(settings)
    spec = settings.workload or ""
    told = {
        "code": workload_code(spec),
        "file": str(getattr(sys.modules[spec.partition(":")[0]], "__file__", None)),
        "modules": {name: str(file) for name, file in imported_below(top).items()},
    }
    out.write_text(json.dumps(told), encoding="utf-8")
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
