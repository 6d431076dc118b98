"""The event simulation against closed forms worked out by hand, and what must hold for any step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_bench.bench.predict.timeline import Compute, Slowdown, Work, make_work, simulate

COMPUTE = Compute(before_ms=50.0, backward_ms=100.0, after_ms=10.0)


def work(*buckets):
    return [Work(num_bytes=4, ready_ms=ready, comm_ms=comm) for ready, comm in buckets]


def test_without_overlap_a_step_is_compute_plus_communication():
    step = simulate(work((100.0, 30.0)), COMPUTE, slowdown=Slowdown(compute=3.0, comm=3.0))
    assert step.step_ms == 190.0
    assert step.exposed_comm_ms == step.comm_ms == 30.0


def test_with_infinite_bandwidth_a_step_is_compute():
    step = simulate(work((10.0, 0.0), (100.0, 0.0)), COMPUTE)
    assert (step.step_ms, step.exposed_comm_ms) == (COMPUTE.total_ms, 0.0)


def test_only_the_last_bucket_is_exposed_where_the_others_fit_inside():
    step = simulate(work((20.0, 30.0), (60.0, 30.0), (100.0, 7.0)), COMPUTE)
    assert step.exposed_comm_ms == pytest.approx(7.0)
    assert [b.start_ms for b in step.buckets] == [20.0, 60.0, 100.0]
    assert step.comm_end_ms == 107.0


def test_all_reduces_queue_in_order():
    step = simulate(work((10.0, 50.0), (20.0, 5.0), (100.0, 1.0)), COMPUTE)
    assert [(b.launch_ms, b.start_ms, b.done_ms) for b in step.buckets[:2]] == [(10, 10, 60), (20, 60, 65)]


def test_a_bucket_waits_for_those_before_it():
    step = simulate(work((80.0, 5.0), (10.0, 5.0)), COMPUTE)
    assert [(b.ready_ms, b.launch_ms, b.start_ms) for b in step.buckets] == [(80, 80, 80), (10, 80, 85)]


def test_mutual_slow_down_by_hand():
    """From 40 ms on both run: compute at 1/2, communication at 1/3.

    20 ms of all-reduce take 60 ms, in which 30 ms of compute are done: 70 at wall time 100. The remaining
    30 ms run alone until 130. Then the last bucket's 10 ms: 140.
    """
    step = simulate(work((40.0, 20.0), (100.0, 10.0)), COMPUTE, slowdown=Slowdown(compute=2.0, comm=3.0))
    assert step.buckets[0].done_ms == pytest.approx(100.0)
    assert step.compute_end_ms == pytest.approx(130.0)
    assert step.comm_end_ms == pytest.approx(140.0)
    assert step.exposed_comm_ms == pytest.approx(40.0)


def test_communication_speeds_up_once_compute_is_over():
    """At 90 ms 10 ms of compute are left: 20 ms at half speed, in which 20/4 = 5 ms of 12 are sent."""
    step = simulate(work((90.0, 12.0)), COMPUTE, slowdown=Slowdown(compute=2.0, comm=4.0))
    assert step.compute_end_ms == pytest.approx(110.0)
    assert step.comm_end_ms == pytest.approx(117.0)


def test_moments_inside_a_slowed_stretch_are_drawn_where_they_happen():
    """Bucket 1 is ready at progress 60, 20 past the start of an all-reduce that halves compute: 40 + 40."""
    step = simulate(work((40.0, 50.0), (60.0, 1.0)), COMPUTE, slowdown=Slowdown(compute=2.0))
    assert step.buckets[1].ready_ms == pytest.approx(80.0)
    assert step.buckets[1].start_ms == pytest.approx(90.0)


def test_copies_in_are_part_of_the_backward_and_only_the_last_bucket_is_copied_back_alone():
    """Two equal buckets, 2 ms to copy each: ready 2 and 4 ms later; the first is back before the second."""
    step = simulate(work((50.0, 1.0), (100.0, 5.0)), COMPUTE, copy_ms=4.0)
    assert [b.ready_ms for b in step.buckets] == [52.0, 104.0]
    assert step.exposed_comm_ms == pytest.approx(4.0 + 5.0 + 2.0)


def test_copies_back_wait_for_the_backward_and_run_on_after_the_last_all_reduce():
    """The large bucket is done at 61; the end of the backward, 110, is followed by 9 ms for it, then 1."""
    large = Work(num_bytes=9, ready_ms=50.0, comm_ms=2.0)
    small = Work(num_bytes=1, ready_ms=100.0, comm_ms=0.5)
    step = simulate([large, small], COMPUTE, copy_ms=10.0)
    assert step.comm_end_ms == pytest.approx(110.5)
    assert step.exposed_comm_ms == pytest.approx(10.0 + 10.0)


def test_one_bucket_is_copied_with_nothing_to_hide_it():
    step = simulate(work((100.0, 30.0)), COMPUTE, copy_ms=10.0)
    assert step.exposed_comm_ms == pytest.approx(10.0 + 30.0 + 10.0)


@pytest.mark.parametrize(("residual_ms", "exposed_ms"), [(3.0, 33.0), (-3.0, 27.0), (-50.0, 0.0)])
def test_a_residual_is_added_whole_but_shortens_no_compute(residual_ms, exposed_ms):
    step = simulate(work((100.0, 30.0)), COMPUTE, residual_ms=residual_ms)
    assert step.exposed_comm_ms == pytest.approx(exposed_ms)
    assert step.step_ms == pytest.approx(COMPUTE.total_ms + exposed_ms)


def test_work_is_a_layouts_bytes_its_last_gradient_and_the_time_of_what_is_sent():
    found = make_work(
        [100, 200, 400], [5.0, 3.0, 9.0], ((0, 1), (2,)), lambda sent: sent / 10, wire_share=0.5
    )
    assert [(w.num_bytes, w.ready_ms, w.comm_ms) for w in found] == [(300, 5.0, 15.0), (400, 9.0, 20.0)]
    assert [w.comm_ms for w in make_work([100], [5.0], ((0,),), lambda sent: sent / 10)] == [10.0]


def test_a_rank_that_takes_longer_takes_longer_everywhere():
    slow = COMPUTE.scaled(1.5)
    assert (slow.before_ms, slow.backward_ms, slow.after_ms) == (75.0, 150.0, 15.0)
    assert slow.total_ms == 240.0


def test_without_buckets_a_step_is_compute_and_nothing_is_drawn():
    step = simulate([], COMPUTE, copy_ms=0.0)
    assert (step.step_ms, step.exposed_comm_ms, step.comm_ms, step.comm_end_ms) == (160.0, 0.0, 0.0, 0.0)
    assert step.buckets == ()
    assert step.compute_end_ms == 100.0


@pytest.mark.parametrize(
    ("comm_ms", "ends"),
    [
        (10.0, (60.0, 75.0)),  # 30 ms beside compute, of which 15 are done
        (20.0, (90.0, 90.0)),  # exactly as long as what is left of compute
        (35.0, (105.0, 90.0)),  # 20 of them beside compute, then 15 alone
    ],
)
def test_one_step_of_the_event_simulation_by_hand(comm_ms, ends):
    """Of 60 ms 30 are done when the bucket is ready. Compute at 1/2, all-reduce at 1/3."""
    compute = Compute(before_ms=0.0, backward_ms=60.0, after_ms=0.0)
    step = simulate(work((30.0, comm_ms)), compute, slowdown=Slowdown(compute=2.0, comm=3.0))
    assert (step.comm_end_ms, step.compute_end_ms) == pytest.approx(ends)
    assert step.buckets[0].start_ms == 30.0


def test_a_bucket_that_was_ready_before_is_not_waited_for():
    step = simulate(work((20.0, 40.0), (30.0, 5.0)), COMPUTE)
    assert [(b.ready_ms, b.start_ms, b.done_ms) for b in step.buckets] == [(20, 20, 60), (30, 60, 65)]


BUCKETS = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 200)), min_size=1, max_size=12)
SLOWDOWNS = st.builds(lambda a, b: Slowdown(compute=a, comm=b), st.floats(1, 4), st.floats(1, 4))


@given(BUCKETS, SLOWDOWNS)
def test_bounds_of_any_step(buckets, slow):
    step = simulate(work(*buckets), COMPUTE, slowdown=slow)
    communication = sum(comm for _, comm in buckets)
    overlapped = min(communication * slow.comm, COMPUTE.backward_ms * slow.compute)
    assert step.exposed_comm_ms >= 0
    assert step.step_ms >= COMPUTE.total_ms - 1e-9
    assert step.step_ms >= COMPUTE.before_ms + max(r for r, _ in buckets) + buckets[-1][1] + 10 - 1e-6
    assert step.step_ms >= COMPUTE.before_ms + buckets[0][0] + communication + 10 - 1e-6
    # Never worse than all compute and all communication one after the other, what overlaps twice over.
    assert step.step_ms <= COMPUTE.total_ms + communication + overlapped + 1e-6


@given(BUCKETS)
def test_undisturbed_overlap_never_costs(buckets):
    step = simulate(work(*buckets), COMPUTE)
    assert step.step_ms <= COMPUTE.total_ms + sum(comm for _, comm in buckets) + 1e-6


@given(BUCKETS, SLOWDOWNS, st.floats(1, 10))
def test_more_bandwidth_is_never_slower(buckets, slow, factor):
    faster = [(ready, comm / factor) for ready, comm in buckets]
    slower_ms = simulate(work(*buckets), COMPUTE, slowdown=slow).step_ms
    assert simulate(work(*faster), COMPUTE, slowdown=slow).step_ms <= slower_ms + 1e-6
