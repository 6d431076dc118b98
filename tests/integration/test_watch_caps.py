"""Bucket caps raced within a training: it ends as without us, whatever goes wrong."""

import sys
from functools import cache

import pytest
from commands import finished
from selection import in_campaign
from test_watch import (
    HOOK,
    OBSERVED,
    PROBED,
    VIEWS,
    WITHOUT_DDP,
    play_unwatched,
    play_watched,
    rows_in,
    rows_of,
)
from test_watch import KINDS as WATCHED

from ddp_bench.bench.common.process import make_package_command
from ddp_bench.bench.results.comparisons import ANSWERS
from ddp_bench.bench.results.store import load_run
from ddp_bench.bench.watch import launch

CAPS = {"default", "0.001", "0.004"}
AT, BLOCK = 6, 2
TURNS = {"at": AT, "block": BLOCK, "skipped": 1, "rounds": 1}
RACE = {**launch.plan_race(",".join(sorted(CAPS)), 1, 1), **TURNS}
JOIN, RANKS = "the training is under join()", "not all ranks could take their turn"
REFUSED = {**OBSERVED, **dict.fromkeys(("joined", "joined_by_active_ranks"), JOIN)}
REFUSED |= dict.fromkeys(("late_hook_of_the_user", "raising_backward"))
RACED = (*(kind for kind in PROBED if kind not in REFUSED), *VIEWS)
FAULTS = (
    *(f"plain@race.Race.{name}:{n}" for name in ("vote", "decide", "take_turn") for n in range(1, 5)),
    *(f"plain@race.reducer.rebuild_reducer:{n}" for n in range(1, 5)),
    *(f"plain@buckets.Model.begin_sync:{n}" for n in range(AT - 1, AT + 4 * BLOCK)),
    *(f"plain@steps.Watch.begin_optimizer:{n}" for n in range(AT - 1, AT + 4 * BLOCK)),
    *(f"plain@steps.Watch.count:{n}" for n in range(4 * AT - 4, 4 * AT + 12)),
)
"""Calls of the watch's own code that raise on rank 1 during the race."""

SEEN_BY_ONE = {
    "plain@race.read_free_bytes=5000": "0 MiB of memory are free, and new buckets may need 0",
    "plain@private.is_captured=1": "its steps were captured in a CUDA graph",
    "plain@reducer.has_compiled=1": "torch.compile has split its graphs by the script's own cap",
}
"""Reasons against the race that rank 1 alone has."""

