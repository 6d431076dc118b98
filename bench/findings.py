"""What was found, in plain sentences: the last lines of a run and the first of its report. Pure."""

from __future__ import annotations

import math
import re

import pandas as pd

from bench.aggregate import ByRound, images_per_s_by_round
from bench.plan import DDP_AXES
from bench.stats import Interval, paired_ratio

TCP_OVERHEAD = 1514 / 1448
"""Bytes on the wire for each byte that TCP delivers, full Ethernet frames."""

LINK_SLACK = 1.08

MODE_NAMES = {"single": "single", "dp": "DataParallel", "ddp": "DDP"}


def findings(cases: pd.DataFrame, blocks: pd.DataFrame) -> list[str]:
    """Sentences about the measured cases: fastest mode at each count, then bucket caps."""
    ok = cases[(cases["status"] == "ok") & cases["images_per_s"].notna()]
    if ok.empty:
        return ["Nothing was measured: no case ended with status ok."]
    throughput = images_per_s_by_round(blocks, dict(zip(ok["case_id"], ok["global_batch"], strict=True)))
    shared = ok["oversubscribed"].fillna(value=False).groupby(ok["num_devices"].astype(int)).any()
    # The largest count that owns its devices is what a reader came for; shared ones come last.
    counts = sorted(shared.index, key=lambda n: (bool(shared[n]), -n))
    sentences = []
    for count in counts:
        sentences += _fastest_mode(ok[ok["num_devices"] == count], throughput, count)
    for count in counts:
        ddp = _plain(ok[(ok["num_devices"] == count) & (ok["mode"] == "ddp")])
        sentences += _best_cap(ddp, throughput, count)
    for count in counts:
        sentences += _communication(_plain(ok[(ok["num_devices"] == count) & (ok["mode"] == "ddp")]), count)
    return sentences


def devices(count: int, device_type: str) -> str:
    """`2 GPUs`, `1 CPU core`."""
    noun = "GPU" if device_type == "cuda" else "CPU core"
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _fastest_mode(here: pd.DataFrame, throughput: dict[str, ByRound], count: int) -> list[str]:
    if not set(here["case_id"]) <= throughput.keys():
        return [f"On {count} devices, blocks.csv lacks blocks of measured cases; nothing is said of them."]
    # DDP stands with the settings a user gets by default, not with the luckiest of many.
    chosen = here.drop_duplicates("mode").sort_values("images_per_s", ascending=False)
    where = f"On {devices(count, str(here['device_type'].iloc[0]))}"
    if bool(here["oversubscribed"].fillna(value=False).any()):
        where += " (oversubscribed: they share fewer cores or GPUs)"
    best = chosen.iloc[0]
    name = _mode_name(best)
    rate = f"{_figures(best['images_per_s'])}{_range(best, 'images_per_s')} images/s"
    scaled = "" if count == 1 else f", {best['speedup']:.2f}x{_range(best, 'speedup')} single"
    if len(chosen) == 1:
        return [f"{where}, {name} gives {rate}{scaled}; no other mode was measured there."]
    other = chosen.iloc[1]
    ratio = paired_ratio(throughput[best["case_id"]], throughput[other["case_id"]])
    if ratio.excludes(1.0):
        verdict = f"{name} is fastest: {rate}{scaled}, {_times(ratio)} the rate of {_mode_name(other)}."
    else:
        verdict = (
            f"{name} and {_mode_name(other)} cannot be told apart: {_times(ratio)}"
            f"{' (one round gives no interval)' if math.isnan(ratio.low) else ''}; "
            f"{name} gives {rate}{scaled}."
        )
    return [f"{where}, {verdict}"]


