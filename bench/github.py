"""What GitHub Actions shows of a command beside its log: annotations, and the summary of the job.

Formats: https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from .text import visible

MOST_ANNOTATIONS = 10
"""Of one level and one step, GitHub shows no more."""


class Annotation(NamedTuple):
    """A sentence that GitHub shows above the log and on the pull request's page."""

    level: Literal["error", "warning"]
    title: str
    text: str

    def command(self) -> str:
        """The line by which a step hands it to GitHub."""
        title = _escaped(self.title).replace(":", "%3A").replace(",", "%2C")
        return f"::{self.level} title={title}::{_escaped(self.text)}"


def _escaped(text: str) -> str:
    return visible(text).replace("%", "%25")


def show(
    annotations: Sequence[Annotation],
    summary: Callable[[], str],
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Print annotations on stderr and append `summary`, Markdown, to the job's; elsewhere nothing.

    A summary that cannot be written is said in a line: the result stands without it.
    """
    if environment.get("GITHUB_ACTIONS") != "true":
        return
    for annotation in annotations[:MOST_ANNOTATIONS]:
        print(annotation.command(), file=sys.stderr)
    place = environment.get("GITHUB_STEP_SUMMARY")
    if place:
        try:
            with Path(place).open("a", encoding="utf-8") as file:
                file.write(f"{summary()}\n")
        except OSError as error:
            print(f"no job summary: {visible(str(error))}", file=sys.stderr)
