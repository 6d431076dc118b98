"""Messages between the ranks of a proof: more of them than a binary tree's first rank speaks to."""

import pytest
from rank_pool import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")

NUM_RANKS = 6

SCRIPT = """
import math
from ddp_bench.bench.proof.peers import ProofGroup
cluster = Cluster()
rank, size = cluster.rank, cluster.world_size
torch.manual_seed(rank)
kinds = {"double": torch.float64, "single": torch.float32, "half": torch.bfloat16, "complex": torch.complex64}
own = {name: torch.randn(40, 25, dtype=dtype).t() for name, dtype in kinds.items()}
own["scalar"] = torch.tensor(0.1 * rank, dtype=torch.float64)
own["none"] = torch.zeros(3) if rank else torch.ones(3)
before = {name: one.clone() for name, one in own.items()}
peers = ProofGroup(rank, size)
with Collectives() as sent:
    means, sizes = peers.average_tensors(own, measures=True)
calls = [*zip(sent.names, sent.num_bytes)]
traffic = [sum(size for name, size in calls if name.startswith(kind)) for kind in ("send", "recv")]

whole = sum(one.numel() * max(one.element_size(), 4) for one in own.values()) + 8 * len(own)
everyone = cluster.gather(own)
def error(name):
    wide = [one[name].to(torch.complex128) for one in everyone]
    return float((means[name] - sum(wide) / size).abs().max() / sum(wide).abs().max())
def length(one):
    return math.hypot(*one.abs().double().flatten().tolist())
longest = {name: max(length(one[name]) for one in everyone) for name in own}
nan = peers.find_worst(math.nan if rank == 3 else rank, f"of {rank}")
report({
    "errors": {name: error(name) for name in own},
    "types": {name: str(one.dtype) for name, one in means.items()},
    "sizes": {name: float(sizes[name]) / longest[name] for name in own},
    "kept": all(torch.equal(one, before[name]) for name, one in own.items()),
    "traffic": [one / whole for one in traffic],
    "same": len({str({n: one.tolist() for n, one in m.items()}) for m in cluster.gather(means)}),
    "worst": [str(nan[0]), nan[1], peers.find_worst(-float(rank), f"of {rank}")],
    "largest": peers.find_all_largest(rank, -rank, math.nan if rank == 4 else 0.0)[:2],
    "is_nan": math.isnan(peers.find_largest(math.nan if rank == 4 else 0.0)),
    "given": [peers.broadcast(torch.full((2,), rank), root).tolist() for root in range(size)],
    "empty": [len(one) for one in peers.average_tensors({}, measures=True)],
})
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_ranks(SCRIPT, NUM_RANKS, tmp_path_factory.mktemp("ranks"))


def test_a_mean_is_that_of_all_ranks_on_each_of_them(found):
    for rank in found:
        limits = dict.fromkeys(rank["errors"], 1e-6) | {"double": 1e-14, "scalar": 1e-14}
        assert {name for name, error in rank["errors"].items() if error > limits[name]} == set()
        assert rank["types"]["half"] == "torch.float32", "16 bits would round the sum"
        assert rank["same"] == 1, "not a bit may differ between ranks"
        assert rank["sizes"] == pytest.approx(dict.fromkeys(rank["errors"], 1.0), rel=1e-6)
        assert rank["kept"], "a rank's own gradients are not written into"
        assert rank["empty"] == [0, 0]


def test_no_rank_carries_more_than_three_times_the_gradients(found):
    for rank in found:
        assert max(rank["traffic"]) <= 3.0
    assert min(map(max, (rank["traffic"] for rank in found))) >= 1.0


def test_the_largest_and_what_a_rank_gives_come_to_all(found):
    for rank in found:
        assert rank["worst"] == ["nan", "of 3", [0.0, "of 0"]]
        assert rank["largest"] == [NUM_RANKS - 1, 0]
        assert rank["is_nan"]
        assert rank["given"] == [[root, root] for root in range(NUM_RANKS)]
