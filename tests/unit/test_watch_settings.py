"""What is said of settings that cost a watched training time: figures in closed form, lines and arguments."""

import pytest
from watched_folders import EACH, EXPOSED_S, OWN_S, lengthen, list_rows, training, watched_run, write_rows

from ddp_bench.bench.findings.watched import conclude_watch

NAME = "train.py:42"


LOADER = {"kind": "loader", "loader": 1, "workers": 4, "pinned": False, "passes": 2, "epochs": 2}


def with_rows(steps, **more):
    for row in list_rows(steps):
        row.update(more)
    return steps


def said_of(run):
    """Costs of settings: what was measured, in ms, and what was not, each with the change."""
    found = [one for one in conclude_watch(run).costs if one.title not in ("Communication", "Straggler")]
    measured = [(one.ms.estimate, one.fact, one.change) for one in found if one.ms]
    return measured, [(one.fact, one.change) for one in found if not one.ms]


def test_a_training_that_is_set_well_is_told_nothing(tmp_path):
    start = {"threads": 1, "cores": [0, 1], "debug": "OFF"}
    model = {"find_unused_parameters": True, "unused": True, "line": NAME}
    folder = write_rows(tmp_path / "w", training(), LOADER, start=start, model=model)
    assert said_of(watched_run(folder, with_page=True)) == ([], [])
    assert "Try " not in (tmp_path / "w" / "report.html").read_text()


def test_each_needless_average_costs_its_share_of_what_communication_adds(tmp_path):
    steps = with_rows(training(num_syncs=4), accumulated=3, signature=EACH | {"sync0": 4})
    run = watched_run(write_rows(tmp_path / "w", steps, model={"kept_at": NAME}))
    [(ms, what, remedy)], others = said_of(run)
    assert ms == pytest.approx(3 / 4 * 4 * 1000 * EXPOSED_S)
    assert "3 times before an accumulation is complete takes 60.0 ms, 50% of each step" in what
    assert remedy == f"Try no_sync() around forward and backward of every micro-step but the last ({NAME})"
    assert others == []
    first, second = conclude_watch(run).costs
    assert (first.title, second.title) == ("Communication", "Micro-steps"), "the larger cost first"
    assert second.remedy == f"{remedy}: a step would take 60.0 ms instead of 120 ms."


def test_without_probes_what_an_average_costs_is_not_measured_and_no_saving(tmp_path):
    made = training(29, hook_at=99, num_syncs=2)
    folder = write_rows(tmp_path / "w", with_rows(made, accumulated=1), model={"kept_at": NAME})
    savings, [(what, _)] = said_of(watched_run(folder, with_page=True))
    assert savings == []
    assert what.endswith("1 time before an accumulation is complete costs time that was not measured.")
    assert "a step would take" not in (tmp_path / "w" / "report.html").read_text()


@pytest.mark.parametrize(
    ("made_by", "remedy"),
    [
        ("", f"find_unused_parameters=False in DistributedDataParallel ({NAME})"),
        ("transformers", "ddp_find_unused_parameters=False in TrainingArguments"),
        ("accelerate", "find_unused_parameters=False in DistributedDataParallelKwargs, one of Accelerator's"),
        ("lightning", "find_unused_parameters=False in DDPStrategy"),
    ],
)
def test_a_search_for_unused_parameters_costs_what_the_last_rank_searches(tmp_path, made_by, remedy):
    """Rank 1 has 2 ms more of other work: without 5 ms of its search rank 0, which has none, is the last."""
    steps = training(late_s=0.002)
    for step in steps:
        step[1]["search_s"] = 0.005
    model = {"find_unused_parameters": True, "unused": False, "line": NAME, "made_by": made_by}
    [(ms, _, said)], others = said_of(watched_run(write_rows(tmp_path / "w", steps, model=model)))
    assert ms == pytest.approx(2)
    assert said.startswith(f"Try {remedy}")
    assert others == []


def test_where_one_rank_has_unused_parameters_the_search_is_needed(tmp_path):
    steps = with_rows(training(), search_s=0.005)
    models = [{"find_unused_parameters": True, "unused": unused} for unused in (False, True)]
    assert said_of(watched_run(write_rows(tmp_path / "w", steps, model=models))) == ([], [])


def test_buffers_and_loaders_cost_what_ranks_wait_for_them_largest_first(tmp_path):
    steps = training(buffers_s=0.03)
    for row in list_rows(steps):
        lengthen(row, data=0.05)
    model = {"buffers_argument": "forward_sync_buffers", "line": "train.py:7"}
    loader = LOADER | {"workers": 0, "line": NAME}
    run = watched_run(write_rows(tmp_path / "w", steps, loader, model=model))
    savings, others = said_of(run)
    assert [ms for ms, _, _ in savings] == pytest.approx([1000 * (OWN_S["data"] + 0.05), 30])
    assert [remedy for _, _, remedy in savings] == [
        f"Try num_workers=2 in DataLoader ({NAME})",
        "Try forward_sync_buffers=False in DistributedDataParallel (train.py:7), if ranks may keep "
        "buffers of their own",
    ]
    assert others == []
    found = conclude_watch(run)
    share = "54.0 ms, 27% of each step."
    assert found.headline == f"Waiting for a DataLoader with 0 workers on each rank takes {share}"
    assert "a step would take 146 ms instead of 200 ms" in found.costs[0].remedy
    assert found.advice.startswith(f"Try num_workers=2 in DataLoader ({NAME}); then watch again and compare ")


def test_what_is_seen_but_not_measured_is_told_apart_with_what_to_change(tmp_path):
    start = {"threads": 4, "cores": [0, 1, 2, 3], "debug": "DETAIL", "device": "cuda:0"}
    loader = LOADER | {"epochs": 1, "line": NAME}
    replicas = {"kind": "parallel", "how": "DataParallel", "devices": 4, "line": "train.py:9"}
    folder = write_rows(tmp_path / "w", training(), loader, replicas, start=start)
    savings, others = said_of(watched_run(folder))
    assert savings == []
    assert dict(others) == {
        "One process trains on 4 GPUs through nn.DataParallel.": (
            "Try DistributedDataParallel, started by torchrun with a process for each GPU (train.py:9)"
        ),
        "Samples have the same order in 2 epochs, for the sampler's epoch is never set.": (
            f"Try sampler.set_epoch(epoch) before each pass over the DataLoader ({NAME})"
        ),
        "Batches are copied to the GPU from memory that is not pinned.": (
            f"Try pin_memory=True in DataLoader ({NAME})"
        ),
        "8 threads of operators share 4 cores.": (
            "Try OMP_NUM_THREADS=2 before the launcher, or torch.set_num_threads(2)"
        ),
        "TORCH_DISTRIBUTED_DEBUG=DETAIL checks the ranks' collectives.": "Try TORCH_DISTRIBUTED_DEBUG=OFF",
    }


def test_ranks_that_are_bound_to_cores_of_their_own_have_enough(tmp_path):
    starts = [{"threads": 2, "cores": cores} for cores in ([0, 1], [2, 3])]
    assert said_of(watched_run(write_rows(tmp_path / "w", training(), start=starts))) == ([], [])
