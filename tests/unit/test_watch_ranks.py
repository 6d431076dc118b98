"""Rows, bucket caps and collectives in the processes of a watched training."""

import pytest

from ddp_bench.bench.watch.launch import is_joined, list_ranks, make_config
from ddp_bench.bench.watch.ranks.private import keep_traceable
from ddp_bench.bench.watch.ranks.reducer import format_cap_mib
from ddp_bench.bench.watch.ranks.rows import Rows


def test_hosts_of_one_name_whose_processes_have_one_number_write_files_of_their_own(tmp_path, monkeypatch):
    """As containers on one machine; another host joins a folder until a rank has begun."""
    monkeypatch.setenv("BENCH_HOST", "rack/node")
    folder = tmp_path / "watched"
    assert not is_joined(folder)
    (folder / "ranks").mkdir(parents=True)
    assert is_joined(folder)
    launches = [make_config(folder, 5) for _ in range(2)]
    for rank, config in enumerate(launches):
        Rows(config).write(kind="start", rank=rank, host="rack/node")
    assert len([*(folder / "ranks").iterdir()]) == 2
    assert [list_ranks(config) for config in launches] == [{0}, {1}]
    assert not is_joined(folder)


@pytest.mark.parametrize("said", ["", "node-1"])
def test_a_rank_that_is_no_number_in_the_environment_ends_no_watch(said, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", said)
    assert Rows(make_config(tmp_path, 5)).rank == 0


@pytest.mark.parametrize("cap", ["25", "0.001", "100", "1.5", "0.1"])
def test_a_cap_is_written_as_the_script_has_it(cap):
    assert format_cap_mib(int(float(cap) * 2**20)) == cap


def test_torchs_compiler_rewrites_a_wrapped_collective_as_it_does_the_original():
    """Torch was compiling before the watch came, as in a notebook."""
    from torch._dynamo.variables.functions import CollectiveFunctionRewriteVariable
    from torch.distributed import _functional_collectives, all_reduce

    def wrapped(*arguments, **named):
        return all_reduce(*arguments, **named)

    assert not CollectiveFunctionRewriteVariable.can_rewrite(wrapped)
    keep_traceable(all_reduce, wrapped)
    try:
        assert CollectiveFunctionRewriteVariable.can_rewrite(wrapped)
    finally:
        _functional_collectives.traceable_collective_remaps.pop(wrapped, None)
