"""A rank is bound to the cores next to its GPU, which is made up here; affinity is this machine's own."""

import os

import pytest
from rank_pool import run_ranks

MORE_CORES = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")

BIND = """
import threading
from ddp_bench.bench.worker.devices import bind_cores

wait = threading.Event()
earlier = threading.Thread(target=wait.wait)
earlier.start()
allowed = sorted(os.sched_getaffinity(0))
said = bind_cores(frozenset(CORES), allowed)
later = threading.Thread(target=wait.wait)
later.start()
threads = [sorted(os.sched_getaffinity(t.native_id)) for t in (threading.main_thread(), earlier, later)]
wait.set()
report([said, *threads])
"""


@MORE_CORES
def test_all_threads_are_bound_to_the_cores_that_are_allowed_and_near_unless_those_are_all_or_none(tmp_path):
    allowed = sorted(os.sched_getaffinity(0))
    near = [[allowed[-1], 100_000], [], [100_000], [*range(4096)]]
    found = run_ranks(f"CORES = {near}[int(os.environ['RANK'])]\n{BIND}", len(near), tmp_path)
    assert found == [[str(allowed[-1]), *[allowed[-1:]] * 3], *[["", *[allowed] * 3]] * 3]


JOIN = """
import types
from ddp_bench.bench.plan.resolve import fill_device_defaults
from ddp_bench.bench.plan.settings import Settings
from ddp_bench.bench.worker import devices
from ddp_bench.bench.worker.messages import Begin

LAST = max(os.sched_getaffinity(0))
at_context = []
calls = {
    "init": lambda: None,
    "device_count": lambda: 2,
    "set_device": lambda device: at_context.append((str(device), sorted(os.sched_getaffinity(0)))),
    "get_device_name": lambda device: "A",
    "get_device_properties": lambda device: types.SimpleNamespace(uuid=str(device)),
}
stand_in(patch, devices, {f"torch.cuda.{name}": call for name, call in calls.items()})
devices.read_near_cores = lambda device: frozenset({LAST, 100_000})
devices.is_narrowed = lambda allowed: NARROWED
number = int(os.environ["RANK"]) % 2
asked = Settings.from_stored({"numa_bind": BIND})
settings = fill_device_defaults(asked, device_type="cuda", num_local_devices=2)
sizes = {"world_size": 2, "local_world_size": 2}
begin = Begin(settings=settings, num_outputs=0, cases=(), meeting="", port=0 if LAUNCHED else 1, **sizes)
place, bound = devices.take_place(begin, number, number)
info = devices.describe_rank(place, number, bound)
report([info.gpu, info.device, info.bound_cores, at_context, list(place.cores)])
"""


CASES = [
    ("on", False, True, True),
    ("on", True, True, False),
    ("on", False, False, True),
    ("on", True, False, True),
    ("off", False, False, False),
]
"""The setting, whether a launcher started the rank, whether its cores are narrowed; whether it is bound."""


@MORE_CORES
def test_a_rank_is_bound_before_its_gpus_context_is_made_unless_a_launcher_has_chosen_its_cores(tmp_path):
    allowed = sorted(os.sched_getaffinity(0))
    script = f"BIND, LAUNCHED, NARROWED, _ = {CASES}[int(os.environ['RANK'])]\n{JOIN}"
    found = run_ranks(script, len(CASES), tmp_path)
    for rank, ((*_, binds), (uuid, device, bound_to, at_context, place)) in enumerate(
        zip(CASES, found, strict=True)
    ):
        cores = allowed[-1:] if binds else allowed
        assert (uuid, device) == (f"GPU-{rank % 2}", f"cuda:{rank % 2}")
        assert bound_to == (str(allowed[-1]) if binds else "")
        assert at_context == [[f"cuda:{rank % 2}", cores]]
        assert place == cores
