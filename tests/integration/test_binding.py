"""A rank is bound to the cores next to its GPU, which is made up here; affinity is this machine's own."""

import os

import pytest
from rank_pool import run_ranks
from selection import in_campaign

MORE_CORES = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")

BIND = """
import threading
from ddp_bench.bench.worker.devices import bind

wait = threading.Event()
earlier = threading.Thread(target=wait.wait)
earlier.start()
allowed = sorted(os.sched_getaffinity(0))
said = bind(frozenset(CORES), allowed)
later = threading.Thread(target=wait.wait)
later.start()
threads = [sorted(os.sched_getaffinity(t.native_id)) for t in (threading.main_thread(), earlier, later)]
wait.set()
report([said, allowed, *threads])
"""


def bound(cores, folder):
    """What a process says that binds itself to `cores`: the cores it told, had, and those of its threads."""
    (found,) = run_ranks(f"CORES = {list(cores)}\n{BIND}", 1, folder)
    return list(found)


@MORE_CORES
def test_all_threads_are_bound_to_the_cores_that_are_allowed_and_near(tmp_path):
    last = max(os.sched_getaffinity(0))
    said, _, *threads = bound([last, 100_000], tmp_path)
    assert said == str(last)
    assert threads == [[last]] * 3


JOIN = """
import types
import torch.cuda
from ddp_bench.bench.resolve import with_device_defaults
from ddp_bench.bench.settings import Settings
from ddp_bench.bench.worker import devices
from ddp_bench.bench.worker.messages import Begin

LAST = max(os.sched_getaffinity(0))
at_context = []
torch.cuda.device_count = lambda: 2
torch.cuda.init = lambda: None
torch.cuda.set_device = lambda device: at_context.append((str(device), sorted(os.sched_getaffinity(0))))
torch.cuda.get_device_name = lambda device: "A"
torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(uuid=str(device))
devices.near_cores = lambda device: frozenset({LAST, 100_000})
devices.is_narrowed = lambda allowed: NARROWED
number = int(os.environ["RANK"])
asked = Settings.of_stored({"numa_bind": BIND})
settings = with_device_defaults(asked, device_type="cuda", num_local_devices=2)
sizes = {"world_size": 2, "local_world_size": 2}
begin = Begin(settings=settings, cases=(), meeting="", port=0 if LAUNCHED else 1, **sizes)
place, bound = devices.take_place(begin, number, number)
info = devices.place_of_rank(place, number, bound)
report([info.gpu, info.device, info.bound_cores, at_context, list(place.cores)])
"""


@MORE_CORES
@pytest.mark.parametrize(
    ("setting", "launched", "narrowed", "binds"),
    [
        ("on", False, True, True),
        ("on", True, True, False),
        *in_campaign(("on", False, False, True), ("on", True, False, True), ("off", False, False, False)),
    ],
)
def test_a_rank_is_bound_before_its_gpus_context_is_made_unless_a_launcher_has_chosen_its_cores(
    tmp_path, *, setting, launched, narrowed, binds
):
    allowed = sorted(os.sched_getaffinity(0))
    cores = allowed[-1:] if binds else allowed
    given = f"BIND = {setting!r}\nLAUNCHED = {launched}\nNARROWED = {narrowed}\n"
    found = run_ranks(f"{given}{JOIN}", 2, tmp_path)
    for rank, (uuid, device, bound_to, at_context, place) in enumerate(found):
        assert (uuid, device) == (f"GPU-{rank}", f"cuda:{rank}")
        assert bound_to == (str(allowed[-1]) if binds else "")
        assert at_context == [[f"cuda:{rank}", cores]]
        assert place == cores


@pytest.mark.parametrize("cores", [[], [100_000], range(4096)], ids=["unknown", "none allowed", "one node"])
def test_nothing_is_bound_where_the_cores_next_to_the_gpu_are_all_or_none(cores, tmp_path):
    said, allowed, *threads = bound(cores, tmp_path)
    assert said == ""
    assert threads == [allowed] * 3
