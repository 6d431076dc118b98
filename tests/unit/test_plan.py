import pytest

from bench.errors import UsageError
from bench.plan import Machine, Planned, estimate_s, expand, plan_hash, round_order, world_size
from bench.settings import Settings, with_device_defaults

CORES_2 = Machine(device_type="cpu", devices_per_node=2)
ONE_GPU = Machine(device_type="cuda", devices_per_node=1)


def make(machine: Machine = CORES_2, **settings: object) -> list[Planned]:
    resolved = with_device_defaults(
        Settings(**settings),  # type: ignore[arg-type]
        device_type=machine.device_type,
        num_local_devices=machine.devices_per_node,
    )
    return expand(resolved, machine, arch="resnet18", image_size=64)


def names(plan: list[Planned]) -> list[tuple[str, int, str]]:
    return [(p.case.mode, p.case.num_devices, p.case.bucket_cap_mb) for p in plan]


def test_the_default_sweep() -> None:
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
    assert [p.skip_reason is not None for p in plan] == [False, True, *[False] * 11]
    assert "plain module" in str(plan[1].skip_reason)
    assert world_size(plan) == 4


def test_single_is_measured_in_every_run() -> None:
    assert names(make(modes=("ddp",), gpus=(2,), bucket_cap_mb=("5",)))[0] == ("single", 1, "")


def test_weak_scaling_fixes_the_batch_per_device_and_strong_the_global_one() -> None:
    weak = make(gpus=(1, 2, 4), batch_size=16)
    assert {p.case.batch_per_device for p in weak} == {16}
    strong = make(gpus=(1, 2, 4), batch_size=16, scaling="strong")
    assert {p.case.global_batch for p in strong} == {16}


def test_a_batch_that_does_not_divide() -> None:
    with pytest.raises(UsageError, match="16 does not divide over 3 devices"):
        make(gpus=(1, 3), batch_size=16, scaling="strong")


def test_one_gpu_skips_what_it_cannot_do() -> None:
    plan = make(ONE_GPU, gpus=(1, 2))
    reasons = {(p.case.mode, p.case.num_devices): p.skip_reason for p in plan}
    assert reasons["ddp", 1] is None
    assert "needs 2 GPUs" in str(reasons["dp", 2])
    assert "one rank per GPU" in str(reasons["ddp", 2])
    assert world_size(plan) == 1
    shared = make(ONE_GPU, gpus=(1, 2), backend="gloo", modes=("ddp",))
    assert all(p.skip_reason is None for p in shared)
    assert [p.oversubscribed for p in shared if p.case.num_devices == 2] == [True] * 4


def test_nodes_of_an_outside_launcher() -> None:
    machine = Machine(device_type="cuda", devices_per_node=8, num_nodes=4, ranks_per_node=8)
    plan = make(machine, gpus=(8, 16, 32, 64), modes=("dp", "ddp"), bucket_cap_mb=("default",))
    by_key = {(p.case.mode, p.case.num_devices): p for p in plan}
    assert by_key["ddp", 16].num_nodes == 2
    assert by_key["ddp", 32].num_nodes == 4
    assert by_key["ddp", 64].skip_reason == "needs 64 ranks, the launcher started 32"
    assert by_key["dp", 8].skip_reason is None
    assert "within one machine" in str(by_key["dp", 16].skip_reason)


def test_accumulation_multiplies_the_global_batch() -> None:
    plan = make(gpus=(2,), accumulate=(1, 4), bucket_cap_mb=("default",), modes=("ddp",))
    assert [p.case.global_batch for p in plan] == [16, 32, 128]


def test_case_ids_are_unique_stable_and_follow_every_setting() -> None:
    ids = [p.case.case_id for p in make(gpus=(1, 2), static_graph=(False, True), comm_hook=("none", "fp16"))]
    assert len(set(ids)) == len(ids)
    assert ids == [
        p.case.case_id for p in make(gpus=(1, 2), static_graph=(False, True), comm_hook=("none", "fp16"))
    ]
    assert not set(ids) & {p.case.case_id for p in make(gpus=(1, 2), precision="bf16")}


def test_rounds_are_permutations_and_differ() -> None:
    orders = [round_order(12, seed=3, round_index=r) for r in range(20)]
    assert all(sorted(order) == list(range(12)) for order in orders)
    assert len({tuple(order) for order in orders}) == 20
    assert orders[0] == round_order(12, seed=3, round_index=0)


def test_plan_hash_follows_the_cases() -> None:
    assert plan_hash(make(gpus=(1, 2))) == plan_hash(make(gpus=(1, 2)))
    assert plan_hash(make(gpus=(1, 2))) != plan_hash(make(gpus=(1, 2), batch_size=8))


def test_the_estimate_counts_shared_cores_and_obeys_the_limit() -> None:
    plan = make(gpus=(4,), modes=("ddp",), bucket_cap_mb=("default",))
    settings = Settings(gpus=(4,), rounds=10, steps=1, batch_size=16)
    # single: 16 images; ddp on 4 shared cores: 64 images' worth per step; 5 warm-up + 10 steps of both
    assert estimate_s(plan, step_s=1.0, single_batch=16, settings=settings) == pytest.approx(75.0)
    limited = Settings(gpus=(4,), max_time=40.0, steps=1, batch_size=16)
    assert estimate_s(plan, step_s=1.0, single_batch=16, settings=limited) == pytest.approx(40.0)
