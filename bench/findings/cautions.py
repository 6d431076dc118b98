"""Everything that speaks against trusting a run, most general first."""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd

from ddp_bench.bench.cli import command
from ddp_bench.bench.findings.caution import MOST_BUSY, MOST_STEAL, Caution
from ddp_bench.bench.findings.links import link_cautions
from ddp_bench.bench.findings.numbers import finite, short
from ddp_bench.bench.findings.stability import cautions
from ddp_bench.bench.manifest import Manifest

MOST_SPLIT_EFFECT = 1e-2
"""More of `split_effect` is no rounding: float32 leaves 1e-3 at most."""


class LoadShares(NamedTuple):
    """What others used of the cores of a run's ranks during the rounds; fractions."""

    busy: float
    steal: float
    """Other guests of the hypervisor."""


def load_shares(manifest: Manifest) -> LoadShares | None:
    """Return the largest shares of any machine of a run; None where the manifest does not tell."""
    shares = [
        LoadShares(load.others / load.cores, load.steal / load.cores) for load in manifest.load if load.cores
    ]
    return LoadShares(*map(max, zip(*shares, strict=True))) if shares else None


def run_cautions(manifest: Manifest, cases: pd.DataFrame, blocks: pd.DataFrame) -> list[Caution]:
    """Return what to know before trusting a run, of its files."""
    settings = manifest.settings
    target = None if settings.rounds else settings.precision_target
    return [
        *other_load(manifest, cases),
        *unequal_weights(cases),
        *cautions(cases, blocks, target=target),
        *link_cautions(manifest, cases),
    ]


def unequal_weights(cases: pd.DataFrame) -> list[Caution]:
    """Return a caution where modes train differently: the loss is no mean over rows of equal weight."""
    largest = finite(cases["split_effect"].max())
    if largest is None or largest <= MOST_SPLIT_EFFECT:
        return []
    return [
        Caution(
            kind="unequal weights",
            text="the loss is no mean over rows of equal weight: its mean over the devices' parts of a batch "
            f"has a gradient up to {short(100 * largest, 2)}% off that of the whole; so modes train "
            "differently",
            advice="compare their speed, not their losses; or average within each row first, then over rows",
        )
    ]


def other_load(manifest: Manifest, cases: pd.DataFrame) -> list[Caution]:
    """Return a caution where other programs or guests used cores that stand in for devices."""
    shares = load_shares(manifest)
    if shares is None or not (cases["device_type"] == "cpu").any():
        return []
    busy, steal = (f"{100 * share:.0f}%" for share in shares)
    said = [
        f"other programs used {busy} of the cores" if shares.busy > MOST_BUSY else "",
        f"the hypervisor gave {steal} of their time to other guests" if shares.steal > MOST_STEAL else "",
    ]
    if not any(said):
        return []
    return [
        Caution(
            kind="other load",
            text=f"{' and '.join(filter(None, said))} during the rounds: steps are longer than on an idle "
            "machine, and vary more",
            advice=f"stop other programs, or use a dedicated machine; {command('doctor')} shows the load",
        )
    ]
