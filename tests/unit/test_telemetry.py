"""GPU telemetry of a rank: real sampler processes over a made-up NVML, when they are asked, how they end."""

import os
import signal
import sys
import time
from types import SimpleNamespace

import msgspec
import pytest
from commands import eventually
from held import held, place_of
from made import planned, resolved
from stand_ins import stand_in

from ddp_bench.bench.machine.gpus import ClockReason
from ddp_bench.bench.measure import telemetry
from ddp_bench.bench.measure.telemetry import (
    Sample,
    Telemetry,
    compute_power_w,
    select_span,
    summarize_samples,
)
from ddp_bench.bench.results.aggregate import describe_planned_case, make_case_rows
from ddp_bench.bench.results.block_times import TELEMETRY_FAILED, BlockTimes
from ddp_bench.bench.results.blocks import Block
from ddp_bench.bench.results.round_times import RoundTimes
from ddp_bench.bench.worker import devices as rank_devices
from ddp_bench.bench.worker.devices import start_sampling
from ddp_bench.bench.worker.messages import AnyAnswer, Report, decode, encode

FIRST, SECOND = "GPU-11111111-aaaa-4bbb-8ccc-0123456789ab", "GPU-22222222-aaaa-4bbb-8ccc-0123456789ab"

NVML = """
import os, time
NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0
class NVMLError(Exception): pass
def nvmlInit():
    if os.environ.get("NVML_FAILS"): raise NVMLError("NVML Shared Library Not Found")
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(i): return i
def nvmlDeviceGetUUID(h): return "GPU-" + ["22222222", "11111111"][h] + "-aaaa-4bbb-8ccc-0123456789ab"
if not os.environ.get("NVML_TELLS_NOTHING"):
    def nvmlDeviceGetMigMode(h): return [int(os.environ.get("NVML_MIG", 0)), 0]
    def nvmlDeviceGetTotalEnergyConsumption(h): return int([500, 300][h] * 1000 * time.monotonic())
    def nvmlDeviceGetClockInfo(h, kind): return [1980, 1410][h]
    def nvmlDeviceGetTemperature(h, sensor): return [71, 62][h]
    def nvmlDeviceGetCurrentClocksThrottleReasons(h): return [0x4, 0x1][h]
"""
"""Two GPUs, numbered against the order of their UUIDs: 500 W and 300 W, the first one power capped."""


@pytest.fixture
def nvml(tmp_path, monkeypatch):
    (tmp_path / "pynvml.py").write_text(NVML)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


@pytest.fixture
def both(nvml):  # noqa: ARG001 - what it samples
    made = Telemetry({0: FIRST, 1: SECOND})
    yield made
    made.close()


def last_second(made, devices):
    now_s = time.monotonic()
    return made.summarize_between(now_s - 1.0, now_s, devices)


def seen(made, devices):
    """What a block of a second tells once the sampler has run so long."""

    def told():
        found = last_second(made, devices)["gpus"]
        return all("power_w" in readings for readings in found.values()) and found

    return eventually(told)


def test_a_block_is_told_the_readings_of_its_own_gpus(both):
    """CUDA's first GPU is NVML's second one: the UUID decides."""
    found = seen(both, [0])
    assert found == {
        FIRST[4:12]: {
            "sm_clock_mhz": 1410,
            "power_w": pytest.approx(300, rel=1e-3),
            "temperature_c": 62,
            "throttled_pct": 0,
            "throttled_by_pct": {},
        }
    }
    found = seen(both, [0, 1])
    assert {name: readings["power_w"] for name, readings in found.items()} == {
        SECOND[4:12]: pytest.approx(500, rel=1e-3),
        FIRST[4:12]: pytest.approx(300, rel=1e-3),
    }
    assert found[SECOND[4:12]]["throttled_by_pct"] == {"power cap": 100}


