"""Phrases that readers stumbled over are refused wherever people read: product, docs and README."""

import re

import pytest
from commands import ROOT

REFUSED = (
    "not ranked",
    "no net hiding",
    "gains more than",
    "counts as equal",
    "are the least",
    "open beside it",
    "is its own work",
    "which is faster: holds",
    "links and torch decide",
    "tells more",
    "what decides an answer",
    "could be saved: ",
    "backward does not hide",
    "waiting beside communication",
    "wait for batches",
    "as on one device",
    "keep this run",
    "decides what is open",
    "quiet the machine",
    "bars regressed",
    "not measured in turns",
    "differs, no obstacle",
    "held against",
    "start both anew",
    "hold all at once",
    "says nothing of dp",
    "pauses included",
    "not known to differ",
    "leave one after another",
    "may stand alone for on",
    "count as none",
    "did not come to",
    "no end of its preparation",
    "so long a process",
    "what has nccl write",
)
"""The left column of a list of sentences, each with a better one, that fresh readers had to read twice."""

TEXTS = sorted(
    path
    for pattern in (
        "README.md",
        "CONTRIBUTING.md",
        "docs/*.md",
        "bench/**/*.py",
        "report/**/*.py",
        "bench/**/*.j2",
        "models/*.py",
        "ddp_bench/*.py",
        "results/README.md",
    )
    for path in ROOT.glob(pattern)
)


def normalise(text):
    """One line of a text, so that a phrase is found across its line breaks and a string's quotes."""
    return re.sub(r'["\s]+', " ", text.replace('f"', '"')).lower()


@pytest.mark.parametrize("phrase", REFUSED)
def test_no_text_has_the_phrase(phrase):
    assert [path.relative_to(ROOT) for path in TEXTS if phrase in normalise(path.read_text("utf-8"))] == []


def test_a_phrase_is_found_across_lines_and_strings():
    assert "not ranked" in normalise('say(f"it is not "\n    f"ranked")')
    assert len(TEXTS) > 150
