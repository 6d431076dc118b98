import re
from dataclasses import replace

import made
import pytest
from made import cap_of, case_of

from ddp_bench.bench.common.errors import UsageError
from ddp_bench.bench.plan.resolve import fill_device_defaults, resolve
from ddp_bench.bench.plan.sweep import EXCLUSIVE, SHARING, Machine, count_ranks, expand_cases, hash_plan
from ddp_bench.bench.run.schedule import draw_round_order
from ddp_bench.bench.run.stop_rule import compute_min_warmup_s, estimate_duration_s

CORES_2 = Machine(device_type="cpu", devices_per_node=2)
ONE_GPU = Machine(device_type="cuda", devices_per_node=1)
EIGHT_GPUS = Machine(device_type="cuda", devices_per_node=8)


def resolved(machine=CORES_2, **settings):
    return made.resolved(device=machine.device_type, devices=machine.devices_per_node, **settings)


def make(machine=CORES_2, **settings):
    return expand_cases(resolved(machine, **settings), machine, arch="resnet18", image_size=64)


def names(plan):
    return [(p.case.mode, p.case.num_devices, cap_of(p.case)) for p in plan]


def test_the_default_sweep():
    plan = make(gpus=(1, 2, 4))
    caps = ["default", "1", "25", "100"]
    assert names(plan) == [
        ("single", 1, ""),
        ("dp", 1, ""),
        ("dp", 2, ""),
        ("dp", 4, ""),
        ("ddp", 1, "default"),
        *(("ddp", 2, cap) for cap in caps),
        *(("ddp", 4, cap) for cap in caps),
    ]
    assert [p.case.num_devices for p in plan if p.oversubscribed] == [4] * 5
    assert [p.skip_reason is not None for p in plan] == [False, True, *[False] * 8, True, True, True]
    assert "plain module" in str(plan[1].skip_reason)
    assert count_ranks(plan) == 4
    assert count_ranks(make(modes=("dp",), gpus=(2,))) == 1


def test_the_option_that_a_skipped_cap_names_brings_it_back():
    for planned in make(gpus=(1, 2, 4))[-3:]:
        (option,) = re.findall(r"--(\S+)", str(planned.skip_reason))
        value = f"default,{planned.case.bucket_cap_mb}"
        settings = resolve({option.replace("-", "_"): value, "gpus": "1,2,4"})
        on_cores = fill_device_defaults(settings, device_type="cpu", num_local_devices=2)
        again = expand_cases(on_cores, CORES_2, arch="resnet18", image_size=64)
        assert [p.skip_reason for p in again if p.case == planned.case] == [None]


def test_dp_and_the_default_cap_are_measured_on_shared_devices_too():
    plan = make(gpus=(4,), bucket_cap_mb=("5", "default"))
    kept = [name for name, p in zip(names(plan), plan, strict=True) if p.skip_reason is None]
    assert kept == [("single", 1, ""), ("dp", 4, ""), ("ddp", 4, "5")]


def test_forms_of_parallel_training_are_planned_at_equal_global_batch():
    how = {"micro_batches": "2,8", "pipeline_schedule": "1f1b"}
    plan = make(modes="ddp,replicate,fsdp,partition,pipeline", gpus="2", bucket_cap_mb="default", **how)
    named = [(p.case.mode, p.case.num_micro_batches) for p in plan]
    assert named[2:] == [("replicate", 1), ("fsdp", 1), ("partition", 1), ("pipeline", 2), ("pipeline", 8)]
    assert {p.case.global_batch for p in plan if p.case.num_devices == 2} == {32}
    assert [p.case.num_batches for p in plan] == [1, 2, 2, 2, 1, 1, 1], "stages all load the whole batch"
    assert {p.case.num_ranks for p in plan[1:]} == {2}
    assert not any(p.skip_reason for p in plan)
    assert count_ranks(plan) == 2


def test_fsdp2_varies_its_policy_and_its_resharding_and_replicate_the_policy_alone():
    how = {"mp_policy": "none,bf16", "reshard_after_forward": "on,off", "precision": "bf16"}
    plan = make(modes="replicate,fsdp", gpus="2", **how)
    named = [p.case.case_id.rpartition("-")[0] for p in plan[1:]]
    assert named[:2] == ["replicate-n2", "replicate-n2-bf16"]
    assert named[2:] == ["fsdp-n2", "fsdp-n2-kept", "fsdp-n2-bf16", "fsdp-n2-bf16-kept"]


