"""What the calibration pass tells: recovered from steps that a known machine would have taken."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made import case_of

from ddp_bench.bench.common.errors import UsageError
from ddp_bench.bench.machine.manifest import Manifest
from ddp_bench.bench.plan.buckets import fill_buckets
from ddp_bench.bench.predict.allreduce import CostCurve, make_curve
from ddp_bench.bench.predict.from_pass import calibrate_run, compute_slowdowns
from ddp_bench.bench.predict.from_rate import ERROR_PCT, OVERLAP_SLOWDOWN
from ddp_bench.bench.predict.networks import find_network
from ddp_bench.bench.predict.prediction import Scenario, simulate_scenario
from ddp_bench.bench.predict.timeline import Compute, Slowdown, simulate_ms
from ddp_bench.bench.results.case_columns import CASES
from ddp_bench.bench.results.columns import ALLREDUCE, BLOCKS, BUCKETS, make_frame
from ddp_bench.bench.results.store import RunData

SIZES = (2_000_000, 6_000_000, 12_000_000, 4_000_000)
READY_MS = (20.0, 45.0, 70.0, 100.0)
COMPUTE = Compute(before_ms=50.0, backward_ms=100.0, after_ms=10.0)
SLOW = Slowdown(compute=1.25, comm=1.4)
COPY_MS = 4.0
RESIDUAL_MS = 6.0
CURVE = CostCurve(((4096.0, 0.5), (1e8, 800.0)))
ORDER = (3, 2, 1, 0)
TRAINABLE = [(f"p{i}", SIZES[ORDER[i]], "") for i in range(4)]


def ends_of(compute, comm, compute_ms, comm_ms):
    """When both end that began together, each so many times slower while the other runs."""
    first = min(compute_ms * compute, comm_ms * comm)
    return first + compute_ms - first / compute, first + comm_ms - first / comm


def slowdowns_of(compute_alone_ms, comm_alone_ms, compute_end_ms, comm_end_ms):
    return compute_slowdowns(locals())


@given(st.floats(1, 4), st.floats(1, 4), st.floats(1, 500), st.floats(1, 500))
def test_slow_downs_from_compute_and_communication_that_began_together(compute, comm, compute_ms, comm_ms):
    ends = ends_of(compute, comm, compute_ms, comm_ms)
    found = slowdowns_of([compute_ms] * 2, comm_ms, *([end] * 2 for end in ends))
    assert found.compute == pytest.approx(compute, rel=1e-6)
    assert found.comm == pytest.approx(comm, rel=1e-6)


def test_bursts_count_as_much_as_they_last_and_noise_makes_no_slow_down_below_one():
    """Compute that took 100 and 50 ms by itself, 150 and 50 beside."""
    found = slowdowns_of([100, 50], 200, [150, 50], [200, 200])
    assert found.compute == pytest.approx(200 / 150)
    found = slowdowns_of([100], 200, [95], [190])
    assert found == Slowdown(compute=1.0, comm=1.0)


def known_run(tmp_path):
    """Two caps over three rounds of a machine that is 10% slower in each round than before."""
    cases, blocks = [], []
    for cap in ("default", "1000"):
        case = case_of(arch="net", image_size=32, batch_per_device=8, backend="gloo", bucket_cap_mb=cap)
        layout = fill_buckets(SIZES, cap)
        first = _first_round(layout)
        for r in (1, 2, 3):
            pace = 1.1 ** (r - 1)
            comm = sum(CURVE(size) for size in layout.num_bytes)
            found = {"timed": first * pace, "no_sync": COMPUTE.total_ms * pace, "comm": comm * pace}
            blocks += [_block(case, r, phase, ms) for phase, ms in found.items()]
            if cap == "default":
                blocks.append(_block(case, r, "calibration", COMPUTE.total_ms * pace, _detail(pace)))
        cases.append(
            {
                **case.to_row(), "case_id": case.case_id, "status": "ok", "num_nodes": 1,
                "num_buckets": len(layout.num_bytes), "bucket_bytes": str(layout),
                "device_name": "CPU core", "global_batch": case.global_batch, "images_per_s": 16_000 / first,
            }
        )  # fmt: skip
    curve = [
        {"num_devices": 2, "backend": "gloo", "bytes": int(size), "time_ms": ms, "num_samples": 1}
        for size, ms in CURVE.points
    ]
    return RunData(
        tmp_path, Manifest(versions={"torch": "2.15"}), make_frame(cases, CASES),
        make_frame(blocks, BLOCKS), make_frame([], BUCKETS), make_frame(curve, ALLREDUCE),
    )  # fmt: skip


def _first_round(layout):
    how = {"slowdown": SLOW, "copy_ms": COPY_MS, "residual_ms": RESIDUAL_MS}
    return simulate_ms(READY_MS, layout, CURVE, COMPUTE, **how)


def _block(case, r, phase, ms, detail=None):
    return {
        "case_id": case.case_id, "phase": phase, "round": r, "rank": 0, "num_steps": 1, "block_ms": ms,
        "steps_ms": f"{ms}", "detail": detail and json.dumps({"calibration": detail}),
    }  # fmt: skip


def _detail(pace):
    """As instruments show it that make a step 5% longer."""
    compute_end_ms, comm_end_ms = ends_of(SLOW.compute, SLOW.comm, 320.0, 800.0)
    longer = 1.05 * pace
    return {
        "order": list(ORDER),
        "ready_ms": [at * longer for at in READY_MS],
        "data_ms": 10.0 * longer, "forward_ms": 40.0 * longer, "backward_ms": 100.0 * longer,
        "optimizer_ms": 10.0 * longer, "copy_ms": COPY_MS * pace,
        "compute_alone_ms": [320.0 * pace], "comm_alone_ms": 800.0 * pace,
        "compute_end_ms": [compute_end_ms * pace], "comm_end_ms": [comm_end_ms * pace],
    }  # fmt: skip


def test_the_machine_that_made_a_run_is_found_again(tmp_path):
    found = calibrate_run(known_run(tmp_path), TRAINABLE)
    assert [p.num_bytes for p in found.parameters] == list(SIZES), "in the reducer's order"
    assert [p.name for p in found.parameters] == ["p3", "p2", "p1", "p0"]
    assert found.compute_slowdown == pytest.approx((SLOW.compute,) * 3)
    assert found.comm_slowdown == pytest.approx((SLOW.comm,) * 3)
    # The middle round is 1.1 times the first.
    assert [p.ready_ms for p in found.parameters] == pytest.approx([1.1 * at for at in READY_MS])
    assert found.backward_ms == pytest.approx((100.0, 110.0, 121.0))
    assert found.forward_ms[0] + found.data_ms[0] == pytest.approx(50.0)
    assert found.optimizer_ms[0] == pytest.approx(10.0)
    assert found.copy_ms == pytest.approx((COPY_MS, 1.1 * COPY_MS, 1.21 * COPY_MS))
    assert found.residual_ms == pytest.approx((RESIDUAL_MS, 1.1 * RESIDUAL_MS, 1.21 * RESIDUAL_MS), rel=0.02)
    assert found.model_error_pct is not None


@pytest.mark.parametrize(("held_up", "hook", "share"), [(2, "none", 1), (1, "fp16", 2)])
def test_a_curve_is_set_right_by_what_the_rounds_took_for_what_the_hook_sent(tmp_path, held_up, hook, share):
    """The network was held up while the curve was taken; or the rounds took as long for half of the bytes."""
    run = known_run(tmp_path)
    curve = run.allreduce.assign(time_ms=held_up * run.allreduce["time_ms"])
    found = calibrate_run(replace(run, allreduce=curve, cases=run.cases.assign(comm_hook=hook)), TRAINABLE)
    sizes = [int(size) for size in run.cases["bucket_bytes"].iloc[0].split("/")]
    of_the_middle_round = pytest.approx(1.1 * sum(map(CURVE, sizes)))
    assert sum(make_curve(found.allreduce[0].points)(size / share) for size in sizes) == of_the_middle_round


def test_the_residual_is_that_of_the_calibrated_case_whatever_the_others_take(tmp_path):
    run = known_run(tmp_path)
    other = (run.blocks["case_id"] == run.cases["case_id"].iloc[1]) & (run.blocks["phase"] == "timed")
    slower = run.blocks.assign(block_ms=run.blocks["block_ms"].where(~other, 1.5 * run.blocks["block_ms"]))
    found, known = (calibrate_run(replace(run, blocks=b), TRAINABLE) for b in (slower, run.blocks))
    assert found.residual_ms == known.residual_ms


def on_one_device(tmp_path, *, wrapper_ms):
    """The same machine with one device: `single`, and DDP, longer by its copies and `wrapper_ms`."""
    run = known_run(tmp_path)
    own = {"num_devices": 1, "batch_per_device": 8, "image_size": 32, "arch": "net", "backend": "gloo"}
    ddp, single = case_of(**own, bucket_cap_mb="default"), case_of(**own | {"mode": "single"})
    kept = run.cases.iloc[:1]
    cases = [
        {**kept.to_dict("records")[0], **case.to_row(), "case_id": case.case_id, "global_batch": 8}
        for case in (ddp, single)
    ]
    blocks = []
    for r in (1, 2, 3):
        pace = 1.1 ** (r - 1)
        detail = {k: v for k, v in _detail(pace).items() if not k.startswith("com")}
        blocks += [
            _block(single, r, "timed", COMPUTE.total_ms * pace),
            _block(ddp, r, "timed", (COMPUTE.total_ms + 2 * COPY_MS + wrapper_ms) * pace),
            _block(ddp, r, "calibration", COMPUTE.total_ms * pace, detail),
        ]
    return replace(
        run,
        cases=make_frame(cases, CASES),
        blocks=make_frame(blocks, BLOCKS),
        allreduce=make_frame([], ALLREDUCE),
    )


def test_one_device_tells_its_compute_its_copies_and_what_the_wrapper_adds(tmp_path):
    found = calibrate_run(on_one_device(tmp_path, wrapper_ms=3.0), TRAINABLE)
    assert found.num_ranks == 1
    assert found.compute().total_ms == pytest.approx(1.1 * COMPUTE.total_ms)
    assert found.copy_ms == pytest.approx((COPY_MS, 1.1 * COPY_MS, 1.21 * COPY_MS))
    assert found.residual_ms == pytest.approx((3.0, 3.3, 3.63), abs=0.4)
    assert (found.get_slowdown(), found.model_error_pct) == (OVERLAP_SLOWDOWN, ERROR_PCT)
    inside = find_network("nvlink-h200")
    steps = [simulate_scenario(found, Scenario(num_devices=n, intra=inside)) for n in (1, 2, 8)]
    alone, two, eight = (step.step_ms for step in steps)
    assert alone == pytest.approx(1.1 * COMPUTE.total_ms)
    assert alone + 2 * 1.1 * COPY_MS < two < eight
    assert steps[2].efficiency < steps[1].efficiency < 1


def test_ranks_that_shared_a_device_calibrate_nothing(tmp_path):
    run = known_run(tmp_path)
    shared = replace(run, cases=run.cases.assign(oversubscribed=True))
    with pytest.raises(UsageError, match="shared devices, and nothing follows for ranks with one each"):
        calibrate_run(shared, TRAINABLE)


def test_a_run_of_another_model_or_without_a_pass_is_refused(tmp_path):
    run = known_run(tmp_path)
    with pytest.raises(UsageError, match="4 parameters, the workload 3"):
        calibrate_run(run, TRAINABLE[:3])
    for phase, said in (("calibration", "--calibrate"), ("no_sync", "no steps without comm")):
        with pytest.raises(UsageError, match=said):
            calibrate_run(replace(run, blocks=run.blocks[run.blocks["phase"] != phase]), TRAINABLE)
