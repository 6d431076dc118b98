"""Finds the bucket cap with which DDP trains fastest: a run with the preset `tune`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..common.cli import get_message_prefix
from .main import CommandHelp
from .main import main as run

EXAMPLES = (
    ("--gpus 8", "DDP's bucket caps on 8 devices"),
    ("--workload net:make", "your model: make() in net.py"),
    ("--comm-hook none,fp16", "other DDP settings, too"),
)

MEANINGS = {"modes": "wrappers to compare: ddp, replicate, fsdp (docs/forms.md) (default: ddp)"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, also in every rank of a launcher, and return its exit code."""
    description = (
        "Find the DDP setting that trains a model fastest: a race that eliminates slow settings as it "
        f"goes. It is `{get_message_prefix('run')} --preset tune`: other options override what the preset "
        "says, such as --bucket-cap-mb."
    )
    arguments = sys.argv[1:] if argv is None else argv
    return run(["--preset", "tune", *arguments], CommandHelp("tune", description, EXAMPLES, MEANINGS))
