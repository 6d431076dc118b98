"""Ranks that wait for each other, for real: the one that is late is named, and no case is blamed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ddp_bench.bench.cluster.meeting import host_name
from ddp_bench.bench.errors import ExitCode

if TYPE_CHECKING:
    from conftest import Ranks

ENDS = """
import time
from ddp_bench.bench.cluster.ranks import Cluster, PeerLostError
from ddp_bench.bench.recovery import lockstep, watchdog
exit_for_real = os._exit
def end(code):
    sys.stderr.flush()
    report(code)
    exit_for_real(0)
os._exit = end
"""
"""Lets a rank end as its watchdog ends it, with the code in its report."""

NEVER_COMES = """
from ddp_bench.bench.cluster import meeting
meeting.MEETING_LIMIT_S = 1.0
if os.environ["RANK"] == "1":
    end(0)
Cluster("cpu")
"""


def test_a_rank_that_never_comes_is_named(ranks: Ranks, tmp_path: Path) -> None:
    codes = ranks(ENDS + NEVER_COMES, 2)
    said = (tmp_path / "0.txt").read_text()
    assert codes == [ExitCode.USAGE, 0], said
    assert "bench.run: error: rank 1 did not come to 127.0.0.1:" in said


ALONE = """
import datetime
from ddp_bench.bench.cluster import meeting
from ddp_bench.bench.errors import UsageError
os.environ |= {"MASTER_PORT": "1", "WORLD_SIZE": "2"}
assert meeting.CONNECT_LIMIT <= datetime.timedelta(seconds=10)
meeting.CONNECT_LIMIT /= 10
try:
    meeting.meet()
except UsageError as error:
    report(str(error))
"""


def test_a_rank_whose_launcher_is_gone_does_not_wait_for_it(ranks: Ranks) -> None:
    """Torch's own limit for a store that nobody opens is five minutes."""
    (said,) = ranks(ALONE, 1)
    assert said.startswith("the ranks cannot meet at 127.0.0.1:1")


STUCK_AT_THE_START = """
from ddp_bench.bench.run import job, rank
from ddp_bench.bench.settings import Settings
watchdog.START_LIMIT_S = rank.START_LIMIT_S = 2.0
rank.PEER_GRACE_S = 0.0
def read_driver():
    if os.environ["RANK"] == "1":
        time.sleep(5)
    return None
setattr(rank, {stuck!r}, lambda *_: read_driver())
settings = Settings(arch="resnet20", modes=("ddp",), gpus=(2,), batch_size=4, device="cpu", rounds=1)
rank.Rank(job.prepare(settings), [], resume=None, quiet=True, as_json=False).run()
"""


@pytest.mark.parametrize("stuck", ["_hello", pytest.param("_host", marks=pytest.mark.campaign)])
def test_a_rank_that_is_stuck_at_the_start_is_named(stuck: str, ranks: Ranks, tmp_path: Path) -> None:
    """In a driver, say, or a file system, before anything is measured."""
    codes = ranks(ENDS + STUCK_AT_THE_START.format(stuck=stuck), 2)
    said = (tmp_path / "0.txt").read_text()
    assert codes[0] == 75, said
    late = f"no end of start-up within 2 s: rank 1 on {host_name()} in read_driver (script:"
    assert late in said
    assert "rank 0" not in said


WAITS_FOR_ITS_TURN = """
os.environ["BENCH_TURNS"] = "a server"
cluster = Cluster("cpu")
guard = watchdog.meet_and_watch()
notes = []
class Notes:
    def note(self, index, what, **more):
        notes.append([index, what])
def lost(failure):
    report([notes, failure.reason])
    exit_for_real(0)
guard.report_to(lost)
steps = lockstep.Lockstep(cluster, guard, Notes() if cluster.is_first else None, 0.0)
steps.run(7, "round 1 (timed)", lambda: 1.0, limit_s=60)
def ask():
    if cluster.is_first:
        time.sleep(4)
try:
    steps.wait_for_turn(ask, limit_s=1.5)
except PeerLostError:
    report(None)
    exit_for_real(0)
"""


