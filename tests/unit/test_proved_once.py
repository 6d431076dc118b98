"""Later launches of a gate go by what the first one has proved; any other run proves by itself."""

from dataclasses import replace

import pytest
from made import planned, resolved

from ddp_bench.bench.common.console import Console
from ddp_bench.bench.common.turns import PROOFS_ENV, TURNS_ENV
from ddp_bench.bench.machine.manifest import Manifest, RankPlace, WorkloadCode
from ddp_bench.bench.plan.sweep import hash_plan
from ddp_bench.bench.results.case_result import read_case_results
from ddp_bench.bench.run.case_runner import CaseRunner
from ddp_bench.bench.run.open_folder import open_run
from ddp_bench.bench.worker import messages as m
from ddp_bench.bench.worker.facts import Begun

PREPARED = {
    "times": {"block_ms": 3.0, "steps_ms": [1.0, 1.0, 1.0]},
    "memory": [{"peak_mib": 100.0, "reserved_mib": 120.0}],
}
PROOF = {"error": 1e-9}
PROOFS = {"gradients": PROOF, "update": PROOF}


class FakeWorkers:
    """Answers as ranks whose model trains right, and keeps what it was asked."""

    launched = None

    def __init__(self):
        self.asked = []

    def __len__(self):
        return 1

    def ask(self, commands, *_):
        asked = [one for one in commands.values() if isinstance(one, m.Prepare)]
        self.asked += [one.proves for one in asked]
        found = [PREPARED | (PROOFS if one.proves else {}) for one in asked] or [None]
        return dict.fromkeys(commands, m.Report(value=found[0]))


@pytest.fixture
def prepare(tmp_path, monkeypatch):
    """Prepares the only case of a run in its folder: what ranks were asked, and the case's row."""

    def run(name, *, code="abc", batch=16, proved="", in_turns=True):
        for variable, value in (
            (PROOFS_ENV, proved),
            (TURNS_ENV, str(tmp_path / "none") if in_turns else ""),
        ):
            if value:
                monkeypatch.setenv(variable, str(value))
            else:
                monkeypatch.delenv(variable, raising=False)
        settings = resolved(
            device="cpu", devices=2, modes=["single"], gpus=[1], batch_size=batch, out=str(tmp_path / name)
        )
        plan = planned(settings, device="cpu", devices=2, arch="resnet20", image_size=32)[:1]
        manifest = Manifest(
            settings=replace(settings, out=None),
            plan_hash=hash_plan(plan),
            workload=WorkloadCode(file="net.py", code_sha256=code),
        )
        recorder, lock, _ = open_run(settings, plan, manifest, {}, resume=None)
        workers = FakeWorkers()
        begun = [Begun(place=RankPlace(rank=0, host="here", device_name="a core"))]
        runner = CaseRunner(workers, settings, plan, begun, recorder, Console(silent=True))
        runner._prepare_case(0, plan[0])
        assert len(runner.live) == 1, "the case is ready"
        facts = recorder.journal.state.settled[0].facts
        recorder.write()
        assert len(read_case_results(recorder.tables.cases)) == 1
        lock.release()
        return workers.asked, facts

    return run


def test_what_the_first_launch_has_proved_is_warmed_up_alone(prepare, tmp_path):
    asked, first = prepare("launch1")
    assert asked == [True]
    assert first["gradient_error"] == 1e-9
    asked, facts = prepare("launch2", proved=tmp_path / "launch1")
    assert asked == [False]
    assert facts == first


@pytest.mark.parametrize(
    "other",
    [{"code": "abd"}, {"batch": 32}, {"in_turns": False}, {"proved": "no such folder"}],
    ids=["other code", "another plan", "not in turns", "no folder"],
)
def test_anything_else_is_proved_anew(other, prepare, tmp_path):
    prepare("launch1")
    asked, _ = prepare("launch2", **{"proved": tmp_path / "launch1", **other})
    assert asked == [True]
