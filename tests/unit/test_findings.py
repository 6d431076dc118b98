"""The notes below a run's answers: what broke, shared devices, slow links and ranks, why DDP scales so."""

import re
from pathlib import Path

import pytest
from finding_cases import CAP_1, DDP, DP, FAILED, SINGLE, concluded, over
from report_runs import case, measured, run, timed, usual_cases

from ddp_bench.bench.findings.cautions import run_cautions
from ddp_bench.bench.findings.findings import conclude
from ddp_bench.bench.findings.notes import (
    LeftOut,
    LinkLimit,
    Overlap,
    ScalingLoss,
    SlowRank,
    notes,
    why_not_measured,
)
from ddp_bench.bench.findings.trust import Caution, Trust
from ddp_bench.bench.manifest import Manifest
from ddp_bench.bench.results.aggregate import comparisons_of_run
from ddp_bench.bench.results.schema import BLOCKS, CASES, typed_frame


def test_cases_that_broke_are_one_note_by_reason():
    broken = [
        case("ddp", 4, status="failed", reason="rank 3 died:\n\x1b[31mexit code 9"),
        *(case("ddp", 8, bucket_cap_mb=cap, status="oom", reason="x" * 500) for cap in "1234"),
        case("dp", 1, status="skipped", reason="the plain module"),
    ]
    (note,) = concluded(SINGLE, DDP, *broken).notes
    assert note.startswith(
        r"5 cases not measured: DDP on 4 GPUs: failed (rank 3 died: \x1b[31mexit code 9); "
    )
    assert "cap 3 and 1 more: oom (" in note
    assert len(note) < 400


SKIPPED = {"status": "skipped", "reason": "the plain module"}


@pytest.mark.parametrize(
    ("cases", "said"),
    [
        ([SINGLE, DP, DDP], []),
        ([SINGLE, DP, DDP, CAP_1 | FAILED], []),
        ([SINGLE, DP | SKIPPED, DDP], []),
        ([SINGLE, DP, DDP | FAILED], [f"every case of ddp failed: {FAILED['reason']}"]),
        ([SINGLE, DP, DDP | FAILED, CAP_1 | SKIPPED], [f"every case of ddp failed: {FAILED['reason']}"]),
        (
            [
                SINGLE,
                DP | {"status": "oom", "reason": "out of memory"},
                DDP | {**FAILED, "status": "timeout"},
            ],
            [
                "every case of dp failed: oom: out of memory",
                f"every case of ddp failed: timeout: {FAILED['reason']}",
            ],
        ),
        ([SINGLE, DP | FAILED, DDP | FAILED], [f"every case of dp and ddp failed: {FAILED['reason']}"]),
        ([SINGLE | FAILED, DP, DDP], []),
        (
            [SINGLE | FAILED, DP | SKIPPED, DDP | SKIPPED],
            [f"every case of single failed: {FAILED['reason']}"],
        ),
        ([SINGLE | SKIPPED, DDP | SKIPPED], ["nothing was measured: the plain module"]),
    ],
)
def test_modes_without_a_measured_case(cases, said):
    """What ends a run with status 4; a reference that nobody asked for counts where nothing else is there."""
    assert why_not_measured(typed_frame(cases, CASES), ("dp", "ddp")) == said


def linked(comm_ms, own_ms=(), **more):
    """Of a DDP case on two ranks; `own_ms` is each round's step under `no_sync` of both ranks."""
    ddp = DDP | measured(comm_ms=comm_ms, exposed_comm_ms=20.0, step_ms=100.0) | {"step_ms_p50": 100.0} | more
    blocks = [
        timed(ddp, r, ms, rank=rank, phase="no_sync", host=f"host{rank}")
        for r, ranks in enumerate(own_ms, 1)
        for rank, ms in enumerate(ranks)
    ]
    data = run([SINGLE, ddp], timed_blocks=blocks)
    return conclude(data.path, data.manifest, data.cases, data.blocks, [])


@pytest.mark.parametrize(("effect", "warned"), [(1e-4, False), (0.3, True), (None, False)])
def test_modes_that_train_differently_are_a_caution(effect, *, warned):
    made = run([case("single", 1, 100.0), case("ddp", 2, 190.0, split_effect=effect)])
    kinds = [one.kind for one in run_cautions(made.manifest, made.cases, made.blocks)]
    assert ("unequal weights" in kinds) == warned


def test_communication_slower_than_its_link_is_said():
    """46.8 MB x 1514 / 1448 at 1 Gbit/s take 391 ms."""
    slow, as_fast_as_it_goes = (
        linked(comm_ms, link="1gbit", bucket_bytes="46758048").found for comm_ms in (700.0, 395.0)
    )
    (limit,) = slow
    assert isinstance(limit, LinkLimit)
    assert limit.allowed_ms == pytest.approx(391, abs=0.5)
    assert as_fast_as_it_goes == ()


