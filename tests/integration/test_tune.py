"""The command as a user types it: one run, a race of DDP's settings."""

import json

import pytest
from commands import TINY, python

from ddp_bench.bench.plan.buckets import PYTORCH_CAPS, fill_buckets
from ddp_bench.bench.predict.calibration import load_calibration
from ddp_bench.bench.results.store import load_run
from ddp_bench.models.registry import make_resnet_workload

pytestmark = pytest.mark.campaign

CAPS = ("default", "0", "0.25")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    out = tmp_path_factory.mktemp("tune") / "out"
    more = ("--calibrate", "--passes", "no_sync,comm", "--gradient-as-bucket-view", "off,on")
    given = (*TINY, "--gpus", "2", "--bucket-cap-mb", ",".join(CAPS), "--rounds", "8", *more)
    how = ("--json", "--out", str(out))
    done = python("-m", "bench.tune", *given, *how, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-4000:]
    return out, json.loads(done.stdout)


def test_the_slowest_leave_and_the_others_are_compared_with_the_default(tuned):
    """Blocks of a dropped case end with the round it was dropped in; its row and the default stay."""
    out, said = tuned
    run = load_run(out)
    assert (run.cases["status"] == "ok").all(), run.cases["reason"].tolist()
    ddp = run.cases[run.cases["mode"] == "ddp"]
    assert set(ddp["bucket_cap_mb"]) == set(CAPS)
    assert list(ddp["gradient_as_bucket_view"]).count(True) == 1, "one setting varied at a time"
    rounds = dict(zip(ddp["case_id"], ddp["num_rounds"], strict=True))
    (default,) = set(run.comparisons["reference_id"])
    assert rounds[default] == 8
    assert sorted(rounds.values())[-3:] == [8, 8, 8], "the default and two finalists"
    assert all(4 <= n < 8 for n in sorted(rounds.values())[:-3])
    assert set(run.comparisons["case_id"]) == rounds.keys() - {default}
    assert set(run.comparisons["margin"]) == {0.01}
    last = run.blocks[run.blocks["phase"] == "timed"].groupby("case_id")["round"].agg(["max", "nunique"])
    assert (last["max"] == last["nunique"]).all(), "nobody comes back"
    assert "DDP settings" in [answer["question"] for answer in said["answers"]]
    assert run.manifest.settings.race


def test_the_calibration_speaks_of_the_model_as_ddp_has_it(tuned):
    out, _ = tuned
    found = load_calibration(out)
    module = make_resnet_workload("resnet20", 32).module()
    assert {p.name for p in found.parameters} == {name for name, _ in module.named_parameters()}
    sizes = [p.num_bytes for p in found.parameters]
    cases = load_run(out).cases
    usual = (cases["bucket_cap_mb"] == "default") & (cases["gradient_as_bucket_view"] == False)  # noqa: E712
    assert str(fill_buckets(sizes, PYTORCH_CAPS)) == (
        cases.loc[usual & (cases["mode"] == "ddp"), "bucket_bytes"].item()
    ), "the reducer's order"
    ready = [p.ready_ms for p in found.parameters]
    assert 0 < ready[0] < ready[-1] <= max(found.backward_ms)
    assert min(*found.compute_slowdown, *found.comm_slowdown) >= 1
    assert found.allreduce[0].points[0][0] == 4096
    assert found.residual_ms
    assert found.single_step_ms