def test_pipelines_take_the_backend_that_torch_asks_for():
    gpus = Machine(device_type="cuda", devices_per_node=2, staged_backend="nccl-lazy")
    how = {"modes": "ddp,fsdp,pipeline", "gpus": "2", "bucket_cap_mb": "default"}
    assert [p.case.backend for p in make(gpus, **how)[1:]] == ["nccl", "nccl", "nccl-lazy"]
    assert {p.case.backend for p in make(gpus, **how, backend="gloo")[1:]} == {"gloo"}


UNUSED = {"modes": "ddp", "gpus": "2", "bucket_cap_mb": "1", "sweep": "star"}
UNUSED |= {"skip_all_reduce_unused_params": "off,on"}
POWERSGD = {"modes": "ddp", "gpus": "2", "comm_hook": "powersgd", "bucket_cap_mb": "100"}
LOOKING = {"find_unused_parameters": "on"}
GRAPHS = {"modes": "ddp", "gpus": "2", "compile": "reduce-overhead"}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"modes": "partition", "gpus": "1"}, "plain module"),
        ({"modes": "pipeline", "gpus": "2", "micro_batches": "3"}, "a batch of 32 does not divide into 3"),
        ({"modes": "pipeline", "gpus": "3", "pipeline_schedule": "1f1b", "micro_batches": "2"}, "3 devices"),
        ({"modes": "pipeline", "gpus": "2", "precision": "fp16"}, "loss scaling"),
        ({"modes": "fsdp", "gpus": "2", "compile": "default"}, "uncompiled"),
        ({"modes": "replicate", "gpus": "2", "mp_policy": "bf16"}, "--precision bf16 compares it"),
        ({"modes": "ddp", "gpus": "2", "sync_batchnorm": "on"}, "SyncBatchNorm needs GPUs"),
        # Unused parameters are left out only where DDP looks for them.
        (UNUSED, "--find-unused-parameters on"),
        *((UNUSED | {way: "on"}, "None") for way in ("find_unused_parameters", "static_graph")),
        # It would hang: torch sends which are unused between the hook's own all-reduces.
        (POWERSGD | LOOKING, "--find-unused-parameters off measures it"),
        *((POWERSGD | more, "None") for more in ({}, LOOKING | {"gpus": "1"})),
        (POWERSGD | LOOKING | {"machine": EIGHT_GPUS, "backend": "nccl"}, "None"),
        # What torch.compile breaks.
        (GRAPHS | {"modes": "dp"}, "cannot replicate"),
        (GRAPHS | {"bucket_cap_mb": "0.25"}, "1 MiB"),
        *((GRAPHS | {"bucket_cap_mb": caps}, "None") for caps in ("default", "1/0.25")),
        (GRAPHS | {"bucket_cap_mb": "default", "accumulate": "2"}, "micro-batches"),
        (GRAPHS | {"bucket_cap_mb": "default", "accumulate": "2", "compile": "default"}, "None"),
    ],
)
def test_what_a_form_or_setting_cannot_do_is_skipped(settings, reason):
    plan = make(**settings)
    assert plan[0].skip_reason is None
    assert reason in str(plan[-1].skip_reason)


def test_unused_parameters_are_left_out_where_ddp_looks_for_them():
    assert make(**UNUSED, find_unused_parameters="on")[-1].case.skip_all_reduce_unused_params


def test_weak_scaling_fixes_the_batch_per_device_strong_the_global_one_and_accumulation_multiplies_it():
    weak = make(gpus=(1, 2, 4), batch_size=16)
    assert {p.case.batch_per_device for p in weak} == {16}
    strong = make(gpus=(1, 2, 4), batch_size=16, scaling="strong")
    assert {p.case.global_batch for p in strong} == {16}
    with pytest.raises(UsageError, match="16 does not divide over 3 devices"):
        make(gpus=(1, 3), batch_size=16, scaling="strong")
    with pytest.raises(UsageError, match="--accumulate multiplies it"):
        make(gpus=(1, 2), batch_size=16, scaling="strong", accumulate=(1, 4))
    plan = make(gpus=(2,), accumulate=(1, 4), bucket_cap_mb=("default",), modes=("ddp",))
    assert [p.case.global_batch for p in plan] == [16, 32, 128]


