"""The reference is what plain DDP comes to on two ranks; what DDP does wrong fails its proof."""

import csv
import functools
import os
from collections import defaultdict

import pytest
from test_workloads import PROVEN
from warm_workers import measure

KINDS = f"""
{PROVEN}
import torch.distributed as dist
import torch.distributed.nn.functional as with_gradients
from torch.nn.parallel import DistributedDataParallel
from ddp_bench.bench.proof.making import begin_draws
from ddp_bench.bench.proof.reference import make_training
from ddp_bench.models.workload import Workload, make_loss_function
def world():
    return dist.get_world_size()
class Net(nn.Sequential):
    def __init__(self, out=4):
        super().__init__(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, out))
class Centre(nn.Module):
    "Batch norm would do, but that under DDP torch before 2.14 refuses the backward of two forwards."
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
    def forward(self, x):
        before = self.mean.clone().to(x.dtype)
        with torch.no_grad():
            self.mean.lerp_(x.mean(0).to(self.mean.dtype), 0.3)
        return x - before
class Normed(nn.Sequential):
    def __init__(self, out=4):
        super().__init__(nn.Linear(8, 16), Centre(), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, out))
def views(n, g):
    return {{"x": torch.randn(n, 8, generator=g), "t": torch.randn(n, 8, generator=g),
             "y": torch.randint(4, (n,), generator=g)}}
def siamese(model, batch):
    return (model(batch["x"]) - model(batch["t"])).square().mean()
def pseudo_labels(model, batch):
    with torch.no_grad():
        labels = model(batch["t"]).argmax(1)
    return functional.cross_entropy(model(batch["x"]), batch["y"]) + functional.cross_entropy(
        model(batch["t"] + 0.1), labels)
class Queue(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net(8)
        self.register_buffer("rows", torch.randn(40, 8))
    def forward(self, x, t):
        scores = self.net(x) @ torch.cat([t, self.rows.to(x.dtype)]).clone().t()
        every = [torch.empty_like(t) for _ in range(world())]
        dist.all_gather(every, t.contiguous())
        self.rows.copy_(torch.cat([*every, self.rows.to(t.dtype)])[:40])
        return functional.cross_entropy(scores, torch.arange(len(x)))
def queued(model, batch):
    return model(batch["x"], batch["t"])
def gathered(model, batch):
    z, t = functional.normalize(model(batch["x"])), functional.normalize(batch["t"][:, :4])
    if world() > 1:
        z, t = (torch.cat(with_gradients.all_gather(one)) for one in (z, t))
    return functional.cross_entropy(z @ t.t() / 0.2, torch.arange(len(z)))
def usual(model, batch):
    return functional.cross_entropy(model(batch["x"]), batch["y"])
def doubled(model, batch):
    return usual(model, batch) * world()
def halved(model, batch):
    return usual(model, batch) / world()
def attacked(model, batch):
    x = batch["x"].clone().requires_grad_()
    functional.cross_entropy(model(x), batch["y"]).backward()
    model.zero_grad()
    return functional.cross_entropy(model(x.detach() + 0.1 * x.grad.sign()), batch["y"])
def smaller_on_one(model, batch):
    return usual(model, batch) * (0.5 if dist.get_rank() == 1 else 1.0)
def logged(model, batch):
    dist.all_reduce(torch.ones(()))
    return smaller_on_one(model, batch)
def of_kind(loss, module=Net, **more):
    return Workload(name="kind", module=module, batch=views, batch_loss=loss, **more)
class Thawing(nn.Module):
    def __init__(self, after):
        super().__init__()
        self.body, self.head, self.calls, self.after = nn.Linear(8, 16), nn.Linear(16, 4), 0, after
        self.body.requires_grad_(False)
    def forward(self, x):
        self.calls += 1
        self.body.requires_grad_(self.calls > self.after)
        return self.head(self.body(x).relu())
class Following(nn.Module):
    def __init__(self, by_rows):
        super().__init__()
        self.net, self.mean, self.by_rows = Net(), nn.Parameter(torch.zeros(8), requires_grad=False), by_rows
    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_((x if self.by_rows else self.net[0].weight).mean(0).to(self.mean.dtype), 0.1)
        return self.net(x - self.mean)
def plain(workload, case, num_steps=2):
    "Train by hand with DDP; this rank's parameters and buffers."
    prover = prover_of(workload)
    prover.make_subject(case)
    module = prover.maker.make_module()
    ddp = DistributedDataParallel(module, process_group=everyone)
    optimizer, loss = workload.optimizer(list(module.parameters())), make_loss_function(workload)
    source = prover.maker.open_source(case, cluster.rank, cluster.place.device)
    with set_default_group(everyone):
        for step in range(num_steps):
            optimizer.zero_grad()
            for micro in range(case.accumulate):
                is_last = micro == case.accumulate - 1
                begin_draws(0, step, micro, cluster.rank)
                with contextlib.nullcontext() if is_last else ddp.no_sync():
                    (loss(ddp, source.get_batch()) / case.accumulate).backward()
            optimizer.step()
    return {{name: one.detach().clone() for name, one in module.state_dict().items()}}
def of_ddp(**settings):
    return case_of(**dict(num_devices=size, batch_per_device=8, data="host", backend="gloo") | settings)
def apart(workload, in_order=False, **settings):
    "How far the reference is from plain DDP, in parameters and in buffers."
    case = of_ddp(**settings)
    right = plain(workload, case)
    prover = prover_of(workload)
    with set_default_group(everyone):
        of = prover.make_subject(case)
        work = make_training(prover.maker, of, (1.0, 1.0, 1.0))
        found = prover.reference.compute_result(replace(work, in_order=in_order))
    start = prover.maker.start
    off = {{n: (one - (right[n] - start[n])).abs().max() for n, one in found.update.items()}}
    buffers = {{n: (one.double() - right[n].double()).abs().max() for n, one in found.buffers.items()}}
    return [float(max(off.values())), float(max(buffers.values(), default=0))]
def effect(workload, **settings):
    prover = prover_of(workload)
    with set_default_group(everyone):
        return prover.split_effect.measure_effect(prover.make_subject(of_ddp(**settings)))
"""