APART = ((80.0, 92.0),)
TURNS = ((80.0, 92.0), (92.0, 80.0))


@pytest.mark.parametrize(
    ("own_ms", "often", "is_chance"),
    # One of two equal ranks is the slower one in all of five rounds once in 16 times.
    [(APART * 6, 6, False), (APART * 5, 5, True)],
)
def test_slow_rank_is_named_with_its_host(own_ms, often, *, is_chance):
    made = linked(40.0, own_ms, **measured(rank_skew_ms=12.0))
    (slow,) = made.found
    assert isinstance(slow, SlowRank)
    assert (slow.rank, slow.host, slow.often, slow.num_rounds) == (1, "host1", often, len(own_ms))
    assert slow.is_chance == is_chance
    assert ("too few to say" in slow.sentence) == is_chance
    assert "unsteady" not in [one.kind for one in made.cautions]


def test_ranks_that_take_turns_at_being_slow_are_unsteady():
    made = linked(40.0, TURNS * 2, **measured(rank_skew_ms=12.0))
    assert made.found == ()
    assert "unsteady" in made.trust.sizes
    assert linked(40.0, ((80.0, 81.0),) * 4, **measured(rank_skew_ms=1.0)).found == ()


def test_skipped_cases_are_one_line_with_their_count():
    few = {"status": "skipped", "reason": "needs 4 GPUs per machine, there are 2"}
    skipped = [case("ddp", 4, bucket_cap_mb=cap, **few) for cap in ("default", "1")]
    plain = case("dp", 1, status="skipped", reason="the plain module")
    alike = CAP_1 | {"status": "skipped", "reason": "same bucket layout"}
    (note,) = concluded(SINGLE, DDP, *skipped, plain, alike).found
    assert isinstance(note, LeftOut)
    assert note.num_cases == 3


def test_overlapping_rates_of_which_one_is_faster_are_explained():
    near = DDP | {"images_per_s_low": 99.0}
    assert [type(one) for one in concluded(SINGLE, DP, near, by=(over(near, DP, 1.1, 1.2),)).found] == [
        Overlap
    ]
    assert concluded(SINGLE, DP, near, by=(over(near, DP, 0.9, 1.2),)).found == ()
    assert concluded(SINGLE, DP, DDP, by=(over(DDP, DP, 1.1, 1.2),)).found == ()


@pytest.mark.parametrize(
    ("kinds", "direction", "sizes", "transfer"),
    [
        ([], (), (), ()),
        (["other load", "drift", "two levels"], (), ("other load", "two levels"), ("drift",)),
        (["few rounds", "slow links"], ("few rounds",), (), ("slow links",)),
    ],
)
def test_trust_sorts_cautions_by_what_they_weaken(kinds, direction, sizes, transfer):
    cautions = [Caution(kind=kind, text="t", advice="a") for kind in kinds]
    found = Trust.of(cautions, on_cpu=True)
    assert (found.direction, found.sizes, found.transfer) == (direction, sizes, transfer)
    assert all(kind in found.sentence for kind in kinds)
    assert found.sentence.endswith(" for GPUs.")
    assert "GPUs" not in Trust.of(cautions, on_cpu=False).sentence


def test_no_missing_value_is_written():
    data = run(usual_cases())
    by = comparisons_of_run(data)
    made = conclude(Path("x"), Manifest(), data.cases, data.blocks, by)
    assert not re.search(r"nan|None|<NA>|inf\b", " ".join(made.sentences))


# The command to run next.


def test_why_ddp_scales_as_it_does_in_parts_that_add_up():
    """Steps of 100 ms alone, 110 in DDP on one device, 115 under no_sync beside another, 150 with it."""
    single, one, two = case("single", 1, 100.0), case("ddp", 1, 90.9), case("ddp", 2, 133.3)
    noise = [1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01, 0.99]
    steps = ((single, "timed", 100.0), (one, "timed", 110.0), (two, "no_sync", 115.0), (two, "timed", 150.0))
    rows = [
        timed(row, r, ms * factor, phase=phase)
        for row, phase, ms in steps
        for r, factor in enumerate(noise, 1)
    ]
    (loss, *_) = notes(typed_frame([single, one, two], CASES), typed_frame(rows, BLOCKS))
    assert isinstance(loss, ScalingLoss)
    assert (loss.step_ms, loss.single_ms) == pytest.approx((150, 100), rel=0.01)
    parts = (loss.own_work_ms, loss.beside_others_ms, loss.communication_ms)
    assert [part.estimate for part in parts] == pytest.approx([10, 5, 35], rel=0.01)