def test_one_gpu_skips_what_it_cannot_do():
    plan = make(ONE_GPU, gpus=(1, 2))
    reasons = {(p.case.mode, p.case.num_devices): p.skip_reason for p in plan}
    assert reasons["ddp", 1] is None
    assert {reasons["ddp", 2], reasons["dp", 2]} == {f"more than 1 GPU; {SHARING}"}
    assert count_ranks(plan) == 1
    shared = make(ONE_GPU, gpus=(1, 2), backend="gloo", modes=("ddp",))
    assert [cap_of(p.case) for p in shared if p.skip_reason] == ["1", "25", "100"]
    assert [p.oversubscribed for p in shared if p.case.num_devices == 2] == [True] * 4


def on_hosts(*num_ranks):
    """The host of each rank, where a launcher has numbered so many on each host, one host after another."""
    return tuple(f"host{host}" for host, count in enumerate(num_ranks) for _ in range(count))


@pytest.mark.parametrize(
    ("modes", "ranks", "runs"), [("dp,ddp", (), False), ("dp", (), True), ("dp", (4,), False)]
)
def test_dp_is_left_out_where_other_ranks_hold_gpus_that_take_one_process(modes, ranks, runs):
    hosts = on_hosts(*ranks)
    machine = Machine(device_type="cuda", devices_per_node=4, is_exclusive=True, rank_hosts=hosts)
    plan = make(machine, gpus="2,4", modes=modes, bucket_cap_mb="default")
    reasons = {p.skip_reason for p in plan if p.case.mode == "dp"}
    assert reasons == ({None} if runs else {EXCLUSIVE})
    assert {p.skip_reason for p in plan if p.case.mode != "dp"} == {None}


def test_nodes_of_an_outside_launcher():
    machine = Machine(device_type="cuda", devices_per_node=8, rank_hosts=on_hosts(8, 8, 8, 8))
    plan = make(machine, gpus=(8, 16, 32, 64), modes=("dp", "ddp"), bucket_cap_mb=("default",))
    by_key = {(p.case.mode, p.case.num_devices): p for p in plan}
    assert by_key["ddp", 64].skip_reason == "needs 64 ranks, the launcher started 32"
    assert by_key["dp", 8].skip_reason is None
    assert "within one machine" in str(by_key["dp", 16].skip_reason)


def test_a_step_setting_makes_another_case():
    switches = ("channels_last", "fused_optimizer", "cudnn_benchmark")
    changed = [{"compile": "default"}, {"precision": "bf16"}, *({name: True} for name in switches)]
    plain, *others = ({p.case.case_id for p in make(gpus=(2,), **more)} for more in [{}, *changed])
    assert all(plain.isdisjoint(ids) for ids in others)


def test_a_ddp_setting_that_came_later_leaves_the_ids_of_its_default_alone():
    """And two of them that are on one at a time are two cases."""
    plain = {p.case.case_id for p in make(gpus=(2,), modes=("ddp",))}
    plan = make(
        gpus=(2,), modes=("ddp",), batched_grad_copy=(False, True), lazy_bucket_allocation=(False, True)
    )
    ids = {p.case.case_id for p in plan}
    assert plain < ids
    assert len(ids) == len(plan) == 1 + 4 * 4
    one_on = [p.case for p in plan if p.case.batched_grad_copy != p.case.lazy_bucket_allocation]
    assert len({case.apart_from_cap for case in one_on}) == 2


def test_settings_name_the_passes_that_would_measure_them_wrongly():
    *_, plain = make(gpus=(2,), modes=("ddp",), bucket_cap_mb=("1",))
    assert plain.case.unmeasured == set()
    assert replace(plain.case, comm_hook="powersgd").unmeasured == {"comm"}
    for name in ("zero_optimizer", "skip_all_reduce_unused_params"):
        assert replace(plain.case, **{name: True}).unmeasured == {"comm", "calibration"}


def test_rounds_are_permutations_and_differ():
    orders = [draw_round_order(12, seed=3, round_index=r) for r in range(20)]
    assert all(sorted(order) == list(range(12)) for order in orders)
    assert len({tuple(order) for order in orders}) == 20
    assert orders[0] == draw_round_order(12, seed=3, round_index=0)