def test_a_turn_that_does_not_come_is_no_fault_of_a_case(ranks: Ranks) -> None:
    (notes, reason), _ = ranks(ENDS + WAITS_FOR_ITS_TURN, 2)
    assert notes == [[7, "round 1 (timed)"], [None, "waiting for its turn"]]
    assert reason == (
        f"no end of the wait for this run's turn within 1.5 s: rank 0 on {host_name()} waits for its turn: "
        "another run on this machine has it"
    )


WAITS_IN_WORK = """
cluster = Cluster("cpu")
guard = watchdog.meet_and_watch()
def lost(failure):
    report([None, failure.reason])
    exit_for_real(0)
guard.report_to(lost)
steps = lockstep.Lockstep(cluster, guard, None, 0.0)
def work():
    if not cluster.is_first:
        for _ in range(40):
            time.sleep(0.1)
try:
    steps.run(7, "round 1 (timed)", work, limit_s=1.5)
except PeerLostError:
    report(None)
    exit_for_real(0)
"""


def test_the_rank_that_is_late_in_a_block_is_named(ranks: Ranks) -> None:
    (_, reason), _ = ranks(ENDS + WAITS_IN_WORK, 2)
    assert f"no end of round 1 (timed) within 1.5 s: rank 1 on {host_name()} in work (script:" in reason
    assert "rank 0" not in reason


NO_DATA = """
from ddp_bench.bench.cluster.ranks import Cluster
cluster = Cluster("cpu")
class Code:
    def __reduce__(self):
        return os.mkdir, ({place!r} + os.environ["RANK"],)
said = []
for send in (cluster.gather, cluster.from_first):
    try:
        send(Code() if send == cluster.gather or cluster.is_first else None)
    except TypeError as error:
        said.append(str(error))
    else:
        said.append("sent")
    if send == cluster.gather:
        cluster.barrier()
    elif cluster.is_first:
        cluster.from_first("instead")
report([said, cluster.gather((1, (cluster.rank,), {{2: b"x"}})) == [(1, (r,), {{2: b"x"}}) for r in (0, 1)]])
"""


LONG = """
import torch
from ddp_bench.bench.cluster.ranks import FIRST_BYTES, Cluster
cluster = Cluster("cpu")
lengths = [(0, 0), (FIRST_BYTES, 1), (3, 5 * FIRST_BYTES)]
torch.set_default_device("meta")
texts = [["x" * n for n in pair] for pair in lengths]
whole = [cluster.gather(pair[cluster.rank]) == pair for pair in texts]
mores = [[more for _, more in cluster.gather_to_first(1, pair[cluster.rank])] for pair in texts]
report([whole, [more == pair for more, pair in zip(mores, texts)]])
"""


def test_messages_of_any_length_arrive_whole_whatever_the_default_device(ranks: Ranks) -> None:
    assert ranks(LONG, 2) == [[[True] * 3, [True] * 3], [[True] * 3, [False] * 3]]


VALUES = """
from ddp_bench.bench.cluster.ranks import Cluster
from ddp_bench.bench.recovery.lockstep import Lockstep
cluster = Cluster("cpu")
class Guard:
    def arm(self, what, limit_s): pass
    def tell(self, status, reason, **more): pass
steps = Lockstep(cluster, Guard(), None, 0.0)
def work():
    if cluster.rank:
        raise ValueError("no such sample")
    return b"a trace" * 10_000
_, reports = steps.run(0, "round 1 (trace)", work, limit_s=60)
report([[r.status, r.reason, len(r.value or ""), "Traceback" in r.traceback] for r in reports])
"""


def test_what_a_block_measured_goes_to_the_first_rank_alone(ranks: Ranks) -> None:
    reason = "ValueError: no such sample"
    first, second = ranks(VALUES, 2)
    assert first == [["ok", "", 70_000, False], ["failed", reason, 0, True]]
    assert second == [["ok", "", 0, False], ["failed", reason, 0, False]]


def test_ranks_send_data_that_runs_no_code(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(NO_DATA.format(place=str(tmp_path / "made-by-rank")), 2)
    assert not list(tmp_path.glob("made-by-rank*"))
    refusal = "ranks cannot send a Code: it is no JSON; name its class with may_be_sent"
    assert found == [[[refusal, refusal], True], [[refusal, "sent"], True]]