@pytest.fixture
def kinds(ranks):
    return lambda script: ranks("import contextlib\n" + KINDS + script)


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}], ids=str)
@pytest.mark.parametrize("loss", ["siamese", "pseudo_labels"])
def test_buffers_come_before_each_forward_before_which_ddp_sends_them(kinds, loss, settings):
    """After a forward without gradients, and within `no_sync`, it sends none."""
    found = kinds(f"""
made = of_kind({loss}, Normed)
report([apart(made, **{settings!r}), outcome(made, **{settings!r})])
""")
    for (weights, buffers), proved in found:
        assert max(weights, buffers) < 1e-6
        assert max(proved) < 1e-6


def test_a_loss_that_is_the_same_on_all_ranks_is_proved(kinds):
    """With alternating signs its gradients would cancel, and prove nothing."""
    found = kinds("""
halves = lambda model, batch: gathered(model, batch) * (0.5 if dist.get_rank() == 1 else 1)
report([outcome(of_kind(gathered)), outcome(of_kind(halves))])
""")
    for proved, wrong in found:
        assert proved[0] < 1e-9
        assert "differ" in str(wrong) or "depend on the numbers of ranks" in str(wrong), wrong


def test_rows_of_all_ranks_are_kept_in_the_order_of_ranks(kinds):
    found = kinds("""
made = of_kind(queued, Queue)
report([apart(made, in_order=True), apart(made), outcome(made)])
""")
    for in_order, shifted, proved in found:
        assert max(in_order) < 1e-6
        assert shifted[1] > 0.1, "or the test tells nothing"
        assert max(proved) < 1e-6


def test_what_depends_on_a_ranks_number_is_no_matter_of_order(kinds):
    """Also where the loss asks other ranks for something else."""
    found = kinds("report([outcome(of_kind(smaller_on_one)), outcome(of_kind(logged))])")
    for without, with_collective in found:
        assert without.startswith("ProofError: gradients differ from those of single by")
        assert with_collective.startswith("its gradients depend on the numbers of ranks")


@pytest.mark.parametrize("after", [0, 1])
def test_a_parameter_that_begins_to_train_is_compared(kinds, after):
    """Plain DDP is wrong there: its ranks part."""
    found = kinds(f"""
made = of_kind(usual, lambda: Thawing({after}))
first, second = cluster.gather(plain(made, of_ddp())["body.weight"])
report([float((first - second).norm() / first.norm()), outcome(made)])
""")
    for parted, said in found:
        assert parted > 1e-4
        assert said.startswith("ProofError: "), said


