"""Eight ranks of one machine, from the plan to the tables, of which one runs: PyTorch's `fake` process group.

It does the collectives of the other seven by leaving tensors as they are. So what is seen here is the paths
that a run of eight devices takes: plan, groups, buckets, phases, rows. Times mean nothing.
"""

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from ddp_bench.bench.console import Console
from ddp_bench.bench.manifest import Manifest, RankPlace
from ddp_bench.bench.measure.timed import Trainer
from ddp_bench.bench.modes import Place
from ddp_bench.bench.modes.ddp import DistributedMode
from ddp_bench.bench.plan import Machine, expand
from ddp_bench.bench.resolve import resolve, with_device_defaults
from ddp_bench.bench.results.store import load_run
from ddp_bench.bench.run.reopen import open_run
from ddp_bench.bench.run.rounds import Rounds
from ddp_bench.bench.worker import messages as m
from ddp_bench.bench.worker import rank as worker
from ddp_bench.bench.worker.proof import Prover, Shown
from ddp_bench.bench.worker.rank import Rank
from ddp_bench.bench.worker.reference import Subject
from ddp_bench.models.registry import resnet_workload

NUM_RANKS = 8
COUNTS = (1, 2, 4, 8)


class EightWorkers:
    """Rank 0 of eight that all say the same."""

    launched = m.Launched(world_size=NUM_RANKS, ranks_per_node=NUM_RANKS)

    def __init__(self, rank):
        self._rank = rank

    def __len__(self):
        return NUM_RANKS

    def ask(self, commands, *_):
        once = {command.name: command for command in reversed(commands.values())}
        answers = {name: self._rank.do(command) for name, command in once.items()}
        return {r: m.decode(m.encode(answers[one.name]), m.AnyAnswer) for r, one in commands.items()}

    def values(self, commands, kind, *_):
        return {r: msgspec.convert(one.value, kind) for r, one in self.ask(commands).items()}


def _without_result(mode, *arguments, **more):
    _plain_init(mode, *arguments, **more)
    mode.ddp.register_comm_hook(None, noop_hook)


_plain_init = DistributedMode.__init__


def _fake_group(ranks, _backend):
    made = dist.new_group(list(ranks), backend="fake")
    assert isinstance(made, dist.ProcessGroup)
    return made


@pytest.fixture(scope="module", autouse=True)
def fake_group():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    with pytest.MonkeyPatch.context() as patched:
        # The fake all-reduce hands no tensor back, which the reducer waits for.
        patched.setattr(DistributedMode, "__init__", _without_result)
        # It does not count its collectives.
        patched.setattr(worker, "_launched", lambda _: 0)
        patched.setattr(worker, "_group", _fake_group)
        patched.setattr(Rank, "_link", lambda *_: None)
        # Nothing is added up, so no gradient is the average that the proof asks for.
        patched.setattr(Prover, "prove", lambda *_: Shown(0.0))
        patched.setattr(Prover, "subject", lambda _self, case, _stages: Subject(case=case))
        patched.setattr(worker, "prove_update", lambda *_: m.UpdateError())
        yield
    dist.destroy_process_group()


def measured(folder, **more):
    """A run of one round of ResNet-20 on eight devices of their own."""
    given = {"gpus": "1,2,4,8", "rounds": "1", "batch_size": "2", "bucket_cap_mb": "default,0.25"}
    asked = resolve(given | {"out": str(folder)} | more)
    settings = with_device_defaults(asked, device_type="cpu", num_local_devices=NUM_RANKS)
    workload = resnet_workload("resnet20", 8)
    machine = Machine(device_type="cpu", devices_per_node=NUM_RANKS)
    plan = expand(settings, machine, arch=workload.name, image_size=workload.image_size)
    rank = Rank(0, 0)
    rank.place = Place(rank=0, device=torch.device("cpu"), cores=(0, 1))
    rank._workload = workload
    begin = m.Begin(
        settings=settings,
        cases=tuple(p.case for p in plan if not p.skip_reason),
        world_size=NUM_RANKS,
        local_world_size=NUM_RANKS,
        meeting="eight",
    )
    assert rank.do(begin).status == "ok"
    opened = open_run(settings, plan, Manifest(settings=settings), {}, resume=None)
    rounds = Rounds(
        workers=EightWorkers(rank),
        settings=settings,
        plan=plan,
        begun=[m.Begun(place=_info(number), fingerprint="") for number in range(NUM_RANKS)],
        recorder=opened.recorder,
        console=Console(silent=True),
        start_anew=list,
    )
    reason = rounds.run()
    opened.recorder.write()
    opened.recorder.close(reason)
    return load_run(folder)


def _info(rank):
    return RankPlace(
        rank=rank, host="one", local_rank=rank, device=f"core {rank}", device_name="core", link=None
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return measured(tmp_path_factory.mktemp("eight") / "run", calibrate="on", channels_last="on")


def ok(run, **wanted):
    rows = run.cases[run.cases["status"] == "ok"].to_dict("records")
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


@pytest.mark.campaign
def test_every_case_of_the_plan_is_measured(run):
    assert [row["num_devices"] for row in ok(run, mode="ddp", bucket_cap_mb="default")] == list(COUNTS)
    assert [row["num_devices"] for row in ok(run, mode="ddp", bucket_cap_mb="0.25")] == [2, 4, 8]
    assert [row["num_devices"] for row in ok(run, mode="dp")] == [2, 4, 8]
    reasons = run.cases[run.cases["status"] != "ok"].set_index("mode")["reason"]
    assert list(reasons.index) == ["dp"], "on one device it is the plain module"


@pytest.mark.campaign
def test_the_global_batch_and_the_buckets_follow_the_count(run):
    for row in ok(run, mode="ddp"):
        assert row["global_batch"] == 2 * row["num_devices"]
        assert not row["oversubscribed"]
    layouts = {
        cap: {row["bucket_bytes"] for row in ok(run, bucket_cap_mb=cap)} for cap in ("default", "0.25")
    }
    gradient_bytes = 4 * sum(p.numel() for p in resnet_workload("resnet20", 8).module().parameters())
    for found in layouts.values():
        assert len(found) == 1, "the same at every count"
        assert sum(map(int, found.pop().split("/"))) == gradient_bytes


@pytest.mark.campaign
def test_the_largest_count_alone_is_calibrated(run):
    found = run.blocks[run.blocks["phase"] == "calibration"]["case_id"].unique()
    assert [row["num_devices"] for row in ok(run) if row["case_id"] in found] == [8]


@pytest.mark.campaign
def test_memory_that_runs_out_ends_its_case_alone(tmp_path, monkeypatch):
    plain = Trainer.step

    def full(trainer):
        ddp = trainer.mode.wrapped
        if isinstance(ddp, DistributedDataParallel) and dist.get_world_size(ddp.process_group) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        plain(trainer)

    monkeypatch.setattr(Trainer, "step", full)
    cases = measured(tmp_path / "run", bucket_cap_mb="default", gpus="2,4").cases
    ddp = cases[cases["mode"] == "ddp"]
    found = dict(zip(ddp["num_devices"], ddp["status"], strict=True))
    assert found == {2: "oom", 4: "ok"}
    assert "--batch-size" in str(ddp[ddp["num_devices"] == 2]["reason"].item())
