from __future__ import annotations

from report_runs import Row, case, measured, run, timed

from bench.findings.findings import findings


def exposed(
    comm_ms: float,
    exposed_ms: float,
    own_ms: tuple[tuple[float, float], ...] = ((80.0, 80.0),),
    **more: object,
) -> list[str]:
    """Findings about a DDP case on two ranks; `own_ms` is each round's step under `no_sync` of both ranks."""
    ddp: Row = case("ddp", 2, 200.0, step_ms_p50=100.0) | measured(
        comm_ms=comm_ms, exposed_comm_ms=exposed_ms
    )
    ddp |= measured(hidden_pct=50.0) | more
    single = case("single", 1, 100.0)
    blocks = [timed(row, r, 100.0) for row in (single, ddp) for r in (1, 2, 3)]
    blocks += [
        timed(ddp, r, ms, rank=rank, phase="no_sync", host=f"host{rank}")
        for r, ranks in enumerate(own_ms, 1)
        for rank, ms in enumerate(ranks)
    ]
    data = run([single, ddp], timed_blocks=blocks)
    return findings(data.cases, data.blocks)


def one(sentences: list[str], start: str) -> str:
    (found,) = (sentence for sentence in sentences if sentence.startswith(start))
    return found


def test_exposed_communication_with_its_link() -> None:
    assert one(exposed(40.0, 20.0, link="1gbit"), "Exposed") == (
        "Exposed: 2 GPUs over 1 Gbit/s, DDP with its defaults: communication adds 20.0 [19.8, 20.2] ms to "
        "the step, 20% of it; alone it would take 40.0 [39.6, 40.4] ms, so 50.0 [49.5, 50.5]% of it is "
        "hidden."
    )


def test_exposed_time_within_the_noise_is_not_claimed() -> None:
    noisy = exposed(40.0, 2.0, exposed_comm_ms_low=-3.0, exposed_comm_ms_high=7.0)
    assert "adds nothing to the step that can be told from noise (2 [-3, 7] ms)" in one(
        noisy, "Exposed"
    ).replace(".00", "")


def test_communication_that_slows_the_compute_is_said() -> None:
    assert "also slows the compute" in one(exposed(20.0, 40.0), "Exposed")
    assert "also slows the compute" not in one(exposed(40.0, 20.0), "Exposed")


def test_communication_slower_than_its_link_is_said() -> None:
    """46.8 MB x 1514 / 1448 at 1 Gbit/s take 391 ms."""
    slow, as_fast_as_it_goes = (
        one(exposed(comm_ms, 300.0, link="1gbit", bucket_bytes="46758048"), "Exposed")
        for comm_ms in (700.0, 395.0)
    )
    assert "The link would allow 391 ms: here the cores limit communication." in slow
    assert "would allow" not in as_fast_as_it_goes


def test_slow_rank_is_named_with_its_host() -> None:
    sentences = exposed(40.0, 20.0, ((80.0, 92.0),) * 4, **measured(rank_skew_ms=12.0))
    assert one(sentences, "Slow rank") == (
        "Slow rank: on 2 GPUs rank 1 on host1 was the slowest in 4 of 4 rounds; its own work "
        "takes 12.0 [11.9, 12.1] ms per step (12% of it) longer than the fastest rank's, and the others wait "
        "for it."
    )


def test_ranks_that_take_turns_are_an_unsteady_machine() -> None:
    turns = ((80.0, 92.0), (92.0, 80.0)) * 2
    assert "not always the same rank" in one(
        exposed(40.0, 20.0, turns, **measured(rank_skew_ms=12.0)), "Ranks"
    )


def test_ranks_of_one_pace_are_not_mentioned() -> None:
    sentences = exposed(40.0, 20.0, ((80.0, 81.0),) * 4, **measured(rank_skew_ms=1.0))
    assert not [sentence for sentence in sentences if sentence.startswith(("Slow rank", "Ranks"))]