def test_what_the_sampler_tells_arrives_in_the_table_of_cases(both):
    """By the way it takes: as a message between ranks, as a block."""
    seen(both, [0, 1])
    dp = next(p for p in plan("cuda")[1] if p.case.mode == "dp")
    block = BlockTimes(1000.0, (500.0, 500.0), last_second(both, [0, 1]))
    report = decode(encode(Report(value=block)), AnyAnswer)
    sent = msgspec.convert(report.value, BlockTimes)
    times = RoundTimes([Block.from_times(1, dp.case.case_id, "timed", 1, 0, 0.0, [("host", 0, sent)])])
    row = make_case_rows([describe_planned_case(dp)], times).iloc[0]
    assert row["sm_clock_mhz"] == 1410
    assert row["power_w"] == pytest.approx(800, rel=1e-3)
    # Half a second for a step of two times 64 images.
    assert row["joules_per_image"] == pytest.approx(800 * 0.5 / 128, rel=1e-3)
    assert (row["temperature_c"], row["throttled_pct"]) == (71, 100)
    assert row["throttle_reasons"] == "power cap"


@pytest.mark.usefixtures("nvml")
@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"NVML_FAILS": "1"}, "NVML Shared Library Not Found"),
        ({"NVML_MIG": "1"}, f"NVML has no whole GPU {FIRST} (MIG, or a container hides it)"),
    ],
)
def test_why_nothing_can_be_sampled_is_told_once(environment, why, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    made = Telemetry({0: FIRST})
    assert last_second(made, [0]) == {TELEMETRY_FAILED: why}
    assert last_second(made, [0]) == {}
    made.close()


@pytest.mark.parametrize("with_what", [signal.SIGKILL, signal.SIGSTOP])
def test_a_sampler_that_ends_or_hangs_holds_nobody_up(with_what, both, monkeypatch):
    seen(both, [0])
    (process,) = both._process
    monkeypatch.setattr(telemetry, "ANSWER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(telemetry, "END_TIMEOUT_S", 0.1)
    process.send_signal(with_what)
    assert "has ended, or hangs" in last_second(both, [0])[TELEMETRY_FAILED]
    assert last_second(both, [0]) == {}
    assert process.wait(30) < 0


@pytest.mark.parametrize(
    "command", [["/there/is/no/such/command"], [sys.executable, "-c", "import time; time.sleep(600)"]]
)
def test_a_sampler_that_cannot_be_started_or_never_answers(command, monkeypatch):
    monkeypatch.setattr(telemetry, "tie_to_parent", lambda _: command)
    monkeypatch.setattr(telemetry, "ANSWER_TIMEOUT_S", 0.1)
    made = Telemetry({0: FIRST})
    assert TELEMETRY_FAILED in last_second(made, [0])
    made.close()
    assert not made._process or made._process[0].wait(30) < 0


def plan(device):
    on = {"device": device, "devices": 4}
    settings = resolved(**on, gpus=(1, 2, 4), modes=("dp", "ddp"), batch_size=64)
    return settings, [p for p in planned(settings, **on) if p.skip_reason is None]


def cases(device):
    return plan(device)[0], [p.case for p in plan(device)[1]]


def test_a_rank_samples_the_gpus_of_its_cases(monkeypatch):
    made = []
    monkeypatch.setattr(rank_devices, "Telemetry", made.append)
    properties = {"torch.cuda.get_device_properties": lambda i: SimpleNamespace(uuid=f"uuid {i}")}
    stand_in(monkeypatch, rank_devices, properties)
    settings, every = cases("cuda")
    start_sampling(settings, every, place_of(0, "cuda:0"))
    start_sampling(settings, every, place_of(3, "cuda:3"))
    start_sampling(settings, [case for case in every if case.mode != "dp"], place_of(0, "cuda:0"))
    assert [sorted(uuids) for uuids in made] == [[0, 1, 2, 3], [3], [0]]
    assert made[1] == {3: "GPU-uuid 3"}
    # None on CPU cores, or where it is off.
    assert start_sampling(*cases("cpu"), place_of(0, "cpu")) is None
    assert settings.telemetry
    assert start_sampling(resolved(device="cuda", telemetry=False), every, place_of(0, "cuda:0")) is None
    assert len(made) == 3


class Recorded:
    """A clock, a trainer and a telemetry that note the order in which they are used."""

    num_lead_in = 2

    def __init__(self):
        self.events = []

    def step(self):
        self.events.append("step")

    step_locally = step

    def check_loss(self):
        self.events.append("loss")

    def release_gradients(self):
        self.events.append("gradients")

    def begin(self):
        self.mark()

    def mark(self):
        self.events.append("mark")

    def read_ms(self):
        self.events.append("read")
        return [2.0, 3.0]

    def summarize_between(self, start_s, end_s, gpus):
        self.events.append(f"telemetry of {gpus}")
        self.seconds = end_s - start_s
        return {"gpus": {}}


@pytest.mark.parametrize(("mode", "devices"), [("single", [1]), ("dp", [0, 1]), ("ddp", [1])])
def test_a_timed_block_is_over_before_anything_is_asked(mode, devices):
    all_of_them = Recorded()
    how_many = 1 if mode == "single" else 2
    case = next(c for c in cases("cuda")[1] if (c.mode, c.num_devices) == (mode, how_many))
    live = held(case, all_of_them, place_of(1, "cuda:1"), clock=all_of_them, telemetry=all_of_them)
    assert live.measure("timed", 2).detail == {"device_allocs": 0, "gpus": {}}
    block = ["step", "step", "mark", "step", "mark", "step", "mark", "read"]
    assert all_of_them.events == [*block, f"telemetry of {devices}", "loss", "gradients"]
    assert all_of_them.seconds == pytest.approx(0.005)
    assert live.measure("no_sync", 2).detail == {"device_allocs": 0}


CAP, HOT, IDLE = ClockReason.POWER_CAP, ClockReason.HARDWARE_HEAT, ClockReason.IDLE


def test_a_summary_by_hand():
    reasons = [{IDLE}, {CAP}, {CAP, HOT}, {ClockReason.APPLICATION}]
    samples = [
        Sample(
            moment_s=10 + 0.1 * i,
            sm_clock_mhz=clock,
            energy_j=5000 + 40.0 * i,
            temperature_c=degrees,
            reasons=frozenset(why),
        )
        for i, (clock, degrees, why) in enumerate(
            zip([600, 1800, 1700, 1900], [50, 61, 64, 63], reasons, strict=True)
        )
    ]
    assert summarize_samples(samples) == {
        "sm_clock_mhz": 1500,
        "power_w": 400,
        "temperature_c": 64,
        "throttled_pct": 50,
        "throttled_by_pct": {"hardware thermal slow-down": 25, "power cap": 50},
    }
    assert summarize_samples([]) == {}
    assert summarize_samples([Sample(moment_s=1), Sample(moment_s=2, sm_clock_mhz=1000)]) == {
        "sm_clock_mhz": 1000
    }


def test_power_of_a_counter_that_moves_in_steps():
    """250 W, counted every 0.1 s: between first and last sample alone there are 10% too few."""
    samples = [Sample(moment_s=t / 20, energy_j=25.0 * (t // 2)) for t in range(20)]
    assert compute_power_w(samples) == pytest.approx(250, rel=0.01)
    ends = samples[-1].energy_j or 0, samples[-1].moment_s
    assert ends[0] / ends[1] < 240


@pytest.mark.parametrize(
    "samples",
    [
        [Sample(moment_s=t / 20, energy_j=50.0 * t) for t in range(3)],
        [Sample(moment_s=float(t), energy_j=7.0) for t in range(3)],
        [Sample(moment_s=1.0)],
    ],
    ids=["too short to count", "a counter that stands still", "unknown"],
)
def test_power_without_a_usable_counter(samples):
    assert compute_power_w(samples) is None


def test_only_samples_between_start_and_end_count():
    samples = [
        Sample(moment_s=t, sm_clock_mhz=mhz)
        for t, mhz in ((0.9, 100), (1.0, 1000), (1.5, 1100), (2.0, 1200), (2.1, 100))
    ]
    assert summarize_samples(select_span(samples, 1.0, 2.0)) == {"sm_clock_mhz": 1100}
