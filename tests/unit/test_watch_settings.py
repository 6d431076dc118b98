"""What is said of settings that cost a watched training time: figures in closed form, lines and arguments."""

import json

import pytest
from test_watch_reader import EACH, EXPOSED_S, OWN_S, step_rows, training, watched_run, write_rows

from ddp_bench.bench.findings.watched import conclude_watch

NAME = "train.py:42"


def changed_run(folder, steps, *, start=None, model=None, rows=(), num_ranks=2):
    """A watched folder whose rows of processes and models say more."""
    write_rows(folder, steps, num_ranks=num_ranks)
    for file in (folder / "ranks").iterdir():
        found = [json.loads(line) for line in file.read_text().splitlines()]
        for row in found:
            row.update({"start": start or {}, "model": model or {}}.get(row["kind"], {}))
        found[2:2] = rows
        file.write_text("".join(f"{json.dumps(row)}\n" for row in found))
    return watched_run(folder)


def with_rows(steps, **more):
    for step in steps:
        for row in step:
            row.update(more)
    return steps


def said_of(run):
    """What would save time, and what was not measured."""
    found = conclude_watch(run).settings
    return [(one.ms.estimate, one.what, one.remedy) for one in found.savings], [*found.unmeasured]


def test_a_training_that_is_set_well_is_told_nothing(tmp_path):
    loader = {"kind": "loader", "loader": 1, "workers": 4, "pinned": False, "passes": 2, "epochs": 2}
    start = {"threads": 1, "cores": [0, 1], "debug": "OFF"}
    model = {"find_unused_parameters": True, "unused": True, "line": NAME}
    run = changed_run(tmp_path / "w", training(), start=start, model=model, rows=[loader])
    assert said_of(run) == ([], [])
    assert "What would save time" not in (tmp_path / "w" / "report.html").read_text()


def test_each_needless_average_costs_its_share_of_what_communication_adds(tmp_path):
    steps = with_rows(training(num_syncs=4), accumulated=3, signature=EACH | {"sync0": 4})
    run = changed_run(tmp_path / "w", steps, model={"kept_at": NAME})
    [(ms, what, remedy)], others = said_of(run)
    assert ms == pytest.approx(3 / 4 * 4 * 1000 * EXPOSED_S)
    assert "gradients 3 times before an accumulation is complete" in what
    assert remedy == f"no_sync() around forward and backward of every micro-step but the last ({NAME})"
    assert others == []
    assert conclude_watch(run).advice == f"Try {remedy}; then watch again."


def test_without_probes_what_an_average_costs_is_not_measured_and_no_saving(tmp_path):
    made = [step_rows([OWN_S] * 2, n, probe=False, hooked=False, num_syncs=2) for n in range(1, 30)]
    run = changed_run(tmp_path / "w", with_rows(made, accumulated=1), model={"kept_at": NAME})
    savings, [(what, _)] = said_of(run)
    assert savings == []
    assert what.startswith("averaging gradients 1 time before")
    page = (tmp_path / "w" / "report.html").read_text()
    assert "Set badly, at a cost that was not measured" in page
    assert "What would save time" not in page


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
    [(ms, _, said)], others = said_of(changed_run(tmp_path / "w", steps, model=model))
    assert ms == pytest.approx(2)
    assert said.startswith(remedy)
    assert others == []


def test_where_one_rank_has_unused_parameters_the_search_is_needed(tmp_path):
    steps = with_rows(training(), search_s=0.005)
    folder = write_rows(tmp_path / "w", steps)
    for rank, file in enumerate(sorted((folder / "ranks").iterdir())):
        row = {"find_unused_parameters": True, "unused": rank == 1}
        text = file.read_text().replace('"why": null', f'"why": null, {json.dumps(row)[1:-1]}')
        file.write_text(text)
    assert said_of(watched_run(folder)) == ([], [])


def test_buffers_and_loaders_cost_what_ranks_wait_for_them_largest_first(tmp_path):
    steps = training(buffers_s=0.03)
    for step in steps:
        for row in step:
            row["parts"]["data"] += 0.05
            row["step_s"] += 0.05
    loader = {"kind": "loader", "loader": 1, "workers": 0, "passes": 1, "line": NAME}
    model = {"buffers_argument": "forward_sync_buffers", "line": "train.py:7"}
    run = changed_run(tmp_path / "w", steps, model=model, rows=[loader])
    savings, others = said_of(run)
    assert [ms for ms, _, _ in savings] == pytest.approx([1000 * (OWN_S["data"] + 0.05), 30])
    assert [remedy for _, _, remedy in savings] == [
        f"num_workers=2 in DataLoader ({NAME})",
        "forward_sync_buffers=False in DistributedDataParallel (train.py:7), if ranks may keep buffers of "
        "their own",
    ]
    assert others == []
    page = (tmp_path / "w" / "report.html").read_text()
    assert page.index("What would save time") < page.rindex(f"num_workers=2 in DataLoader ({NAME})")


def test_what_is_seen_but_not_measured_is_told_apart_with_what_to_change(tmp_path):
    start = {"threads": 4, "cores": [0, 1, 2, 3], "debug": "DETAIL", "device": "cuda:0"}
    rows = [
        {
            "kind": "loader",
            "loader": 1,
            "workers": 4,
            "pinned": False,
            "passes": 2,
            "epochs": 1,
            "line": NAME,
        },
        {"kind": "parallel", "how": "DataParallel", "devices": 4, "line": "train.py:9"},
    ]
    savings, others = said_of(changed_run(tmp_path / "w", training(), start=start, rows=rows))
    assert savings == []
    assert dict(others) == {
        "nn.DataParallel, which trains on 4 GPUs from one process": (
            "DistributedDataParallel, started by torchrun with a process for each GPU (train.py:9)"
        ),
        "the same order of samples in 2 epochs, for the sampler's epoch is never set": (
            f"sampler.set_epoch(epoch) before each pass over the DataLoader ({NAME})"
        ),
        "copying batches to the GPU from memory that is not pinned": (
            f"pin_memory=True in DataLoader ({NAME})"
        ),
        "8 threads of operators on 4 cores": (
            "OMP_NUM_THREADS=2 before the launcher, or torch.set_num_threads(2)"
        ),
        "the checks of TORCH_DISTRIBUTED_DEBUG=DETAIL": "TORCH_DISTRIBUTED_DEBUG=OFF",
    }


def test_ranks_that_are_bound_to_cores_of_their_own_have_enough(tmp_path):
    folder = write_rows(tmp_path / "w", training())
    for rank, file in enumerate(sorted((folder / "ranks").iterdir())):
        file.write_text(
            file.read_text().replace('"threads": 1', f'"threads": 2, "cores": [{2 * rank}, {2 * rank + 1}]')
        )
    assert said_of(watched_run(folder)) == ([], [])
