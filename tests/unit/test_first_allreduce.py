"""The first all-reduce of a run: what does not communicate is named. Failures come in an order made here."""

from types import SimpleNamespace

import pytest
from made import planned, resolved, torchrun

from ddp_bench.bench.errors import GaveUpError
from ddp_bench.bench.manifest import RankPlace
from ddp_bench.bench.run.failures import Failure, RestartError
from ddp_bench.bench.run.standalone import check_links
from ddp_bench.bench.worker import messages as m


class Broken:
    """Workers of which `dead` pairs hang in a collective, or all where more than `most` take part."""

    launched = None

    def __init__(self, num_ranks, dead=(), most=99, raises=""):
        self.num_ranks, self.dead, self.most, self.raises = num_ranks, dead, most, raises
        self.asked = []

    def __len__(self):
        return self.num_ranks

    def ask(self, commands, what, limit_s):
        (link,) = set(commands.values())
        assert isinstance(link, m.Link)
        ranks = range(link.first, link.first + link.num_ranks)
        self.asked.append((link.first, link.num_ranks))
        if any({*pair} <= {*ranks} for pair in self.dead) or len(ranks) > self.most:
            if not self.raises:
                raise RestartError(Failure("timeout", f"no end of {what} within {limit_s:g} s"))
            bad = m.Report(status="failed", reason=self.raises)
            return {rank: bad if rank == ranks[-1] else m.Report() for rank in commands}
        return {rank: m.Report() for rank in commands}


def place(rank):
    return RankPlace(rank=rank, host="h", local_rank=rank, device=f"cuda:{rank}", device_name="A")


@pytest.fixture
def checked():
    def check(workers):
        starts = []
        run = SimpleNamespace(
            workers=workers,
            plan=planned(resolved(gpus=(1, 4), modes=("ddp",), bucket_cap_mb=("default",))),
            recorder=SimpleNamespace(note=lambda *_: None),
            places=[place(rank) for rank in range(len(workers))],
            began=starts.append,
        )
        check_links(run, lambda: "other workers")
        return starts

    return check


def test_ranks_that_communicate_are_asked_once(checked):
    workers = Broken(4)
    assert checked(workers) == []
    assert workers.asked == [(0, 4)]


def test_a_pair_that_hangs_is_named(checked):
    workers = Broken(4, dead=[(1, 2)])
    with pytest.raises(GaveUpError, match=r"^rank 1 \(cuda:1 on h\) and rank 2 \(cuda:2 on h\) do .* 20 s"):
        checked(workers)
    assert workers.asked == [(0, 4), (0, 2), (1, 2)]


def test_where_each_pair_communicates_and_all_do_not_it_says_so(checked):
    with pytest.raises(GaveUpError, match=r"^4 ranks, from rank 0 .*; each pair of neighbours does"):
        checked(Broken(4, most=2))


def test_an_error_names_its_rank(checked):
    with pytest.raises(GaveUpError, match=r"unhandled system error \(rank 3\)"):
        checked(Broken(4, dead=[(2, 3)], raises="unhandled system error"))


def test_a_launcher_starts_nothing_anew(checked):
    workers = Broken(4, dead=[(0, 1)])
    workers.launched = torchrun(4)
    with pytest.raises(GaveUpError, match=r"^4 ranks, from"):
        checked(workers)
    assert workers.asked == [(0, 4)]