@pytest.mark.parametrize(
    ("gpus", "accumulate", "asked", "step_s", "expected_s", "num_rounds"),
    [
        # single and DDP, whose step on 4 shared cores takes 4; 10 rounds of both
        (4, 1, {"rounds": 10}, 1.0, 50.0, 10),
        (4, 1, {"max_time": 40.0}, 1.0, 40.0, 8),
        # on two cores of their own: a step each, 3 a round; the first round is always finished
        (2, 1, {"rounds": 4, "steps": 3}, 0.5, 4 * 3, 4),
        (2, 1, {"rounds": 4, "steps": 3, "max_time": 1.0}, 0.5, 3, 1),
        (2, 4, {"rounds": 4, "steps": 3}, 0.5, (1 + 4) * 4 * 1.5, 4),
    ],
)
def test_the_estimate_is_of_the_rounds_or_the_limit(gpus, accumulate, asked, step_s, expected_s, num_rounds):
    plan = make(gpus=(gpus,), modes=("ddp",), bucket_cap_mb=("default",), accumulate=(accumulate,))
    settings = resolved(**{"steps": 1, **asked})
    prepared_s, rounds_s, rounds = estimate_duration_s(
        plan, step_s=step_s, single_batch=16, settings=settings
    )
    assert rounds_s == pytest.approx(expected_s), "what prepares the cases does not count against the limit"
    assert rounds == num_rounds
    other_s, *_ = estimate_duration_s(plan, step_s=2 * step_s, single_batch=16, settings=settings)
    assert prepared_s < other_s < 2 * prepared_s, "a step of each case, and a start that it always has"


def test_a_plan_with_a_compiler_expects_more_of_its_start():
    eager, both = (
        estimate_duration_s(make(compile=axis), step_s=0.1, single_batch=16, settings=resolved(max_time=60.0))
        for axis in (("off",), ("off", "default"))
    )
    assert both[0] > 2 * eager[0]
    assert eager[1] == both[1] == 60.0


def test_warm_ups_on_gpus_take_two_seconds_or_a_tenth_of_the_time_together():
    plan = make(EIGHT_GPUS, gpus=(1, 2), modes=("ddp",), bucket_cap_mb=("default",))
    assert len(plan) == 3
    for limit_s, least_s in ((600.0, 2.0), (30.0, 1.0)):
        settings = resolved(EIGHT_GPUS, max_time=limit_s)
        assert compute_min_warmup_s(plan, settings) == pytest.approx(least_s)
        # a block of a second each, of 20 steps
        one_round = replace(settings, rounds=1)
        prepared_s, rounds_s, _ = estimate_duration_s(plan, step_s=0.05, single_batch=32, settings=one_round)
        assert prepared_s > 3 * least_s
        assert rounds_s == pytest.approx(3 * 1.0)
    assert compute_min_warmup_s(plan, resolved(max_time=600.0)) == 0.0


def one_case(**more):
    return case_of(**{"arch": "resnet18", "image_size": 64, "batch_per_device": 16, **more})


def test_what_a_case_is():
    """DP on CPU cores a stand-in, and nothing else; DDP on several devices one that communicates."""
    assert one_case(mode="dp").impl == "cpu_standin"
    assert one_case(mode="dp", device_type="cuda").impl == one_case().impl == "torch"
    assert one_case().communicates
    assert not one_case(num_devices=1).communicates
    assert not one_case(mode="dp").communicates
    assert one_case(bucket_cap_mb="1").apart_from_cap == one_case(bucket_cap_mb="25").apart_from_cap
    assert one_case().apart_from_cap != one_case(static_graph=True).apart_from_cap


def test_a_star_varies_one_setting_at_a_time():
    axes = {"bucket_cap_mb": ("default", "1", "5"), "static_graph": (False, True), "accumulate": (1, 2)}
    plan = make(modes=("ddp",), gpus=(1, 2), sweep="star", **axes)
    points = [
        (p.case.num_devices, str(p.case.bucket_cap_mb), p.case.static_graph, p.case.accumulate)
        for p in plan[1:]
    ]
    assert points == [
        (1, "default", False, 1),
        (2, "default", False, 1),
        (2, "1", False, 1),
        (2, "5", False, 1),
        (2, "default", True, 1),
        (2, "default", False, 2),
    ]


