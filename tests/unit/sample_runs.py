"""The recorded samples, and their tables made anew from their blocks."""

import functools

import pytest
from commands import ROOT
from renewed import renewed

from ddp_bench.bench.results.store import load_run

SAMPLES = sorted(path.parent for path in (ROOT / "results" / "samples").rglob("manifest.json"))

EVERY_SAMPLE = [
    pytest.param(path, id=str(path.relative_to(ROOT / "results" / "samples"))) for path in SAMPLES
]


@functools.cache
def sample(path):
    return load_run(path)


@functools.cache
def _today(path):
    return renewed(sample(path))


@functools.cache
def comparisons(path):
    return tuple(_today(path).compared)


@functools.cache
def rebuilt(path):
    """What a run of today would have written as cases.csv."""
    return _today(path).cases