def test_frozen_parameters_that_a_forward_changes_are_compared(kinds):
    """Those that follow the weights are equal on all ranks, those that follow its rows are not."""
    found = kinds("""
report([outcome(of_kind(usual, lambda: Following(by_rows))) for by_rows in (False, True)])
""")
    for alike, parted in found:
        assert max(alike) < 1e-6
        assert parted.startswith("ProofError: parameters"), parted


def test_the_effect_of_a_split_is_that_of_the_case_against_one_device_on_all_rows(kinds):
    found = kinds("report([effect(of_kind(one)) for one in (usual, gathered, attacked, doubled, halved)])")[0]
    assert max(found[:3]) < 1e-9
    assert found[3:] == pytest.approx([1.0, 0.5])


def test_the_effect_of_a_split_is_unknown_where_the_plain_module_differs_from_itself(kinds):
    found = kinds("""
def seen_before(model, batch):
    weight = 1 + batch["x"][0, 0].detach() * model(batch["x"]).new_ones(()) * len(seen)
    seen.append(1)
    return usual(model, batch) * weight
seen = []
def drawn(model, batch):
    return usual(model, {**batch, "x": batch["x"] * torch.rand(())})
report([effect(of_kind(seen_before)), effect(of_kind(drawn))])
""")
    assert found == [[None, None]] * 2


def test_rows_of_one_device_that_weigh_differently_are_seen(kinds):
    """The first row of each device has as many labels as that of the other, the second has not."""
    found = kinds("""
def batch(num_rows, generator):
    labels = torch.randint(10, (num_rows, 8), generator=generator)
    labels[2:, 1:] = -100
    return torch.randn(num_rows, 8, 4, generator=generator), labels
made = Workload(name="labels", module=lambda: nn.Linear(4, 10), batch=batch,
                loss=lambda outputs, labels: functional.cross_entropy(outputs.mT, labels))
report([effect(made, batch_per_device=2), effect(made, batch_per_device=4)])
""")
    unseen, seen = found[0]
    assert unseen < 1e-12
    assert seen > 0.1


def test_what_users_code_keeps_is_of_the_type_of_training_and_the_same_on_all_ranks(kinds):
    found = kinds("""
tables, losses = {}, []
def first_call(model, batch):
    x = batch["x"]
    if x.shape not in tables:
        tables[x.shape] = torch.linspace(0.5, 1.5, 8, dtype=x.dtype)
    loss = usual(model, {**batch, "x": (x * tables[x.shape]).to(model(x).dtype)})
    losses.append(loss.detach())
    return loss / losses[0]
proved = outcome(of_kind(first_call))
report([proved, float(losses[0]), [str(one.dtype) for one in tables.values()]])
""")
    for proved, _, types in found:
        assert max(proved) < 1e-6
        assert set(types) == {"torch.float32"}
    assert found[0][1] == found[1][1]


def test_a_gradient_that_is_zero_proves_nothing(kinds):
    found = kinds("""
still = of_kind(usual, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
report([outcome(of_kind(lambda m, b: usual(m, b) * 0)), outcome(still)])
""")
    for without, still in found:
        assert without == "its gradients are all zero on the batch of the proof"
        assert still == "its optimizer changes no parameter in them"


def test_the_largest_error_of_all_ranks_keeps_its_name_and_kind(kinds):
    found = kinds("""
from ddp_bench.bench.proof.judge import RelativeError
from ddp_bench.bench.proof.peers import ProofGroup
peers = ProofGroup(cluster.rank, size, control)
own = [RelativeError(0.1, 0.3, "gradients", "gradients a"),
       RelativeError(0.2, 0.1, "buffers", "buffers b.mean")]
nan = [RelativeError(9.0, 9.0, "gradients", "gradients a"),
       RelativeError(float("nan"), 1.0, "parameters", "parameters b")]
def wrong_on_last(self):
    named = normal(self)
    return {n: one + (cluster.rank == size - 1) for n, one in named.items()}
from ddp_bench.bench.modes.base import Mode
normal = Mode.collect_buffers
patch.setattr(Mode, "collect_buffers", wrong_on_last)
mine, odd = own[cluster.rank].find_largest(peers), nan[cluster.rank].find_largest(peers)
report([mine.describe(0.15), mine.describe(0.25), odd.describe(1.0), outcome(of_kind(siamese, Normed))])
""")
    for total, of_one, nan, proof in found:
        assert total == "buffers differ from those of single by 0.2"
        assert of_one == "gradients of a differ from those of single by 0.3"
        assert nan == "parameters differ from those of single by nan"
        assert proof.startswith("ProofError: buffers differ from those of single by")