def _best_cap(ddp: pd.DataFrame, throughput: dict[str, ByRound], count: int) -> list[str]:
    if len(ddp) < 2 or not set(ddp["case_id"]) <= throughput.keys():
        return []
    where = f"DDP on {devices(count, str(ddp['device_type'].iloc[0]))}"
    reference = ddp[ddp["bucket_cap_mb"] == "default"]
    base = (reference if len(reference) else ddp).iloc[0]
    rivals = ddp[ddp["case_id"] != base["case_id"]]
    best = rivals.sort_values("images_per_s", ascending=False).iloc[0]
    # The best of several is picked after the fact: Bonferroni keeps the claim at 95%.
    ratio = paired_ratio(
        throughput[best["case_id"]], throughput[base["case_id"]], confidence=1 - 0.05 / len(rivals)
    )
    base_name = (
        "PyTorch's default" if base["bucket_cap_mb"] == "default" else f"cap {base['bucket_cap_mb']} MiB"
    )
    cap = f"bucket cap {best['bucket_cap_mb']} MiB"
    if ratio.low > 1:
        return [f"{where}: {cap} is best, {_times(ratio)} the rate of {base_name}; that is beyond the noise."]
    if ratio.high < 1:
        return [
            f"{where}: {base_name} is the best bucket cap; the next, {cap}, runs at {_times(ratio)} its rate."
        ]
    nearest = f"the fastest other, {cap}, runs at {_times(ratio)} its rate."
    return [f"{where}: no bucket cap beats {base_name} beyond the noise; {nearest}"]


def _communication(ddp: pd.DataFrame, count: int) -> list[str]:
    measured = ddp[ddp["exposed_comm_ms"].notna() & ddp["comm_ms"].notna()]
    if measured.empty:
        return []
    row = measured.iloc[0]
    link = "" if pd.isna(row["link"]) else f" over {row['link']}"
    layout = "the default buckets" if row["bucket_cap_mb"] == "default" else f"cap {row['bucket_cap_mb']} MiB"
    alone = f"{_figures(row['comm_ms'])}{_range(row, 'comm_ms')} ms"
    added = f"{_figures(row['exposed_comm_ms'])}{_range(row, 'exposed_comm_ms')} ms"
    share = 100 * row["exposed_comm_ms"] / row["step_ms_p50"]
    where = f"DDP on {devices(count, str(row['device_type']))}{link} with {layout}"
    sentence = (
        f"{where}: communication alone takes {alone}; it adds {added} to the step ({share:.0f}% of it)."
    )
    allowed_ms = _link_ms(str(row["link"]), str(row["bucket_bytes"]), count)
    if allowed_ms is not None and row["comm_ms"] > LINK_SLACK * allowed_ms:
        sentence += f" The link would allow {_figures(allowed_ms)} ms: here the cores limit communication."
    return [sentence]


def _link_ms(link: str, bucket_bytes: str, num_ranks: int) -> float | None:
    """Least milliseconds of a ring all-reduce over a lab's link: 2 (n - 1) / n of the bytes, with headers."""
    rate = re.fullmatch(r"([0-9.]+)([mg])bit(\+.*)?", link)
    if rate is None or not re.fullmatch(r"[0-9/]+", bucket_bytes):
        return None
    num_bytes = sum(int(size) for size in bucket_bytes.split("/")) * 2 * (num_ranks - 1) / num_ranks
    return num_bytes * TCP_OVERHEAD * 8 / (float(rate[1]) * (1e6 if rate[2] == "m" else 1e9)) * 1000


def _plain(ddp: pd.DataFrame) -> pd.DataFrame:
    """The cases that differ from the first only in their bucket cap."""
    if ddp.empty:
        return ddp
    other = [axis for axis in DDP_AXES if axis != "bucket_cap_mb"]
    settings = ddp[other].astype(object).fillna("")
    return ddp[(settings == settings.iloc[0]).all(axis=1)]


def _mode_name(row: pd.Series) -> str:
    name = MODE_NAMES.get(row["mode"], str(row["mode"]))
    return f"{name} (CPU stand-in)" if str(row["impl"]) == "cpu_standin" else name


def _range(row: pd.Series, column: str) -> str:
    low, high = row[f"{column}_low"], row[f"{column}_high"]
    return "" if pd.isna(low) else f" [{_figures(low)}, {_figures(high)}]"


def _figures(value: float) -> str:
    """Four significant figures, thousands separated, never in powers of ten."""
    decimals = max(3 - math.floor(math.log10(abs(value))), 0) if value else 0
    return f"{value:,.{decimals}f}"


def _times(ratio: Interval) -> str:
    if math.isnan(ratio.low):
        return f"{ratio.estimate:.3f}x"
    return f"{ratio.estimate:.3f}x [{ratio.low:.3f}, {ratio.high:.3f}]"
