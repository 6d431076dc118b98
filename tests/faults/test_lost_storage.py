"""The disk is full, or the results folder is gone: the run ends with one line that says how to go on."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from fault_campaign import Campaign, Deed, deed

pytestmark = pytest.mark.campaign
FULL = [
    deed("disk_full", moment, "fill disk")
    for moment in ("before_first_block", "in_timed_block", "while_writing")
]
REMOVED = [
    deed("folder_removed", moment, "remove folder") for moment in ("before_first_block", "between_rounds")
]
RENAMED = deed("folder_renamed", "in_timed_block", "rename folder", "elsewhere")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    made = Campaign(tmp_path_factory.mktemp("full"))
    disk = made.folder / "disk"
    disk.mkdir()
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True, check=False
        ).returncode
    )
    made.out = disk / "run"
    try:
        for fault in FULL:
            made.start(fault)
            (disk / "filler").unlink(missing_ok=not mounted)
        made.start()
        yield made
    finally:
        if mounted:
            subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("fault", FULL, ids=lambda fault: fault.name)
def test_a_full_disk(full: Campaign, undisturbed: pd.DataFrame, fault: Deed) -> None:
    ended = full.check(fault.name, undisturbed)
    assert ended.code == 2
    said = f"{full.out} cannot be written: "
    assert sum(said in line for line in ended.error.splitlines()) == 1, ended.error
    assert f"python -m bench.run {shlex.join(full.resume)}" in ended.error
    assert "Traceback" not in ended.error


def line(campaign: Campaign) -> str:
    return (
        f"bench.run: error: {campaign.out} has been removed or renamed during the run; if renamed, python -m "
        "bench.run --resume with its new name goes on\n"
    )


@pytest.mark.parametrize("fault", REMOVED, ids=lambda fault: fault.name)
def test_a_removed_folder_ends_the_run_in_one_line(tmp_path: Path, fault: Deed) -> None:
    campaign = Campaign(tmp_path)
    assert campaign.run(fault) == (2, line(campaign))
    assert list(campaign.markers.glob(f"{fault.name}.*.csv")), "it happened"
    assert not campaign.out.exists(), "nothing is written there again"


def test_a_renamed_folder_goes_on_under_its_new_name(tmp_path: Path, undisturbed: pd.DataFrame) -> None:
    campaign = Campaign(tmp_path)
    assert campaign.run(RENAMED) == (2, line(campaign))
    assert not campaign.out.exists()
    campaign.out = campaign.out.with_name("run-elsewhere")
    campaign.ended[RENAMED.name] = campaign.look(2, "")
    campaign.start()
    campaign.check(RENAMED.name, undisturbed)