def test_ranks_that_call_the_model_another_number_of_times_fail_and_none_waits(kinds):
    found = kinds("""
from ddp_bench.bench.measure.faults import PeerFailedError
def more_on_one(model, batch):
    if dist.get_rank() == 1 and world() > 1:
        model(batch["t"])
    return usual(model, batch)
def raises_on_one(model, batch):
    loss = usual(model, batch)
    if dist.get_rank() == 1 and world() > 1:
        raise ValueError("no such row")
    return loss + usual(model, batch)
def tried(loss):
    try:
        return outcome(of_kind(loss, Normed))
    except (PeerFailedError, ValueError) as error:
        return str(error)
report([tried(more_on_one), tried(raises_on_one)])
""")
    assert [one[0] for one in found] == [
        "the ranks call the model another number of times, and DDP would hang"
    ] * 2
    assert [one[1] for one in found] == ["another rank of the case failed", "no such row"]


OF_A_USER = """
import os
from functools import partial
import torch
from torch import nn
from torch.nn import functional
from ddp_bench import Workload

def note(module, x):
    with open("seen.txt", "a") as file:
        file.write(f"{os.getpid()} {x.device.type} {module.training}\\n")

class Thawing(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.calls = nn.Linear(8, 16), nn.Linear(16, 4), 0
        self.body.requires_grad_(False)
    def forward(self, x):
        note(self, x)
        self.calls += 1
        self.body.requires_grad_(self.calls > 12)
        return self.head(self.body(x).relu())

def pairs(n, g):
    return torch.randn(n, 8, generator=g), torch.randint(4, (n,), generator=g)

workload = Workload(name="mine", module=Thawing, batch=pairs)

class Classifier(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(192, 4))
    def forward(self, x):
        note(self, x)
        return super().forward(x)
"""


@pytest.fixture(scope="module")
def user_run(tmp_path_factory):
    """Runs a user's workload, or the function that makes the module: its cases, and who saw which devices."""

    @functools.cache
    def run(name):
        folder = tmp_path_factory.mktemp("look")
        (folder / "mine.py").write_text(OF_A_USER)
        arguments = (
            *("--workload", f"mine:{name}", "--image-size", "8", "--device", "cpu", "--gpus", "2"),
            *("--modes", "ddp", "--bucket-cap-mb", "default", "--batch-size", "4", "--rounds", "2"),
            *("--steps", "5", "--out", str(folder / "run")),
        )
        done = measure(arguments, folder)
        assert (folder / "run").exists(), done.stderr[-2000:]
        with (folder / "run" / "cases.csv").open() as file:
            cases = {row["mode"]: row for row in csv.DictReader(file)}
        seen = defaultdict(set)
        for line in (folder / "seen.txt").read_text().splitlines():
            pid, device, training = line.split()
            seen[pid].add((device, training == "True"))
        return cases, seen

    return run


@pytest.mark.parametrize("name", ["workload", "Classifier"])
def test_no_process_that_trains_or_forks_has_looked_at_the_model(user_run, name):
    """What code keeps of the meta device, or of a look in evaluation, holds no numbers of training."""
    _, seen = user_run(name)
    looked = {pid for pid, how in seen.items() if ("meta", False) in how or ("meta", True) in how}
    trained = {pid for pid, how in seen.items() if len(how) == 1 or ("cpu", True) in how} - looked
    assert len(looked) == 1
    assert len(trained) == 2
    assert all(("cpu", True) in seen[pid] for pid in trained)
    assert seen.keys() == looked | trained
    assert str(os.getpid()) not in seen


def test_what_begins_to_train_after_the_proof_is_seen_after_the_last_round(user_run):
    cases, _ = user_run("workload")
    assert cases["single"]["status"] == "ok"
    assert cases["ddp"]["status"] == "failed"
    assert (
        "gradients of body.weight, body.bias differ between ranks after the last round"
        in (cases["ddp"]["reason"])
    )