KINDS = (*RACED, *REFUSED, *WITHOUT_DDP, *FAULTS, *SEEN_BY_ONE)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Kinds of so many ranks, unwatched and with a race that begins at a count."""

    @cache
    def both(size, kinds, at=AT):
        folder = tmp_path_factory.mktemp("raced")
        return play_unwatched(size, WATCHED), play_watched(folder, size, kinds, {**RACE, "at": at})

    return both


def of_kind(played, kind, *launched):
    """Pair the ends of a kind on each rank, unwatched and watched."""
    unwatched, watched = played(*launched)
    return [(one[kind.partition("@")[0]], other[kind]) for one, other in zip(unwatched, watched, strict=True)]


def notes_of(rank):
    return [row["text"] for row in rows_of(rank, "note") if row["text"] != RACE["note"]]


def caps_of(rank):
    """Caps by backward, of those that count."""
    syncs = (sync for row in rows_of(rank, "step") for sync in row["syncs"])
    return {(sync["model"], sync["k"]): sync["cap"] for sync in syncs if sync.get("cap")}


@pytest.mark.parametrize("kind", RACED)
def test_two_ranks_end_with_the_same_bits_after_a_race_and_with_their_own_cap(played, kind):
    ranks = of_kind(played, kind, 2, KINDS)
    for one, other in ranks:
        assert (one["end"], one["caps"]) == (other["end"], other["caps"])
        assert notes_of(other) == []
        assert {*caps_of(other).values()} >= CAPS
        syncs = [sync for row in rows_of(other, "step") for sync in row["syncs"]]
        raced_by = [sync["ready_s"] for sync in syncs if "cap" in sync]
        assert not any(raced_by), "raced steps are those of DDP alone"
        begin, *_, end = (i for i, sync in enumerate(syncs) if "cap" in sync)
        assert not any(sync["probe"] for sync in syncs[begin:end])
    assert caps_of(ranks[0][1]) == caps_of(ranks[1][1]), "turns come at the same backwards"


@pytest.mark.parametrize("kind", [*REFUSED, *WITHOUT_DDP])
def test_what_stands_against_a_race_is_said_and_changes_nothing(played, kind):
    for one, other in of_kind(played, kind, 2, KINDS):
        assert one["end"] == other["end"]
        if why := REFUSED.get(kind):
            assert notes_of(other) == [f"the race of bucket caps ended: {why}"]
            assert (one["sent"], caps_of(other)) == (other["sent"], {})


@pytest.mark.parametrize("kind", SEEN_BY_ONE)
def test_what_one_rank_alone_sees_ends_the_race_on_all(played, kind):
    (_, first), (unwatched, second) = of_kind(played, kind, 2, KINDS)
    assert notes_of(first) == [f"the race of bucket caps ended: {RANKS}"]
    assert notes_of(second) == [f"the race of bucket caps ended: {SEEN_BY_ONE[kind]}"]
    assert (second["end"], second["sent"]) == (unwatched["end"], unwatched["sent"]), "nothing was built anew"


@pytest.mark.parametrize("kind", FAULTS)
def test_an_exception_of_the_watch_on_one_rank_changes_nothing_in_a_race(played, kind):
    ranks = of_kind(played, kind, 2, KINDS)
    assert [one["end"] for one, _ in ranks] == [other["end"] for _, other in ranks]
    assert any("error of its own" in text for text in notes_of(ranks[1][1]))


@pytest.mark.campaign
@pytest.mark.parametrize(("kind", "at", "why"), [("joined", 3, JOIN), ("late_hook_of_the_user", 13, HOOK)])
def test_what_comes_up_during_a_race_ends_it(played, kind, at, why):
    for one, other in of_kind(played, kind, 2, (kind,), at):
        assert one["end"] == other["end"]
        assert caps_of(other)
        assert notes_of(other) == [f"the race of bucket caps ended: {why}"]


@pytest.mark.parametrize("kind", in_campaign(*(kind for kind in RACED if kind not in VIEWS)))
def test_three_ranks_end_within_rounding(played, kind):
    for one, other in of_kind(played, kind, 3, RACED):
        assert {*caps_of(other).values()} >= CAPS
        # Their 12 steps end before the race does.
        ended = kind in ("loaders_and_evaluation", "epoch_never_set")
        assert ended or one["caps"] == other["caps"]
        assert other["norms"] == pytest.approx(one["norms"], rel=1e-3)


@pytest.mark.parametrize("kind", in_campaign(*VIEWS))
def test_on_three_ranks_views_are_not_raced(played, kind):
    for one, other in of_kind(played, kind, 3, RACED):
        assert (one["end"], caps_of(other)) == (other["end"], {})


SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.set_num_threads(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(64, 64)] * 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2000):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
"""


def test_a_race_is_announced_and_answered_and_its_folder_has_a_case_for_each_cap(tmp_path):
    script, folder = tmp_path / "train.py", tmp_path / "watched"
    script.write_text(SCRIPT)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    options = ("--bucket-cap-mb", "default,0.01", "--steps", "20", "--stop", "--out", str(folder))
    done = finished(make_package_command("watch", *options, "--", *torchrun, str(script)), tmp_path)
    assert done.returncode == 0, done.stderr
    note = launch.make_config(folder, 20, bucket_cap_mb="default,0.01")["race"]["note"]
    assert done.stderr.startswith(f"{note}\n") or note in done.stderr.splitlines()[0]
    run = load_run(folder)
    assert note in run.manifest.watched.notes
    assert [case.get_setting("bucket_cap_mb") for case in run.results] == ["default", "0.01"]
    (compared,) = run.compared
    assert (compared.num_rounds, compared.answer in ANSWERS) == (launch.MIN_RACE_ROUNDS, True)
    assert run.results[0].exposed_comm_ms is not None
    assert not any("needs" in one for one in run.manifest.watched.notes)
    rows = rows_in(folder)
    assert sorted(row["rank"] for row in rows if row["kind"] == "end") == [0, 1]
    assert {row["race_ends_at"] for row in rows if row["kind"] == "model"} == {24 + 2 * 6 * launch.BLOCK}
