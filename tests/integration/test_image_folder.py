import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from statistics import median

import pytest
import torch
from commands import ROOT, eventually, has_ended
from held import held, place_of
from made import case_of, resolved
from PIL import Image
from torch import nn

from ddp_bench.bench.common.errors import UsageError
from ddp_bench.bench.measure.timed import Trainer
from ddp_bench.bench.modes.base import Mode
from ddp_bench.bench.worker.messages import Inspect
from ddp_bench.bench.worker.rank import Rank
from ddp_bench.models import folder
from ddp_bench.models.data import Share, open_source
from ddp_bench.models.folder import MAX_CHECKED, Images, check_folder
from ddp_bench.models.registry import make_resnet_workload
from ddp_bench.models.workload import make_module

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")

WORKLOAD = make_resnet_workload("resnet20", 8)
MEAN_RED, STD_RED = 0.485, 0.229


def _paint(path, red, size=(12, 9), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (red, 0, 0)).convert(mode).save(path)


def _fill(folder, num_images):
    """Images of one colour each: no crop or flip hides which image a batch holds."""
    for red in range(num_images):
        _paint(folder / f"{red:03}.png", red)
    return folder


def _open(folder, **changes):
    return open_source(WORKLOAD, str(folder), Share(**{"batch_size": 2} | changes))


def _reds(images):
    return (255 * (images[:, 0, 4, 4] * STD_RED + MEAN_RED)).round().int().tolist()


def _epoch(source, num_steps):
    return [red for _ in range(num_steps) for red in _reds(source.get_batch()[0])]


def _loaders():
    """Processes that this one started to load images."""
    return [one for one in multiprocessing.active_children() if type(one) is multiprocessing.Process]


def test_images_arrive_at_the_workloads_size_normalised(tmp_path):
    source = _open(_fill(tmp_path, 4))
    images, targets = source.get_batch()
    assert images.shape == (2, 3, 8, 8)
    assert images.dtype == torch.float32
    assert targets.tolist() == [0, 0]
    torch.testing.assert_close(images[:, 1], torch.full((2, 8, 8), (0 - 0.456) / 0.224))
    source.close()


def test_an_epoch_is_every_image_once_in_an_order_by_the_seed_and_the_next_is_reshuffled(tmp_path):
    _fill(tmp_path, 12)
    source, again, other = (_open(tmp_path, seed=seed) for seed in (1, 1, 2))
    first, second = _epoch(source, 6), _epoch(source, 6)
    assert sorted(first) == sorted(second) == list(range(12))
    assert first not in (second, sorted(first))
    assert first == _epoch(again, 6) != _epoch(other, 6)


def test_shards_of_the_ranks_are_disjoint_in_every_epoch(tmp_path):
    _fill(tmp_path, 13)
    sources = [_open(tmp_path, rank=rank, world_size=3) for rank in range(3)]
    for _ in range(3):
        shards = [_epoch(source, 2) for source in sources]
        seen = [red for shard in shards for red in shard]
        assert len(seen) == len(set(seen)) == 12, "the thirteenth image does not fill a global batch"


def test_worker_processes_give_the_same_shard_and_end_on_close(tmp_path):
    _fill(tmp_path, 8)
    alone, source = _open(tmp_path), _open(tmp_path, num_workers=1)
    assert _epoch(source, 4) == _epoch(alone, 4)
    workers = _loaders()
    assert len(workers) == 1
    assert _epoch(source, 4) == _epoch(alone, 4)
    assert _loaders() == workers, "workers must outlive the epoch"
    source.close()
    assert not _loaders()


def test_classes_are_the_subfolders_with_images(tmp_path):
    _paint(tmp_path / "dog" / "a.png", 1)
    _paint(tmp_path / "cat" / "deep" / "b.jpg", 0)
    _paint(tmp_path / "ignored.png", 9)
    (tmp_path / "empty").mkdir()
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    found = Images(tmp_path, 8)
    assert found.classes == ["cat", "dog"]
    paths = [tmp_path / "cat" / "deep" / "b.jpg", tmp_path / "dog" / "a.png"]
    assert found.samples == [(str(path), target) for target, path in enumerate(paths)]
    images, targets = _open(tmp_path).get_batch()
    assert dict(zip(_reds(images), targets.tolist(), strict=True)) == {0: 0, 1: 1}


