"""Two cases compared as the suite compares them: a ratio in every round, then the median. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from bench.results.aggregate import images_per_s_by_round
from bench.stats import paired_ratio
from report.numbers import Estimate
from report.select import text

if TYPE_CHECKING:
    import pandas as pd

    from report.select import Row


def throughput_ratio(row: Row, reference: Row, blocks: pd.DataFrame) -> Estimate | None:
    """Throughput of a case over that of another, paired within rounds; None without common rounds."""
    batches = {text(r["case_id"]): int(r["global_batch"]) for r in (row, reference)}
    by_round = images_per_s_by_round(blocks[blocks["case_id"].isin(list(batches))], batches)
    if by_round.keys() != batches.keys():
        return None
    ratio = paired_ratio(*(by_round[text(r["case_id"])] for r in (row, reference)))
    if math.isnan(ratio.estimate):
        return None
    return (
        Estimate(ratio.estimate) if math.isnan(ratio.low) else Estimate(ratio.estimate, ratio.low, ratio.high)
    )
