"""What the doctor says of machines that are not at hand."""

import functools
import json
import shutil

import pynvml
import pytest
from doctor_machines import (
    GIB,
    blank,
    changed,
    file,
    found_in,
    gpu,
    h100_box,
    laptop,
)

from ddp_bench.bench.doctor import main
from ddp_bench.bench.doctor.gpu import format_range
from ddp_bench.bench.doctor.resources import check_shared_memory
from ddp_bench.bench.machine import host as machine

MIB = 2**20
H100S = "8 x NVIDIA H100 80GB HBM3"


def test_what_was_not_read_is_unknown_and_never_judged(tmp_path):
    judged = {name: line.status for name, line in found_in(blank(), tmp_path).items()}
    # What the environment says is always known, and so is that torch is not there.
    expected = {"GPUs": "ok", "threads": "ok", "settings": "ok", "torch": "bad"}
    assert {name: status for name, status in judged.items() if status != "unknown"} == expected


def without_each_reading(machine):
    """Copies of a machine, each with one reading missing."""
    copies = [changed(machine, files={path: None}) for path in machine.files]
    if isinstance(machine.gpus, list):
        # Without its name a GPU is none to CUDA_VISIBLE_DEVICES.
        copies += [changed(machine, **gpu(0, **{name: None})) for name in machine.gpus[0] if name != "UUID"]
    return [*copies, changed(machine, load=None), changed(machine, shm=None)]


@pytest.mark.parametrize("make", [h100_box, laptop])
def test_no_missing_reading_makes_a_machine_worse(make, tmp_path):
    def bad(machine, root):
        return {name for name, line in found_in(machine, root).items() if line.status == "bad"}

    before = bad(make(), tmp_path)
    copies = without_each_reading(make())
    assert len(copies) > 20
    for number, copy in enumerate(copies):
        root = tmp_path / str(number)
        assert bad(copy, root) <= before, copy
        shutil.rmtree(root)


@pytest.fixture
def doctor(tmp_path, monkeypatch, capsys):
    """The command on a machine: its exit code and what it prints."""

    def run(machine, *options):
        with monkeypatch.context() as patch:
            machine.install(tmp_path, patch)
            patch.setattr(main, "examine", functools.partial(main.examine, tmp_path))
            return main.main(options), capsys.readouterr().out

    return run


def test_exit_code_is_one_only_where_something_is_bad(doctor):
    assert [doctor(make())[0] for make in (h100_box, laptop)] == [0, 0]
    code, out = doctor(changed(laptop(), **file("sys/fs/cgroup/cpu.max", "50000 100000")))
    assert code == 1
    assert "not fit to measure on" in out.splitlines()[-1]


def test_quiet_shows_only_what_needs_attention(doctor):
    assert doctor(h100_box(), "--quiet") == (0, "")
    _, out = doctor(laptop(), "--quiet")
    assert {row.split()[0] for row in out.splitlines() if not row.startswith(" ")} == {"caution"}


def test_json_has_every_finding_or_with_quiet_what_needs_attention(doctor):
    code, out = doctor(changed(h100_box(), allowed=frozenset(range(60))), "--json")
    told = json.loads(out)
    assert (code, told["status"], len(told["findings"])) == (0, "ok", 20)
    assert told["findings"][0] == {"name": "GPUs", "status": "ok", "text": H100S, "advice": ""}
    code, out = doctor(changed(blank(), gpus=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH), "--json", "--quiet")
    told = json.loads(out)
    assert (code, told["status"]) == (1, "bad")
    assert {line["status"] for line in told["findings"]} <= {"caution", "bad"}


def test_nothing_of_nvml_is_set_and_every_name_is_known_to_it(tmp_path, monkeypatch):
    machine = h100_box()
    fake = machine.nvml()
    monkeypatch.setattr(machine, "nvml", lambda: fake)
    found_in(machine, tmp_path)
    assert (fake.absent, fake.set_calls) == (set(), [])


def test_lists_and_ranges_of_cores_and_spans():
    assert machine.parse_cores("0-3,8") == {0, 1, 2, 3, 8}
    assert machine.parse_cores("") == frozenset()
    assert machine.parse_cores("all") is None
    assert (machine.format_ranges([0, 1, 2, 3, 6]), machine.format_ranges([5])) == ("0-3,6", "5")
    assert (format_range([41.2, 40.6]), format_range([40, 47]), format_range([])) == ("41", "40-47", "?")


@pytest.mark.parametrize(
    ("free", "status"), [(64 * MIB, "caution"), (146 * MIB, "caution"), (147 * MIB, "ok")]
)
def test_shared_memory_holds_the_batches_of_loader_workers(free, status):
    """2 workers keep 2 batches of 64 x 3 x 224 x 224 float32 each: 154,140,672 bytes."""
    answer = check_shared_memory((8 * GIB, 8 * GIB - free, free), 1)
    assert answer.status == status
    assert ("--shm-size=1g" in answer.advice) == (status == "caution")
    assert check_shared_memory((64 * MIB, 0, 64 * MIB), 16).advice.startswith("docker run --shm-size=5g")
    assert check_shared_memory(None, 1).status == "unknown"