@pytest.mark.parametrize("way", ["to its parent", "by two links"])
def test_a_link_to_a_folder_above_it_is_refused(way, tmp_path):
    data, other = tmp_path / "data", tmp_path / "other"
    _paint(data / "cat" / "a.png", 1)
    _paint(other / "b.png", 1)
    (data / "cat" / "linked").symlink_to(other)
    assert len(Images(data, 8)) == 2, "a link to a folder elsewhere is followed"
    (data / "dog").symlink_to(data / "cat")
    assert len(Images(data, 8)) == 4, "and so is one to a folder beside it"
    place, target = (data / "cat", data) if way == "to its parent" else (other, data / "cat")
    (place / "again").symlink_to(target)
    with pytest.raises(UsageError, match="is a link to a folder above it"):
        Images(data, 8)


@pytest.mark.parametrize(
    ("name", "mode"), [("a.png", "L"), ("a.png", "RGBA"), ("a.jpg", "CMYK"), ("a.gif.bmp", "P")]
)
def test_every_colour_mode_becomes_rgb(tmp_path, name, mode):
    _paint(tmp_path / name, 200, mode=mode)
    assert check_folder(tmp_path) == 1
    assert _open(tmp_path, batch_size=1).get_batch()[0].shape == (1, 3, 8, 8)


def test_a_run_checks_the_folder_before_it_begins(tmp_path):
    (tmp_path / "bad.png").write_text("no image")
    settings = resolved(arch="resnet20", data=str(tmp_path))
    with pytest.raises(UsageError, match="cannot read image"):
        Rank(0, 0).compute_reply(Inspect(settings=settings))


def test_a_folder_that_is_missing_or_without_images(tmp_path):
    (tmp_path / "readme.txt").write_text("no image")
    for call in (check_folder, _open):
        with pytest.raises(UsageError, match=r"no folder '.*nowhere'; data is `device`, `host` or"):
            call(tmp_path / "nowhere")
        with pytest.raises(UsageError, match=r"has no images; put \.jpg \.jpeg \.png"):
            call(tmp_path)


@pytest.mark.parametrize("name", ["bad.png", "bad.jpg"])
@pytest.mark.parametrize("damage", ["truncated", "text", "empty"])
def test_a_corrupt_image_is_named(tmp_path, name, damage):
    path = _fill(tmp_path, 3) / name
    Image.effect_noise((90, 60), 80).save(path)
    assert check_folder(tmp_path) == 4
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        path.write_text("not an image" if damage == "text" else "")
    # By a process that loads images too.
    sources = [_open(tmp_path, num_workers=number) for number in ((0, 1) if damage == "truncated" else (0,))]
    for call in (lambda: check_folder(tmp_path), *(partial(_epoch, source, 2) for source in sources)):
        with pytest.raises(UsageError, match=f"cannot read image '.*{name}' .*; delete it or put") as caught:
            call()
        assert "\n" not in str(caught.value)
    for source in sources:
        source.close()
    assert not _loaders()


NUM_CASES, NUM_VISITS, IMAGE_S, ROWS = 3, 4, 0.01, 4
LINEAR = replace(WORKLOAD, module=lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10)))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_loading_is_part_of_every_step_though_other_cases_run_between_the_blocks(
    tmp_path, monkeypatch, num_workers
):
    """A decoder that takes a known time gives so many batches a second, and no block may be faster."""
    decode, num_decoded = folder.default_loader, multiprocessing.Value("i", 0)

    def slow(path):
        time.sleep(IMAGE_S)
        with num_decoded:
            num_decoded.value += 1
        return decode(path)

    monkeypatch.setattr(folder, "default_loader", slow)
    _fill(tmp_path, 60)
    settings = resolved(arch="resnet20", data=str(tmp_path), data_workers=num_workers, steps=1)
    steps = settings.count_steps_per_block(1.0)
    case = case_of(mode="single", num_devices=1, batch_per_device=ROWS, data=str(tmp_path), image_size=8)

    def make():
        source = _open(tmp_path, batch_size=ROWS, num_workers=num_workers)
        trainer = Trainer(case, Mode(make_module(LINEAR)), LINEAR, source)
        return held(case, trainer, place_of(), settings=settings)

    cases, took_ms = [make() for _ in range(NUM_CASES)], []
    for one in cases:
        with one.enter_training():  # begins the processes
            one.measure("timed", steps)
    for _ in range(NUM_VISITS):
        for one in cases:
            with one.enter_training():
                took_ms.append(one.measure("timed", steps).block_ms)
            before = num_decoded.value
            time.sleep(3 * ROWS * IMAGE_S)  # another run's turn, or the conductor's tables
            assert num_decoded.value == before, "processes of no case work between blocks"
    decoding_ms = 1000 * IMAGE_S * ROWS * steps / num_workers
    assert median(took_ms) > 0.8 * decoding_ms
    for one in cases:
        one.trainer.close()
    assert not _loaders()