def test_a_grid_varies_all_at_once_but_the_cap_of_one_device():
    axes = {"bucket_cap_mb": ("default", "1"), "static_graph": (False, True)}
    plan = make(modes=("ddp",), gpus=(1, 2), **axes)
    points = [(p.case.num_devices, str(p.case.bucket_cap_mb), p.case.static_graph) for p in plan[1:]]
    assert points == [
        *((1, "default", graph) for graph in (False, True)),
        *((2, cap, graph) for cap in ("default", "1") for graph in (False, True)),
    ]


def test_ranks_spread_over_nodes_share_no_device():
    machine = Machine(device_type="cuda", devices_per_node=4, rank_hosts=on_hosts(4, 4))
    plan = make(machine, gpus=(4, 6, 8), modes=("ddp",), bucket_cap_mb=("default",))
    assert [(p.case.num_devices, p.num_nodes, p.oversubscribed, p.skip_reason) for p in plan[1:]] == [
        (4, 1, False, None),
        (6, 2, False, None),
        (8, 2, False, None),
    ]
    assert count_ranks(plan) == 8
    crowded = Machine(device_type="cuda", devices_per_node=2, rank_hosts=on_hosts(4, 4))
    first = make(crowded, gpus=(8,), modes=("ddp",), bucket_cap_mb=("default",), backend="nccl")[1]
    assert first.skip_reason == "needs 4 GPUs per machine, there are 2"
    assert first.oversubscribed


def test_ids_and_hashes_stay_as_they_are():
    """Two versions compare their cases by id, and a run is resumed by the hash of its plan."""
    default = make(gpus=(1, 2))
    assert hash_plan(default) == "06814ebd1515"
    assert [p.case.case_id for p in default] == [
        "single-n1-161a99",
        "dp-n1-97b06a",
        "dp-n2-30efb8",
        "ddp-n1-capdefault-b3b66b",
        "ddp-n2-capdefault-6d5053",
        "ddp-n2-cap1-d519ba",
        "ddp-n2-cap25-07e4f3",
        "ddp-n2-cap100-7dedb3",
    ]
    gpus = Machine(device_type="cuda", devices_per_node=4)
    varied = make(
        gpus,
        gpus=(4,),
        modes=("ddp",),
        sweep="star",
        precision="bf16",
        scaling="strong",
        batch_size=64,
        bucket_cap_mb=("default", "0", "25", "1/25/25", "0.25"),
        gradient_as_bucket_view=(False, True),
        static_graph=(True,),
        find_unused_parameters=(True,),
        sync_buffers=(True, False),
        sync_batchnorm=(False, True),
        comm_hook=("none", "fp16"),
    )
    assert hash_plan(varied) == "6904af8c6b7d"
    switches = ("gradient_as_bucket_view", "static_graph", "find_unused_parameters", "sync_batchnorm")
    every = dict.fromkeys(switches, True) | {"sync_buffers": False, "comm_hook": "fp16", "accumulate": 4}
    case_id = one_case(bucket_cap_mb="5", **every).case_id
    assert case_id.startswith("ddp-n2-cap5-view-static-unused-nobuf-syncbn-fp16-acc4-")


def test_a_calibration_of_powersgd_is_refused():
    asked = {"modes": "ddp", "gpus": "2", "calibrate": "on"}
    assert len(make(**asked, comm_hook="none,powersgd")) > 1
    with pytest.raises(UsageError, match=r"--comm-hook none,powersgd$"):
        make(**asked, comm_hook="powersgd,none")


@pytest.mark.parametrize("machine", [ONE_GPU, Machine(device_type="cpu", devices_per_node=1)])
def test_a_calibration_of_ranks_that_share_devices_is_refused_before_anything_is_measured(machine):
    asked = {"modes": "ddp", "gpus": "2", "share_gpus": "on"}
    assert len(make(machine, **asked)) > 1, "no default calibrates them"
    with pytest.raises(UsageError, match=r"share devices here.*--gpus 1$"):
        make(machine, **asked, calibrate="on")
    assert len(make(machine, **asked | {"gpus": "1", "share_gpus": "off"}, calibrate="on")) > 1
