"""Shows every case beside DDP's default at the headline count, fastest first, and what counts as equal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ddp_bench.bench.findings.answers import headline
from ddp_bench.bench.findings.numbers import between, plural, times
from ddp_bench.bench.findings.wording import Row, settings_label, short_mode, text, truth
from ddp_bench.bench.results.comparisons import Comparison, default_of, over_default
from ddp_bench.bench.results.schema import records
from ddp_bench.report.drawings import Forest, Ratio
from ddp_bench.report.select import WorkloadCases

_MOST = 24
_STYLES = {"dp": "dp", "ddp": "ddp"}
_LONGEST = 46
"""Characters of a name that leave room for the number beside it."""

_HOW = (
    "Each mark is a case's throughput over that of DDP with its defaults on as many devices; right "
    "of the line it is faster. Bars are 95% intervals that hold for all rows at once: where a bar leaves the "
    "line to one side the case is faster or slower, where it lies inside the shaded band it differs by less "
    "than the margin, and otherwise the rounds do not tell. The axis is logarithmic."
)


def forest(workload: WorkloadCases, comparisons: Sequence[Comparison], *, key: str) -> Forest | None:
    """Draw every case of the headline count over DDP's default; None where nothing is compared."""
    here = headline(workload.cases)
    cases = records(here)
    default = default_of(cases)
    rows = {text(row["case_id"]): row for row in cases}
    found = over_default(comparisons, cases)
    shown = [(rows[name], ratio) for name, ratio in found.items() if name in rows and name != default]
    if default is None or not shown:
        return None
    shown.sort(key=lambda pair: -pair[1].estimate)
    of_many = f" Of {len(shown)} cases the fastest {_MOST} are drawn." if len(shown) > _MOST else ""
    margin = comparisons[0].margin
    count = plural(rows[default]["num_devices"], workload.device)
    standing = settings_label(rows[default]) or "defaults"
    drawn = tuple(
        Ratio(_name(row), ratio, _STYLES.get(text(row["mode"]), "other"), truth(row["oversubscribed"]))
        for row, ratio in shown[:_MOST]
    )
    return Forest(
        key=f"{key}-forest",
        title="Every case against DDP's default",
        caption=_finding(drawn, count, margin),
        how_to_read=f"{_HOW} DDP's default here: {standing}; margin {100 * margin:g}%.{of_many}",
        x_label=f"throughput over DDP's default on {count}",
        margin=margin,
        rows=drawn,
    )


def _name(row: Row) -> str:
    name = ", ".join(filter(None, (short_mode(row), settings_label(row))))
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"


def _finding(rows: Sequence[Ratio], count: str, margin: float) -> str:
    """Say what the answers of the run say of these ratios: faster is beyond the margin, or it is nothing."""
    within = [1 / (1 + margin) <= row.interval.low and row.interval.high <= 1 + margin for row in rows]
    faster = [row for row, equal in zip(rows, within, strict=True) if row.interval.low > 1 and not equal]
    most = f"{100 * margin:g}%"
    if all(math.isnan(row.interval.low) for row in rows):
        said = "there are too few rounds to compare"
    elif faster:
        best = max(faster, key=lambda row: row.interval.estimate)
        more = f", as {_others(len(faster) - 1)}" if len(faster) > 1 else ""
        gain = f"{times(best.interval.estimate)} {between(best.interval)}"
        said = f"{best.label} is faster than DDP's default, {gain}{more}"
    elif all(within):
        said = f"no case differs from DDP's default by more than {most}"
    elif all(row.interval.high < 1 for row in rows):
        said = "every other case is slower than DDP's default"
    else:
        said = f"no case is shown to be faster than DDP's default by more than {most}"
    return f"On {count} {said}."


def _others(how_many: int) -> str:
    return "is 1 other" if how_many == 1 else f"are {how_many} others"
