"""Says what two runs can tell that were measured one after the other, and the command that tells more."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_bench.bench.cli import command
from ddp_bench.bench.manifest import Manifest
from ddp_bench.bench.settings import as_options, options_of
from ddp_bench.bench.text import visible

NOT_INTERLEAVED = "Not interleaved: a change may be the machine's."
"""Stands before every comparison of two separate runs."""

UNKNOWN_REF = "REF"

LEFT_OUT = {"out", "name", "sustain", "race", "trace", "calibrate", "allreduce_curve"}
"""Settings that are not repeated: the gate decides on folders, and compares nothing of the others."""


def took_turns(runs: Sequence[Manifest]) -> bool:
    """Whether these manifests are of runs that `bench.gate --interleave` measured together, and of no more.

    A run that was gone on with later has rounds beyond those in turns.
    """
    ids = {manifest.interleaved_id for manifest in runs}
    return len(ids) == 1 and None not in ids and not any(manifest.resumed for manifest in runs)


def interleave_command(baseline: Manifest, candidate: Manifest) -> str:
    """Write the command that measures what two manifests tell of in turns, as the candidate was measured.

    `UNKNOWN_REF` stands for the baseline's commit, of the repository that holds what trains, where its
    manifest does not know it.
    """
    names = {setting.name for setting in options_of()} - LEFT_OUT
    arguments = as_options(candidate.settings, names)
    code = baseline.workload if candidate.settings.workload else baseline.git
    reference = code.commit[:12] if code and code.commit else UNKNOWN_REF
    return visible(command("gate", "--interleave", reference, "--", *arguments))
