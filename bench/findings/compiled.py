"""What torch.compile brings: compiled cases over eager ones, and what compiling took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from ddp_bench.bench.estimate import MIN_ROUNDS
from ddp_bench.bench.findings.answers import Verdict
from ddp_bench.bench.findings.numbers import about, between, finite, times
from ddp_bench.bench.findings.wording import Row, compile_label, mode_name, place
from ddp_bench.bench.results.comparisons import (
    EQUAL,
    FASTER,
    SLOWER,
    TOO_FEW,
    UNRESOLVED,
    Comparison,
    compile_mode,
    over_eager,
)
from ddp_bench.bench.results.schema import records

COMPILE = "torch.compile"


def compile_verdicts(cases: pd.DataFrame, comparisons: Sequence[Comparison]) -> list[Verdict]:
    """Say for each mode of torch.compile what it brings to DDP on most devices, else to one device."""
    ok = cases[cases["status"] == "ok"]
    rows = {str(row["case_id"]): row for row in records(ok)}
    found: dict[str, list[Comparison]] = {}
    for one in over_eager(comparisons, rows.values()):
        found.setdefault(compile_mode(rows[one.case_id]), []).append(one)
    return [_verdict(own, rows) for own in found.values()]


def _verdict(comparisons: Sequence[Comparison], rows: Mapping[str, Row]) -> Verdict:
    most = max(comparisons, key=lambda one: int(rows[one.case_id]["num_devices"]))
    alone = [one for one in comparisons if rows[one.case_id]["mode"] == "single" and one is not most]
    ours, reference = rows[most.case_id], rows[most.reference_id]
    mode, other = compile_mode(ours), compile_label(compile_mode(reference))
    subject, ratio = f"{mode_name(ours)} on {place(ours)}", most.ratio
    is_so = f"{subject} is {times(ratio.estimate)} as fast as {other} {between(ratio)}"
    if most.answer == TOO_FEW:
        said = f"too few rounds to compare {subject} with {other}: {most.num_rounds}, {MIN_ROUNDS} at least"
    elif most.answer == UNRESOLVED:
        low, high = times(ratio.low), times(ratio.high)
        said = f"unresolved, {subject} is {times(ratio.estimate)} as fast as {other}, "
        said += f"anywhere from {low} to {high}"
    elif most.answer == EQUAL:
        said = f"no difference above {100 * most.margin:g}%, {is_so}"
    else:
        said = is_so
    said += "".join(f", single {times(one.ratio.estimate)} {between(one.ratio)}" for one in alone)
    given = "" if mode == "default" else f'mode="{mode}"'
    paste = (
        f"model.compile({given}); model = DDP(model)" if ours["mode"] == "ddp" else f"model.compile({given})"
    )
    less = f", by less than {100 * most.margin:g}%" if most.within_margin else ""
    return Verdict(
        COMPILE,
        most.answer,
        f"torch.compile{'' if mode == 'default' else f' ({mode})'}: {said}{_took(ours)}.",
        paste if most.answer == FASTER and not less else "",
        (most, *alone),
        label=f"{most.answer} than {other}{less}" if most.answer in (FASTER, SLOWER) else "",
    )


def _took(row: Row) -> str:
    seconds = finite(row.get("compile_s"))
    return "" if seconds is None else f"; compiling took {about(seconds)}"
