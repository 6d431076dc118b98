"""What is predicted from one GPU's rate, against what was published for more of them."""

from statistics import median

import pytest
from commands import ROOT
from published import ERRORS, ERRORS_BY_CONSTANT, SHARES, SLOWDOWNS, fitted, left_out, rows, table

from ddp_bench.bench.predict.from_rate import ERROR_PCT, OVERLAP_SLOWDOWN, WRAPPER_MS

USED = [row for row in rows() if not row["left_out"]]
FEW, MANY = ([row for row in USED if (row.num_gpus <= 8) == few] for few in (True, False))

UNEXPLAINED = ("Lambda", "A100", 8)
"""10% slower than its own source's figures of one, two and four GPUs, for no reason that it gives; the same
source's older run of such a machine lost 1%."""


@pytest.fixture(scope="module")
def errors():
    """Of each row, with the constant fitted to the other sources."""
    return left_out(ERRORS, SLOWDOWNS)


def sizes(found, chosen):
    return [abs(found[row]) for row in chosen]


def is_unexplained(row):
    return (row["source"], row["gpu"], row.num_gpus) == UNEXPLAINED


def test_the_fitted_constants_are_those_of_the_rows_that_are_not_left_out():
    assert OVERLAP_SLOWDOWN.comm == fitted(ERRORS, SLOWDOWNS, USED)
    # One V100, batch 32: 319 images/s with DDP, 329 without; ResNet-50 has 161 trainable tensors.
    assert pytest.approx(32_000 / 319 - 32_000 / 329, rel=0.01) == 161 * WRAPPER_MS


def test_a_source_is_predicted_by_constants_fitted_to_the_others(errors):
    assert median(sizes(errors, USED)) <= 2.5
    assert max(sizes(errors, [row for row in USED if not is_unexplained(row)])) <= 8
    assert max(sizes(errors, USED)) == pytest.approx(9.8, abs=0.1), "the one that is not explained"
    for source in {row["source"] for row in USED}:
        assert median(sizes(errors, [row for row in USED if row["source"] == source])) <= 2.5


def test_so_it_is_if_both_versions_of_pytorchs_table_are_left_out_together():
    found = left_out(ERRORS, SLOWDOWNS, group=lambda row: row["source"].partition(" ")[0])
    assert median(sizes(found, USED)) <= 2.5
    assert max(sizes(found, [row for row in USED if not is_unexplained(row)])) <= 8


def test_two_nodes_are_predicted_as_their_ports_allow(errors):
    """Of four GPUs or eight, with one port, two or four: which of them is the only difference."""
    two = [row for row in rows() if row["network"] and row.num_gpus == 2 * int(row["node"] or 8)]
    assert {(row["node"], row["nics"]) for row in two} == {("", "4"), ("", "1"), ("4", "2"), ("4", "1")}
    assert median(sizes(errors, two)) <= 2.5
    assert max(sizes(errors, two)) <= 8


def test_no_row_is_off_by_more_than_eight_percent_left_out_or_not(errors):
    assert max(sizes(errors, [row for row in rows() if not is_unexplained(row)])) <= 8


def test_it_is_nearer_than_perfect_scaling_and_than_perfect_scaling_times_a_constant(errors):
    perfect = {row: 100 * (row.perfect / row.published - 1) for row in USED}
    by_constant = left_out(ERRORS_BY_CONSTANT, SHARES)
    for rule in (perfect, by_constant):
        for chosen in (USED, FEW, MANY):
            assert median(sizes(errors, chosen)) < median(sizes(rule, chosen))
        nearer = {s for s in {row["source"] for row in USED} if _of(errors, s) < _of(rule, s)}
        # BERT's two rows lost by chance what other sources lost on average.
        assert nearer | {"DLPerf"} == {row["source"] for row in USED}


def _of(found, source):
    return median(sizes(found, [row for row in USED if row["source"] == source]))


def test_intervals_hold_the_rows_and_are_no_wider_than_they_need_be(errors):
    inside, widths = [], []
    for row in USED:
        found = row.predicted(with_interval=True)
        shift = (1 + errors[row] / 100) * row.published / found.estimate
        inside.append(shift * found.low <= row.published <= shift * found.high)
        widths += [(found.high - found.low) / found.estimate] * (row.num_gpus <= 8)
    assert sum(inside) >= 0.9 * len(USED)
    assert median(widths) <= 0.15
    assert median(widths) > ERROR_PCT / 100


@pytest.mark.parametrize(("gpus", "published"), [(2, 306), (4, 305), (8, 299), (16, 294)])
def test_buckets_of_1_mib_which_nothing_was_fitted_to(gpus, published):
    """PyTorch's table of buckets of 1 MiB, ResNet-50, images/s per V100: from 317 on one, with DDP."""
    row = next(row for row in USED if row["model"] == "resnet50" and row.num_gpus == gpus)
    found = row.predicted(with_interval=True, rate="317", bucket_cap_mb="1")
    assert found.low <= gpus * published <= found.high


def test_the_documentation_has_every_row():
    page = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    assert "\n".join(table()) in page