def test_loader_processes_that_are_no_forks_need_nothing_of_the_users(tmp_path, monkeypatch):
    """Python 3.14 begins them so: what they are given is pickled, and a lambda cannot be."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("forkserver", force=True)
    monkeypatch.setattr(f"{__name__}.WORKLOAD", replace(WORKLOAD, loss=lambda outputs, _: outputs.sum()))
    try:
        source = _open(_fill(tmp_path, 8), num_workers=1)
        assert source.get_batch()[0].shape == (2, 3, 8, 8)
        source.pause()
        source.close()
    finally:
        multiprocessing.set_start_method(before, force=True)
    assert not _loaders()


KILLED = """
import multiprocessing, os, signal, sys
from pathlib import Path
import torch
from ddp_bench.models.data import Share, open_source
from ddp_bench.models.registry import make_resnet_workload
workload = make_resnet_workload("resnet20", 8)
source = open_source(workload, sys.argv[1], Share(batch_size=2, num_workers=2))
source.get_batch()
workers = [worker.pid for worker in multiprocessing.active_children()]
for worker in workers:
    os.kill(worker, signal.SIGSTOP)
Path(sys.argv[2]).write_text(" ".join(map(str, workers)))
os.kill(os.getpid(), signal.SIGKILL)
"""
"""Stopped workers look after no parent: only the kernel ends them."""


@pytest.mark.campaign
@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_workers_end_with_a_rank_that_was_killed(tmp_path):
    """They are forks, which would hold its GPU."""
    said = tmp_path / "workers"
    command = [sys.executable, "-c", KILLED, str(_fill(tmp_path / "images", 8)), str(said)]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    workers = [int(pid) for pid in said.read_text().split()]
    assert len(workers) == 2
    try:
        eventually(lambda: all(map(has_ended, workers)), 30)
    finally:
        for pid in itertools.filterfalse(has_ended, workers):
            os.kill(pid, signal.SIGKILL)


def test_a_large_folder_is_checked_in_an_even_sample(tmp_path):
    first = tmp_path / "0000.bmp"
    _paint(first, 0, size=(1, 1))
    for index in range(1, 2 * MAX_CHECKED):
        (tmp_path / f"{index:04}.bmp").hardlink_to(first)
    unchecked, checked = tmp_path / "1001.bmp", tmp_path / "1002.bmp"
    unchecked.unlink()
    unchecked.write_text("corrupt")
    assert check_folder(tmp_path) == 2 * MAX_CHECKED
    checked.unlink()
    checked.write_text("corrupt")
    with pytest.raises(UsageError, match=r"1002\.bmp"):
        check_folder(tmp_path)


def test_fewer_images_than_one_global_batch_and_more_classes_than_the_model_has_outputs(tmp_path):
    few = _fill(tmp_path / "few", 5)
    with pytest.raises(UsageError, match=r"has 5 images, one global batch needs 6 \(2 x 3 ranks\)"):
        _open(few, world_size=3)
    assert len(_epoch(_open(few, batch_size=1, world_size=5), 1)) == 1
    for index in range(11):
        _paint(tmp_path / "many" / f"class{index:02}" / "a.png", index)
    with pytest.raises(UsageError, match="has 11 classes, resnet20 has 10 outputs; use a model"):
        _open(tmp_path / "many")
